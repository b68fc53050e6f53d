// Package workers joins the tensor-parallel workers of a model: processes of one
// machine that compute a part of each matrix each. Rank 0 hands out the steps through
// shared memory. For a sum, every worker writes its part to shared memory, and every
// worker adds all parts in order of ranks, so that all get the same bits.
//
// Each worker counts its contributions in a word of shared memory. A worker that
// waits polls that word for some microseconds and then sleeps on it (a futex). Two
// slots for contributions take turns: no worker can write its third contribution
// before all have read the first.
//
// Invariant: no wait is longer than Options.Timeout, except the wait for the next
// step, which ends with the group or with rank 0's process. Once a worker is lost,
// every call of every worker fails.
//
// The package knows neither models nor devices.
package workers

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/tandem-serving/tandem/engine/backend"
)

// MaxWorkers bounds the workers of a node.
const MaxWorkers = 16

// ErrClosed means that rank 0 has ended the group.
var ErrClosed = errors.New("workers: the group has ended")

// Sizes in shared memory, in bytes.
const (
	cacheLine   = 64                                             // a cache line: words of different writers do not share one
	headBytes   = 4096                                           // state
	slotBytes   = 256 << 10                                      // largest contribution
	slotFloats  = slotBytes / 4                                  // larger sums take several meetings
	workerLines = 4 * cacheLine                                  // offset of the workers' own lines
	_           = headBytes - workerLines - MaxWorkers*cacheLine // it fits
)

// spins is how often a word is polled before sleeping, which takes a few microseconds.
// maxSleep bounds one sleep.
const (
	spins    = 4000
	maxSleep = 250 * time.Millisecond
)

// Group is a worker's view of the shared memory. Only MarkLost may be called by another goroutine.
type Group struct {
	rank, ranks int
	timeout     time.Duration
	mu          sync.Mutex // of mem, between MarkLost and Close
	mem         []byte     // nil: closed
	head        *head
	words       []*word // [ranks] number of contributions of each worker
	mailbox     []int32 // the step
	slots       [2][][]float32

	meetings uint32 // meetings that this worker has joined
	steps    uint32
	reason   atomic.Pointer[string] // why a worker is lost, if this process knows
}

var _ backend.WorkerGroup = (*Group)(nil)

// word is a counter that other processes may sleep on.
type word struct {
	value    atomic.Uint32
	sleepers atomic.Int32
}

// head is the start of the shared memory.
type head struct {
	lost   atomic.Int32 // rank+1 of a lost worker; 0: none
	_      [cacheLine - 4]byte
	closed atomic.Int32
	_      [cacheLine - 4]byte
	step   word // number of the last step
}

// Mailbox returns the bytes that a step within limits takes, with so many groups of
// KV.
func Mailbox(l backend.Limits, groups int) int {
	words := 3 + 2*l.Tokens + 2*l.Outputs + l.Seqs*(5+groups*(1+l.Blocks))
	return (4*words + headBytes - 1) / headBytes * headBytes
}

// size returns the bytes of a group's shared memory.
func size(ranks, mailbox int) int { return headBytes + mailbox + 2*ranks*slotBytes }

// NewFile returns the shared memory of a group of so many workers whose steps take
// mailbox bytes.
func NewFile(ranks, mailbox int) (*os.File, error) {
	return newMemory("tandem-ranks", int64(size(ranks, mailbox)))
}

// Open maps a group's memory as one of its workers. A wait for another worker ends
// the group after timeout.
func Open(f *os.File, rank, ranks, mailbox int, timeout time.Duration) (*Group, error) {
	if ranks < 1 || ranks > MaxWorkers || rank < 0 || rank >= ranks || mailbox < 0 || mailbox%headBytes != 0 || timeout <= 0 {
		return nil, fmt.Errorf("workers: rank %d of %d, steps of %d bytes, timeout %v: want at most %d workers", rank, ranks, mailbox, timeout, MaxWorkers)
	}
	mem, err := Map(f, 0, size(ranks, mailbox))
	if err != nil {
		return nil, err
	}
	g := &Group{rank: rank, ranks: ranks, timeout: timeout, mem: mem, head: (*head)(unsafe.Pointer(&mem[0]))}
	at := headBytes
	if mailbox > 0 {
		g.mailbox = unsafe.Slice((*int32)(unsafe.Pointer(&mem[at])), mailbox/4)
	}
	at += mailbox
	for r := range ranks {
		g.words = append(g.words, (*word)(unsafe.Pointer(&mem[workerLines+r*cacheLine])))
		for i := range g.slots {
			slot := (*float32)(unsafe.Pointer(&mem[at+(i*ranks+r)*slotBytes]))
			g.slots[i] = append(g.slots[i], unsafe.Slice(slot, slotFloats))
		}
	}
	return g, nil
}

// End makes the next call of every worker fail with ErrClosed.
func (g *Group) End() {
	g.head.closed.Store(1)
	g.wakeAll()
}

