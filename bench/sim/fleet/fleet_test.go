package fleet

import (
	"compress/gzip"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/route"
)

func soaking() bool { return os.Getenv("TANDEM_SOAK") != "" }

// conversation is the Mooncake conversation trace.
var conversation = sync.OnceValues(func() ([]sim.Request, error) {
	f, err := os.Open("../testdata/mooncake_conversation.jsonl.gz")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return nil, err
	}
	return sim.ReadTrace(z)
})

// goals are those of the reference runs.
var goals = Goals{TTFT: 2 * time.Second, TPOT: 50 * time.Millisecond}

// dynamoFleet has the sizes of the reference runs of NVIDIA Dynamo's mocker.
func dynamoFleet(t *testing.T, prefill, decode int, policy route.Policy, speedup float64) Options {
	t.Helper()
	steps, err := StepTimesOf("dynamo")
	if err != nil {
		t.Fatal(err)
	}
	return Options{Prefill: prefill, Decode: decode, Blocks: 2000, BlockTokens: 512, Steps: steps, Policy: policy, Speedup: speedup}
}

// play runs the first requests of the conversation trace.
func play(t *testing.T, requests int, o Options) *Result {
	t.Helper()
	trace, err := conversation()
	if err != nil {
		t.Fatal(err)
	}
	r, err := Run(trace[:min(requests, len(trace))], o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// All 14 figures of eight colocated nodes under round robin are within 2 % of those of Dynamo's
// mocker, an independent simulator with the same step times. So is the ITL's p99 of six prefill and
// two decode nodes, and of four and four. The short form plays a part of each run.
func TestMatchesDynamo(t *testing.T) {
	for _, c := range []struct {
		prefill, decode int
		speedup         float64
		// ms, and tokens per second; 0: not compared
		ttftMean, ttftP50, ttftP90, ttftP99, itlMean, itlP99, tokens float64
		shortTTFT, shortITL                                          float64 // means of this simulator with the first 1,000 requests
	}{
		{0, 8, 1, 321.36, 184.84, 701.76, 2046.4, 7.63, 13.69, 1163.4, 345.82, 7.824},
		{0, 8, 3, 392.96, 230.23, 884.95, 2413.9, 15.60, 180.73, 3466.8, 426.88, 15.630},
		// Dynamo's transfers differ, so that its times to the first token do.
		{6, 2, 1, 0, 0, 0, 0, 0, 20.11, 0, 389.99, 10.927},
		{4, 4, 1, 0, 0, 0, 0, 0, 14.40, 0, 458.47, 8.026},
	} {
		name := fmt.Sprintf("%dP%dD x%g", c.prefill, c.decode, c.speedup)
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := dynamoFleet(t, c.prefill, c.decode, route.RoundRobin, c.speedup)
			requests := math.MaxInt
			if testing.Short() {
				requests = 1000
			}
			s := play(t, requests, o).Summarize(goals)
			ms := func(d time.Duration) float64 { return d.Seconds() * 1e3 }
			if testing.Short() {
				if ttft, itl := ms(s.TTFTMean)/c.shortTTFT, ms(s.ITLMean)/c.shortITL; math.Abs(ttft-1) > 1e-3 || math.Abs(itl-1) > 1e-3 {
					t.Errorf("means of TTFT %.2f ms and ITL %.3f ms, want %g and %g", ms(s.TTFTMean), ms(s.ITLMean), c.shortTTFT, c.shortITL)
				}
				return
			}
			for _, v := range []struct {
				name      string
				got, want float64
			}{
				{"TTFT mean", ms(s.TTFTMean), c.ttftMean}, {"TTFT p50", ms(s.TTFTP50), c.ttftP50}, {"TTFT p90", ms(s.TTFTP90), c.ttftP90}, {"TTFT p99", ms(s.TTFTP99), c.ttftP99},
				{"ITL mean", ms(s.ITLMean), c.itlMean}, {"ITL p99", ms(s.ITLP99), c.itlP99}, {"output tokens per second", s.TokensPerSecond, c.tokens},
			} {
				if v.want == 0 {
					continue
				}
				t.Logf("note: %s: %.2f, Dynamo %.2f (%+.2f %%)", v.name, v.got, v.want, 100*(v.got/v.want-1))
				if math.Abs(v.got/v.want-1) > 0.02 {
					t.Errorf("%s: %.2f, Dynamo has %.2f", v.name, v.got, v.want)
				}
			}
		})
	}
}

