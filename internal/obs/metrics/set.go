package metrics

import (
	"fmt"
	"math"
	"slices"
	"sort"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// Set is the series of one process. Its methods are safe for concurrent use.
type Set struct {
	roles    Role
	model    atomic.Pointer[string] // served name, a label of vllm: rows
	families []family
	naming   sync.Mutex // held while family.named is replaced
	registry *prometheus.Registry
}

// family is one row's series, in the order of the product of its label values.
type family struct {
	series []series
	named  atomic.Pointer[[]series]                               // of Named
	info   atomic.Pointer[func() (value float64, facts []string)] // of an info; nil: not known yet
}

// series is one combination of label values, which are in the table's order.
type series struct {
	labels    []string
	value     *Value     // of a counter or gauge
	histogram *Histogram // of a histogram
}

// New returns the series of the given roles. model is the served model's name, or empty until
// SetModel.
func New(roles Role, model string) *Set {
	s := &Set{roles: roles, families: make([]family, len(Rows))}
	s.SetModel(model)
	for id := range Rows {
		row := &Rows[id]
		if row.Roles&roles == 0 || row.Kind == KindInfo {
			continue
		}
		f := &s.families[id]
		for _, labels := range product(row.Labels, roles) {
			f.series = append(f.series, series{labels, new(Value), &Histogram{bounds: row.Buckets, counts: make([]atomic.Uint64, len(row.Buckets)+1)}})
		}
	}
	s.register()
	return s
}

// SetModel changes the label model_name.
func (s *Set) SetModel(name string) { s.model.Store(&name) }

// product returns every combination of the roles' label values; the last label varies fastest.
func product(labels []Label, roles Role) [][]string {
	out := [][]string{nil}
	for _, l := range labels {
		var next [][]string
		for _, prefix := range out {
			for _, v := range l.valuesOf(roles) {
				next = append(next, append(slices.Clone(prefix), v))
			}
		}
		out = next
	}
	return out
}

// Counter returns a counter. Like Gauge and Histogram, it panics if the row has another kind,
// other roles or another number of labels, because that is an error in the caller's code. A
// label value that is not in the row counts as the label's last value.
func (s *Set) Counter(id ID, labels ...string) *Value {
	return s.series(id, KindCounter, labels).value
}

// valuesOf returns the values of the roles.
func (l *Label) valuesOf(roles Role) []string {
	if l.Of == nil {
		return l.Values
	}
	return slices.DeleteFunc(slices.Clone(l.Values), func(v string) bool { return l.Of[v]&roles == 0 })
}

// MaxNames bounds the names of a row.
const MaxNames = 100

// Named returns a counter of a row for a name of the process' configuration, which is the value of
// the first label; labels are the values of the others. The first MaxNames names have series of
// their own, from their first call on. Further names count as the first label's last value.
func (s *Set) Named(id ID, name string, labels ...string) *Value {
	values, f := Rows[id].Labels[0].Values, &s.families[id]
	if name = strings.ToValidUTF8(name, "?"); slices.Contains(values, name) {
		return s.Counter(id, append([]string{name}, labels...)...)
	}
	s.naming.Lock()
	defer s.naming.Unlock()
	var all []series
	if now := f.named.Load(); now != nil {
		all = *now
	}
	find := func() int {
		return slices.IndexFunc(all, func(x series) bool { return x.labels[0] == name && slices.Equal(x.labels[1:], labels) })
	}
	at, each := find(), len(f.series)/len(values)
	if at < 0 && len(all) == MaxNames*each {
		return s.Counter(id, append([]string{values[len(values)-1]}, labels...)...)
	}
	if at < 0 {
		all = slices.Clone(all)
		for _, x := range f.series[:each] {
			all = append(all, series{labels: append([]string{name}, x.labels[1:]...), value: new(Value)})
		}
		f.named.Store(&all)
		at = find()
	}
	return all[at].value
}

// Info sets the facts of an info, in the order of its labels.
func (s *Set) Info(id ID, facts ...string) {
	s.InfoFunc(id, func() (float64, []string) { return 1, facts })
}

// InfoFunc reads an info's value and facts from f at each scrape. f must be safe for concurrent
// use and must not block.
func (s *Set) InfoFunc(id ID, f func() (value float64, facts []string)) {
	row := &Rows[id]
	if _, facts := f(); row.Kind != KindInfo || row.Roles&s.roles == 0 || len(facts) != len(row.Labels) {
		panic(fmt.Sprintf("metrics: %s set as an info of %d labels in roles %b", row.Name, len(facts), s.roles))
	}
	s.families[id].info.Store(&f)
}

// Has reports whether the process' roles have a metric.
func (s *Set) Has(id ID) bool { return Rows[id].Roles&s.roles != 0 }

// Gauge returns a gauge.
func (s *Set) Gauge(id ID, labels ...string) *Value {
	return s.series(id, KindGauge, labels).value
}

// Histogram returns a histogram.
func (s *Set) Histogram(id ID, labels ...string) *Histogram {
	return s.series(id, KindHistogram, labels).histogram
}

func (s *Set) series(id ID, kind Kind, labels []string) *series {
	row := &Rows[id]
	if row.Kind != kind || row.Roles&s.roles == 0 || len(labels) != len(row.Labels) {
		panic(fmt.Sprintf("metrics: %s requested as kind %d with %d labels in roles %b", row.Name, kind, len(labels), s.roles))
	}
	i := 0
	for n := range row.Labels {
		values := row.Labels[n].valuesOf(s.roles)
		at := slices.Index(values, labels[n])
		if at < 0 {
			at = len(values) - 1
		}
		i = i*len(values) + at
	}
	return &s.families[id].series[i]
}

// Value is a counter or a gauge.
type Value struct {
	bits atomic.Uint64 // float64
	fn   atomic.Pointer[func() float64]
}

// Inc adds one.
func (v *Value) Inc() { v.Add(1) }

// Add adds x, which is not negative for a counter.
func (v *Value) Add(x float64) {
	addFloat(&v.bits, x)
}

// Set sets a gauge, or a counter whose owner keeps the count.
func (v *Value) Set(x float64) { v.bits.Store(math.Float64bits(x)) }

// Func reads the value from f at each scrape. f must be safe for concurrent use and must not
// block.
func (v *Value) Func(f func() float64) { v.fn.Store(&f) }

// Get returns the current value.
func (v *Value) Get() float64 {
	if f := v.fn.Load(); f != nil {
		return (*f)()
	}
	return math.Float64frombits(v.bits.Load())
}

func addFloat(bits *atomic.Uint64, x float64) {
	for {
		old := bits.Load()
		if bits.CompareAndSwap(old, math.Float64bits(math.Float64frombits(old)+x)) {
			return
		}
	}
}

// Histogram counts observations by size.
type Histogram struct {
	bounds []float64
	counts []atomic.Uint64 // [len(bounds)+1], not cumulative; the last is +Inf
	sum    atomic.Uint64   // float64
}

// Observe counts x under the smallest bound that is at least x.
func (h *Histogram) Observe(x float64) {
	h.counts[sort.SearchFloat64s(h.bounds, x)].Add(1)
	addFloat(&h.sum, x)
}

// Count returns the number of observations.
func (h *Histogram) Count() uint64 {
	var n uint64
	for i := range h.counts {
		n += h.counts[i].Load()
	}
	return n
}

// Sum returns the sum of observations.
func (h *Histogram) Sum() float64 { return math.Float64frombits(h.sum.Load()) }
