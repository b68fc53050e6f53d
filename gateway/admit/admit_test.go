package admit

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// plain is the same rules over a list, without any structure to keep.
type plain struct {
	limits Limits
	items  []*plainItem // in the order of arrival
	vt     map[plainShare]float64
	v      map[int32]float64
	row    int
	passed int
}

type plainItem struct {
	name, flow int
	priority   int32
	tokens     int
}

type plainShare struct {
	flow     int
	priority int32
}

var weights = []float64{1, 2, 0.5, 4}

func (p *plain) tokens(keep func(*plainItem) bool) (n int) {
	for _, i := range p.items {
		if keep(i) {
			n += i.tokens
		}
	}
	return n
}

func (p *plain) best() (best int32, more bool) {
	best = p.items[0].priority
	for _, i := range p.items {
		best = min(best, i.priority)
	}
	return best, slices.ContainsFunc(p.items, func(i *plainItem) bool { return i.priority > best })
}

func (p *plain) next() *plainItem {
	if len(p.items) == 0 {
		return nil
	}
	best, more := p.best()
	if more && p.row+1 >= p.limits.Skip {
		return p.items[slices.IndexFunc(p.items, func(i *plainItem) bool { return i.priority > best })]
	}
	var next *plainItem
	for _, i := range p.items {
		if i.priority != best {
			continue
		}
		if s := (plainShare{i.flow, best}); next == nil || p.vt[s] < p.vt[plainShare{next.flow, best}] {
			next = i
		}
	}
	return next
}

func (p *plain) take() *plainItem {
	i := p.next()
	best, more := p.best()
	s := plainShare{i.flow, i.priority}
	switch {
	case i.priority == best && more:
		p.row++
	default:
		p.row = 0
	}
	if i.priority == best {
		p.v[best] = p.vt[s]
	}
	p.passed = 0
	p.vt[s] += float64(i.tokens) / weights[i.flow]
	p.remove(i)
	return i
}

// pass lets a request go before its turn; odd ones do not fit.
func (p *plain) pass() *plainItem {
	if len(p.items) == 0 {
		return nil
	}
	best, _ := p.best()
	next := p.next()
	for _, most := range sizes {
		if next.tokens <= most {
			return nil
		}
		at := slices.IndexFunc(p.items, func(i *plainItem) bool {
			return i.priority == best && i.tokens <= most && sizeOf(i.tokens) == sizeOf(most)
		})
		if at < 0 {
			continue
		}
		if i := p.items[at]; i.name%2 == 0 && p.passed+i.tokens <= PassTokens+next.tokens {
			p.passed += i.tokens
			p.vt[plainShare{i.flow, i.priority}] += float64(i.tokens) / weights[i.flow]
			p.remove(i)
			return i
		}
	}
	return nil
}

func (p *plain) remove(i *plainItem) {
	if p.drop(i); len(p.items) == 0 {
		p.vt, p.v, p.row, p.passed = map[plainShare]float64{}, map[int32]float64{}, 0, 0
	}
}

func (p *plain) drop(i *plainItem) {
	at := slices.Index(p.items, i)
	p.items = slices.Delete(p.items, at, at+1)
}

func (p *plain) charge(flow int, priority int32, n int) {
	if len(p.items) > 0 {
		s := plainShare{flow, priority}
		p.vt[s] = max(p.v[priority], p.vt[s]+float64(n)/weights[flow])
	}
}

// push returns the names of the evicted, and whether there is a place.
func (p *plain) push(i *plainItem) (out []int, ok bool) {
	keep := slices.Clone(p.items)
	for len(p.items) > 0 && (len(p.items)+1 > p.limits.Requests || p.tokens(func(*plainItem) bool { return true })+i.tokens > p.limits.Tokens) {
		v := p.victim(i)
		if v == nil {
			p.items = keep
			return nil, false
		}
		out = append(out, v.name)
		p.drop(v)
	}
	s := plainShare{i.flow, i.priority}
	if !slices.ContainsFunc(p.items, func(o *plainItem) bool { return plainShare{o.flow, o.priority} == s }) {
		p.vt[s] = max(p.vt[s], p.v[i.priority])
	}
	p.items = append(p.items, i)
	return out, true
}

