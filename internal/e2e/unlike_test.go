package e2e

import (
	"math/rand/v2"
	"path/filepath"
	"testing"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/kvtransfer/fabric"
)

// TestUnlikeEndsPrefillForThemselves: a prefill node whose blocks have another size or type, or lie in another order, is refused before anything
// travels, over every way that KV has; the decode node computes the prompt, and the tokens are those of a node alone.
func TestUnlikeEndsPrefillForThemselves(t *testing.T) {
	dir := filepath.Join(checkpoints, "gqa-tied")
	base := engine.LoadOptions{Model: dir, Kernels: native(), Threads: 1, KVMemory: 8 << 20, MaxSeqs: 4, MaxBatchedTokens: 64, MaxModelLen: 192, KVDType: "float32"}
	rng := rand.New(rand.NewPCG(11, 1))
	ways := map[string]kvtransfer.Network{"mem": nil, "tcp": kvtransfer.TCP{}, "shm": sharedTCP{}}
	if fabric.Built {
		ways["rdma"] = rdmaTCP{provider: "shm"}
	}
	same := func(*engine.LoadOptions) {}
	for name, c := range map[string]struct {
		change func(*engine.LoadOptions) // of the prefill node
		decode func(*engine.LoadOptions) // of the decode node
		remote uint64
	}{
		"alike":          {same, same, 1},
		"larger blocks":  {func(o *engine.LoadOptions) { o.BlockTokens = 32 }, same, 0},
		"smaller blocks": {same, func(o *engine.LoadOptions) { o.BlockTokens = 32 }, 0},
		"narrower KV":    {func(o *engine.LoadOptions) { o.KVDType = "bfloat16" }, same, 0},
		"wider KV":       {same, func(o *engine.LoadOptions) { o.KVDType = "bfloat16" }, 0},
		"fp8 KV":         {func(o *engine.LoadOptions) { o.KVDType = "fp8" }, same, 0},
		"both fp8":       {func(o *engine.LoadOptions) { o.KVDType = "fp8" }, func(o *engine.LoadOptions) { o.KVDType = "fp8_e4m3" }, 1},
		"memory size":    {func(o *engine.LoadOptions) { o.KVMemory = 4 << 20 }, same, 1}, // which may differ
	} {
		for way, network := range ways {
			t.Run(name+"/"+way, func(t *testing.T) {
				pre, dec := base, base
				c.change(&pre)
				c.decode(&dec)
				f := newFleetOver(t, network, dec, &pre)
				defer f.close()
				alone := newFleet(t, dec, nil)
				defer alone.close()
				g := &nodepb.Generate{RequestId: "r", Attempt: 1, Prompt: randomTokens(rng, 100, f.loaded[0].Model.VocabSize()), MaxTokens: 8, IgnoreEos: true,
					Sampling: &nodepb.Sampling{Seed: 3}, Prefill: []string{"prefill"}}
				got := f.run(t, g)
				g.Prefill = nil
				if err := compare(got, alone.run(t, g), g); err != nil {
					t.Error(err)
				}
				if n := f.decode.Counters().RemotePrefills; n != c.remote {
					t.Errorf("%d prompts were prefilled elsewhere, want %d", n, c.remote)
				}
				if s := f.reader.Stats(); c.remote == 0 && (s.LeasesGranted != 0 || s.PayloadBytes != 0) {
					t.Errorf("pages were granted: %+v", s)
				}
			})
		}
	}
}

// A prompt's KV in fp8 takes half the bytes of bfloat16 on the way to the decode node.
func TestFP8HalvesTransfers(t *testing.T) {
	sent := map[string]uint64{}
	for _, kv := range []string{"bfloat16", "fp8"} {
		o := engine.LoadOptions{Model: filepath.Join(checkpoints, "gqa-tied"), Kernels: native(), Threads: 1, KVMemory: 4 << 20, MaxSeqs: 4, MaxBatchedTokens: 64, MaxModelLen: 192, KVDType: kv}
		f := newFleetOver(t, nil, o, &o)
		f.run(t, &nodepb.Generate{RequestId: "r", Attempt: 1, Prompt: randomTokens(rand.New(rand.NewPCG(5, 1)), 100, f.loaded[0].Model.VocabSize()), MaxTokens: 2, IgnoreEos: true,
			Sampling: &nodepb.Sampling{Seed: 3}, Prefill: []string{"prefill"}})
		sent[kv] = f.reader.Stats().PayloadBytes
		f.close()
	}
	if sent["fp8"] == 0 || 2*sent["fp8"] != sent["bfloat16"] {
		t.Errorf("%v bytes were sent", sent)
	}
}
