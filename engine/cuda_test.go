//go:build cgo && linux

package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"unsafe"

	kernels "github.com/tandem-serving/tandem/cuda"
	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/masks"
	"github.com/tandem-serving/tandem/engine/model"
	"github.com/tandem-serving/tandem/engine/sample"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// behind counts outputs with rules in steps that start from tokens that are not known yet, and
// those with masks, also after drafts.
type behind struct {
	*model.Model
	ruled, masked, guessed int
}

func (b *behind) Start(s *backend.Step) error {
	for i, out := range s.Outputs {
		if out.Params.Controls != nil && s.Tokens[out.Row] < 0 {
			b.ruled++
		}
		if out.Params.Mask != nil {
			b.masked++
			if i > 0 && out.Row == s.Outputs[i-1].Row+1 && out.Position == s.Outputs[i-1].Position+1 && out.Params.Seed == s.Outputs[i-1].Params.Seed {
				b.guessed++
			}
		}
	}
	return b.Model.Start(s)
}

// ruleSets are of some requests; those of the last are more than a device takes.
func ruleSets() map[int]Rules {
	long := Rules{Presence: 1}
	for i := range int32(9000) {
		long.BadWords = append(long.BadWords, []int32{i % 70, i % 90})
	}
	return map[int]Rules{
		3: {Repetition: 1.4, Frequency: 0.7, MinTokens: 6, Stops: []int32{1, 2, 3}},
		5: {Presence: 2, Allowed: []int32{4, 9, 11, 40, 41, 60}, BadWords: [][]int32{{4, 9}, {11, 11}, {9, 9, 4}}, Bias: []sample.Bias{{Token: 60, Value: 3}, {Token: 7, Value: 50}}},
		6: long,
	}
}

// answers runs requests of several kinds at once on a device and returns the tokens
// of each, the log-probabilities of those that want them, what was logged, and how
// many draws by rules were given out before the token in front was known.
func answers(t *testing.T, o LoadOptions) (all [][]int32, probs [][]float32, log string, ahead int) {
	t.Helper()
	var said strings.Builder
	o.Logger = slog.New(slog.NewTextHandler(&said, nil))
	l, err := Load(o)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	m := &behind{Model: l.Model}
	e, err := New(Options{Model: m, Backend: l.Backend, KV: l.KV, Scheduler: l.Scheduler})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { e.Run(ctx) })
	all, probs = make([][]int32, 7), make([][]float32, 7)
	var ended sync.WaitGroup
	for i := range all {
		prompt := make([]int32, 5+i*6)
		for j := range prompt {
			prompt[j] = int32((i*31 + j*7) % 90)
		}
		r := &Request{Prompt: prompt, MaxTokens: 12, Rules: ruleSets()[i]}
		if i%2 == 1 {
			r.Sampling = Sampling{Seed: uint64(i), Temperature: 0.8, TopP: 0.9, TopK: 20}
		}
		if i%3 == 2 {
			r.LogProbs, r.TopLogProbs = true, 3
		}
		ended.Add(1)
		r.Emit = func(tk Token) {
			if tk.Err != nil {
				t.Error(tk.Err)
			} else {
				all[i] = append(all[i], tk.ID)
				if p := tk.LogProbs; p != nil {
					probs[i] = append(probs[i], p.LogProb, float32(p.Rank))
					for _, best := range p.Top {
						probs[i] = append(probs[i], best.LogProb)
					}
				}
			}
			if tk.Finish != 0 {
				ended.Done()
			}
		}
		if _, _, err := e.Add(r); err != nil {
			t.Fatal(err)
		}
	}
	ended.Wait()
	stop()
	running.Wait()
	return all, probs, said.String(), m.ruled
}

