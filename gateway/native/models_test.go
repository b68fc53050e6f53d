package native

import (
	"slices"
	"testing"

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