func (p *plain) victim(i *plainItem) *plainItem {
	worst := i.priority
	for _, o := range p.items {
		worst = max(worst, o.priority)
	}
	held := func(flow int) float64 {
		return float64(p.tokens(func(o *plainItem) bool { return o.flow == flow && o.priority == worst })) / weights[flow]
	}
	var v *plainItem
	for _, o := range p.items { // the newest of those that hold most
		if o.priority == worst && (v == nil || held(o.flow) >= held(v.flow)) {
			v = o
		}
	}
	if v == nil || worst == i.priority && (v.flow == i.flow || held(v.flow) <= held(i.flow)+float64(i.tokens)/weights[i.flow]) {
		return nil
	}
	return v
}

// Random events are decided as by the plain list.
func TestAsPlain(t *testing.T) {
	for seed := range uint64(300) {
		if err := asPlain(seed); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}

func asPlain(seed uint64) error {
	rng := rand.New(rand.NewPCG(seed, 1))
	l := Limits{Requests: 1 + rng.IntN(30), Tokens: 20 + rng.IntN(8000), Skip: 2 + rng.IntN(5)}
	q := New(l)
	p := &plain{limits: l, vt: map[plainShare]float64{}, v: map[int32]float64{}}
	var flows []*Flow
	for _, w := range weights {
		flows = append(flows, NewFlow(w))
	}
	byName := map[int]*Item{}
	now := time.Unix(0, 0)
	for step := range 400 {
		now = now.Add(time.Duration(rng.IntN(100)) * time.Millisecond)
		switch op := rng.IntN(9); {
		case op < 4:
			// Powers of two, so that sums of shares do not depend on their order.
			i := &plainItem{step, rng.IntN(len(flows)), int32(rng.IntN(3)), 1 << rng.IntN(12)}
			mine := &Item{Flow: flows[i.flow], Priority: i.priority, Tokens: i.tokens, Owner: step}
			evicted, no := q.Push(now, mine, 1<<62)
			out, ok := p.push(i)
			if ok != (no == nil) || len(out) != len(evicted) {
				return fmt.Errorf("step %d: refused %+v, evicted %d, want %t and %v", step, no, len(evicted), !ok, out)
			}
			for n, e := range evicted {
				if e.Owner != out[n] || e.Waiting() {
					return fmt.Errorf("step %d: evicted %v, want %v", step, e.Owner, out[n])
				}
			}
			byName[step] = mine
		case op < 6:
			got := q.Take(now)
			if len(p.items) == 0 {
				if got != nil {
					return fmt.Errorf("step %d: took %v of nothing", step, got.Owner)
				}
				break
			}
			if want := p.take(); got == nil || got.Owner != want.name {
				return fmt.Errorf("step %d: took %+v, want %+v", step, got, want)
			}
		case op < 7:
			got, want := q.NextShorter(func(i *Item) bool { return i.Owner.(int)%2 == 0 }), p.pass()
			if (got == nil) != (want == nil) || got != nil && got.Owner != want.name {
				return fmt.Errorf("step %d: %+v passed, want %+v", step, got, want)
			}
			if got != nil {
				q.Pass(now, got)
			}
		case op < 8 && len(p.items) > 0:
			i := p.items[rng.IntN(len(p.items))]
			p.remove(i)
			q.Remove(now, byName[i.name])
			q.Remove(now, byName[i.name])
		default:
			flow, priority, n := rng.IntN(len(flows)), int32(rng.IntN(3)), 1<<rng.IntN(8)-16
			p.charge(flow, priority, n)
			q.Charge(flows[flow], priority, n)
		}
		if err := q.Check(); err != nil {
			return fmt.Errorf("step %d: %w", step, err)
		}
		if q.Len() != len(p.items) {
			return fmt.Errorf("step %d: %d wait, want %d", step, q.Len(), len(p.items))
		}
	}
	return nil
}

// Shorter requests pass one whose turn it is until they have PassTokens more than it has
// itself; when it has had its turn, others may pass the next. What passes is charged, and
// nobody passes those of its own size.
func TestShorterRequestsPass(t *testing.T) {
	now := time.Unix(0, 0)
	q := New(Limits{Requests: 1000, Tokens: 1 << 20})
	flow, other := NewFlow(1), NewFlow(1)
	push := func(f *Flow, priority int32, tokens int) {
		t.Helper()
		if _, no := q.Push(now, &Item{Flow: f, Priority: priority, Tokens: tokens}, time.Hour); no != nil {
			t.Fatalf("%+v", no)
		}
	}
	push(flow, 0, 1000)
	push(flow, 0, 1000)
	push(flow, 0, 900)
	for range 100 {
		push(flow, 0, 100)
	}
	push(flow, 1, 1)
	push(other, 0, 3000)
	all := func(i *Item) bool { return i.Tokens != 1000 }
	for range 110 { // any number of those that take nothing from the request whose turn it is
		push(flow, 0, 50)
	}
	elsewhere := func(i *Item) bool { return i.Tokens == 50 }
	for n := range 111 {
		i := q.NextElsewhere(elsewhere)
		if (i != nil) != (n < 110) {
			t.Fatalf("%d requests go elsewhere, want 110 of %d tokens in all", n, 110*50)
		}
		if i != nil {
			q.PassElsewhere(now, i)
		}
	}
	for turn, want := range []int{50, 30, 20} { // 5048 tokens before that of 3000, 3048 before that of 1000, and what is left
		n := 0
		for i := q.NextShorter(all); i != nil && i.Tokens == 100; i = q.NextShorter(all) {
			if q.Pass(now, i); i.Waiting() {
				t.Fatalf("%+v passed and waits", i)
			}
			n++
		}
		if n != want {
			t.Errorf("%d of 100 tokens passed turn %d, want %d", n, turn, want)
		}
		if i := q.Take(now); i.Tokens != []int{3000, 1000, 1000}[turn] {
			t.Errorf("turn %d has a request of %d tokens: the flow that was served less goes first", turn, i.Tokens)
		}
		if err := q.Check(); err != nil {
			t.Error(err)
		}
	}
}

// fleet serves what it is given in steps, a token each for every request that runs.
type fleet struct {
	q      *Queue
	now    time.Time
	places int
	runs   []*run
	served map[*Flow]int
}

type run struct {
	item *Item
	left int // tokens of its answer
}

func (f *fleet) step(answer func() int) {
	f.now = f.now.Add(10 * time.Millisecond)
	for len(f.runs) < f.places && f.q.Len() > 0 {
		i := f.q.Take(f.now)
		f.served[i.Flow] += i.Tokens
		f.runs = append(f.runs, &run{i, answer()})
	}
	for _, r := range f.runs {
		f.served[r.item.Flow]++
		f.q.Charge(r.item.Flow, r.item.Priority, 1)
		r.left--
	}
	f.runs = slices.DeleteFunc(f.runs, func(r *run) bool { return r.left <= 0 })
}

// Flows that always wait are served tokens as their weights say, whatever the sizes
// of their requests; one that joins late gets its share from then on, and no more.
func TestWeights(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 5))
	f := &fleet{q: New(Limits{Requests: 1000, Tokens: 1 << 20}), now: time.Unix(0, 0), places: 16, served: map[*Flow]int{}}
	two, one, late := NewFlow(2), NewFlow(1), NewFlow(1)
	fill := func(flow *Flow, most int) {
		for n := 0; n < 40; n++ {
			waits := 0
			for _, s := range flow.shares {
				if flow.epoch == f.q.epoch {
					waits += s.items.Len()
				}
			}
			if waits >= 40 {
				return
			}
			if _, no := f.q.Push(f.now, &Item{Flow: flow, Tokens: 1 + rng.IntN(most)}, time.Hour); no != nil {
				t.Fatalf("%+v", no)
			}
		}
	}
	ratio := func(what string, a, b *Flow, want float64) {
		t.Helper()
		if got := float64(f.served[a]) / float64(f.served[b]); got < 0.97*want || got > 1.03*want {
			t.Errorf("%s: %d and %d tokens, 1:%.3f, want %g", what, f.served[a], f.served[b], got, want)
		}
	}
	for range 20_000 {
		fill(two, 50)
		fill(one, 2000) // fewer and larger
		f.step(func() int { return 1 + rng.IntN(100) })
	}
	ratio("two", two, one, 2)
	clear(f.served)
	for range 20_000 {
		fill(two, 50)
		fill(one, 2000)
		fill(late, 300)
		f.step(func() int { return 1 + rng.IntN(100) })
	}
	ratio("with a third", two, one, 2)
	ratio("who came late", two, late, 2)
	if err := f.q.Check(); err != nil {
		t.Error(err)
	}
}