// The whole engine over the kernels' host twin gives the tokens of the CPU backend:
// chunked prompts, batches that change with every step, draws on the device.
func TestEngineOnTheTwin(t *testing.T) {
	twin, err := kernels.Twin("..", "")
	if err != nil {
		t.Fatal(err)
	}
	o := LoadOptions{Model: "model/testdata/gqa-tied", Threads: 1, KVMemory: 4 << 20, MaxSeqs: 5, MaxBatchedTokens: 24, MaxModelLen: 96, KVDType: "float32", Device: "cpu"}
	want, wantProbs, _, _ := answers(t, o)
	o.Device, o.CUDALibrary, o.SharedKV = "cuda:0", twin, true
	for _, late := range []string{"1", "2"} {
		t.Setenv("TANDEM_TWIN_LATE", late) // the device does what it is told some time after
		o.EnforceEager = late == "2"
		got, probs, said, ahead := answers(t, o)
		if ahead == 0 {
			t.Errorf("late %s: no draw by rules was given out ahead", late)
		}
		for i := range probs {
			if !slices.EqualFunc(probs[i], wantProbs[i], func(a, b float32) bool { return math.Abs(float64(a-b)) < 1e-4 }) || (i%3 == 2) != (len(probs[i]) == 5*12) {
				t.Errorf("late %s: log-probabilities of request %d are %v, on the CPU %v", late, i, probs[i], wantProbs[i])
			}
		}
		if !slices.EqualFunc(got, want, slices.Equal) {
			t.Errorf("late %s, eager %v: tokens are %v, on the CPU %v", late, o.EnforceEager, got, want)
		}
		graphs := "graphs=4" // of 8, 4, 2 and 1
		if o.EnforceEager {
			graphs = "graphs=0"
		}
		if !strings.Contains(said, "computing on a GPU") || !strings.Contains(said, graphs) {
			t.Errorf("eager %v: logged %s", o.EnforceEager, said)
		}
	}
	o.KVDType, o.EnforceEager = "fp8", false
	got, _, _, _ := answers(t, o)
	o.Device, o.CUDALibrary, o.SharedKV = "cpu", "", false
	if want, _, _, _ := answers(t, o); !slices.EqualFunc(got, want, slices.Equal) {
		t.Errorf("with KV in fp8 tokens are %v, on the CPU %v", got, want)
	}
}

// TestStatesOnTheTwin: models whose layers have a state give the CPU's tokens over the kernels' host
// twin, also where steps start before the tokens of the last one are known.
func TestStatesOnTheTwin(t *testing.T) {
	twin, err := kernels.Twin("..", "")
	if err != nil {
		t.Fatal(err)
	}
	o := LoadOptions{Model: "model/testdata/qwen3.5", Threads: 1, KVMemory: 4 << 20, MaxSeqs: 5, MaxBatchedTokens: 24, MaxModelLen: 96, StateTokens: 16, KVDType: "float32", Device: "cpu"}
	want, _, _, _ := answers(t, o)
	o.Device, o.CUDALibrary = "cuda:0", twin
	t.Setenv("TANDEM_TWIN_LATE", "1")
	got, _, _, ahead := answers(t, o)
	if !slices.EqualFunc(got, want, slices.Equal) || ahead == 0 {
		t.Errorf("%d draws ahead; tokens are %v, on the CPU %v", ahead, got, want)
	}
}

// constrainedAnswers runs constrained requests next to others. It returns the tokens of each, the
// log-probabilities of those that request them, and the model, which has counted masks.
func constrainedAnswers(t *testing.T, o LoadOptions) (all [][]int32, probs [][]float32, m *behind) {
	t.Helper()
	o.Logger = slog.New(slog.DiscardHandler)
	l, err := Load(o)
	if err != nil {
		t.Fatal(err)
	}
	words := twinWords(l.Model.VocabSize())
	eo := l.Options()
	m = &behind{Model: l.Model}
	eo.Model, eo.GrammarLimits = m, grammar.DefaultLimits()
	eo.Vocabulary = func() (masks.Vocabulary, error) { return masks.Vocabulary{Vocabulary: words}, nil }
	e, err := New(eo)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	go e.Run(ctx)
	all, probs = make([][]int32, 9), make([][]float32, 9)
	var ended sync.WaitGroup
	for i := range all {
		r := &Request{Prompt: tokens(5+i*4, i), MaxTokens: 14}
		if i%4 > 0 {
			r.Grammar = &testGrammars[i%len(testGrammars)]
		}
		if i%2 == 1 {
			r.Sampling = Sampling{Seed: uint64(i), Temperature: 1.2, TopP: 0.95, TopK: 40}
		}
		if i%3 == 2 {
			r.Rules = Rules{Repetition: 1.4, Frequency: 0.7, Bias: []sample.Bias{{Token: 'e' - ' ', Value: 4}}}
			r.LogProbs, r.TopLogProbs = true, 2
		}
		ended.Add(1)
		r.Emit = func(tk Token) {
			if tk.Err != nil {
				t.Error(tk.Err)
			} else {
				all[i] = append(all[i], tk.ID)
				if p := tk.LogProbs; p != nil {
					probs[i] = append(probs[i], p.LogProb, p.Top[0].LogProb, p.Top[1].LogProb)
				}
			}
			if tk.Finish != 0 {
				ended.Done()
			}
		}
		if _, _, err := e.Add(r); err != nil {
			t.Fatal(err)
		}
	}
	ended.Wait()
	stop()
	<-e.Done()
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	return all, probs, m
}

