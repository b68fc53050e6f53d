//go:build cgo && linux

package cuda

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/memory"
	"github.com/tandem-serving/tandem/engine/model"
	"github.com/tandem-serving/tandem/engine/sample"
)

// tolerance is how far a logit may be from the CPU's.
const tolerance = 1e-4

var modelLimits = backend.Limits{Tokens: 64, Outputs: 16, Seqs: 5, Blocks: 12}

const blockTokens = 16

// seat is a model on a backend.
type seat struct {
	*model.Model
	backend.Backend
}

func sit(t testing.TB, src *model.Source, b backend.Backend, kv backend.DType) *seat {
	t.Helper()
	return sitAs(t, src, b, kv, model.Options{})
}

func sitAs(t testing.TB, src *model.Source, b backend.Backend, kv backend.DType, o model.Options) *seat {
	t.Helper()
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	m, err := model.Load(src, b, modelLimits, o)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.AllocKV(kvSpec(src, kv)); err != nil {
		t.Fatal(err)
	}
	return &seat{m, b}
}

func kvSpec(src *model.Source, kv backend.DType) backend.KVSpec {
	spec := memory.Arrange(memory.Need{
		Layers: src.Config.KVLayers(), BlockTokens: blockTokens, DType: kv,
		MaxModelLen: modelLimits.Blocks * blockTokens, MaxBatchedTokens: modelLimits.Tokens,
	})
	spec.Blocks = modelLimits.Seqs * modelLimits.Blocks * len(spec.Groups)
	return spec
}

func openGPU(t testing.TB, o Options) *CUDA {
	t.Helper()
	o.Library = libraryPath
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// talk is one sequence of a test: prompt, then what the CPU draws.
type talk struct {
	tokens []int32
	done   int
	params sample.Params
	tables [][]int32
}

// load makes a step of what rng picks of the talks: chunks of prompts, single
// tokens behind them, now and then some more outputs than the last.
func load(rng *rand.Rand, talks []*talk, spec backend.KVSpec) (*backend.Step, []*talk) {
	s := &backend.Step{}
	var who []*talk
	for _, i := range rng.Perm(len(talks)) {
		k := talks[i]
		left := len(k.tokens) - k.done
		room := modelLimits.Tokens - len(s.Tokens)
		if left == 0 || room == 0 || rng.IntN(4) == 0 {
			continue
		}
		n := min(1+rng.IntN(left), room)
		span := backend.Span{Row: int32(len(s.Tokens)), Tokens: int32(n), Start: int32(k.done)}
		for g, group := range spec.Groups {
			if group.Window > 0 {
				for place := range max(0, k.done-group.Window+1) / group.BlockTokens {
					k.tables[g][place] = -1
				}
			}
			span.Tables = append(span.Tables, k.tables[g][:(k.done+n+group.BlockTokens-1)/group.BlockTokens])
		}
		for p := k.done; p < k.done+n; p++ {
			s.Tokens, s.Positions = append(s.Tokens, k.tokens[p]), append(s.Positions, int32(p))
		}
		k.done += n
		if k.done == len(k.tokens) && len(s.Outputs) < modelLimits.Outputs {
			out := backend.Output{Row: int32(len(s.Tokens) - 1), Position: int32(k.done), Params: k.params, LogProbs: (k.done * 5) % 22}
			if c := k.params.Controls; c != nil && wordsOf(c) > ruleWords {
				out.LogProbs = 0 // the host draws, and looks for itself
			}
			s.Outputs = append(s.Outputs, out)
			who = append(who, k)
		}
		s.Spans = append(s.Spans, span)
	}
	s.Sampled = make([]int32, len(s.Outputs))
	return s, who
}

// newTalks makes sequences whose blocks are anywhere in the pool.
func newTalks(rng *rand.Rand, vocab int, spec backend.KVSpec) []*talk {
	perm := rng.Perm(spec.Blocks)
	talks := make([]*talk, modelLimits.Seqs)
	for i := range talks {
		k := &talk{tokens: make([]int32, 1+rng.IntN(90))}
		for j := range k.tokens {
			k.tokens[j] = rng.Int32N(int32(vocab))
		}
		if i%2 == 1 {
			k.params = sample.Params{Seed: rng.Uint64(), Temperature: 0.5 + rng.Float32(), TopP: 0.7, TopK: int32(rng.IntN(30)), MinP: 0.01}
		}
		switch i {
		case 2:
			r := sample.Rules{Repetition: 1.3, Frequency: 0.5, Presence: -0.2, MinTokens: 4, Stops: []int32{1, 2, 3}, Bias: []sample.Bias{{Token: 5, Value: 2}}}
			k.params.Controls = sample.NewControls(r, k.tokens, nil)
		case 3:
			k.params.Controls = tooManyRules()
		}
		for range spec.Groups {
			table := make([]int32, modelLimits.Blocks)
			for j := range table {
				table[j] = int32(perm[j])
			}
			perm = perm[modelLimits.Blocks:]
			k.tables = append(k.tables, table)
		}
		talks[i] = k
	}
	return talks
}

// made is what weights of some models are turned into; others stay as they are stored,
// and have the same operations.
var made = map[string]model.Quantization{"deepseek-plain": model.INT8, "qwen3-moe-plain": model.INT4, "mistral-full": model.INT4}

// Whole models give the CPU's logits and draws, whatever shares a step.
func TestModels(t *testing.T) {
	folders, err := filepath.Glob("../../model/testdata/*/config.json")
	if err != nil || len(folders) < 10 {
		t.Fatal(folders, err)
	}
	for i, config := range folders {
		if testing.Short() && i%3 > 0 {
			continue
		}
		dir := filepath.Dir(config)
		t.Run(filepath.Base(dir), func(t *testing.T) {
			src, err := model.OpenDir(dir)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { src.Close() })
			host, err := cpu.New(cpu.Options{Limits: modelLimits, Threads: 1})
			if err != nil {
				t.Fatal(err)
			}
			o := model.Options{Quantization: made[filepath.Base(dir)]}
			want := sitAs(t, src, widened{host}, backend.F32, o)
			compareModels(t, src, want, nil, sitAs(t, src, openGPU(t, Options{Limits: modelLimits}), backend.F32, o), backend.F32, tolerance)
		})
	}
}