// The worst priority gets one turn in Skip, or in DefaultSkip without one, the oldest
// first, while the best never ceases.
func TestNoStarvation(t *testing.T) {
	limits := Limits{Requests: 100, Tokens: 1000, Skip: 4}
	noStarvation(t, New(limits), 4)
	changed := New(limits)
	limits.Skip = 0
	noStarvation(t, New(limits), DefaultSkip)
	changed.SetLimits(limits)
	noStarvation(t, changed, DefaultSkip)
}

func noStarvation(t *testing.T, q *Queue, skip int) {
	t.Helper()
	now := time.Unix(0, 0)
	a, b := NewFlow(1), NewFlow(0.001)
	push := func(f *Flow, priority int32, owner any) {
		if _, no := q.Push(now, &Item{Flow: f, Priority: priority, Tokens: 5, Owner: owner}, time.Hour); no != nil {
			t.Fatalf("%+v", no)
		}
	}
	for n := range 5 {
		push(b, int32(10-n), n)
	}
	var turns []int
	for turn := 1; len(turns) < 5; turn++ {
		push(a, -3, -1)
		push(a, -3, -1)
		if i := q.Take(now); i.Flow == b {
			if i.Owner != len(turns) {
				t.Errorf("%v before %d", i.Owner, len(turns))
			}
			turns = append(turns, turn)
		}
	}
	if want := []int{skip, 2 * skip, 3 * skip, 4 * skip, 5 * skip}; !slices.Equal(turns, want) {
		t.Errorf("turns %v, want %v", turns, want)
	}
}

