// Package ranks joins the processes of one machine that compute a model together,
// a part of each matrix each: they share memory through which rank 0 hands out the
// steps, and in which every rank lays down what it brings to a sum. All then read
// the parts of all, from rank 0's on, so that all have the same bits.
//
// A rank says in a word of its own how many times it has brought something. Who
// waits looks at the word for some microseconds and then sleeps on it (a futex). There
// are two places for what a rank brings, which take turns: nobody can come to
// the third meeting before all have read what was there at the first.
//
// Invariant: no wait is longer than Options.Timeout, but that for the next step,
// which ends with the group or with rank 0's process. Once a rank is lost, every
// call of every rank fails.
//
// The package knows neither models nor devices.
package ranks

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

// MaxRanks bounds the ranks of a node.
const MaxRanks = 16

// ErrClosed says that rank 0 has ended the group.
var ErrClosed = errors.New("ranks: the group has ended")

// Sizes of what is in shared memory, in bytes.
const (
	line       = 64                                    // words that different ranks write are not of one line
	headBytes  = 4096                                  // state
	slotBytes  = 256 << 10                             // what a rank brings at once
	slotFloats = slotBytes / 4                         // larger sums take several meetings
	rankLines  = 4 * line                              // where the ranks' own lines begin
	_          = headBytes - rankLines - MaxRanks*line // it fits
)

// spins is how often a word is looked at before sleeping: a few microseconds. A
// sleeper looks up every nap at the latest.
const (
	spins = 4000
	nap   = 250 * time.Millisecond
)

// Group is a rank's view of the shared memory. One goroutine uses it, but for Lose.
type Group struct {
	rank, ranks int
	timeout     time.Duration
	mu          sync.Mutex // of mem, between Lose and Close
	mem         []byte     // nil: closed
	head        *head
	own         []*word // [ranks] how often each has brought something
	mailbox     []int32 // the step
	slots       [2][][]float32

	meetings uint32 // that this rank has come to
	steps    uint32
	reason   atomic.Pointer[string] // why a rank is lost, where this process knows
}

var _ backend.Ranks = (*Group)(nil)

// word is a counter that others may sleep on.
type word struct {
	value    atomic.Uint32
	sleepers atomic.Int32
}

// head is the first bytes of the shared memory.
type head struct {
	lost   atomic.Int32 // rank+1 of one that is lost; 0: none
	_      [line - 4]byte
	closed atomic.Int32
	_      [line - 4]byte
	step   word // number of the last step that was handed out
}

// Mailbox is the memory that a step within limits takes, in bytes, with so many
// groups of KV.
func Mailbox(l backend.Limits, groups int) int {
	words := 3 + 2*l.Tokens + 2*l.Outputs + l.Seqs*(5+groups*(1+l.Blocks))
	return (4*words + headBytes - 1) / headBytes * headBytes
}

// size is the shared memory of a group.
func size(ranks, mailbox int) int { return headBytes + mailbox + 2*ranks*slotBytes }

// NewFile is the shared memory of a group of so many ranks whose steps take mailbox
// bytes.
func NewFile(ranks, mailbox int) (*os.File, error) {
	return newMemory("tandem-ranks", int64(size(ranks, mailbox)))
}

// Open looks at a group's memory as one of its ranks. A wait for another rank ends
// the group after timeout.
func Open(f *os.File, rank, ranks, mailbox int, timeout time.Duration) (*Group, error) {
	if ranks < 1 || ranks > MaxRanks || rank < 0 || rank >= ranks || mailbox < 0 || mailbox%headBytes != 0 || timeout <= 0 {
		return nil, fmt.Errorf("ranks: rank %d of %d, steps of %d bytes, and %v to wait; want at most %d ranks", rank, ranks, mailbox, timeout, MaxRanks)
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
		g.own = append(g.own, (*word)(unsafe.Pointer(&mem[rankLines+r*line])))
		for i := range g.slots {
			slot := (*float32)(unsafe.Pointer(&mem[at+(i*ranks+r)*slotBytes]))
			g.slots[i] = append(g.slots[i], unsafe.Slice(slot, slotFloats))
		}
	}
	return g, nil
}