// Close unmaps the memory. No call of this worker may be running.
func (g *Group) Close() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	mem := g.mem
	g.mem = nil
	return unmap(mem)
}

// Rank returns the number of this worker, from 0 on.
func (g *Group) Rank() int { return g.rank }

// Size returns the number of workers.
func (g *Group) Size() int { return g.ranks }

// MarkLost marks a worker as lost, with the reason, for all workers. It may be called at
// any time.
func (g *Group) MarkLost(rank int, why string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.mem == nil {
		return // closed
	}
	g.reason.CompareAndSwap(nil, &why)
	g.head.lost.CompareAndSwap(0, int32(rank)+1)
	g.wakeAll()
}

// Err returns why the group has failed, or nil. It must not be called after Close.
func (g *Group) Err() error {
	lost := int(g.head.lost.Load())
	switch {
	case g.head.closed.Load() != 0: // a worker that ends after End is not lost
		return ErrClosed
	case lost == 0:
		return nil
	}
	why := "reported by another worker"
	if r := g.reason.Load(); r != nil {
		why = *r
	}
	return fmt.Errorf("%w: rank %d of %d: %s", backend.ErrLost, lost-1, g.ranks, why)
}

// Waiting returns Err. It marks this worker as lost if it has waited for its device,
// and so for another worker's device, for longer than the timeout.
func (g *Group) Waiting(began time.Time) error {
	if g.Err() == nil && time.Since(began) > g.timeout {
		g.MarkLost(g.rank, fmt.Sprintf("its device did not end a step within %v", g.timeout))
	}
	return g.Err()
}

func (g *Group) wakeAll() {
	wake(&g.head.step.value)
	for _, w := range g.words {
		wake(&w.value)
	}
}

// post stores a word's value and wakes its sleepers.
func (w *word) post(value uint32) {
	w.value.Store(value)
	if w.sleepers.Load() > 0 {
		wake(&w.value)
	}
}

// await waits until a word that rank writes has reached a value. If that takes longer
// than bound, rank is marked as lost. bound 0 means no bound.
func (g *Group) await(w *word, value uint32, rank int, bound time.Duration) error {
	reached := func() bool { return int32(w.value.Load()-value) >= 0 }
	for range spins {
		if reached() {
			return nil
		}
	}
	w.sleepers.Add(1)
	defer w.sleepers.Add(-1)
	began := time.Now()
	for {
		now := w.value.Load()
		if reached() {
			return nil
		}
		if err := g.Err(); err != nil {
			return err
		}
		rest := maxSleep
		if bound > 0 {
			if rest = min(maxSleep, bound-time.Since(began)); rest <= 0 {
				g.MarkLost(rank, fmt.Sprintf("no response within %v", bound))
				continue
			}
		}
		sleep(&w.value, now, rest)
	}
}

// meet writes this worker's part and waits for the others. The returned parts stay
// readable until this worker's next meeting but one.
func (g *Group) meet(part []float32) ([][]float32, error) {
	if err := g.Err(); err != nil {
		return nil, err
	}
	slots := g.slots[g.meetings%2]
	copy(slots[g.rank], part)
	g.meetings++
	g.words[g.rank].post(g.meetings)
	for r, w := range g.words {
		if err := g.await(w, g.meetings, r, g.timeout); err != nil {
			return nil, err
		}
	}
	return slots, nil
}

// AllReduce sets x to the sum of all workers' x, added in order of ranks. An empty x
// is a barrier.
func (g *Group) AllReduce(x []float32) error {
	for {
		n := min(len(x), slotFloats)
		slots, err := g.meet(x[:n])
		if err != nil {
			return err
		}
		first := slots[0][:n]
		copy(x, first)
		for _, s := range slots[1:] {
			for i, v := range s[:n] {
				x[i] += v
			}
		}
		if x = x[n:]; len(x) == 0 {
			return nil
		}
	}
}

// AllGather sets dst to all workers' src, side by side; see backend.WorkerGroup.
func (g *Group) AllGather(dst, src []float32, rows int) error {
	if rows == 0 {
		return nil
	}
	cols, widest := len(dst)/rows, 0
	for r := range g.ranks {
		from, end := backend.Cut(cols, 1, r, g.ranks)
		widest = max(widest, end-from)
	}
	for at := 0; at < rows*widest; at += slotFloats {
		part := src[min(at, len(src)):min(at+slotFloats, len(src))]
		slots, err := g.meet(part)
		if err != nil {
			return err
		}
		for r, s := range slots {
			from, end := backend.Cut(cols, 1, r, g.ranks)
			scatter(dst, s, at, cols, from, end, rows)
		}
	}
	return nil
}

// scatter copies numbers [at, at+len(s)) of a worker's rows, which are columns [from, end)
// of dst, to their places.
func scatter(dst, s []float32, at, cols, from, end, rows int) {
	width := end - from
	for i := at; i < min(at+len(s), rows*width); {
		row, col := i/width, i%width
		n := min(width-col, at+len(s)-i)
		copy(dst[row*cols+from+col:][:n], s[i-at:])
		i += n
	}
}