// A prediction comes once some turns were seen, and is what then happens.
func TestPredict(t *testing.T) {
	q, now := New(Limits{Requests: 1000, Tokens: 100_000}), time.Unix(0, 0)
	a, b := NewFlow(1), NewFlow(1)
	push := func(f *Flow, n int, patience time.Duration) *Refusal {
		_, no := q.Push(now, &Item{Flow: f, Tokens: 100}, patience)
		if no == nil && n > 1 {
			for range n - 1 {
				_, no = q.Push(now, &Item{Flow: f, Tokens: 100}, patience)
			}
		}
		return no
	}
	if wait, known := q.Predict(now, a, 0); wait != 0 || !known {
		t.Errorf("nobody waits: %v %t", wait, known)
	}
	push(a, 200, 0)
	if _, known := q.Predict(now, a, 0); known {
		t.Error("known from nothing")
	}
	for range 20 { // 1,000 tokens a second
		now = now.Add(100 * time.Millisecond)
		q.Take(now)
	}
	want := func(what string, f *Flow, priority int32, want time.Duration) {
		t.Helper()
		if got, known := q.Predict(now, f, priority); !known || got < want-10*time.Millisecond || got > want+10*time.Millisecond {
			t.Errorf("%s: %v %t, want %v", what, got, known, want)
		}
	}
	want("behind all", a, 0, 18*time.Second)
	want("behind all", a, 1, 18*time.Second)
	want("ahead of all", a, -1, 0)
	want("another flow", b, 0, 0)
	if wait, _ := q.Predict(now, b, 0); wait != 0 {
		t.Errorf("a flow of which nothing waits is to wait for %v: want 0, its first request goes next", wait)
	}
	if no := push(a, 1, 17*time.Second); no == nil || no.Reason != Late || no.Wait < 17900*time.Millisecond {
		t.Errorf("%+v", no)
	}
	push(b, 10, time.Minute)
	want("its second", b, 0, 2*time.Second) // the other half is a's
	want("all", a, 0, 19*time.Second)
	// What a flow has in one priority does not wait behind what it has in another.
	if _, no := q.Push(now, &Item{Flow: a, Priority: 1, Tokens: 100}, time.Minute); no != nil {
		t.Fatalf("%+v", no)
	}
	want("its first of a worse priority, behind the better one", b, 1, 19*time.Second)
	want("all of the better one", a, 0, 19*time.Second)
	// What nobody waited for is no measure.
	for q.Len() > 0 {
		now = now.Add(100 * time.Millisecond)
		q.Take(now)
	}
	now = now.Add(time.Hour)
	push(a, 10, time.Minute)
	want("later", a, 0, time.Second)
}

