package native

import (
	"slices"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/render"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// Absent models (Options.KeepModels) never refuse one that nodes serve: the oldest makes room.
func TestAbsentModelsMakeRoom(t *testing.T) {
	fleet, all := new(nodes.Snapshot), []*Model{}
	for i := range 2 * maxModels {
		if full(fleet, all) || len(spare(fleet, slices.Clone(all))) != i {
			t.Fatalf("%d absent models leave no room", i)
		}
		all = append(all, &Model{Model: render.Model{Fingerprint: uint64(i + 1)}, bundle: new(nodepb.Bundle)})
	}
	if full(fleet, all) {
		t.Error("absent models leave no room")
	}
	if left := spare(fleet, slices.Clone(all)); !slices.Equal(left, all[1:]) {
		t.Errorf("%d models are left", len(left))
	}
}

// A request takes the blocks of states that a node keeps, not one for each place: a node of the
// default memory has room for the prompts that it computes.
func TestBlocksOfStates(t *testing.T) {
	groups := []*nodepb.CacheGroup{{BlockTokens: 128}, {BlockTokens: 128, Window: 2, Every: 1024}}
	m, err := NewModel(&nodepb.Bundle{Model: "hybrid", BlockTokens: 16, Groups: groups}, "", "", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if got := m.kvBlocks(8192); got != 64+5 {
		t.Errorf("8,192 tokens take %d blocks, want 64 and 5 states", got)
	}
}

// A request takes the blocks of a window and of a step of the node, 2,048 tokens where the node does
// not report its own.
func TestBlocksOfWindows(t *testing.T) {
	for step, want := range map[uint32]int{0: 193, 512: 97} {
		b := &nodepb.Bundle{Model: "windows", BlockTokens: 16, StepTokens: step, Groups: []*nodepb.CacheGroup{{BlockTokens: 16, Window: 1024}}}
		m, err := NewModel(b, "", "", time.Now())
		if err != nil {
			t.Fatal(err)
		}
		if got := m.kvBlocks(8192); got != want {
			t.Errorf("steps of %d: 8,192 tokens take %d blocks, want %d", step, got, want)
		}
	}
}