// TestModelBF16 compares a model whose heads have a size that tensor cores compute with, over bf16
// KV, with cuBLASLt.
//
// The unit of its limits is how far bf16 KV moves the CPU's logits, which is the effect of rounding
// two vectors of a layer, keys and values. Errors of roundings are independent, so that their
// squares add up. A number of KV whose fp32 bits differ in the last places may be rounded to either
// side. If all were, both backends' roundings would add up: √2 units. cuBLASLt also rounds four
// vectors of a layer, and attend_tiles queries and weights: √5 units. The rows are few, so that twice
// as much is allowed.
func TestModelBF16(t *testing.T) {
	all := modelRounds
	if os.Getenv("TANDEM_SOAK") == "" {
		modelRounds = 5
	}
	t.Cleanup(func() { modelRounds = all })
	src, err := model.OpenDir("../../builtin/model")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { src.Close() })
	var hosts [2]*cpu.CPU
	for i := range hosts {
		if hosts[i], err = cpu.New(cpu.Options{Limits: modelLimits, Threads: 1}); err != nil {
			t.Fatal(err)
		}
	}
	dev := openGPU(t, Options{Limits: modelLimits, BLAS: lt(t)})
	compareModels(t, src, sit(t, src, widened{hosts[0]}, backend.BF16), sit(t, src, widened{hosts[1]}, backend.F32), sit(t, src, dev, backend.BF16), backend.BF16, 2*math.Sqrt(5))
}

// widened is a backend that computes with the values of matrices of 8 and 4 bits, and does
// not round activations for them as the CPU does.
type widened struct{ backend.Backend }

func (w widened) Load(t backend.Tensor) (backend.Weight, error) {
	switch {
	case t.DType == backend.FP8 && t.Scales.Cols == 16 && t.Shape[1] == 16: // DeepSeek's heads, whose neighbours are cut in between: see oneType
		t = t.Expand(backend.BF16)
	case t.DType == backend.FP8:
		t = t.Expand(backend.F32)
	}
	if t.As != 0 {
		wide, in := t, t.Shape[1]
		wide.As, wide.DType, wide.Data = 0, backend.F32, nil
		row, q := make([]float32, in), make([]byte, backend.QuantGroup)
		for i := range t.Shape[0] {
			floats(row, t.Data[i*in*t.DType.Size():], t.DType)
			for at := 0; at < in; at += backend.QuantGroup {
				group := row[at:min(at+backend.QuantGroup, in)]
				scale := backend.QuantizeGroup(q, group, t.As)
				for j := range group {
					wide.Data = binary.LittleEndian.AppendUint32(wide.Data, math.Float32bits(scale*float32(int8(q[j]))))
				}
			}
		}
		t = wide
	}
	return w.Backend.Load(t)
}