// End has every rank's next call fail with ErrClosed.
func (g *Group) End() {
	g.head.closed.Store(1)
	g.wakeAll()
}

// Close unmaps the memory. Nothing of this rank's may be in use.
func (g *Group) Close() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	mem := g.mem
	g.mem = nil
	return unmap(mem)
}

// Rank is this process's.
func (g *Group) Rank() int { return g.rank }

// Ranks is how many there are.
func (g *Group) Ranks() int { return g.ranks }

// Lose tells all ranks that one is lost, and why. It may be called at any time.
func (g *Group) Lose(rank int, why string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.mem == nil {
		return // it has been closed
	}
	g.reason.CompareAndSwap(nil, &why)
	g.head.lost.CompareAndSwap(0, int32(rank)+1)
	g.wakeAll()
}

// Err is why the group cannot go on; nil as long as it can. As AllReduce and AllGather, it is for before Close.
func (g *Group) Err() error {
	lost := int(g.head.lost.Load())
	switch {
	case g.head.closed.Load() != 0: // whoever ends then, ends for that
		return ErrClosed
	case lost == 0:
		return nil
	}
	why := "another rank has found it so"
	if r := g.reason.Load(); r != nil {
		why = *r
	}
	return fmt.Errorf("%w: rank %d of %d: %s", backend.ErrLost, lost-1, g.ranks, why)
}

// Waiting is Err, and loses this rank once it has waited for its device, and so for
// another one's, for longer than the bound.
func (g *Group) Waiting(began time.Time) error {
	if g.Err() == nil && time.Since(began) > g.timeout {
		g.Lose(g.rank, fmt.Sprintf("its device did not end a step within %v", g.timeout))
	}
	return g.Err()
}

func (g *Group) wakeAll() {
	wake(&g.head.step.value)
	for _, w := range g.own {
		wake(&w.value)
	}
}

// post raises a word and wakes who sleeps on it.
func (w *word) post(value uint32) {
	w.value.Store(value)
	if w.sleepers.Load() > 0 {
		wake(&w.value)
	}
}

// await waits until the word has reached a value. It is rank's to raise; a rank
// that takes longer than the bound is lost, unless bound is 0.
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
		rest := nap
		if bound > 0 {
			if rest = min(nap, bound-time.Since(began)); rest <= 0 {
				g.Lose(rank, fmt.Sprintf("it did not come within %v", bound))
				continue
			}
		}
		sleep(&w.value, now, rest)
	}
}

// meet lays down what this rank brings and waits for the others. What all
// brought stays readable until this rank's next meeting but one.
func (g *Group) meet(part []float32) ([][]float32, error) {
	if err := g.Err(); err != nil {
		return nil, err
	}
	slots := g.slots[g.meetings%2]
	copy(slots[g.rank], part)
	g.meetings++
	g.own[g.rank].post(g.meetings)
	for r, w := range g.own {
		if err := g.await(w, g.meetings, r, g.timeout); err != nil {
			return nil, err
		}
	}
	return slots, nil
}

// AllReduce makes x the sum of all ranks' x, from rank 0's on. Nothing is a sum,
// too: all have come when it returns.
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

// AllGather makes dst all ranks' src, side by side; see backend.Ranks.
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
			lay(dst, s, at, cols, from, end, rows)
		}
	}
	return nil
}

// lay copies numbers [at, at+len(s)) of a rank's rows, which are columns [from, end)
// of dst's, to where they belong.
func lay(dst, s []float32, at, cols, from, end, rows int) {
	width := end - from
	for i := at; i < min(at+len(s), rows*width); {
		row, col := i/width, i%width
		n := min(width-col, at+len(s)-i)
		copy(dst[row*cols+from+col:][:n], s[i-at:])
		i += n
	}
}