// A full queue gives up what is worst in it, or refuses, saying until when.
func TestFull(t *testing.T) {
	now := time.Unix(0, 0)
	q := New(Limits{Requests: 4, Tokens: 1000})
	a, b := NewFlow(1), NewFlow(1)
	push := func(f *Flow, priority int32, nTokens int, owner string) ([]*Item, *Refusal) {
		return q.Push(now, &Item{Flow: f, Priority: priority, Tokens: nTokens, Owner: owner}, time.Hour)
	}
	for n := range 4 {
		push(a, 0, 10, fmt.Sprint("a", n))
	}
	if _, no := push(a, 0, 10, "own"); no == nil || no.Reason != Full || no.Wait != 0 {
		t.Errorf("%+v", no)
	}
	if _, no := push(a, 1, 10, "worse"); no == nil || no.Reason != Full {
		t.Errorf("%+v", no)
	}
	out, no := push(b, 0, 10, "b0")
	if no != nil || len(out) != 1 || out[0].Owner != "a3" {
		t.Errorf("%v %+v", out, no)
	}
	if out, no := push(b, 0, 10, "b1"); no != nil || len(out) != 1 || out[0].Owner != "a2" {
		t.Errorf("%v %+v", out, no)
	}
	if _, no := push(b, 0, 10, "b2"); no == nil { // they hold the same
		t.Error("b took more than its share")
	}
	if out, no := push(a, -1, 985, "large"); no != nil || len(out) != 3 {
		t.Errorf("%v %+v", out, no)
	}
	if _, no := push(a, -1, 30, "tokens"); no == nil || no.Reason != TooMany {
		t.Errorf("%+v", no)
	}
	if err := q.Check(); err != nil {
		t.Error(err)
	}
}

// Priorities without number leave nothing behind.
func TestManyPriorities(t *testing.T) {
	q, now, f := New(Limits{Requests: 1000, Tokens: 1 << 20}), time.Unix(0, 0), NewFlow(1)
	stays := &Item{Flow: f, Priority: 1 << 30, Tokens: 1}
	q.Push(now, stays, time.Hour)
	for p := range int32(10_000) {
		i := &Item{Flow: f, Priority: p, Tokens: 1}
		q.Push(now, i, time.Hour)
		q.Charge(f, p, 5)
		q.Remove(now, i)
	}
	if len(q.classes) > maxClasses || len(f.shares) > maxClasses+1 {
		t.Errorf("%d priorities and %d shares are remembered", len(q.classes), len(f.shares))
	}
	if err := q.Check(); err != nil {
		t.Error(err)
	}
}

func BenchmarkPushTake(b *testing.B) {
	q, now := New(Limits{Requests: 1 << 20, Tokens: 1 << 40}), time.Unix(0, 0)
	var flows []*Flow
	for range 1000 {
		flows = append(flows, NewFlow(1))
	}
	for n := range 10_000 {
		q.Push(now, &Item{Flow: flows[n%1000], Tokens: 100}, time.Hour)
	}
	b.ReportAllocs()
	for n := 0; b.Loop(); n++ {
		q.Push(now, &Item{Flow: flows[n%1000], Tokens: 100}, time.Hour)
		q.Take(now)
	}
}

