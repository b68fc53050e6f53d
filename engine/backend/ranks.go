package backend

import (
	"errors"
	"time"
)

// ErrLost says that a rank of a model that several processes compute has ended,
// hangs, or has failed. None of the others can go on.
var ErrLost = errors.New("backend: a rank is lost")

// Ranks joins the processes that compute one model together, a part of each matrix
// each. Rank 0 is told of steps and gives every one to the others; all of them run
// the same operations over their parts.
//
// Invariant: what AllReduce and AllGather give depends on what the ranks brought
// alone, not on when they came: sums are taken from rank 0 on, and all ranks get
// the same bits. A rank that does not come within the implementation's bound makes
// every rank's call end with ErrLost.
type Ranks interface {
	Rank() int // of this process, from 0 on
	Ranks() int

	// Begin gives a step that is about to run to the other ranks; of rank 0 alone.
	Begin(step *Step) error
	// Err is why no rank can go on; nil as long as they can.
	Err() error
	// Waiting is why a wait for the others that began then is in vain, for devices
	// that meet by themselves; nil as long as it is not.
	Waiting(began time.Time) error
	// AllReduce makes x the sum of all ranks' x.
	AllReduce(x []float32) error
	// AllGather makes dst, of so many rows, all ranks' rows side by side: a rank
	// brings the columns that Cut gives it.
	AllGather(dst, src []float32, rows int) error
}

// Cut is a rank's part of so many, [from, end), if they are dealt out in pieces of
// unit as evenly as can be.
func Cut(of, unit, rank, ranks int) (from, end int) {
	pieces := of / unit
	from, end = rank*pieces/ranks*unit, (rank+1)*pieces/ranks*unit
	if rank == ranks-1 {
		end = of
	}
	return from, end
}
