package e2e

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/kvtransfer"
)

// BenchmarkFirstToken is the time to the first token of a cold prompt of the
// built-in model, on an idle fleet: prefilled on the decode node, or on another
// node with its KV sent over TCP. Where remote stops being much slower is where
// --min-remote-prefill-tokens belongs.
func BenchmarkFirstToken(b *testing.B) {
	for _, nTokens := range []int{17, 33, 65, 129, 257, 513} {
		for _, where := range []string{"local", "remote"} {
			b.Run(fmt.Sprintf("%s/prompt=%d", where, nTokens), func(b *testing.B) {
				o := engine.LoadOptions{Model: engine.Builtin, Kernels: native(), Threads: 1, MaxSeqs: 16, KVMemory: 256 << 20}
				pre := o
				f := newFleetOver(b, kvtransfer.TCP{}, o, &pre)
				defer f.close()
				rng := rand.New(rand.NewPCG(1, 1))
				for i := range b.N + 1 {
					if i == 1 {
						b.ResetTimer() // the first request dials
					}
					g := &nodepb.Generate{
						RequestId: "bench", Attempt: 1, Prompt: randomTokens(rng, nTokens, 2048), MaxTokens: 1, IgnoreEos: true,
						PrefixRoot: uint64(kvcache.Root("m", "", "")), Sampling: &nodepb.Sampling{Seed: uint64(i)},
					}
					if where == "remote" {
						g.Prefill = []string{"prefill"}
					}
					s, _, err := f.client.generate(g)
					if err != nil {
						b.Fatal(err)
					}
					<-s.done
					if s.err != nil {
						b.Fatal(s.err)
					}
				}
			})
		}
	}
}