// A refusal names the limit: tokens where there is a place left for one more
// request, else requests.
func TestRefusalNamesTheLimit(t *testing.T) {
	now := time.Unix(0, 0)
	for _, c := range []struct {
		limits Limits
		want   Reason
	}{
		{Limits{Requests: 2, Tokens: 100}, TooMany},
		{Limits{Requests: 1, Tokens: 100}, Full},
		{Limits{Requests: 1, Tokens: 1000}, Full},
	} {
		q := New(c.limits)
		f := NewFlow(1)
		if _, no := q.Push(now, &Item{Flow: f, Tokens: 60}, time.Hour); no != nil {
			t.Fatal(no)
		}
		if _, no := q.Push(now, &Item{Flow: f, Tokens: 60}, time.Hour); no == nil || no.Reason != c.want {
			t.Errorf("%+v: %+v: want reason %d", c.limits, no, c.want)
		}
	}
}

// A flow that comes back each time that nobody waits keeps nothing of before.
func TestFlowKeepsNoOldShares(t *testing.T) {
	q := New(Limits{Requests: 10, Tokens: 1000})
	f := NewFlow(1)
	for n := range 100 {
		now := time.Unix(int64(n), 0)
		if _, no := q.Push(now, &Item{Flow: f, Tokens: 1}, time.Hour); no != nil {
			t.Fatal(no)
		}
		q.Take(now)
	}
	if len(f.shares) > 1 {
		t.Errorf("a flow of one priority has %d shares", len(f.shares))
	}
}

// The measured pace is that of the last half minute or so, also if nobody asks
// for it meanwhile.
func TestPaceForgets(t *testing.T) {
	var p pace
	now := time.Unix(0, 0)
	p.begin(now)
	for _, tokens := range []int{10, 100} {
		for range 120 {
			now = now.Add(time.Second)
			p.count(now, tokens)
		}
	}
	if rate, known := p.rate(now); !known || rate < 90 {
		t.Errorf("two minutes at 10 and two at 100 tokens per second give %g, %t: want about 100", rate, known)
	}
}

func TestCheckFindsDamage(t *testing.T) {
	for name, damage := range map[string]func(*Queue){
		"requests":   func(q *Queue) { q.nItems++ },
		"tokens":     func(q *Queue) { q.nTokens++ },
		"limits":     func(q *Queue) { q.limits.Requests = 1 },
		"priorities": func(q *Queue) { q.classes[0], q.classes[1] = q.classes[1], q.classes[0] },
		"class":      func(q *Queue) { q.classes[0].tokens++ },
		"weight":     func(q *Queue) { q.classes[0].weight++ },
		"flow":       func(q *Queue) { q.classes[0].flows[0].tokens++ },
		"place":      func(q *Queue) { q.classes[0].flows[0].at++ },
		"behind":     func(q *Queue) { q.classes[0].v = math.Inf(1) },
		"heap":       func(q *Queue) { q.classes[0].flows[0].vt = 1e9 },
		"size":       func(q *Queue) { l := &q.classes[0].bySize[0]; l.MoveToBack(l.Front()) },
		"gone":       func(q *Queue) { q.classes[0].bySize[3].PushBack(new(Item)) },
		"item":       func(q *Queue) { q.classes[0].items.Front().Value.(*Item).Priority++ },
	} {
		t.Run(name, func(t *testing.T) {
			now := time.Unix(0, 0)
			q := New(Limits{Requests: 10, Tokens: 1000})
			for n := range 4 {
				if _, no := q.Push(now, &Item{Flow: NewFlow(1), Priority: int32(n / 2), Tokens: 10}, time.Hour); no != nil {
					t.Fatal(no)
				}
			}
			if err := q.Check(); err != nil {
				t.Fatal(err)
			}
			damage(q)
			if err := q.Check(); !errors.Is(err, ErrBroken) {
				t.Errorf("Check = %v: want %v", err, ErrBroken)
			}
		})
	}
}
