//go:build cgo && linux

package cuda

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/model"
	"github.com/tandem-serving/tandem/engine/sample"
)

// adaptCase is products some of which adapters have parts for, of odd widths too, and
// of rows that no adapter has.
func adaptCase() kernelCase {
	const heads, dim, in, odd, most = 3, 40, 64, 77, 6
	spec := func(b int) backend.KVSpec { return backend.UniformKV(1, b, 16, heads, dim, backend.F32) }
	return kernelCase{name: "adapters", rows: 90, adapted: true, kv: func(*rand.Rand) backend.KVSpec { return spec(120) }, make: func(b *bench) func() {
		x, q, k, v := b.input(in, 1), b.output(heads*dim), b.output(heads*dim), b.output(heads*dim)
		gate, up, thin, last := b.output(odd), b.buf(odd), b.output(30), b.output(heads*dim)
		matrix := func(out, in int) backend.Weight { return b.weight(backend.BF16, 0.1, out, in) }
		w := []backend.Weight{matrix(heads*dim, in), matrix(heads*dim, in), matrix(heads*dim, in), matrix(odd, in), matrix(odd, in), matrix(30, odd)}
		shapes := [][2]int{{heads * dim, in}, {heads * dim, in}, {heads * dim, in}, {odd, in}, {odd, in}, {30, odd}}
		dev := b.Backend
		if w, ok := dev.(widened); ok {
			dev = w.Backend
		}
		a := dev.(backend.Adapters)
		targets := slices.Delete(slices.Clone(w), 1, 2) // the second has none
		b.must(a.AllocAdapters(2, most, targets))
		for place, rank := range map[int]int{1: most, 2: 3} {
			var parts []backend.AdapterPart
			for i := range w {
				p := backend.AdapterPart{Target: w[i], Rank: rank, A: make([]float32, rank*shapes[i][1]), B: make([]float32, rank*shapes[i][0])}
				for j := range p.A {
					p.A[j] = float32(math.Sin(float64(j*(i+3)+place))) / 8
				}
				for j := range p.B {
					p.B[j] = float32(math.Cos(float64(j*(i+5)+place))) / 8
				}
				if i != 1 && (place == 1 || i%2 == 0) {
					parts = append(parts, p)
				}
			}
			b.must(a.LoadAdapter(place, parts))
		}
		return func() {
			for i, to := range []backend.Buf{q, k, v} {
				b.Linear(to, x, w[i], backend.NoWeight)
			}
			b.StoreKV(0, k, v)
			b.Linear(gate, x, w[3], backend.NoWeight)
			b.Linear(up, x, w[4], backend.NoWeight)
			b.GatedAct(gate, gate, up, backend.Act(0))
			b.Linear(thin, gate, w[5], backend.NoWeight)
			b.Attention(last, q, backend.AttentionSpec{Heads: heads, KVHeads: heads, HeadDim: dim, Scale: 0.3})
		}
	}}
}

var adapterNames = []string{"all", "attention", "mlp"}

