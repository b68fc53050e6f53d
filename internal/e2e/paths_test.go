package e2e

import (
	"crypto/tls"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/kvtransfer/fabric"
)

const checkpoints = "../../engine/model/testdata"

// One request gives the same bits on every path: alone, in a batch, in chunks,
// after a prefix hit, after a preemption, prefilled on another node, resumed
// from its own output, with tokens guessed ahead. A seed makes a fleet with
// random bounds and a random load; every token, every logit behind it and every
// log-probability of a prompt must equal what the same request gets alone on a
// node of its own, with nothing guessed.

// load is one request of a schedule.
type load struct {
	g     *nodepb.Generate
	delay time.Duration
}

// rdmaBytes is what a hundred schedules move by RDMA at the least: one in eight, in a build that can.
var rdmaBytes = map[bool]int{true: 100_000}[fabric.Built]

// paths counts how often each path ran.
type paths struct {
	requests, batched, chunked, hits, preempted, remote, local, resumed, controlled, stopped, scored, guessed, accepted, drafted, draftsKept, tcp, tls, shared, rdma, adapted, constrained, finished, ended uint64
}

func (p *paths) String() string {
	return fmt.Sprintf("requests %d, steps with several sequences %d, chunked prompts %d, prefix-hit tokens %d, preemptions %d, prefilled elsewhere %d, prefilled on decode %d, resumed %d, with penalties and masks %d, ended by a stop token %d, with scored prompts %d, guessed tokens %d, of which accepted %d, by a model %d, of which %d, pages over TCP %d, over TLS %d, bytes out of shared memory %d, bytes by RDMA %d, with adapters %d, with a grammar %d, of which %d finished and %d could not continue",
		p.requests, p.batched, p.chunked, p.hits, p.preempted, p.remote, p.local, p.resumed, p.controlled, p.stopped, p.scored, p.guessed, p.accepted, p.drafted, p.draftsKept, p.tcp, p.tls, p.shared, p.rdma, p.adapted, p.constrained, p.finished, p.ended)
}

// alone runs requests one at a time, without cache hits, as the reference.
type alone struct {
	f    *fleet
	salt uint64
	tls  *tls.Config // of those that are compared with it, where they encrypt
}

// adaptersOf is what is loaded beside a checkpoint: those that were made for it.
func adaptersOf(dir string) (a engine.Adapters) {
	if filepath.Base(dir) == "gqa-tied" {
		a = engine.Adapters{Places: len(adapterNames), Rank: 8}
		for _, name := range adapterNames {
			a.Modules = append(a.Modules, engine.AdapterModule{Name: name, Path: filepath.Join(filepath.Dir(dir), "lora", name)})
		}
	}
	return a
}

var adapterNames = []string{"all", "attention", "mlp"}

func newAlone(t *testing.T, c campaigned) *alone {
	dir := c.dir()
	f := newFleet(t, c.on(engine.LoadOptions{Model: dir, Kernels: c.kernels, Quantization: c.quantization, KVDType: c.kv, Threads: 1, KVMemory: 16 << 20, MaxSeqs: 4, MaxBatchedTokens: 256, Adapters: adaptersOf(dir), StateTokens: c.states}), nil)
	return &alone{f: f, salt: 1 << 60, tls: nodesTLS(t)}
}

// campaigned is what the schedules of a campaign are computed with. A draft model,
// where there is one beside the model itself, has its vocabulary. kv is the type of KV,
// by default the checkpoint's.
type campaigned struct {
	checkpoint, quantization, kernels, draft, kv string

	states int    // tokens between kept states of a model that has them, which guesses nothing; 0: none
	gpu    string // the shared object with kernels for GPUs, or their host twin; empty: CPUs
}

// on returns the options with the device of the campaign.
func (c campaigned) on(o engine.LoadOptions) engine.LoadOptions {
	if c.gpu != "" {
		o.Device, o.CUDALibrary, o.SharedKV, o.OneOrder, o.EnforceEager = "cuda:0", c.gpu, true, true, true
	}
	return o
}

func (c campaigned) dir() string { return filepath.Join(checkpoints, c.checkpoint) }

