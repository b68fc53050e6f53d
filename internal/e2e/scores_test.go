package e2e

import (
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// A prompt's log-probabilities are those of one plain forward pass over it: a
// log-softmax in float64 of the logits before each token, all of them sorted. They
// come from the decode node in chunks, also where a prefill node was named.
func TestPromptLogProbsAgainstPlainForwardPass(t *testing.T) {
	for _, ckpt := range []string{"gqa-tied", "mistral-window"} {
		dir := filepath.Join(checkpoints, ckpt)
		plain, err := engine.Load(engine.LoadOptions{Model: dir, Threads: 1, KVMemory: 16 << 20, MaxSeqs: 4, MaxBatchedTokens: 256})
		if err != nil {
			t.Fatal(err)
		}
		o := engine.LoadOptions{Model: dir, Threads: 2, KVMemory: 16 << 20, MaxSeqs: 4, MaxBatchedTokens: 16}
		f := newFleet(t, o, &o)
		vocab := plain.Model.VocabSize()
		for seed := range uint64(4) {
			rng := rand.New(rand.NewPCG(seed, 5))
			best := uint32(rng.IntN(20))
			g := &nodepb.Generate{RequestId: ckpt, Attempt: 1, Prompt: randomTokens(rng, 2+rng.IntN(70), vocab), MaxTokens: 1, PromptLogprobs: &best,
				Sampling: &nodepb.Sampling{Seed: 1000 + seed}, Prefill: []string{"prefill"}}
			got := f.run(t, g).prompt
			if len(got.Logprobs) != len(g.Prompt)-1 || len(got.Ranks) != len(got.Logprobs) || len(got.TopTokens) != len(got.Logprobs)*int(best) {
				t.Fatalf("%s: %d log-probabilities, %d ranks, %d best of %d tokens", ckpt, len(got.Logprobs), len(got.Ranks), len(got.TopTokens), len(g.Prompt))
			}
			err := plain.Logits(g.Prompt, 0, func(at int, logits []float32) error {
				if at+1 == len(g.Prompt) {
					return nil
				}
				probs, order := plainLogSoftmax(logits)
				own := g.Prompt[at+1]
				if d := math.Abs(float64(got.Logprobs[at]) - probs[own]); d > 1e-5 || order[got.Ranks[at]-1] != own {
					t.Errorf("%s: token %d: %g with rank %d, want %g, there stands token %d", ckpt, at+1, got.Logprobs[at], got.Ranks[at], probs[own], order[got.Ranks[at]-1])
				}
				for k := range int(best) {
					i := at*int(best) + k
					if got.TopTokens[i] != order[k] || math.Abs(float64(got.TopLogprobs[i])-probs[order[k]]) > 1e-5 {
						t.Errorf("%s: token %d: best %d is %d with %g, want %d with %g", ckpt, at+1, k, got.TopTokens[i], got.TopLogprobs[i], order[k], probs[order[k]])
					}
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		if n := f.preEng.Stats().PromptComputed; n != 0 || f.decode.Counters().RemotePrefills != 0 {
			t.Errorf("%s: the prefill node computed %d tokens of prompts whose logits are looked at", ckpt, n)
		}
		f.close()
		if err := plain.Close(); err != nil {
			t.Error(err)
		}
	}
}

// plainLogSoftmax is every token's log-probability, and the tokens by it.
func plainLogSoftmax(logits []float32) (probs []float64, order []int32) {
	most := slices.Max(logits)
	sum := 0.0
	for _, v := range logits {
		sum += math.Exp(float64(v) - float64(most))
	}
	for i, v := range logits {
		probs = append(probs, float64(v)-float64(most)-math.Log(sum))
		order = append(order, int32(i))
	}
	slices.SortStableFunc(order, func(a, b int32) int {
		switch {
		case probs[a] > probs[b]:
			return -1
		case probs[a] < probs[b]:
			return 1
		}
		return 0
	})
	return probs, order
}
