package kvtransfer

import (
	"context"
	"fmt"
	"time"

	"github.com/tandem-serving/tandem/kvtransfer/lease"
)

// PushOptions configure one push.
type PushOptions struct {
	// OnSent, if set, hears that the source pages of these positions are read for the last time, batch by batch; not that they
	// landed. It is called from a sending goroutine with no lock held, never after Wait or Abort has returned.
	OnSent func(region, firstIndex, nPages int)
}

// Push sends pages under one grant. Its methods may be called from any goroutine.
type Push struct {
	s        *writerSession
	key      lease.Key
	nPages   int // positions of all regions
	grant    *grant
	duration time.Duration // of the lease
	onSent   func(region, firstIndex, nPages int)
	done     chan struct{} // closed when it has ended and no source page is read
	over     chan struct{} // closed when the reader has answered, or the session is dead
	renewal  *time.Timer

	// Under s.mu:
	queued    []bool  // [region*nPages+index] given to Send
	queue     []batch // not yet sent; pages may be more than a frame carries
	waiting   bool    // in s.turn
	permitted bool    // pieces may be sent
	target    uint64  // by RDMA: key of the reader's region 0
	nSending  int     // batches being written
	nFlying   uint64  // pieces in those
	nSent     uint64  // pieces written
	nGiven    uint64  // pieces given to Send
	progress  uint64  // the owner's
	told      uint64  // progress of the last renewal
	answered  bool    // the reader, not the session's end, closed over
	ended     bool
	settled   bool
	err       error
}

func newPush(s *writerSession, g *grant, o PushOptions) *Push {
	return &Push{
		s: s, key: g.key, nPages: len(g.pages), grant: g, duration: g.duration, onSent: o.OnSent,
		permitted: s.kind != fabricConn,
		done:      make(chan struct{}), over: make(chan struct{}), queued: make([]bool, len(g.pages)*g.layout.Regions),
	}
}

// Bytes returns how many bytes of pages have been written to the reader.
func (p *Push) Bytes() int64 {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	return int64(p.nSent) * int64(p.s.w.o.Layout.PageBytes)
}

// Pages returns how many positions the grant has.
func (p *Push) Pages() int { return p.nPages }

// Direct says that pages are read in WriterOptions.Device rather than Memory: that is where they have to be when they are given to Send.
func (p *Push) Direct() bool { return p.s.direct() }

// Runs returns which positions exist in fewer regions than the layout has; none: all are in all. Not to be changed.
func (p *Push) Runs() []Run { return p.grant.runs }