// everyArchitecture are those of the checkpoints, as they are stored, and in 8 and
// 4 bits: dense, with experts, and with the matrices that DeepSeek cuts.
var everyArchitecture = []campaigned{
	{checkpoint: "gqa-tied"}, {checkpoint: "headdim"}, {checkpoint: "mistral-window", draft: "qwen3-moe"}, {checkpoint: "qwen3", draft: "mha"},
	{checkpoint: "qwen3-moe", draft: "mistral-window"}, {checkpoint: "gpt-oss-mxfp4", draft: "gemma4-ple"}, {checkpoint: "gemma4-moe", draft: "gpt-oss-mxfp4"},
	{checkpoint: "gemma4-ple", draft: "gemma4-moe"}, {checkpoint: "deepseek", draft: "deepseek-plain"}, {checkpoint: "deepseek-fp8", draft: "deepseek"},
	{checkpoint: "gemma2", draft: "olmo2"}, {checkpoint: "glm4-moe"},
	{checkpoint: "mistral-window", quantization: "int8", kv: "fp8"}, {checkpoint: "deepseek", quantization: "int8", kv: "fp8"},
	{checkpoint: "qwen3-moe", quantization: "int4"}, {checkpoint: "gemma4-moe", quantization: "int4", kv: "fp8"},
}

func (a *alone) run(t *testing.T, g *nodepb.Generate) trace {
	t.Helper()
	a.salt++
	q := &nodepb.Generate{
		RequestId: "alone", Attempt: 1, Prompt: g.Prompt, MaxTokens: g.MaxTokens, IgnoreEos: true, StopTokenIds: g.StopTokenIds, PrefixRoot: a.salt,
		Sampling: g.Sampling, PromptLogprobs: g.PromptLogprobs, Adapter: g.Adapter, Grammar: g.Grammar,
	}
	return a.f.run(t, q)
}

// run waits for one request.
func (f *fleet) run(t testing.TB, g *nodepb.Generate) trace {
	t.Helper()
	s, _, err := f.client.generate(g)
	if err != nil {
		t.Fatal(err)
	}
	return f.wait(t, s, g)
}

func (f *fleet) wait(t testing.TB, s *stream, g *nodepb.Generate) trace {
	t.Helper()
	select {
	case <-s.done:
	case <-time.After(f.timeout):
		t.Fatalf("request %s did not end: %d tokens so far, %+v", g.RequestId, len(s.tokens), f.decEng.Stats())
	}
	cannot := ""
	if s.err != nil {
		if cannot = s.err.Error(); g.Grammar == nil || !strings.Contains(cannot, "cannot continue under its grammar") {
			t.Fatalf("request %s: %v", g.RequestId, s.err)
		}
	}
	f.probes.mu.Lock()
	defer f.probes.mu.Unlock()
	return trace{tokens: s.tokens, logits: f.probes.by[probeKey(g.Sampling.Seed, g.Sampling.Choice)], prompt: &s.prompt, err: cannot}
}

// schedule makes a seed's requests: prompts that share prefixes, some of them
// repeated, each with a sampling seed of its own.
func schedule(rng *rand.Rand, seed uint64, vocab int, remote bool) []load {
	stems := make([][]int32, 3)
	for i := range stems {
		stems[i] = randomTokens(rng, 20+rng.IntN(60), vocab)
	}
	constraints := rand.New(rand.NewPCG(seed, 19))
	var loads []load
	for i := range 5 + rng.IntN(6) {
		stem := stems[rng.IntN(len(stems))]
		prompt := append(slices.Clone(stem[:1+rng.IntN(len(stem))]), randomTokens(rng, rng.IntN(40), vocab)...)
		if len(loads) > 0 && rng.IntN(4) == 0 {
			prompt = slices.Clone(loads[rng.IntN(len(loads))].g.Prompt)
		}
		g := &nodepb.Generate{
			RequestId: fmt.Sprintf("s%d-r%d", seed, i), Attempt: 1, Prompt: prompt, MaxTokens: uint32(4 + rng.IntN(44)), IgnoreEos: true,
			PrefixRoot: uint64(kvcache.Root("tiny", "", "")),
			Sampling:   &nodepb.Sampling{Seed: seed<<16 | uint64(i)},
		}
		if rng.IntN(3) > 0 {
			g.Sampling.Temperature, g.Sampling.TopP, g.Sampling.TopK = 0.5+rng.Float32(), 0.8+0.2*rng.Float32(), int32(rng.IntN(40))
		}
		if rng.IntN(3) == 0 {
			control(rng, g, vocab)
		}
		if rng.IntN(6) == 0 {
			best := uint32(rng.IntN(5))
			g.PromptLogprobs = &best
		}
		if rng.IntN(3) == 0 {
			g.StopTokenIds = randomTokens(rng, 8, vocab)
		}
		g.Sampling.Choice = uint32(rng.IntN(3))
		if remote && rng.IntN(5) > 0 {
			g.Prefill = []string{"prefill"}
		}
		constrain(constraints, g)
		loads = append(loads, load{g: g, delay: time.Duration(rng.IntN(300)) * time.Microsecond})
	}
	return loads
}

