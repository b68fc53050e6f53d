package fleet

import (
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/route"
)

// randomFleet draws a fleet and a load that brings it near one of its limits.
func randomFleet(seed uint64) (name string, trace []sim.Request, o Options) {
	draw := rand.New(rand.NewPCG(seed, 16))
	between := func(lo, hi float64) float64 { return lo * math.Pow(hi/lo, draw.Float64()) }
	kind := []string{"kv", "prefill", "bursty", "mixed"}[seed%4]
	o = Options{
		Prefill: draw.IntN(5), Decode: 2 + draw.IntN(4), BlockTokens: 128, BatchedTokens: []int{2048, 8192}[draw.IntN(2)],
		Steps: stepTimes[draw.IntN(len(stepTimes))], Seed: seed, GrantTimeout: 2 * time.Second,
	}
	meanPrompt, meanAnswer := between(500, 8000), between(30, 300)
	spread := between(0.2, 0.8)
	if kind == "mixed" {
		spread = 1.3
	}
	shared := draw.Float64() * 0.8 // share of a prompt that a family has in common
	families := 1 + draw.IntN(40)
	const requests = 300
	lognormal := func(mean float64) int { // within 8 × the mean
		return 1 + int(mean*min(8, math.Exp(spread*draw.NormFloat64()-spread*spread/2)))
	}
	longest := int(8*meanPrompt) + int(8*meanAnswer) + 2
	// What a request costs when it is alone in a step.
	prefill := o.Steps.Step(Shape{Chunk: int(meanPrompt), Attended: meanPrompt * meanPrompt / 2}, 1<<20).Seconds()
	streams := between(4, 24)
	pool := max(float64(longest), streams*(meanPrompt+meanAnswer))
	step := o.Steps.Step(Shape{Streams: int(streams), ContextSum: int(streams * meanPrompt)}, int(pool)).Seconds()
	computers := float64(o.Prefill)
	if computers == 0 {
		computers = float64(o.Decode)
	}
	rate := computers / prefill                                                              // requests per second that prefill takes
	hold := meanAnswer*step + prefill                                                        // seconds in the pool
	room := float64(o.Decode) * pool / (meanPrompt + meanAnswer) / hold                      // requests per second that the pools take
	decode := float64(o.Decode) * min(pool/(meanPrompt+meanAnswer), 256) / meanAnswer / step // that steps take
	load := between(0.4, 0.9)
	if kind == "kv" { // pools are what limits
		pool *= min(1, 0.8*min(rate, decode)/room)
		pool = max(pool, float64(longest))
		room = float64(o.Decode) * pool / (meanPrompt + meanAnswer) / hold
	}
	o.Blocks = int(pool)/o.BlockTokens + 2
	rate = load * min(rate, room, decode)
	at := 0.0
	for i := range requests {
		pace := rate
		if kind == "bursty" { // half of the requests at 8 × the pace, and the rate on the mean
			pace = 8 * rate
			if i/25%2 == 1 {
				pace = rate * 8 / 15
			}
		}
		at += draw.ExpFloat64() / pace
		q := sim.Request{At: time.Duration(at * 1e9), Tokens: lognormal(meanPrompt), Output: lognormal(meanAnswer)}
		family := draw.IntN(families)
		for b := range q.Tokens/sim.BlockTokens + 1 {
			id := uint64(i)<<32 | uint64(b)
			if float64(b*sim.BlockTokens) < shared*float64(q.Tokens) {
				id = uint64(family)<<16 | uint64(b) | 1<<60
			}
			q.Blocks = append(q.Blocks, kvcache.Hash(id*0x9e3779b97f4a7c15))
		}
		trace = append(trace, q)
	}
	return fmt.Sprintf("%s: %dP%dD, %d×%d tokens, %s, prompts %.0f, answers %.0f, %.0f %% of %d families, load %.2f", kind, o.Prefill, o.Decode,
		o.Blocks, o.BlockTokens, o.Steps.Name, meanPrompt, meanAnswer, 100*shared, families, load), trace, o
}

// Below saturation the default policy is no worse than round robin on the mean of
// random fleets, and on none by more than 2 points, with block events and fresh heartbeats
// as well as without and 2 s old. In a soak each run is the mean of 32 placements: round
// robin from another first node differs from itself by up to 28 points.
func TestPrefixKeepsUpWithRoundRobin(t *testing.T) {
	seeds, placements := uint64(20), 1
	if soaking() {
		seeds, placements = 200, 32
	}
	var mu sync.Mutex
	sum, worst := 0.0, 0.0
	t.Run("seeds", func(t *testing.T) {
		for seed := range seeds {
			for _, blind := range []bool{false, true} {
				t.Run(fmt.Sprintf("%d blind=%t", seed, blind), func(t *testing.T) {
					t.Parallel()
					name, prefix, turns := bothPolicies(t, seed, placements, blind)
					if turns-prefix > 0.02 {
						t.Errorf("%s: goodput %.3f, round robin %.3f", name, prefix, turns)
					}
					mu.Lock()
					defer mu.Unlock()
					sum += turns - prefix
					worst = max(worst, turns-prefix)
				})
			}
		}
	})
	t.Logf("note: round robin is at most %.1f points better; the mean of %d runs is %.2f points above it", 100*worst, 2*seeds, -100*sum/float64(2*seeds))
	if sum > 0 {
		t.Errorf("goodput is %.3f below round robin's on the mean", sum/float64(2*seeds))
	}
}

// bothPolicies is the mean goodput of a random fleet by prefix and by round robin.
func bothPolicies(t *testing.T, seed uint64, placements int, blind bool) (name string, prefix, turns float64) {
	name, trace, o := randomFleet(seed)
	o.Heartbeat, o.NoEvents = 100*time.Millisecond, blind
	if blind {
		o.Heartbeat = 2 * time.Second
	}
	goodput := map[route.Policy]float64{}
	for o.Placing = range placements {
		for _, o.Policy = range []route.Policy{route.Prefix, route.RoundRobin} {
			r, err := Run(trace, o)
			if err != nil {
				t.Fatalf("%s: %v: %v", name, o.Policy, err)
			}
			goodput[o.Policy] += r.Summarize(goals).Goodput / float64(placements)
		}
	}
	return name, goodput[route.Prefix], goodput[route.RoundRobin]
}