// compareModels compares steps of got with want. Logits may differ by tolerance. If there is a model
// exact over other KV, the root of the mean of their squares may be tolerance times that of want and
// exact, and a single logit may differ by maxSigmas times as much.
func compareModels(t *testing.T, src *model.Source, want, exact, got *seat, kv backend.DType, tolerance float64) {
	const maxSigmas = 4.5 // of some ten thousand numbers that are normally distributed
	spec, worst, draws, drawn := kvSpec(src, kv), 0.0, 0, 0
	squares, unit := 0.0, 0.0
	rng := rand.New(rand.NewPCG(1, uint64(src.Config.Layers)))
	talks := newTalks(rng, want.VocabSize(), spec)
	var scratch sample.Scratch
	for steps := 0; steps < modelRounds || drawn == 0 && steps < rounds; steps++ {
		step, who := load(rng, talks, spec)
		if len(step.Tokens) == 0 {
			continue
		}
		if err := want.Step(step, nil); err != nil {
			t.Fatal(err)
		}
		sampled := slices.Clone(step.Sampled)
		for _, m := range []*seat{exact, got} {
			if m == nil {
				continue
			}
			if err := m.Step(step, nil); err != nil {
				t.Fatal(err)
			}
		}
		a, b := want.Download(nil, want.Logits()), got.Download(nil, got.Logits())
		if exact != nil {
			for i, v := range exact.Download(nil, exact.Logits()) {
				squares, unit = squares+math.Pow(float64(a[i]-b[i]), 2), unit+math.Pow(float64(a[i]-v), 2)
			}
		}
		for i := range a {
			worst = max(worst, math.Abs(float64(a[i]-b[i])))
			if b[i] != b[i] {
				t.Fatalf("step %d: a logit is not a number", steps)
			}
		}
		vocab := want.VocabSize()
		for i := range step.Outputs {
			// On the device's own logits the host would draw the same.
			own := sample.Pick(b[i*vocab:(i+1)*vocab], &step.Outputs[i].Params, step.Outputs[i].Position, &scratch)
			if own != step.Sampled[i] {
				t.Errorf("step %d, output %d: token %d drawn, the host draws %d of the same logits", steps, i, step.Sampled[i], own)
			}
			compareProbs(t, got.Backend.(*CUDA), i, step.Outputs[i].LogProbs, b[i*vocab:(i+1)*vocab], own)
			drawn++
			if sampled[i] == step.Sampled[i] {
				draws++
			}
		}
		for i, k := range who {
			if k.tokens = append(k.tokens, sampled[i]); k.params.Controls != nil {
				k.params.Controls.Add(sampled[i])
			}
		}
		if t.Failed() {
			return
		}
	}
	if exact != nil {
		n := float64(drawn * want.VocabSize())
		unit = math.Sqrt(unit / n)
		if squares = math.Sqrt(squares / n); squares > tolerance*unit {
			t.Errorf("logits are off by %.2g on average, at most %.2g is allowed", squares, tolerance*unit)
		}
		t.Logf("logits are off by %.2g on average, or %.2g times what rounding KV changes", squares, squares/unit)
		tolerance *= maxSigmas * unit
	}
	t.Logf("worst error of a logit %.2g of %.2g, %d of %d draws are the CPU's", worst, tolerance, draws, drawn)
	if worst > tolerance || drawn < 1 || draws < drawn*9/10 {
		t.Errorf("a logit is off by %g, at most %g is allowed; %d of %d draws are the CPU's", worst, tolerance, draws, drawn)
	}
}

// compareProbs compares the device's log-probabilities of an output with sample.LogProbs of
// its logits.
func compareProbs(t *testing.T, c *CUDA, output, asked int, logits []float32, token int32) {
	t.Helper()
	own, rank, top, ok := c.LogProbs(output, nil)
	if ok != (asked > 0) {
		t.Errorf("output %d: %d asked, told %v", output, asked, ok)
	}
	if !ok {
		return
	}
	const close = 1e-6 // of sums in another order
	wantOwn, wantRank, wantTop := sample.LogProbs(sample.Portable{}, logits, token, asked-1, nil, nil)
	same := math.Abs(float64(own-wantOwn)) <= close && rank == wantRank && len(top) == len(wantTop)
	for i := range min(len(top), len(wantTop)) {
		same = same && top[i].Token == wantTop[i].Token && math.Abs(float64(top[i].LogProb-wantTop[i].LogProb)) <= close
	}
	if !same {
		t.Errorf("output %d: %v, rank %d, %v; the host finds %v, %d, %v", output, own, rank, top, wantOwn, wantRank, wantTop)
	}
}