// control gives a request penalties, bias and masks, which must hold on every
// path too, and after a resume.
func control(rng *rand.Rand, g *nodepb.Generate, vocab int) {
	s := g.Sampling
	s.RepetitionPenalty = 0.7 + 0.8*rng.Float32()
	s.PresencePenalty, s.FrequencyPenalty = rng.Float32()*2-1, rng.Float32()*2-1
	s.MinP = rng.Float32() * 0.2
	s.MinTokens = uint32(rng.IntN(10))
	s.LogitBias = []*nodepb.LogitBias{{Token: int32(rng.IntN(vocab)), Value: rng.Float32()*10 - 5}}
	s.BadWords = []*nodepb.TokenSequence{{Tokens: randomTokens(rng, 1+rng.IntN(2), vocab)}}
	if rng.IntN(4) == 0 {
		s.AllowedTokenIds = randomTokens(rng, 40, vocab)
	}
	g.Logprobs, g.TopLogprobs = true, uint32(rng.IntN(5))
}

func randomTokens(rng *rand.Rand, n, vocab int) []int32 {
	ts := make([]int32, n)
	for i := range ts {
		ts[i] = int32(rng.IntN(vocab))
	}
	return ts
}

// campaign runs seeds and returns the first difference it finds, or nil.
func campaign(t *testing.T, c campaigned, first uint64, n int, fault bool, count *paths) error {
	ref := newAlone(t, c)
	defer ref.f.close()
	vocab := ref.f.loaded[0].Model.VocabSize()
	for seed := first; seed < first+uint64(n); seed++ {
		rng := rand.New(rand.NewPCG(seed, 7))
		if err := oneSchedule(t, ref, rng, seed, vocab, c, fault, count); err != nil {
			return err
		}
	}
	return nil
}