// adaptedSeat is a model with its three adapters in places 1, 2 and 3 of four.
func adaptedSeat(t *testing.T, src *model.Source, b backend.Backend) *seat {
	t.Helper()
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	m, err := model.Load(src, b, modelLimits, model.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if bytes, err := m.Adapters(len(adapterNames)+1, 16); err != nil || bytes < 1 {
		t.Fatalf("%d bytes, %v", bytes, err)
	}
	if err := b.AllocKV(kvSpec(src, backend.F32)); err != nil {
		t.Fatal(err)
	}
	for i, name := range adapterNames {
		if err := m.LoadAdapter(i+1, openAdapter(t, name)); err != nil {
			t.Fatal(err)
		}
	}
	return &seat{m, b}
}

func openAdapter(t *testing.T, name string) *model.Adapter {
	t.Helper()
	a, err := model.OpenAdapter(filepath.Join("../../model/testdata/lora", name))
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// merged are prompts and the logits behind them, which PEFT computed with each
// adapter merged into the weights.
func merged(t *testing.T, dir string, at int) (prompt []int32, logits []float64) {
	t.Helper()
	var g struct {
		Cases []struct {
			Prompt []int32     `json:"prompt"`
			Logits [][]float64 `json:"logits"`
		} `json:"cases"`
	}
	f, err := os.Open(filepath.Join("../../model/testdata", dir, "goldens.json.gz"))
	if err == nil {
		defer f.Close()
		var z *gzip.Reader
		if z, err = gzip.NewReader(f); err == nil {
			err = json.NewDecoder(z).Decode(&g)
		}
	}
	if err != nil || len(g.Cases) <= at {
		t.Fatalf("%s: %d cases, %v", dir, len(g.Cases), err)
	}
	c := g.Cases[at]
	return c.Prompt, c.Logits[len(c.Logits)-1]
}

func openTied(t *testing.T) *model.Source {
	t.Helper()
	src, err := model.OpenDir("../../model/testdata/gqa-tied")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { src.Close() })
	return src
}

// mixed is a step of several prompts' tokens [from, to), each through its adapter; a
// from below 0 counts from a prompt's end.
func mixed(prompts [][]int32, adapters []int32, from, to int) *backend.Step {
	s := &backend.Step{}
	first := from
	for i, p := range prompts {
		end := min(to, len(p))
		if from = first; first < 0 {
			from += len(p)
		}
		if from >= end {
			continue
		}
		span := backend.Span{Row: int32(len(s.Tokens)), Tokens: int32(end - from), Start: int32(from), Adapter: adapters[i]}
		var table []int32
		for b := range (end + blockTokens - 1) / blockTokens {
			table = append(table, int32(i*modelLimits.Blocks+b))
		}
		span.Tables = [][]int32{table}
		for at := from; at < end; at++ {
			s.Tokens, s.Positions = append(s.Tokens, p[at]), append(s.Positions, int32(at))
		}
		s.Spans = append(s.Spans, span)
		s.Outputs = append(s.Outputs, backend.Output{Row: int32(len(s.Tokens) - 1), Position: int32(end), Params: sample.Params{}})
	}
	s.Sampled = make([]int32, len(s.Outputs))
	return s
}

// Three adapters and a request without one in each step compute what PEFT computes
// with each merged into the weights, and then draw the CPU's tokens; so does a request
// for itself.
func TestAdaptersAreMergedWeights(t *testing.T) {
	src := openTied(t)
	host, err := cpu.New(cpu.Options{Limits: modelLimits, Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	want, got := adaptedSeat(t, src, host), adaptedSeat(t, src, openGPU(t, Options{Limits: modelLimits}))
	prompts, adapters := make([][]int32, 4), []int32{0, 1, 2, 3}
	goldens := make([][]float64, 4)
	for i, name := range append([]string{"gqa-tied"}, "lora/all", "lora/attention", "lora/mlp") {
		prompts[i], goldens[i] = merged(t, name, []int{5, 1, 1, 1}[i])
	}
	vocab, worst := got.VocabSize(), 0.0
	compare := func(logits []float32, golden []float64) {
		t.Helper()
		for j, v := range golden {
			worst = max(worst, math.Abs(float64(logits[j])-v))
		}
	}
	// Prompts in chunks of 7, each step with all of them, or those that are left.
	longest := 0
	for _, p := range prompts {
		longest = max(longest, len(p))
	}
	for from := 0; from < longest; from += 7 {
		s := mixed(prompts, adapters, from, from+7)
		if err := got.Step(s, nil); err != nil {
			t.Fatal(err)
		}
		logits, at := got.Download(nil, got.Logits()), 0
		for i, p := range prompts {
			if from >= len(p) {
				continue
			}
			if from+7 >= len(p) {
				compare(logits[at*vocab:(at+1)*vocab], goldens[i])
			}
			at++
		}
		if err := want.Step(s, nil); err != nil {
			t.Fatal(err)
		}
	}
	// Then tokens, all together.
	draws := func(m *seat) [][]int32 {
		texts := make([][]int32, len(prompts))
		for i, p := range prompts {
			texts[i] = slices.Clone(p)
		}
		for range 8 { // at first the last token anew: its KV is what it was
			s := mixed(texts, adapters, -1, 1000)
			if err := m.Step(s, nil); err != nil {
				t.Fatal(err)
			}
			for i, token := range s.Sampled {
				texts[i] = append(texts[i], token)
			}
		}
		return texts
	}
	if a, b := draws(got), draws(want); !slices.EqualFunc(a, b, slices.Equal) {
		t.Errorf("draws are %v, the CPU's %v", a, b)
	}
	t.Logf("worst error of a logit %.2g", worst)
	if !(worst <= tolerance) {
		t.Errorf("a logit is off by %g from merged weights, at most %g is allowed", worst, tolerance)
	}
}

// Steps without an adapter run the plan that has none. Requests in a step with other
// requests' adapters have the bits that they have without. A place that is reloaded while
// steps are queued serves its new adapter.
func TestAdapterPlans(t *testing.T) {
	t.Setenv("TANDEM_TWIN_LATE", "5")
	src := openTied(t)
	dev := openGPU(t, Options{Limits: modelLimits})
	m := adaptedSeat(t, src, dev)
	var told []int
	graphs, err := m.Capture(4, func(done, of int) { told = append(told, done, of) })
	if want := []int{1, 3, 2, 3, 3, 3}; !slices.Equal(told, want) {
		t.Errorf("heard of %v, want %v: batches of 4, 2 and 1", told, want)
	}
	if err != nil || graphs%2 != 0 || len(dev.plans) != len(dev.adapt.plans) || graphs < 2 {
		t.Fatalf("%d graphs, %d and %d plans, %v", graphs, len(dev.plans), len(dev.adapt.plans), err)
	}
	count := func(p *plan) (n int) {
		for _, o := range p.ops {
			if o.kind == opAdapt {
				n++
			}
		}
		return n
	}
	key := backend.Key{Tokens: 1, Outputs: 1}
	if n, with := count(dev.plans[key]), count(dev.adapt.plans[key]); n != 0 || with != 4*src.Config.Layers {
		t.Errorf("%d and %d operations of adapters in plans of %d layers, want none and 4 of each: queries, keys and values together, what attention gives, gate and up together, and down", n, with, src.Config.Layers)
	}
	prompt, _ := merged(t, "gqa-tied", 7)
	prompts := [][]int32{prompt, prompt}
	logits := func(adapters ...int32) []float32 {
		if err := m.Step(mixed(prompts, adapters, 0, 9), nil); err != nil {
			t.Fatal(err)
		}
		return m.Download(nil, m.Logits())
	}
	vocab := m.VocabSize()
	without, beside := logits(0, 0), logits(0, 1)
	if !slices.Equal(without[:vocab], beside[:vocab]) {
		t.Error("a request beside one with an adapter has other bits than without")
	}
	if slices.Equal(without[vocab:], beside[vocab:]) {
		t.Error("an adapter changes nothing")
	}
	// Two steps ahead, then another adapter in the same place before they have ended.
	single := func() *backend.Step { return mixed(prompts[:1], []int32{1}, 0, 1) }
	if err := m.Start(single()); err != nil {
		t.Fatal(err)
	}
	before := make([]int32, 1)
	if err := m.LoadAdapter(4, openAdapter(t, "mlp")); err != nil {
		t.Fatal(err)
	}
	if err := m.Finish(before); err != nil {
		t.Fatal(err)
	}
	if got, want := logits(4, 0), logits(3, 0); !slices.Equal(got, want) {
		t.Error("an adapter in another place has other bits")
	}
	if err := m.LoadAdapter(4, openAdapter(t, "attention")); err != nil {
		t.Fatal(err)
	}
	if got, want := logits(4, 0), logits(2, 0); !slices.Equal(got, want) {
		t.Error("what was in a place before is still there")
	}
}

// What there is no place for is refused, and changes nothing.
func TestAdaptersRefused(t *testing.T) {
	src := openTied(t)
	dev := openGPU(t, Options{Limits: modelLimits, Eager: true})
	m := adaptedSeat(t, src, dev)
	prompt, _ := merged(t, "gqa-tied", 7)
	refused := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, backend.ErrShape) && !errors.Is(err, model.ErrAdapter) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, place := range []int32{-1, 4, 5} {
		refused("a place without an adapter", m.Step(mixed([][]int32{prompt}, []int32{place}, 0, 2), nil))
	}
	refused("a place that there is not", m.LoadAdapter(5, openAdapter(t, "all")))
	refused("places twice", dev.AllocAdapters(1, 1, nil))
	other := openGPU(t, Options{Limits: modelLimits})
	defer other.Close()
	refused("no places", other.AllocAdapters(0, 1, nil))
	for _, w := range dev.weights {
		if w.in == 0 {
			continue
		}
		refused("a rank beyond the places'", dev.LoadAdapter(1, []backend.AdapterPart{{Target: 0, Rank: 17, A: make([]float32, 17*w.in), B: make([]float32, 17*w.out)}}))
		break
	}
}
