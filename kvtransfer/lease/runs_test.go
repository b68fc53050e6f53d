package lease

import (
	"errors"
	"testing"
	"time"
)

// TestRuns: a lease whose pages are not all of all regions expects just the
// pieces that there are, and lets no other land.
func TestRuns(t *testing.T) {
	table := New(Options{Epoch: 1, Regions: 3, Pages: 10, MaxLeases: 2, Quarantine: time.Second})
	pages := []int32{9, 8, 7, 6}
	for name, runs := range map[string][]Run{
		"too few": {{3, 3}}, "too many": {{3, 3}, {2, 1}}, "no pages": {{4, 3}, {0, 1}}, "below": {{5, 3}, {-1, 1}},
		"no regions": {{3, 3}, {1, 0}}, "more regions than there are": {{4, 4}},
	} {
		if _, err := table.Grant(0, pages, time.Second, runs...); !errors.Is(err, ErrPages) {
			t.Errorf("%s: %v", name, err)
		}
	}
	k, err := table.Grant(0, pages, time.Second, Run{Pages: 3, Regions: 3}, Run{Pages: 1, Regions: 1})
	if err != nil {
		t.Fatal(err)
	}
	dst := make([]int32, len(pages))
	for _, region := range []uint32{1, 2, 3} {
		if v := table.Admit(k, 1, region, []uint32{2, 3}, dst); v != Invalid {
			t.Errorf("region %d of a page that has one is %v", region, v)
		}
	}
	for region, index := range [][]uint32{{0, 1, 2, 3}, {0, 1, 2}, {0, 1, 2}} {
		if v := table.Admit(k, 1, uint32(region), index, dst); v != Admitted || dst[0] != 9 || dst[2] != 7 {
			t.Fatalf("region %d: %v, pages %v", region, v, dst)
		}
		if !table.BeginRead(k, len(index)) {
			t.Fatal("the lease has ended")
		}
		want := Arriving
		if region == 2 {
			want = Complete
		}
		if s := table.EndRead(0, k, uint32(region), index); s != want {
			t.Errorf("after region %d the lease is %v, want %v", region, s, want)
		}
		if err := table.Check(); err != nil {
			t.Error(err)
		}
	}
}