// Constrained requests have the CPU's tokens over the kernels' host twin, with and without guesses. The
// device applies their masks.
func TestConstrainedOnTheTwin(t *testing.T) {
	twin, err := kernels.Twin("..", "")
	if err != nil {
		t.Fatal(err)
	}
	for _, guesses := range []int{0, 4} {
		o := LoadOptions{Model: "model/testdata/gqa-tied", Threads: 1, KVMemory: 4 << 20, MaxSeqs: 5, MaxBatchedTokens: 24, MaxModelLen: 96, KVDType: "float32", Device: "cpu"}
		o.Speculation = Speculation{Tokens: guesses, Lookup: Lookup{Min: 1, Max: 2}}
		want, wantProbs, _ := constrainedAnswers(t, o)
		o.Device, o.CUDALibrary, o.EnforceEager = "cuda:0", twin, guesses > 0
		t.Setenv("TANDEM_TWIN_LATE", "3")
		got, probs, m := constrainedAnswers(t, o)
		if m.masked < 60 || m.guessed == 0 {
			t.Errorf("%d guesses: %d outputs with masks, %d of them after a draft", guesses, m.masked, m.guessed)
		}
		for i := range want {
			if !slices.Equal(got[i], want[i]) {
				t.Errorf("%d guesses, request %d: tokens are %v, on the CPU %v", guesses, i, got[i], want[i])
			}
			if !slices.EqualFunc(probs[i], wantProbs[i], func(a, b float32) bool { return math.Abs(float64(a-b)) < 1e-4 }) {
				t.Errorf("%d guesses, request %d: log-probabilities are %v, on the CPU %v", guesses, i, probs[i], wantProbs[i])
			}
		}
	}
}

// Weights in 8 and 4 bits are so on a GPU, too: they take what the CPU has of them, and
// the class names them. Blocks that its kernels have no products with become bfloat16.
func TestNarrowWeightsOnTheTwin(t *testing.T) {
	twin, err := kernels.Twin("..", "")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ model, quantization, as string }{{"deepseek-fp8", "none", "/fp8/"}, {"deepseek-fp8", "int4", "/int4/"}, {"gqa-tied", "int8", "/int8/"}} {
		var said strings.Builder
		o := LoadOptions{Model: "model/testdata/" + c.model, Quantization: c.quantization, Threads: 1, KVMemory: 4 << 20, MaxSeqs: 1, MaxBatchedTokens: 8, MaxModelLen: 64, Device: "cpu"}
		o.Logger = slog.New(slog.NewTextHandler(&said, nil))
		var bytes [2]int64
		for i, device := range []string{"cpu", "cuda:0"} {
			o.Device, o.CUDALibrary = device, twin
			l, err := Load(o)
			if err != nil {
				t.Fatal(err)
			}
			bytes[i] = l.WeightBytes
			if !strings.Contains(l.Class, c.as) {
				t.Errorf("%s on %s: class %s, want %s in it", c.model, device, l.Class, c.as)
			}
			l.Close()
		}
		if kept := !strings.Contains(said.String(), "kept in another type"); bytes[0] != bytes[1] || kept == (c.as == "/int4/") {
			t.Errorf("%s, %s: %d bytes on the CPU, %d on a GPU; logged %s", c.model, c.quantization, bytes[0], bytes[1], &said)
		}
	}
}

// A missing GPU is named. auto continues without it and logs why.
func TestNoGPU(t *testing.T) {
	o := LoadOptions{Model: "model/testdata/gqa-tied", Threads: 1, KVMemory: 4 << 20, CUDALibrary: "testdata/none.so"}
	for device, complaint := range map[string]string{"cuda:0": "none.so", "cuda:x": "use auto, cpu, cuda or cuda:N"} {
		o.Device = device
		if l, err := Load(o); !errors.Is(err, ErrOption) || !strings.Contains(err.Error(), complaint) {
			t.Errorf("%s: %v, %v", device, l, err)
		}
	}
	var said strings.Builder
	o.Device, o.Logger = "auto", slog.New(slog.NewTextHandler(&said, nil))
	l, err := Load(o)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if !strings.Contains(said.String(), "computing on the CPU") || !strings.Contains(said.String(), "make cuda") {
		t.Errorf("logged %s", &said)
	}
}

