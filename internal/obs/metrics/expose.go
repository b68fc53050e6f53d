package metrics

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/common/expfmt"
)

// format is the format that every scraper reads.
var format = expfmt.NewFormat(expfmt.TypeTextPlain)

// ContentType is the content type of Append's text.
var ContentType = string(format)

// register creates the set's registry: its own series, and those of the process and the Go
// runtime under the names of Prometheus' client libraries.
func (s *Set) register() {
	s.registry = prometheus.NewPedanticRegistry()
	s.registry.MustRegister(s, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
}

// Describe implements prometheus.Collector. It describes nothing, which makes the collector
// unchecked, because the model's name, a label, is not known yet.
func (s *Set) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (s *Set) Collect(to chan<- prometheus.Metric) {
	facts := prometheus.Labels{"engine": "0", "model_name": *s.model.Load()}
	for id := range Rows {
		row, f := &Rows[id], &s.families[id]
		info := f.info.Load()
		if len(f.series) == 0 && info == nil {
			continue
		}
		constant := prometheus.Labels{}
		for _, name := range common(ID(id)) {
			constant[name] = facts[name]
		}
		names := make([]string, len(row.Labels))
		for i, l := range row.Labels {
			names[i] = l.Name
		}
		desc := prometheus.NewDesc(row.Name, row.Help, names, constant)
		if info != nil {
			value, facts := (*info)()
			to <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, facts...)
		}
		each := f.series
		if named := f.named.Load(); named != nil {
			each = slices.Concat(each, *named)
		}
		for _, x := range each {
			switch row.Kind {
			case KindHistogram:
				to <- x.histogram.metric(desc, x.labels)
			case KindCounter:
				to <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, x.value.Get(), x.labels...)
			default:
				to <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, x.value.Get(), x.labels...)
			}
		}
	}
}

// metric returns the histogram's current state, with cumulative buckets.
func (h *Histogram) metric(desc *prometheus.Desc, values []string) prometheus.Metric {
	buckets := make(map[float64]uint64, len(h.bounds))
	var n uint64
	for i := range h.bounds {
		n += h.counts[i].Load()
		buckets[h.bounds[i]] = n
	}
	n += h.counts[len(h.bounds)].Load()
	return prometheus.MustNewConstHistogram(desc, n, h.Sum(), buckets, values...)
}

// Append appends the exposition of every series in Prometheus' text format.
func (s *Set) Append(dst []byte) []byte {
	families, err := s.registry.Gather()
	out := bytes.NewBuffer(dst)
	if err != nil { // families has the rest
		fmt.Fprintf(out, "# %q\n", err.Error())
	}
	enc := expfmt.NewEncoder(out, format)
	for _, f := range families {
		if err := enc.Encode(f); err != nil {
			fmt.Fprintf(out, "# %q\n", err.Error())
		}
	}
	return out.Bytes()
}