func oneSchedule(t *testing.T, ref *alone, rng *rand.Rand, seed uint64, vocab int, with campaigned, fault bool, count *paths) error {
	remote := rng.IntN(2) == 0
	o := with.on(engine.LoadOptions{
		Model: with.dir(), Kernels: with.kernels, Quantization: with.quantization, KVDType: with.kv, Threads: 1 + rng.IntN(2), MaxSeqs: 2 + rng.IntN(6),
		MaxBatchedTokens: 8 + rng.IntN(90), MaxModelLen: 192, FaultBatchOrder: fault, Adapters: adaptersOf(with.dir()), StateTokens: with.states,
	})
	if rng.IntN(2) == 0 && with.states == 0 {
		o.Speculation = engine.Speculation{Tokens: 1 + rng.IntN(6), Lookup: engine.Lookup{Min: 1, Max: 1 + rng.IntN(3)}}
		if rng.IntN(3) == 0 { // the model itself guesses well, another one badly
			if o.Speculation.Model = with.dir(); with.draft != "" && rng.IntN(2) == 0 {
				o.Speculation.Model = filepath.Join(checkpoints, with.draft)
			}
		}
	}
	blockBytes := int64(ref.f.loaded[0].KV.BlockBytes())
	blocks := func(o *engine.LoadOptions) int { // of one sequence of 192 tokens
		return kvcache.Peak(ref.f.loaded[0].Scheduler.Pool.Groups, o.MaxModelLen, o.MaxBatchedTokens)
	}
	o.KVMemory = blockBytes * int64(blocks(&o)+rng.IntN(6)) // one fits, a batch of them does not
	if o.Speculation.Model != "" {
		o.KVMemory *= 4 // the draft model has its share of it
	}
	var pre *engine.LoadOptions
	if remote {
		p := o
		p.Speculation = engine.Speculation{}
		p.MaxBatchedTokens = 8 + rng.IntN(90)
		p.KVMemory = blockBytes * int64(blocks(&p)+2+rng.IntN(30))
		pre = &p
	}
	ways := []kvtransfer.Network{nil, kvtransfer.TCP{}, sharedTCP{}}
	way := ways[seed%3]
	switch n := seed % 16; {
	case fabric.Built && n < 2: // not more: its ends take long to meet
		way = rdmaTCP{provider: []string{"tcp", "shm"}[n]}
	case n == 3:
		way = tlsTCP{config: ref.tls}
	}
	f := newFleetOver(t, way, o, pre)
	defer f.close()

	loads := schedule(rng, seed, vocab, remote)
	if o.Adapters.Places > 0 {
		for _, l := range loads {
			if name := append([]string{""}, adapterNames...)[rng.IntN(1+len(adapterNames))]; name != "" {
				l.g.Adapter, l.g.PrefixRoot = &nodepb.Adapter{Name: name}, uint64(kvcache.Root("tiny", name, ""))
				count.adapted++
			}
		}
	}
	streams := make([]*stream, len(loads))
	for i, l := range loads {
		time.Sleep(l.delay)
		s, _, err := f.client.generate(l.g)
		if err != nil {
			t.Fatal(err)
		}
		streams[i] = s
	}
	for i, l := range loads {
		got := f.wait(t, streams[i], l.g)
		want := ref.run(t, l.g)
		if err := compare(got, want, l.g); err != nil {
			return fmt.Errorf("seed %d (remote %t, %+v): %w", seed, remote, o, err)
		}
		if l.g.Logprobs {
			count.controlled++
		}
		if l.g.PromptLogprobs != nil {
			count.scored++
		}
		if len(want.tokens) < limitOf(l.g) && l.g.Grammar == nil {
			count.stopped++
		}
		if l.g.Grammar != nil {
			count.constrained++
			switch finished, err := follows(l.g.Grammar, want.tokens, vocab); {
			case err != nil:
				return fmt.Errorf("seed %d, request %s: %w", seed, l.g.RequestId, err)
			case finished:
				count.finished++
			case want.err != "":
				count.ended++
			}
		}
		if len(l.g.Prompt) > o.MaxBatchedTokens {
			count.chunked++
		}
	}
	if err := resume(t, f, ref, rng, loads, count); err != nil {
		return fmt.Errorf("seed %d: %w", seed, err)
	}
	st := f.decEng.Stats()
	c := f.decode.Counters()
	count.requests += uint64(len(loads))
	count.batched += st.BatchedSteps
	count.hits += st.Scheduler.PrefixHits
	count.preempted += st.Scheduler.Preemptions
	guessed, accepted := &count.guessed, &count.accepted
	if o.Speculation.Model != "" {
		guessed, accepted = &count.drafted, &count.draftsKept
	}
	*guessed += st.Scheduler.Drafted
	for _, n := range st.Scheduler.Accepted {
		*accepted += n
	}
	count.remote += c.RemotePrefills
	s := f.reader.Stats()
	switch way.(type) {
	case kvtransfer.TCP:
		count.tcp += s.Pieces
	case tlsTCP:
		count.tls += s.Pieces
	}
	count.shared += s.SharedBytes
	count.rdma += s.FabricBytes
	count.local += c.LocalPrefills
	return nil
}