// Where decode KV is scarce the default policy holds its goodput: six prefill and
// two decode nodes at three times the trace's speed, with block events and
// heartbeats, and without and 2 s old. Four decode nodes with the figures of H100
// are no worse than with every prompt on prefill nodes.
func TestScarceKVMemory(t *testing.T) {
	if !soaking() {
		t.Log("note: the whole trace with scarce KV memory is played in make soak")
		return
	}
	o := dynamoFleet(t, 6, 2, route.Prefix, 3)
	o.Heartbeat, o.GrantTimeout = 100*time.Millisecond, 2*time.Second
	s := play(t, math.MaxInt, o).Summarize(goals)
	t.Logf("note: 6P2D x3: %+v", s)
	if s.Goodput < 0.98 || s.TTFTP90 > 800*time.Millisecond {
		t.Errorf("6P2D x3: goodput %.3f, want .98; TTFT p90 %v, want 800ms", s.Goodput, s.TTFTP90)
	}
	o.Heartbeat, o.NoEvents = 2*time.Second, true
	if s := play(t, math.MaxInt, o).Summarize(goals); s.Goodput < 0.97 {
		t.Errorf("6P2D x3 without block events and with heartbeats 2 s old: goodput %.3f, want .97", s.Goodput)
	}
	o = dynamoFleet(t, 5, 4, route.Prefix, 3)
	o.Blocks, o.Heartbeat, o.GrantTimeout = 806, 100*time.Millisecond, 2*time.Second
	var err error
	if o.Steps, err = StepTimesOf("h100"); err != nil {
		t.Fatal(err)
	}
	byDefault := play(t, math.MaxInt, o).Summarize(goals).Goodput
	o.MinRemote = 1
	remote := play(t, math.MaxInt, o).Summarize(goals).Goodput
	t.Logf("note: 5P4D x3, H100: goodput %.3f, always remote %.3f", byDefault, remote)
	if byDefault < remote {
		t.Errorf("5P4D x3, H100: goodput %.3f, always remote %.3f", byDefault, remote)
	}
}

// Every kind of fleet serves every request once, clients measure a first token
// after their request and no more than the steps allow, and a second run is equal.
func TestRunsRepeat(t *testing.T) {
	for _, c := range []struct {
		name            string
		prefill, decode int
		policy          route.Policy
		heartbeat       time.Duration
		noEvents        bool
	}{
		{"colocated", 0, 4, route.RoundRobin, 0, false},
		{"prefix", 3, 2, route.Prefix, 500 * time.Millisecond, false},
		{"blind", 3, 2, route.Prefix, 2 * time.Second, true},
		{"drawn", 3, 2, route.PowerOfTwo, 500 * time.Millisecond, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := dynamoFleet(t, c.prefill, c.decode, c.policy, 1.5)
			o.Heartbeat, o.NoEvents, o.GrantTimeout = c.heartbeat, c.noEvents, 2*time.Second
			r := play(t, 300, o)
			tokens := 0
			for i := range r.Requests {
				q := &r.Requests[i]
				if tokens += q.Output; q.Err != nil || q.First <= q.At || q.Last < q.First {
					t.Fatalf("request %d: %+v", i, q)
				}
			}
			if tokens != r.Tokens {
				t.Errorf("%d tokens were emitted, clients wanted %d", r.Tokens, tokens)
			}
			if again := play(t, 300, o); again.Digest() != r.Digest() {
				t.Error("a second run had another result")
			}
		})
	}
}

