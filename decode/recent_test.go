package decode

import (
	"testing"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

func TestRecentKeepsTheLast(t *testing.T) {
	var r recent
	root := kvcache.Root("m", "", "")
	key := func(i int) kvcache.Hash { return r.key(root, []int32{int32(i), 7}) }
	if key(1) == key(2) || key(1) == r.key(root, []int32{1}) || key(1) == r.key(kvcache.Root("m", "", "salt"), []int32{1, 7}) {
		t.Fatal("different prompts have one key")
	}
	for i := range 3 * maxRecent {
		r.add(key(i))
		r.add(key(i)) // again changes nothing
	}
	for i := range 3 * maxRecent {
		if want := i >= 2*maxRecent; r.has(key(i)) != want {
			t.Fatalf("prompt %d: remembered %t, want %t", i, !want, want)
		}
	}
}
