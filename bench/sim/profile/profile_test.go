package profile

import (
	"bytes"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func named(t *testing.T, name string) *Profile {
	t.Helper()
	p, known, err := Named(name)
	if err != nil || !known {
		t.Fatalf("%s: %v, %v", name, known, err)
	}
	return p
}

// The estimates of an 8B model are within 12 % of the coefficients that were fitted to measured
// kernels.
func TestEstimatesAgreeWithMeasurements(t *testing.T) {
	for name, fitted := range map[string][6]float64{ // decode fixed, per context token, per sequence; floor, per token, per pair
		"h100:llama-8b": {6.403e-3, 42.19e-9, 10.57e-6, 8.77e-3, 20.36e-6, 0.782e-9},
		"h200:llama-8b": {4.943e-3, 29.85e-9, 11.02e-6, 6.24e-3, 20.07e-6, 0.812e-9},
	} {
		p := named(t, name)
		d, r := p.Step.Decode, p.Step.Prefill
		for i, got := range []float64{d.Fixed, d.PerCtx, d.PerSeq, r.Floor, r.PerToken, r.PerPair} {
			if off := got/fitted[i] - 1; math.Abs(off) > 0.12 {
				t.Errorf("%s: coefficient %d is %g, fitted %g (%+.0f %%)", name, i, got, fitted[i], 100*off)
			}
		}
	}
}

// Every GPU with every model has a usable estimate, or says that the weights do not fit.
func TestEveryEstimate(t *testing.T) {
	fits := 0
	for _, g := range gpus {
		for _, m := range llms {
			for _, gpuName := range []string{g.name, "8x" + g.name} {
				p, known, err := Named(gpuName + ":" + m.name)
				if !known {
					t.Fatalf("%s:%s is not known", gpuName, m.name)
				}
				if err != nil {
					if !strings.Contains(err.Error(), "use more GPUs") {
						t.Errorf("%s:%s: %v", gpuName, m.name, err)
					}
					continue
				}
				fits++
				if err := p.Check(); err != nil || p.Basis() != "estimate ±25 %" {
					t.Errorf("%s:%s: %v, %s", gpuName, m.name, err, p.Basis())
				}
			}
		}
	}
	if fits < 100 {
		t.Errorf("%d estimates, want 100", fits)
	}
}

// A mixture of experts reads fewer weights for few sequences.
func TestExpertsOfFewSequences(t *testing.T) {
	times := named(t, "h200:mixtral-8x7b").Times()
	one, many := times.Step(Shape{Streams: 1, ContextSum: 100}), times.Step(Shape{Streams: 64, ContextSum: 6400})
	if ratio := many.Seconds() / one.Seconds(); ratio < 3 || ratio > 5 {
		t.Errorf("one sequence takes %v, 64 take %v", one, many)
	}
	if times.Decode.Points != 2 {
		t.Errorf("%+v", times.Decode)
	}
}

func TestNamesOfNothing(t *testing.T) {
	for name, want := range map[string]string{
		"h900:llama-8b": "no GPU is called", "h100:llama-9b": "no model is called", "9xh100:llama-8b": "write 1 to 8",
		"0xh100:llama-8b": "write 1 to 8", "l4:llama-70b": "use more GPUs, such as 2xl4:llama-70b",
	} {
		if _, known, err := Named(name); !known || !errors.Is(err, ErrProfile) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
	for _, name := range []string{"a.yaml", "./h100:llama-8b", "profile"} {
		if _, known, err := Named(name); known || err != nil {
			t.Errorf("%s: %v, %v", name, known, err)
		}
	}
	if _, err := Load("nothing.yaml"); !errors.Is(err, ErrProfile) || !strings.Contains(err.Error(), "h200:llama-8b") {
		t.Error(err)
	}
}

// What Write writes, Read reads. The file has about 30 lines.
func TestFileOfAProfile(t *testing.T) {
	for _, name := range []string{"h200:llama-8b", "2xh200:mixtral-8x7b", "4xrtxpro6000:llama-70b"} {
		p := named(t, name)
		p.Measured = Origin{Commit: "1234567", At: "2026-11-25", Seconds: 214, Noise: 0.012}
		p.Step.Prefill.Points = [][]float64{{128, 0, 0.006, 0.0001}, {2048, 0, 0.0434}}
		var b bytes.Buffer
		if err := p.Write(&b); err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(b.String(), "\n"); n > 35 {
			t.Errorf("%s: %d lines:\n%s", name, n, b.String())
		}
		got, err := Read(&b)
		if err != nil || !reflect.DeepEqual(got, p) {
			t.Errorf("%s: %v\ngot  %+v\nwant %+v", name, err, got, p)
		}
	}
}

// The example of the documentation is a profile.
func TestExampleOfTheDocumentation(t *testing.T) {
	page, err := os.ReadFile("../../../docs/sim.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(page), "```yaml\n")
	example, _, ok := strings.Cut(rest, "```")
	if p, err := Read(strings.NewReader(example)); err != nil || !ok || len(p.Step.Prefill.Points) != 3 {
		t.Errorf("%v:\n%s", err, example)
	}
}

// text returns the file of an estimate with a part replaced.
func text(t *testing.T, old, new string) string {
	t.Helper()
	var b bytes.Buffer
	if err := named(t, "h200:llama-8b").Write(&b); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(b.String(), old) {
		t.Fatalf("no %q in\n%s", old, b.String())
	}
	return strings.Replace(b.String(), old, new, 1)
}

// A wrong file is refused with one sentence that names the place and the remedy.
func TestWrongFiles(t *testing.T) {
	for _, c := range []struct{ old, new, want string }{
		{"version: 1", "version: 2", "version is 2"},
		{"version: 1", "version: 1\nextra: 3", "line 2: the key extra is not known"},
		{"tp: 1", "tp: one", "of the wrong type: write a number"},
		{"tp: 1", "tp: 1, colour: red", "the key colour is not known"},
		{"source: estimate", "source: guess", "write measured, estimate or imported"},
		{"gamma: 1", "gamma: .nan", "step.mixed.gamma is NaN"},
		{"gamma: 1", "gamma: .inf", "step.mixed.gamma is +Inf"},
		{"block_tokens: 16", "block_tokens: 0", "memory.block_tokens is 0"},
		{"layers: 32", "layers: -1", "model.layers is -1"},
		{"fixed: ", "points: [[1, 1]]\n    fixed: ", "point 1 has 2 numbers"},
		{"fixed: ", "points: [[1, 1, 0.1], [1, 1, 0.2]]\n    fixed: ", "point 2 repeats 1, 1"},
		{"fixed: ", "points: [[0, 1, 0.1]]\n    fixed: ", "point 1 is [0 1 0.1]"},
		{"fixed: ", "points: fast\n    fixed: ", "write a list of numbers"},
		{"version: 1", "version: 1\n---\nversion: 1", "more than one YAML document"},
		{"version: 1", "version: 1\nversion: 1", "already defined"},
	} {
		_, err := Read(strings.NewReader(text(t, c.old, c.new)))
		if !errors.Is(err, ErrProfile) || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %v, want %q", c.new, err, c.want)
		}
	}
	for _, c := range []struct{ file, want string }{{"", "the file is empty"}, {"- 1", "write a mapping"}, {"a: [", "write YAML"}} {
		if _, err := Read(strings.NewReader(c.file)); !errors.Is(err, ErrProfile) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v, want %q", c.file, err, c.want)
		}
	}
	path := filepath.Join(t.TempDir(), "bad.yaml")
	if err := os.WriteFile(path, []byte("version: 3"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(path); !errors.Is(err, ErrProfile) || !strings.Contains(err.Error(), "bad.yaml: version is 3") {
		t.Error(err)
	}
}

// Between points durations are interpolated and outside of them follow the coefficients, which is
// counted.
func TestPointsAndCoefficients(t *testing.T) {
	p := named(t, "h200:llama-8b")
	d := &p.Step.Decode
	for _, seqs := range []float64{1, 64, 256} {
		for _, ctx := range []float64{128, 8192} { // twice as slow as the coefficients
			d.Points = append(d.Points, []float64{seqs, ctx, 2 * (d.Fixed + d.PerSeq*seqs + d.PerCtx*seqs*ctx)})
		}
	}
	times := p.Times()
	plain := named(t, "h200:llama-8b").Times()
	between := p.Step.Overhead.Between
	for _, c := range []struct {
		streams, ctx int
		factor       float64
	}{{64, 8192, 2}, {32, 4000, 2}, {200, 128, 2}, {32, 100, 1}, {300, 4000, 1}, {32, 9000, 1}} {
		s := Shape{Streams: c.streams, ContextSum: c.streams * c.ctx}
		got, want := times.Step(s).Seconds()-between, c.factor*(plain.Step(s).Seconds()-between)
		if math.Abs(got/want-1) > 1e-5 {
			t.Errorf("%d streams of %d tokens: %g s, want %g", c.streams, c.ctx, got, want)
		}
	}
	if times.Decode != (Uses{Points: 3, Coefficients: 3}) || times.Decode.String() != "50.0 % between points, the others by coefficients" {
		t.Errorf("%+v: %v", times.Decode, times.Decode)
	}
}

// More work never takes less time, for any points of a full grid.
func TestMoreWorkTakesLonger(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 3))
		var points [][]float64
		for x := range 4 {
			for y := range 4 {
				points = append(points, []float64{float64(x), float64(y), 0.001 + r.Float64()})
			}
		}
		r.Shuffle(len(points), func(i, j int) { points[i], points[j] = points[j], points[i] })
		g := newGrid(points)
		for range 100 {
			x, y := 3*r.Float64(), 3*r.Float64()
			a, ok := g.at(x, y)
			if !ok {
				t.Fatalf("seed %d: (%g, %g) is outside", seed, x, y)
			}
			for _, to := range [][2]float64{{x + r.Float64(), y}, {x, y + r.Float64()}} {
				if b, ok := g.at(to[0], to[1]); ok && b < a-1e-12 {
					t.Fatalf("seed %d: (%g, %g) takes %g, %v takes %g", seed, x, y, a, to, b)
				}
			}
		}
	}
}