// A GPU logs that attention does without tensor cores if the size of blocks does not fit them.
func TestBlockSizesOfGPUs(t *testing.T) {
	twin, err := kernels.Twin("..", "")
	if err != nil {
		t.Fatal(err)
	}
	for size, want := range map[int]bool{8: true, 16: false, 24: true, 32: false} {
		var said strings.Builder
		o := &LoadOptions{Device: "cuda:0", CUDALibrary: twin, BlockTokens: size, Logger: slog.New(slog.NewTextHandler(&said, nil))}
		if _, err := choose(o); err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(said.String(), fmt.Sprintf("block_size=%d ", size)); got != want {
			t.Errorf("blocks of %d tokens: logged %q", size, said.String())
		}
	}
}

// A GPU for which the kernels have no machine code is used with a warning, or refused with its compute
// capability.
func TestGPUWithoutMachineCode(t *testing.T) {
	twin, err := kernels.Twin("..", "")
	if err != nil {
		t.Fatal(err)
	}
	for capability, want := range map[string]string{"80": "", "110": "compute_capability=", "75": "no code for compute capability 7.5"} {
		t.Setenv("TANDEM_TWIN_CAPABILITY", capability)
		var said strings.Builder
		o := &LoadOptions{Device: "cuda:0", CUDALibrary: twin, Logger: slog.New(slog.NewTextHandler(&said, nil))}
		c, err := choose(o)
		if capability == "75" {
			if !errors.Is(err, ErrOption) || !strings.Contains(err.Error(), want) {
				t.Errorf("a GPU of 7.5: %v, want %s", err, want)
			}
			o.Device = "auto"
			if c, err := choose(o); err != nil || c.gpu || !strings.Contains(said.String(), want) {
				t.Errorf("a GPU of 7.5 with --device auto: %+v, %v, logged %s", c, err, &said)
			}
			continue
		}
		if err != nil || !c.gpu || strings.Contains(said.String(), "level=WARN") != (want != "") || !strings.Contains(said.String(), want) {
			t.Errorf("capability %s: %+v, %v, logged %s", capability, c, err, &said)
		}
	}
}

// A GPU that cannot be used is a warning with a remedy.
func TestUnusableGPU(t *testing.T) {
	for why, remedy := range map[string]string{
		"GPU 0: CUDA driver version is insufficient for CUDA runtime version":                   "R525",
		"GPU 0: the kernels have no code for compute capability 7.5, only for 8.0, 8.9 and 9.0": "compute capability 8.0 or newer",
		"no GPU kernels at /x/tandem-cuda.so (`make cuda` builds them)":                         "next to the program",
		"GPU 0: unknown error": "tandem doctor",
	} {
		for gpus, want := range map[int]string{0: "level=INFO", 2: "level=WARN"} {
			var said strings.Builder
			logOnCPU(slog.New(slog.NewTextHandler(&said, nil)), fmt.Errorf("%w: %s", backend.ErrNoDevice, why), gpus)
			if !strings.Contains(said.String(), want) || strings.Contains(said.String(), remedy) != (gpus > 0) || strings.Contains(said.String(), backend.ErrNoDevice.Error()) {
				t.Errorf("%s, %d GPUs: logged %s", why, gpus, &said)
			}
		}
	}
}

