package backend

import (
	"errors"
	"time"
)

// ErrLost means that a tensor-parallel worker has ended, hangs, or has failed. The
// other workers cannot continue.
var ErrLost = errors.New("backend: a tensor-parallel worker is lost")

// WorkerGroup joins the tensor-parallel workers of a model: processes that compute a part of
// each matrix each. Rank 0 receives the steps and forwards each one to the others. All
// of them run the same operations over their parts.
//
// Invariant: the results of AllReduce and AllGather depend only on the contributions,
// not on when they came. Sums are added in order of ranks, and all workers get the
// same bits. If a worker does not contribute within the implementation's timeout, the
// calls of all workers return ErrLost.
type WorkerGroup interface {
	Rank() int // of this process, from 0 on
	Size() int // number of workers

	// Begin forwards a step that is about to run to the other workers. Only rank 0
	// calls it.
	Begin(step *Step) error
	// Err returns why no worker can continue, or nil.
	Err() error
	// Waiting returns why a wait for the others that began at began must end, or nil.
	// It is for devices that communicate by themselves.
	Waiting(began time.Time) error
	// AllReduce sets x to the sum of all workers' x.
	AllReduce(x []float32) error
	// AllGather sets the rows of dst to all workers' rows side by side. A worker
	// contributes the columns that Cut returns for it.
	AllGather(dst, src []float32, rows int) error
}

// Cut returns a rank's part [from, end) of a length that is divided into pieces of unit
// as evenly as possible.
func Cut(of, unit, rank, ranks int) (from, end int) {
	pieces := of / unit
	from, end = rank*pieces/ranks*unit, (rank+1)*pieces/ranks*unit
	if rank == ranks-1 {
		end = of
	}
	return from, end
}
