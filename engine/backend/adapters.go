package backend

import "fmt"

// Adapters is a backend that can add low-rank products to some of its matrices:
// y = x·Wᵀ + (x·Aᵀ)·Bᵀ, where A and B belong to the adapter of a row's span. A row's
// result depends on its own adapter alone.
type Adapters interface {
	// AllocAdapters makes room for places adapters, of at most rank rows in each A, on
	// the target matrices. It is called once, before the first Replay.
	AllocAdapters(places, rank int, targets []Weight) error
	// LoadAdapter loads an adapter into a place, from 1 on, and replaces the one there.
	// Matrices without a part are unchanged.
	LoadAdapter(place int, parts []AdapterPart) error
}

// AdapterPart is an adapter's part in one matrix [out, in].
type AdapterPart struct {
	Target Weight
	Rank   int
	A      []float32 // [Rank, in]
	B      []float32 // [out, Rank], the adapter's factor included
}

// Check returns ErrShape if the part does not fit a matrix [out, in] in a place of at
// most the given rank. takes is whether the matrix accepts a part and has none yet.
func (p *AdapterPart) Check(name string, out, in, most int, takes bool) error {
	if takes && p.Rank >= 1 && p.Rank <= most && len(p.A) == p.Rank*in && len(p.B) == out*p.Rank {
		return nil
	}
	return fmt.Errorf("%w: adapter of rank %d, at most %d, of %d and %d numbers for %s [%d, %d]", ErrShape, p.Rank, most, len(p.A), len(p.B), name, out, in)
}

// AdapterBytes returns the memory of one place for a matrix [out, in].
func AdapterBytes(rank, out, in int) int64 {
	tiles := func(n int) int64 { return int64((n + 15) / 16 * 16) }
	return 4 * (tiles(rank)*int64(in) + tiles(out)*int64(rank))
}