// resume gives one request a second attempt that starts from part of its
// output, as after the loss of a node.
func resume(t *testing.T, f *fleet, ref *alone, rng *rand.Rand, loads []load, count *paths) error {
	l := loads[rng.IntN(len(loads))]
	want := ref.run(t, l.g)
	if len(want.tokens) < 2 {
		return nil // nothing is left to resume
	}
	g := &nodepb.Generate{
		RequestId: l.g.RequestId + "-again", Attempt: 2, Prompt: l.g.Prompt, MaxTokens: l.g.MaxTokens, IgnoreEos: true, StopTokenIds: l.g.StopTokenIds,
		PrefixRoot: l.g.PrefixRoot, Sampling: l.g.Sampling, Prefill: l.g.Prefill, Adapter: l.g.Adapter, Grammar: l.g.Grammar,
		Output: want.tokens[:1+rng.IntN(len(want.tokens)-1)],
	}
	got := f.run(t, g)
	got.tokens, got.prompt = append(slices.Clone(g.Output), got.tokens...), want.prompt
	count.resumed++
	return compare(got, want, l.g)
}

// compare holds tokens and logits against the reference.
func compare(got, want trace, g *nodepb.Generate) error {
	if got.err != want.err {
		return fmt.Errorf("request %s: ends with %q, alone with %q", g.RequestId, got.err, want.err)
	}
	failed := want.err != "" && len(want.tokens) == 0 // then a part of the prompt's scores may be there
	if !failed && (!proto.Equal(got.prompt, want.prompt) || g.PromptLogprobs != nil && len(want.prompt.Logprobs) != len(g.Prompt)-1) {
		return fmt.Errorf("request %s: the prompt's log-probabilities differ (prompt %d): %v, want %v", g.RequestId, len(g.Prompt), got.prompt, want.prompt)
	}
	if len(got.tokens) != len(want.tokens) || len(want.tokens) < limitOf(g) && len(g.StopTokenIds) == 0 && g.Grammar == nil {
		return fmt.Errorf("request %s: %d tokens, alone it had %d, at most %d", g.RequestId, len(got.tokens), len(want.tokens), limitOf(g))
	}
	for i := range got.tokens {
		pos := len(g.Prompt) + i
		if h, ok := got.logits[pos]; ok && h != want.logits[pos] {
			return fmt.Errorf("request %s: logits differ at position %d (prompt %d)", g.RequestId, pos, len(g.Prompt))
		}
		if got.tokens[i] != want.tokens[i] {
			return fmt.Errorf("request %s: token %d is %d, want %d", g.RequestId, i, got.tokens[i], want.tokens[i])
		}
	}
	return nil
}

// native is the fastest C variant here, or portable without cgo.
func native() string {
	for _, v := range cpu.Variants() {
		if v != cpu.Portable {
			return v
		}
	}
	return cpu.Portable
}

// stored are the classes of numerics that differ while weights are as they are
// stored: VNNI is for products with quantized ones alone.
func stored() []string {
	return slices.DeleteFunc(cpu.Variants(), func(v string) bool { return strings.HasSuffix(v, "vnni") })
}

// quantizing is the variant of a class that products with quantized weights have,
// where there is one: VNNI's.
func quantizing(kernels string) string {
	for _, v := range cpu.Variants() {
		if v == kernels+"vnni" || kernels == "avx2" && v == "avxvnni" {
			return v
		}
	}
	return kernels
}