// A prompt that a prefill node computed on the twin continues on a decode node on another
// twin with the tokens that the CPU gives it alone. Its KV is sent layer by layer and is on
// the device before the request runs. A second job finds it cached.
func TestPrefillAndDecodeOnTheTwin(t *testing.T) {
	twin, err := kernels.Twin("..", "")
	if err != nil {
		t.Fatal(err)
	}
	prompt := make([]int32, 43)
	for i := range prompt {
		prompt[i] = int32(i * 11 % 90)
	}
	o := LoadOptions{Model: "model/testdata/gqa-tied", Threads: 1, KVMemory: 4 << 20, MaxSeqs: 5, MaxBatchedTokens: 24, MaxModelLen: 96, KVDType: "float32", Device: "cpu"}
	start := func(o LoadOptions) (*Loaded, *Engine) {
		o.Logger = slog.New(slog.DiscardHandler)
		l, err := Load(o)
		if err != nil {
			t.Fatal(err)
		}
		e, err := New(l.Options())
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(context.Background())
		go e.Run(ctx)
		t.Cleanup(func() {
			stop()
			<-e.Done()
			if err := l.Close(); err != nil {
				t.Error(err)
			}
		})
		return l, e
	}
	ask := func(e *Engine, hold bool) (scheduler.RequestID, func() []int32) {
		var got []int32
		done := make(chan struct{})
		id, _, err := e.Add(&Request{Prompt: prompt, MaxTokens: 9, Hold: hold, Emit: func(tk Token) {
			if tk.Err != nil {
				t.Error(tk.Err)
			}
			got = append(got, tk.ID)
			if tk.Finish != 0 {
				close(done)
			}
		}})
		if err != nil {
			t.Fatal(err)
		}
		return id, func() []int32 { <-done; return got }
	}
	_, host := start(o)
	_, answer := ask(host, false)
	want := answer()

	t.Setenv("TANDEM_TWIN_LATE", "5")
	o.Device, o.CUDALibrary, o.SharedKV = "cuda:0", twin, true
	from, prefills := start(o)
	pages := func(l *Loaded, region int, direct bool) []byte {
		if !direct {
			return l.Region(region)
		}
		at, _ := l.Direct().KVAddress(region) // the host's memory stands in for the GPU's
		return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&at))), l.KV.Blocks*l.KV.PageBytes)
	}
	for _, c := range []struct {
		direct, fresh, wrong bool
	}{
		{}, {}, // computed, then cached
		{direct: true, fresh: true}, {direct: true, wrong: true},
	} {
		if c.fresh {
			from, prefills = start(o)
		}
		to, decodes := start(o)
		id, answer := ask(decodes, true)
		res, err := decodes.Reserve(id, len(prompt)-1)
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		there := res.Groups[0].Blocks
		bt := prefills.Groups()[0].BlockTokens
		digests := make(map[[2]int32]PageDigest)
		j := &Job{Tokens: prompt[:len(prompt)-1], Direct: c.direct, Done: func(err error) { done <- err }, Layer: func(layer, upTo int, tables [][]kvcache.BlockID) {
			region, page := from.KV.Layers[layer].Region, from.KV.PageBytes
			for i := range (upTo + bt - 1) / bt { // what is there now; the network takes it at once
				src, dst := int(tables[0][i])*page, int(there[i])*page
				copy(pages(to, region, c.direct)[dst:dst+page], pages(from, region, c.direct)[src:src+page])
				if c.direct {
					digests[[2]int32{int32(region), int32(i)}] = PageDigest{Region: region, Page: int32(there[i]), CRC: from.Direct().KVDigest(region, int32(tables[0][i]))}
				}
			}
		}}
		job, _, err := prefills.AddJob(j)
		if err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		prefills.ReleaseJob(job, j)
		arrived, mismatches := uint64(len(prompt)-1), 0
		if c.direct {
			if c.wrong {
				pages(to, 0, true)[int(there[1])*to.KV.PageBytes] ^= 8
				arrived = 0 // it is noticed, and computed again
			}
			decodes.ArrivedOnDevice(res.ID, slices.Collect(maps.Values(digests)), func() { mismatches++ })
		} else {
			decodes.Arrived(res.ID)
		}
		if got := answer(); !slices.Equal(got, want) {
			t.Errorf("tokens are %v, on the CPU %v", got, want)
		}
		if s := decodes.Stats(); s.Prompts.Arrived != arrived || (mismatches == 1) != c.wrong {
			t.Errorf("%d tokens arrived, %d mismatches", s.Prompts.Arrived, mismatches)
		}
	}
}

// Several GPUs need NCCL, and do not send KV to other nodes.
func TestTensorParallelOnGPUsRefused(t *testing.T) {
	twin, err := kernels.Twin("..", "")
	if err != nil {
		t.Fatal(err)
	}
	for want, shared := range map[string]bool{"--nccl-library testdata/none.so": false, "needs `tandem serve`": true} {
		l, err := Load(LoadOptions{
			Model: "model/testdata/gqa-tied", KVMemory: 4 << 20, Device: "cuda:0", CUDALibrary: twin, NCCLLibrary: "testdata/none.so", SharedKV: shared,
			TensorParallel: TensorParallel{Size: 2, Command: []string{"/bin/false"}},
		})
		if err == nil {
			l.Close()
		}
		if !errors.Is(err, ErrOption) || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}
