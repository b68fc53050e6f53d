package kvtransfer

import (
	"context"
	"fmt"
	"time"

	"github.com/tandem-serving/tandem/kvtransfer/lease"
)

// PushOptions configure one push.
type PushOptions struct {
	// OnSent, if set, is called for each batch of positions whose source pages are no longer read.
	// They may not have landed yet. It is called from a sending goroutine with no lock held, and
	// never after Wait or Abort has returned.
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
	done     chan struct{} // closed when the push has ended and no source page is read
	over     chan struct{} // closed when the reader has answered, or the session has failed
	renewal  *time.Timer

	// Under s.mu:
	queued    []bool  // [region*nPages+index] given to Send
	queue     []batch // not yet sent; pages may be more than a frame carries
	waiting   bool    // in s.turn
	permitted bool    // pieces may be sent
	target    uint64  // RDMA: key of the reader's region 0
	nSending  int     // batches being written
	nInFlight uint64  // pieces in those
	nSent     uint64  // pieces written
	nGiven    uint64  // pieces given to Send
	progress  uint64  // the owner's, from Renew
	renewed   uint64  // progress of the last renewal
	answered  bool    // over was closed by the reader's answer, not by the session's end
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

// Bytes returns the bytes of pages written to the reader so far.
func (p *Push) Bytes() int64 {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	return int64(p.nSent) * int64(p.s.w.o.Layout.PageBytes)
}

// Pages returns the number of positions of the grant.
func (p *Push) Pages() int { return p.nPages }

// Direct reports whether pages are read from WriterOptions.Device instead of Memory. Then they must
// be there when they are given to Send.
func (p *Push) Direct() bool { return p.s.direct() }

// Runs returns the positions that exist in fewer regions than the layout has; none: all positions
// exist in all regions. The caller must not change it.
func (p *Push) Runs() []Run { return p.grant.runs }

// Send queues source pages of one region for positions firstIndex, firstIndex+1, … of the grant and
// returns at once. The grant bounds the queue, since each (region, position) is sent exactly once.
// Source pages must not change until OnSent, Wait or Abort. The error is ErrArguments for pages
// that do not exist or were sent before, otherwise the error that ended the push.
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

// takeLocked removes one frame's pages from the queue.
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
	p.nInFlight += uint64(len(b.pages))
	return b
}

// checkLocked checks that no piece is lost or sent twice before the push ends.
func (p *Push) checkLocked() error {
	nQueued := uint64(0)
	for _, b := range p.queue {
		nQueued += uint64(len(b.pages))
	}
	if !p.ended && p.nGiven != nQueued+p.nInFlight+p.nSent {
		return fmt.Errorf("kvtransfer: push %v was given %d pieces, but %d are queued, %d in flight and %d sent", p.key, p.nGiven, nQueued, p.nInFlight, p.nSent)
	}
	if p.ended && (nQueued > 0 || p.settled != (p.nSending == 0)) {
		return fmt.Errorf("kvtransfer: push %v ended with %d pieces queued, %d batches in flight, settled %t", p.key, nQueued, p.nSending, p.settled)
	}
	return nil
}

// Renew reports the owner's progress: its place in a queue, steps done, any number that only grows
// while it works. The lease is renewed each third of its duration if that number, or the number of
// pages sent, has grown. An owner that hangs lets the lease expire.
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
	if p.progress+p.nSent > p.renewed {
		p.s.renewLocked(p)
	}
	p.renewal.Reset(p.duration / 3)
}

// Done is closed when the push has ended, with or without an error, and its source pages are no
// longer read.
func (p *Push) Done() <-chan struct{} { return p.done }

// Err returns why the push failed; nil while it is open and after the reader confirmed it.
func (p *Push) Err() error {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	return p.err
}

// Wait returns nil when the reader has confirmed that every piece landed and matched, otherwise the
// push's error. If ctx ends first, Wait aborts the push. After it returns, no source page is read.
func (p *Push) Wait(ctx context.Context) error {
	select {
	case <-p.done:
	case <-ctx.Done():
		_ = p.Abort(context.Cause(ctx)) // Err has the reason; an unacknowledged abort has closed the session
	}
	return p.Err()
}

// Abort ends the push. It returns when no source page is read any more and the reader has confirmed
// that nothing lands any more. Its error means that the reader did not confirm; then the session's
// connections are closed, which ends the lease. Abort of an ended push does nothing.
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
