package prefill

import (
	"fmt"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/kvtransfer"
)

// A model of three KV groups: two layers that see everything, one with a window, one
// with a window and blocks of twice as many tokens.
func feedEngine(t *testing.T, ranks int) *engine.Engine {
	t.Helper()
	groups := []kvcache.Group{{BlockTokens: 8}, {BlockTokens: 8, Window: 20}, {BlockTokens: 16, Window: 40}}
	kv := backend.KVSpec{
		Blocks: 128, Regions: 2, PageBytes: pageBytes, DType: backend.F32,
		Groups: []backend.KVGroup{
			{BlockTokens: 8, KVHeads: 1, HeadDim: 2, Layers: 2},
			{BlockTokens: 8, KVHeads: 1, HeadDim: 2, Window: 20, Layers: 1},
			{BlockTokens: 16, KVHeads: 1, HeadDim: 1, Window: 40, Layers: 1},
		},
		Layers: []backend.KVPlace{{Group: 0}, {Group: 1}, {Group: 0, Region: 1}, {Group: 2}},
	}
	m := &model{kv: newMemory(1)}
	e, err := engine.New(engine.Options{Model: m, Backend: m, KV: kv, Workers: ranks, Scheduler: scheduler.Config{
		Pool: kvcache.Config{Blocks: 128, BlockTokens: 8, Groups: groups}, MaxSeqs: 4, MaxBatchedTokens: stepTokens, MaxModelLen: 200,
	}})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// The pages of a push are, group after group, those that hold what is read once the
// prompt is computed. Each group has them in the regions of its own layers, once for
// each rank.
func TestFeedExpectsWhatIsRead(t *testing.T) {
	for _, c := range []struct {
		ranks, from, total int
		runs               []kvtransfer.Run
	}{
		{1, 0, 77, []kvtransfer.Run{{Pages: 10, Regions: 2}, {Pages: 3, Regions: 1}, {Pages: 3, Regions: 1}}},
		{1, 48, 77, []kvtransfer.Run{{Pages: 4, Regions: 2}, {Pages: 3, Regions: 1}, {Pages: 2, Regions: 1}}},
		{1, 64, 65, []kvtransfer.Run{{Pages: 1, Regions: 2}, {Pages: 1, Regions: 1}, {Pages: 1, Regions: 1}}},
		{2, 0, 16, []kvtransfer.Run{{Pages: 2, Regions: 4}, {Pages: 2, Regions: 2}, {Pages: 1, Regions: 2}}},
	} {
		f := newFeed(feedEngine(t, c.ranks), c.from, c.total)
		pages := 0
		for _, r := range c.runs {
			pages += r.Pages
		}
		if !slices.Equal(f.runs, c.runs) || f.nPages != pages {
			t.Errorf("tokens [%d,%d) on %d ranks: %d pages (%v), want %d (%v)", c.from, c.total, c.ranks, f.nPages, f.runs, pages, c.runs)
		}
	}
}

// However the prompt is cut into chunks, each piece that the grant expects is sent
// once, from the block that holds its tokens, and no block is sent before its last
// token is computed.
func TestFeedSendsEachPieceOnce(t *testing.T) {
	for _, ranks := range []int{1, 2} {
		e := feedEngine(t, ranks)
		for _, from := range []int{0, 16, 48} {
			for _, total := range []int{61, 64, 77} {
				for _, chunk := range []int{5, 8, 24, 100} {
					checkFeed(t, fmt.Sprintf("tokens [%d,%d) in chunks of %d, %d ranks", from, total, chunk, ranks), e, from, total, chunk)
				}
			}
		}
	}
}

func checkFeed(t *testing.T, what string, e *engine.Engine, from, total, chunk int) {
	t.Helper()
	// Block 1000×group + place holds a place of a group.
	tables := make([][]kvcache.BlockID, len(e.Groups()))
	for g, spec := range e.Groups() {
		for place := range spec.End(total) {
			tables[g] = append(tables[g], kvcache.BlockID(1000*g+place))
		}
	}
	type page struct{ region, index int }
	want := map[page]int32{}
	index := 0
	for g, spec := range e.Groups() {
		for place := range spec.End(total) {
			if (place+1)*spec.BlockTokens <= from || place < spec.First(total) {
				continue // decode has it, or it has fallen out of the window
			}
			for _, l := range e.KV().Layers {
				for rank := range e.Workers() {
					if l.Group == g {
						want[page{l.Region*e.Workers() + rank, index}] = int32(1000*g + place)
					}
				}
			}
			index++
		}
	}
	f, got := newFeed(e, from, total), map[page]int32{}
	for upTo := 0; upTo < total; {
		upTo = min(upTo+chunk, total)
		for l := range e.KV().Layers {
			f.layer(l, upTo, tables)
			pieces, ended, err := f.take()
			if ended || err != nil {
				t.Fatalf("%s: ended (%t) before done, %v", what, ended, err)
			}
			for _, p := range pieces {
				for i, block := range p.src {
					at, g := page{p.region, p.first + i}, int(block/1000)
					if _, twice := got[at]; twice {
						t.Errorf("%s: region %d, page %d is sent twice", what, at.region, at.index)
					}
					got[at] = block
					if end := (int(block%1000) + 1) * e.Groups()[g].BlockTokens; end > upTo && upTo < total {
						t.Errorf("%s: group %d sends a block up to token %d when %d are computed", what, g, end, upTo)
					}
				}
			}
		}
	}
	if len(got) != len(want) {
		t.Errorf("%s: %d pieces, want %d", what, len(got), len(want))
	}
	for at, block := range want {
		if b, sent := got[at]; !sent || b != block {
			t.Errorf("%s: region %d, page %d is of block %d (sent: %t), want %d", what, at.region, at.index, b, sent, block)
		}
	}
	f.done(nil)
	if pieces, ended, err := f.take(); len(pieces) != 0 || !ended || err != nil {
		t.Errorf("%s: %d pieces after the last layer, ended: %t, %v", what, len(pieces), ended, err)
	}
}