// Send queues source pages of one region for positions firstIndex, firstIndex+1, … of the grant and returns at once. The queue is
// bounded by the grant, since each (region, position) is sent exactly once. Source pages must not change until OnSent, Wait or
// Abort says so. The error is ErrArguments for pages that do not exist or were sent before, else why the push has ended.
func (p *Push) Send(region int, srcPages []int32, firstIndex int) error {
	s := p.s
	mem := s.w.mem
	if region < 0 || region >= mem.layout.Regions || firstIndex < 0 || firstIndex > p.nPages || len(srcPages) > p.nPages-firstIndex {
		return fmt.Errorf("%w: sending %d pages to region %d from position %d: the grant has %d positions in %d regions",
			ErrArguments, len(srcPages), region, firstIndex, p.nPages, mem.layout.Regions)
	}
	if most := p.grant.regions(firstIndex, len(srcPages)); region >= most {
		return fmt.Errorf("%w: sending positions %d to %d to region %d, they have %d", ErrArguments, firstIndex, firstIndex+len(srcPages)-1, region, most)
	}
	for _, page := range srcPages {
		if page < 0 || int(page) >= mem.nPages {
			return fmt.Errorf("%w: source page %d of %d", ErrArguments, page, mem.nPages)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.ended {
		if p.err == nil {
			return fmt.Errorf("%w: the push is complete", ErrArguments)
		}
		return p.err
	}
	queued := p.queued[region*p.nPages+firstIndex:][:len(srcPages)]
	for i, q := range queued {
		if q {
			return fmt.Errorf("%w: region %d, position %d is sent twice", ErrArguments, region, firstIndex+i)
		}
	}
	if len(srcPages) == 0 {
		return nil
	}
	for i := range queued {
		queued[i] = true
	}
	p.nGiven += uint64(len(srcPages))
	p.queue = append(p.queue, batch{p: p, region: region, first: firstIndex, pages: append([]int32(nil), srcPages...)})
	if !p.waiting && p.permitted {
		p.waiting = true
		s.turn = append(s.turn, p)
	}
	if s.rdma.rouse(); len(srcPages) > maxBatch {
		s.work.Broadcast()
	} else {
		s.work.Signal()
	}
	return nil
}

// takeLocked takes one frame's worth from the queue.
func (p *Push) takeLocked() batch {
	q := &p.queue[0]
	b := *q
	if len(b.pages) > maxBatch {
		b.pages = b.pages[:maxBatch]
		q.first += maxBatch
		q.pages = q.pages[maxBatch:]
	} else {
		p.queue = p.queue[1:]
	}
	p.nSending++
	p.nFlying += uint64(len(b.pages))
	return b
}

// checkLocked verifies that no piece is lost or sent twice before the push ends.
func (p *Push) checkLocked() error {
	nQueued := uint64(0)
	for _, b := range p.queue {
		nQueued += uint64(len(b.pages))
	}
	if !p.ended && p.nGiven != nQueued+p.nFlying+p.nSent {
		return fmt.Errorf("kvtransfer: push %v was given %d pieces, but %d are queued, %d in flight and %d sent", p.key, p.nGiven, nQueued, p.nFlying, p.nSent)
	}
	if p.ended && (nQueued > 0 || p.settled != (p.nSending == 0)) {
		return fmt.Errorf("kvtransfer: push %v ended with %d pieces queued, %d batches in flight, settled %t", p.key, nQueued, p.nSending, p.settled)
	}
	return nil
}

// Renew tells how far the owner is: its place in a queue, steps done, anything that only grows while it works. The lease is renewed
// each third of its duration if that number, or that of pages sent, has grown since; an owner that hangs lets it expire.
func (p *Push) Renew(progress uint64) {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	p.progress = max(p.progress, progress)
}

func (p *Push) autoRenew() {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	if p.ended {
		return
	}
	if p.progress+p.nSent > p.told {
		p.s.renewLocked(p)
	}
	p.renewal.Reset(p.duration / 3)
}

// Done is closed when the push has ended, for better or worse, and none of its source pages is read any more.
func (p *Push) Done() <-chan struct{} { return p.done }

// Err returns why the push failed; nil while it is open and after the reader confirmed it.
func (p *Push) Err() error {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	return p.err
}

// Wait returns nil when the reader has confirmed that every piece landed and matched, else why not. If ctx ends first the push is
// aborted. When it returns, no source page is read any more.
func (p *Push) Wait(ctx context.Context) error {
	select {
	case <-p.done:
	case <-ctx.Done():
		_ = p.Abort(context.Cause(ctx)) // Err says what ended it; an abort that was not acknowledged has closed the session
	}
	return p.Err()
}

// Abort ends the push and returns when no source page is read any more and the reader has confirmed that nothing lands any more. The
// error says that it did not confirm; then its connections are closed, and the lease ends with them. Aborting a push that has ended does nothing.
func (p *Push) Abort(why error) error {
	s := p.s
	s.mu.Lock()
	if p.ended {
		s.mu.Unlock()
		<-p.done
		return nil
	}
	text := "no reason given"
	if why != nil {
		text = why.Error()
	}
	s.endLocked(p, abortError(why))
	posted := s.postLocked(control{kind: msgAbort, key: p.key, text: text})
	s.mu.Unlock()
	if !posted {
		s.fail(fmt.Errorf("%w: reader %q does not read its control connection", ErrTimeout, s.node))
	}
	timer := time.NewTimer(s.w.o.AckTimeout)
	defer timer.Stop()
	select {
	case <-p.over:
	case <-timer.C:
		s.w.count(func(c *WriterStats) { c.AbortsUnacked++ })
		s.fail(fmt.Errorf("%w: reader %q did not acknowledge an abort", ErrTimeout, s.node))
	}
	<-p.done
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.answered {
		return nil
	}
	return s.err
}

func abortError(why error) error {
	if why == nil {
		return ErrAborted
	}
	return fmt.Errorf("%w: %w", ErrAborted, why)
}