func TestSameBitsOnEveryPath(t *testing.T) {
	// Each class of numerics that this machine has, in full: nine schedules of each checkpoint, three
	// with slow kernels. Under the race detector, which is after other faults, and in short tests the
	// fastest one in part.
	seeds, classes, begin := 9*len(everyArchitecture), stored(), uint64(1)
	switch {
	case os.Getenv("TANDEM_SOAK") != "":
		seeds, begin = 5000, soakSeed(t, begin)
	case raceEnabled, testing.Short():
		seeds, classes = 5*len(everyArchitecture), classes[:1]
	case cpu.Has(cpu.AMX):
		classes = append(classes, cpu.AMX)
	}
	for _, kernels := range classes {
		t.Run(kernels, func(t *testing.T) {
			var count paths
			seeds := seeds
			if len(classes) > 1 && (kernels == cpu.AMX || kernels == cpu.Portable || kernels == cpu.Generic) {
				// AMX is like the first but for products with bf16 and MXFP4. The other two are slow, and
				// only their kernels differ: engine/backend/cpu tests those.
				seeds /= 3
			}
			for i, c := range everyArchitecture {
				if c.kernels = kernels; c.quantization != "" {
					c.kernels = quantizing(kernels)
				}
				if err := campaign(t, c, begin+uint64(i*1_000_000), seeds/len(everyArchitecture), false, &count); err != nil {
					t.Fatalf("%s, quantization %q: %v", c.checkpoint, c.quantization, err)
				}
			}
			t.Logf("note: kernels %s, seed %d, %d schedules: %s", kernels, begin, seeds, &count)
			for _, c := range []struct {
				path string
				n    uint64
				min  int // in a hundred schedules
			}{
				{"requests", count.requests, 600}, {"batched steps", count.batched, 800}, {"chunked prompts", count.chunked, 150},
				{"prefix hits", count.hits, 2000}, {"preemptions", count.preempted, 15}, {"remote prefills", count.remote, 100},
				{"local prefills", count.local, 20}, {"resumed", count.resumed, 60}, {"penalties and masks", count.controlled, 120},
				{"stop tokens", count.stopped, 20}, {"scored prompts", count.scored, 50},
				{"with adapters", count.adapted, 30},
				{"with a grammar", count.constrained, 120}, {"finished under a grammar", count.finished, 30}, {"ended under a grammar", count.ended, 3},
				{"guessed tokens", count.guessed, 900}, {"accepted guesses", count.accepted, 200}, {"refused guesses", count.guessed - count.accepted, 200},
				{"guessed by a model", count.drafted, 300}, {"of those accepted", count.draftsKept, 100},
				{"pages over TCP", count.tcp, 90}, {"pages over TLS", count.tls, 20}, {"bytes out of shared memory", count.shared, 90_000}, {"bytes by RDMA", count.rdma, rdmaBytes},
			} {
				if c.n < uint64(c.min*seeds/100) {
					t.Errorf("%s: ran %d times in %d schedules, want at least %d in a hundred: the campaign no longer covers this path", c.path, c.n, seeds, c.min)
				}
			}
		})
	}
}

// The campaign must notice a kernel whose sums depend on the batch.
func TestBatchDependentReductionIsNoticed(t *testing.T) {
	var count paths
	err := campaign(t, campaigned{checkpoint: "gqa-tied", kernels: native()}, 1, 20, true, &count)
	if err == nil || !strings.Contains(err.Error(), "differ") {
		t.Fatalf("a reduction that depends on the batch went unnoticed (%v); %s", err, &count)
	}
	t.Log(err)
}

// Between classes of numerics bits differ, but no greedy token does where the
// two best logits are further apart than the classes' rounding.
func TestClassesAgreeOnClearTokens(t *testing.T) {
	const gap = 1e-3 // logits here differ by some 1e-5
	rng := rand.New(rand.NewPCG(11, 7))
	var prompts [][]int32
	n := 25
	if raceEnabled { // many times slower
		n = 5
	}
	for range n {
		prompts = append(prompts, randomTokens(rng, 1+rng.IntN(100), 256))
	}
	var first []trace
	var gaps map[uint64]map[int]float32
	compared := 0
	for _, kernels := range cpu.Variants() {
		a := newAlone(t, campaigned{checkpoint: "gqa-tied", kernels: kernels})
		a.f.probes.gaps = make(map[uint64]map[int]float32)
		for i, p := range prompts {
			g := &nodepb.Generate{RequestId: kernels, Prompt: p, MaxTokens: 24, Sampling: &nodepb.Sampling{Seed: uint64(i + 1)}}
			got := a.run(t, g)
			if len(first) <= i {
				first = append(first, got)
				gaps = a.f.probes.gaps
				continue
			}
			for n, token := range got.tokens {
				clear := gaps[uint64(i+1)][len(p)+n] > gap
				if token != first[i].tokens[n] && clear {
					t.Errorf("%s: prompt %d, token %d: %d, %s drew %d by %g", kernels, i, n, token, cpu.Variants()[0], first[i].tokens[n], gaps[uint64(i+1)][len(p)+n])
				}
				if !clear || token != first[i].tokens[n] {
					break // from here on they may go different ways
				}
				compared++
			}
		}
		a.f.close()
	}
	if want := 16 * n * (len(cpu.Variants()) - 1); compared < want {
		t.Errorf("%d tokens were compared, want at least %d", compared, want)
	}
}