// Several chunks attend to less than one of their size.
func TestSeveralChunks(t *testing.T) {
	p := named(t, "h200:llama-8b")
	r := &p.Step.Prefill
	for _, tokens := range []float64{512, 8192} {
		for _, start := range []float64{0, 16384} {
			r.Points = append(r.Points, []float64{tokens, start, r.Fixed + r.PerToken*tokens + r.PerPair*tokens*(start+tokens/2)})
		}
	}
	times := p.Times()
	one := times.Step(Shape{Chunk: 4096, Attended: 4096 * 2048})
	two := times.Step(Shape{Chunk: 4096, Attended: 2 * 2048 * 1024})
	if two >= one || times.Prefill.Points != 2 {
		t.Errorf("one chunk takes %v, two halves %v: %+v", one, two, times.Prefill)
	}
}

func FuzzRead(f *testing.F) {
	var b bytes.Buffer
	p, _, err := Named("2xh200:mixtral-8x7b")
	if err != nil {
		f.Fatal(err)
	}
	if err := p.Write(&b); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Add([]byte("version: 1\nstep: {decode: {points: [[1, 1, 1]]}}"))
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := Read(bytes.NewReader(data))
		if err != nil {
			if !errors.Is(err, ErrProfile) || strings.Contains(err.Error(), "\n") {
				t.Fatalf("%q", err)
			}
			return
		}
		times := p.Times()
		for _, s := range []Shape{{Chunk: 1}, {Chunk: 8192, Attended: 8192 * 4096}, {Streams: 1, ContextSum: 1}, {Chunk: 512, Attended: 1 << 40, Streams: 256, ContextSum: 1 << 30}} {
			if d := times.Step(s); d < 0 {
				t.Fatalf("%+v takes %v", s, d)
			}
		}
	})
}
