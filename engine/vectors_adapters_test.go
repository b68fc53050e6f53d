package engine

import (
	"math"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// A vector with an adapter is that of the adapted model: the logits of tokens differ as the
// log-probabilities of the same request for tokens do, and rows are not those of the base model.
func TestVectorsOfAdapters(t *testing.T) {
	b := adapterBench(t)
	prompt := tokens(20, 3)
	ask := func(adapter string, change func(*Request)) Token {
		t.Helper()
		got := make(chan Token, 2)
		r := &Request{Root: kvcache.Root("m", adapter, ""), Prompt: prompt, MaxTokens: 1, Adapter: adapter, Emit: func(tk Token) { got <- tk }}
		change(r)
		if _, _, err := b.Add(r); err != nil {
			t.Fatal(err)
		}
		tk := <-got
		if tk.Err != nil {
			t.Fatal(tk.Err)
		}
		return tk
	}
	rows := map[string][]float32{}
	for _, adapter := range []string{"", "all"} {
		rows[adapter] = ask(adapter, func(r *Request) { r.Pool = PoolLast }).Vector
		logits := ask(adapter, func(r *Request) { r.Pool, r.PoolTokens = PoolLogits, []int32{5, 9} }).Vector
		top := ask(adapter, func(r *Request) { r.LogProbs, r.LogProbTokens = true, []int32{5, 9} }).LogProbs.Top
		want := map[int32]float32{}
		for _, p := range top {
			want[p.Token] = p.LogProb
		}
		if off := math.Abs(float64(logits[0] - logits[1] - (want[5] - want[9]))); len(want) < 2 || off > 1e-4 {
			t.Errorf("adapter %q: logits %v, log-probabilities %v", adapter, logits, want)
		}
	}
	if slices.Equal(rows[""], rows["all"]) || cosine(rows[""], rows["all"]) > 0.9999 {
		t.Error("the adapter does not change the vector")
	}
}
