//go:build cgo && linux

package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	kernels "github.com/tandem-serving/tandem/cuda"
	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// TestGPUToGPU: prompts whose KV goes from one GPU's memory to the other's, past the hosts', or, where libfabric's provider reaches no GPU, through
// them, have the tokens and logits that their decode node alone gives them, also under a grammar. The GPUs are the kernels' host twin.
func TestGPUToGPU(t *testing.T) {
	twin, err := kernels.Twin("../..", "")
	if err != nil {
		t.Fatal(err)
	}
	o := engine.LoadOptions{
		Model: filepath.Join(checkpoints, "gqa-tied"), Threads: 1, KVMemory: 4 << 20, KVDType: "float32", MaxSeqs: 2, MaxBatchedTokens: 12, MaxModelLen: 64, EnforceEager: true, OneOrder: true,
		Device: "cuda:0", CUDALibrary: twin, SharedKV: true,
	}
	request := func(i int) *nodepb.Generate {
		prompt := make([]int32, 24+i)
		for j := range prompt { // the second begins as the first, which both ends have cached
			prompt[j] = int32((j*11 + j/16*i) % 90)
		}
		g := &nodepb.Generate{
			RequestId: "r", Attempt: 1, Prompt: prompt, MaxTokens: 3, IgnoreEos: true, PrefixRoot: uint64(kvcache.Root("tiny", "", "")), Sampling: &nodepb.Sampling{Seed: uint64(100 + i), Temperature: 1},
		}
		if i == 2 {
			of := testGrammars[6]
			g.MaxTokens, g.Grammar = 0, &nodepb.Grammar{Kind: of.Kind, Text: of.Text, Compact: of.Compact, Version: engine.GrammarVersion, MaxTokens: 6}
		}
		return g
	}
	alone := newFleet(t, o, nil)
	var want []trace
	for i := range 3 {
		g := request(i)
		want = append(want, alone.run(t, g))
		if g.Grammar != nil {
			if _, err := follows(g.Grammar, want[i].tokens, alone.loaded[0].Model.VocabSize()); err != nil {
				t.Error(err)
			}
		}
	}
	alone.close()
	for _, way := range []rdmaTCP{{provider: "shm", gpu: true}, {provider: "tcp"}} {
		t.Run(way.provider, func(t *testing.T) {
			f := newFleetOver(t, way, o, &o)
			defer f.close()
			for i := range 3 {
				g := request(i)
				g.Prefill = []string{"prefill"}
				if err := compare(f.run(t, g), want[i], g); err != nil {
					t.Error(err)
				}
			}
			if s := f.reader.Stats(); s.FabricBytes == 0 || f.decEng.Stats().Prompts.Arrived == 0 || s.LeasesFailed > 0 {
				t.Errorf("%d bytes came by RDMA, %d tokens arrived: %+v", s.FabricBytes, f.decEng.Stats().Prompts.Arrived, s)
			}
			for i, l := range f.loaded {
				if seen := copied(l); seen == way.gpu {
					t.Errorf("node %d: its host's memory has KV: %v", i, seen)
				}
			}
		})
	}
}

// TestStatesOfGPUsOnEveryPath is TestStatesOnEveryPath on the kernels' host twin.
func TestStatesOfGPUsOnEveryPath(t *testing.T) {
	twin, err := kernels.Twin("../..", "")
	if err != nil {
		t.Fatal(err)
	}
	seeds, begin := 1, uint64(7)
	if os.Getenv("TANDEM_SOAK") != "" {
		seeds, begin = 60, soakSeed(t, begin)
	}
	var count paths
	if err := campaign(t, campaigned{checkpoint: "qwen3.5", states: 16, kv: "fp8", gpu: twin}, begin, seeds, false, &count); err != nil {
		t.Fatal(err)
	}
	t.Logf("note: seed %d, %d schedules: %s", begin, seeds, &count)
	if count.chunked == 0 || count.resumed == 0 || seeds > 1 && (count.hits == 0 || count.batched == 0 || count.preempted == 0 || count.remote == 0) {
		t.Error("a path did not run")
	}
}

// copied says whether a node's KV came past its host's memory.
func copied(l *engine.Loaded) bool {
	for i := range l.Regions() {
		if slices.ContainsFunc(l.Region(i), func(b byte) bool { return b != 0 }) {
			return true
		}
	}
	return false
}