// The digest has the block events: runs with equal times of requests differ if their nodes evict
// other blocks.
func TestDigestHasBlockEvents(t *testing.T) {
	var trace []sim.Request
	for i := range 20 {
		trace = append(trace, sim.Request{At: time.Duration(i) * time.Second, Tokens: 1200, Output: 4, Blocks: []kvcache.Hash{kvcache.Hash(3 * i), 1, 2}})
	}
	run := func(blocks int) *Result {
		o := dynamoFleet(t, 0, 1, route.Prefix, 1)
		o.Blocks, o.Steps = blocks, stepTimes[1] // which do not depend on the pool
		r, err := Run(trace, o)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	small, large := run(16), run(1000)
	if small.Requests[19].Last != large.Requests[19].Last || small.Digest() == large.Digest() {
		t.Errorf("last tokens at %v and %v, digests %x and %x", small.Requests[19].Last, large.Requests[19].Last, small.Digest(), large.Digest())
	}
}

// Short prompts do not wait behind long ones on a prefill node, and long ones are served.
func TestShortPromptsPassLongOnes(t *testing.T) {
	o := dynamoFleet(t, 1, 1, route.Prefix, 1)
	o.BlockTokens, o.Blocks, o.BatchedTokens, o.MinRemote = 16, 25_000, 2048, 1
	var err error
	if o.Steps, err = StepTimesOf("h100"); err != nil {
		t.Fatal(err)
	}
	kinds, err := sim.ParseMix("0.95:256:16,0.05:16000:16")
	if err != nil {
		t.Fatal(err)
	}
	r, err := Run(sim.Mix(kinds, 1000, 30, 1), o)
	if err != nil {
		t.Fatal(err)
	}
	var short, long time.Duration
	longs := 0
	for i := range r.Requests {
		if q := &r.Requests[i]; q.Prompt > 1000 {
			longs++
			long += q.First - q.At
		} else {
			short += q.First - q.At
		}
	}
	long /= time.Duration(longs)
	short /= time.Duration(len(r.Requests) - longs)
	t.Logf("note: short prompts take %v to their first token on the mean, %d long ones %v", short, longs, long)
	if longs < 30 || 4*short > long {
		t.Errorf("short prompts take %v to their first token, %d long ones %v", short, longs, long)
	}
}

// A prompt that no pool holds is refused; the others are served.
func TestTooLongIsRefused(t *testing.T) {
	o := dynamoFleet(t, 0, 1, route.Prefix, 1)
	o.Blocks = 4
	r, err := Run([]sim.Request{{Tokens: 4 * 512, Output: 3}, {Tokens: 100, Output: 3}}, o)
	if err != nil || r.Requests[0].Err == nil || r.Requests[1].Err != nil || r.Tokens != 3 {
		t.Errorf("%v: %+v", err, r)
	}
}

// Prefill nodes of the same kind by another name change nothing. Slower ones, with less memory, make
// first tokens later and no other; steps that are planned ahead give the same result as without.
func TestKindsOfNodes(t *testing.T) {
	o := dynamoFleet(t, 3, 2, route.Prefix, 1.5)
	o.MinRemote = 1
	one := play(t, 200, o)
	o.PrefillKind = &Kind{Steps: o.Steps, Blocks: o.Blocks}
	if same := play(t, 200, o); same.Digest() != one.Digest() {
		t.Error("prefill nodes of the same kind have another result")
	}
	step, counted := o.Steps.Step, 0
	o.PrefillKind = &Kind{Blocks: 500, Steps: StepTimes{Name: "slow", Count: func(Shape) { counted++ }, Step: func(s Shape, pool int) time.Duration {
		if pool != 500*o.BlockTokens {
			t.Fatalf("a pool of %d tokens", pool)
		}
		return 2 * step(s, pool)
	}}}
	slow := play(t, 200, o)
	a, b := one.Summarize(goals), slow.Summarize(goals)
	if b.TTFTP50 < a.TTFTP50*3/2 || b.ITLP50 > a.ITLP50*11/10 || counted == 0 || counted >= slow.Steps {
		t.Errorf("TTFT %v, ITL %v; of equal nodes %v and %v; %d of %d steps by slow nodes", b.TTFTP50, b.ITLP50, a.TTFTP50, a.ITLP50, counted, slow.Steps)
	}
	if o.Stepwise = true; play(t, 200, o).Digest() != slow.Digest() {
		t.Error("steps that are planned ahead have another result")
	}
}

func TestBadOptions(t *testing.T) {
	trace := []sim.Request{{Tokens: 1, Output: 1}}
	for _, change := range []func(*Options){
		func(o *Options) { o.Decode = 0 }, func(o *Options) { o.Steps = StepTimes{} }, func(o *Options) { o.Heartbeat = -1 }, func(o *Options) { o.Speedup = math.NaN() }, func(o *Options) { o.PrefillKind = &Kind{Steps: o.Steps} },
	} {
		o := dynamoFleet(t, 0, 1, route.Prefix, 1)
		change(&o)
		if _, err := Run(trace, o); !errors.Is(err, ErrOptions) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	if _, err := Run(nil, dynamoFleet(t, 0, 1, route.Prefix, 1)); !errors.Is(err, ErrOptions) {
		t.Errorf("an empty trace: %v", err)
	}
	if _, err := StepTimesOf("a100"); !errors.Is(err, ErrOptions) || !strings.Contains(err.Error(), "h100") {
		t.Errorf("unknown step times: %v", err)
	}
}
