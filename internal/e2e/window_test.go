package e2e

import (
	"math/rand/v2"
	"path/filepath"
	"testing"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// TestOnlyWhatDecodeReadsTravels: of layers that see a window the prefill node sends the blocks of the window alone, and the tokens are
// those of a node that computed the prompt by itself.
func TestOnlyWhatDecodeReadsTravels(t *testing.T) {
	const window, layers, perBlock, arrived = 21, 3, 16, 112 // of the checkpoint; tokens of a block; of the prompt's 127 those in whole blocks
	o := engine.LoadOptions{Model: filepath.Join(checkpoints, "mistral-window"), Kernels: native(), Threads: 1, KVMemory: 8 << 20, MaxSeqs: 4, MaxBatchedTokens: 32, MaxModelLen: 192}
	f := newFleetOver(t, nil, o, &o)
	defer f.close()
	alone := newFleet(t, o, nil)
	defer alone.close()
	g := &nodepb.Generate{RequestId: "r", Attempt: 1, Prompt: randomTokens(rand.New(rand.NewPCG(12, 1)), 128, f.loaded[0].Model.VocabSize()), MaxTokens: 8, IgnoreEos: true,
		Sampling: &nodepb.Sampling{Seed: 3}, Prefill: []string{"prefill"}}
	got := f.run(t, g)
	g.Prefill = nil
	if err := compare(got, alone.run(t, g), g); err != nil {
		t.Error(err)
	}
	blocks := arrived/perBlock - (arrived-(window-1))/perBlock
	if s := f.reader.Stats(); s.LeasesArrived != 1 || s.Pieces != uint64(blocks*layers) {
		t.Errorf("%d transfers of %d pieces, want one of %d blocks in %d layers", s.LeasesArrived, s.Pieces, blocks, layers)
	}
}
