package route

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"sort"
	"testing"

	"github.com/cespare/xxhash/v2"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// search finds the first point at or after the key, on rings of any size and of uneven points.
func TestSearch(t *testing.T) {
	draw := rand.New(rand.NewPCG(3, 3))
	for range 300 {
		var r ring
		hash := uint64(0)
		for range draw.IntN(3000) {
			r.points = append(r.points, point{hash: hash})
			if gap := draw.Uint64() >> (8 + draw.IntN(56)); gap <= math.MaxUint64-hash {
				hash += gap
			}
		}
		for range 50 {
			key := kvcache.Hash(draw.Uint64())
			if len(r.points) > 0 && draw.IntN(4) == 0 { // a ring that has the key
				r.points = r.points[:1]
				r.points[0].hash = hashOf(key) + uint64(draw.IntN(3)) - 1
			}
			want := sort.Search(len(r.points), func(i int) bool { return r.points[i].hash >= hashOf(key) })
			r.index()
			if got := r.search(key); got != want {
				t.Fatalf("key %x of %d points: %d, want %d", key, len(r.points), got, want)
			}
		}
	}
}

func hashOf(key kvcache.Hash) uint64 {
	return xxhash.Sum64(binary.LittleEndian.AppendUint64(nil, uint64(key)))
}
