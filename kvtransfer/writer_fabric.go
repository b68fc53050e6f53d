package kvtransfer

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/tandem-serving/tandem/kvtransfer/fabric"
)

// openFabric registers the memory to write from, once for all readers.
func (w *Writer) openFabric() error {
	if w.o.Fabric == nil || w.o.Transport != OverRDMA {
		return nil
	}
	for _, b := range w.mem.mem {
		s, err := w.o.Fabric.Source(fabric.Of(b))
		if err != nil {
			return errors.Join(fmt.Errorf("kvtransfer: registering memory: %w", err), w.closeFabric())
		}
		w.sources = append(w.sources, s)
	}
	return nil
}

func (w *Writer) closeFabric() error {
	var errs []error
	for _, s := range w.sources {
		errs = append(errs, s.Close())
	}
	w.sources = nil
	return errors.Join(errs...)
}

// writerFabric writes to one reader's memory.
type writerFabric struct {
	end     endpoint
	targets []fabric.Target // [region]
	fixed   bool            // their keys are the session's
	wake    chan struct{}   // something is on its way
	events  []fabric.Event  // the sender's
	active  atomic.Bool     // the sender has just taken completions

	mu     sync.Mutex
	room   *sync.Cond
	frames map[uint64]*outgoing // by number
	oldest uint64               // no frame before it is there
	ended  bool
}

// outgoing is a frame whose pages the provider may still read, or that its reader has not acknowledged.
type outgoing struct {
	batch
	left  int  // writes that are not over here
	acked bool // all have landed there
}

func (f *writerFabric) close() error {
	if f == nil {
		return nil
	}
	return f.end.Close()
}

// meet exchanges endpoints with the reader, over a connection that has said hello.
func (s *writerSession) meet(ctx context.Context, conn net.Conn) (_ *writerFabric, err error) {
	unhook := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer unhook()
	d := s.w.o.Fabric
	e, err := d.Endpoint(fabricDepth)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConnection, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.Close())
		}
	}()
	ours := fabricMessage{provider: d.Info().Provider, place: d.Place(), endpoint: string(e.Name())}
	if _, err := conn.Write(ours.encode()); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConnection, err)
	}
	b := make([]byte, fabricSize(s.w.o.Layout.Regions))
	if _, err := io.ReadFull(conn, b); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConnection, err)
	}
	var theirs fabricMessage
	if err := theirs.decode(b, s.w.o.Layout.Regions); err != nil {
		return nil, err
	}
	if theirs.refused {
		return nil, fmt.Errorf("%w: reader %q has provider %q, writer %q, or not on one host", ErrRefused, s.node, theirs.provider, ours.provider)
	}
	if err := e.Peer([]byte(theirs.endpoint)); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConnection, err)
	}
	if !unhook() {
		return nil, fmt.Errorf("%w: meeting %q: %w", ErrTimeout, s.node, ctx.Err())
	}
	f := &writerFabric{end: e, targets: theirs.targets, fixed: theirs.fixed, wake: make(chan struct{}, 1), events: make([]fabric.Event, 64), frames: make(map[uint64]*outgoing)}
	if s.w.wrap != nil {
		f.end = s.w.wrap(e)
	}
	f.room = sync.NewCond(&f.mu)
	return f, nil
}

// permitLocked lets a push's pieces go.
func (s *writerSession) permitLocked(p *Push, key uint64) {
	if p.ended || p.permitted {
		return
	}
	p.permitted, p.target = true, key
	if len(p.queue) > 0 && !p.waiting {
		p.waiting = true
		s.turn = append(s.turn, p)
		s.work.Broadcast()
	}
}

// sendFabric writes batches to the reader's memory until the session ends, with the headers on the data connection. A batch's pages are read
// until the provider has said so of each, and the reader that all have landed.
func (s *writerSession) sendFabric(conn net.Conn) error {
	f := s.rdma
	var loops sync.WaitGroup
	loops.Go(func() {
		s.lost(s.receiveLanded(conn, f))
		f.stop()
	})
	loops.Go(func() {
		if err := s.pollFabric(f); err != nil {
			s.lost(err)
		}
	})
	header, one := make([]byte, sharedSize), make([]batch, 0, 1)
	for number := uint64(0); ; number++ {
		one = s.next(one[:0])
		if len(one) == 0 {
			break
		}
		if !f.add(number, one[0]) {
			s.sent(one[0], net.ErrClosed)
			break
		}
		h := s.frame(one[0])
		h.number = number
		h.encode(header)
		conn.SetWriteDeadline(time.Now().Add(s.w.o.FrameTimeout))
		_, err := conn.Write(header)
		if err == nil {
			err = s.post(f, number, one[0])
		}
		if err != nil {
			s.lost(err)
			break
		}
	}
	loops.Wait() // the session has ended, and its connections are closed
	err := f.close()
	for _, o := range f.frames { // nothing reads their pages any more
		s.sent(o.batch, net.ErrClosed)
	}
	return err
}

// add waits for room; false: the session is over.
func (f *writerFabric) add(number uint64, b batch) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for !f.ended {
		for f.oldest < number && f.frames[f.oldest] == nil {
			f.oldest++
		}
		if number < f.oldest+maxUncopied { // so that the reader knows what can come
			break
		}
		f.room.Wait()
	}
	if f.ended {
		return false
	}
	f.frames[number] = &outgoing{batch: b, left: len(b.pages)}
	signal(f.wake)
	return true
}

// stop wakes whoever waits.
func (f *writerFabric) stop() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ended = true
	f.room.Broadcast()
}

// over notes that a write is over here, or that all of a frame have landed there; the batch comes back when both are so.
func (f *writerFabric) over(number uint64, acked bool) (b batch, done bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	o := f.frames[number]
	if o == nil {
		return b, false
	}
	if acked {
		o.acked = true
	} else {
		o.left--
	}
	if !o.acked || o.left > 0 {
		return b, false
	}
	delete(f.frames, number)
	f.room.Signal()
	return o.batch, true
}

// post starts a batch's writes.
func (s *writerSession) post(f *writerFabric, number uint64, b batch) error {
	var all [maxBatch]fabric.Write
	size, key := s.w.o.Layout.PageBytes, f.targets[b.region].Key
	if !f.fixed {
		key = b.p.target + uint64(b.region)
	}
	for i, page := range b.pages {
		all[i] = fabric.Write{
			From: uintptr(unsafe.Pointer(&s.w.mem.page(b.region, page)[0])), Source: s.w.sources[b.region], Bytes: size,
			To: f.targets[b.region].At + uint64(b.p.grant.pages[b.first+i])*uint64(size), Key: key,
		}
	}
	return s.start(f, number, all[:len(b.pages)])
}

// A writer whose provider takes no more looks so often for completions before it sleeps so long, as while the two connect.
const (
	fullLooks = 200
	fullSleep = 50 * time.Microsecond
)

// senderPolls is how long the poller leaves completions to a sender that takes them by itself.
const senderPolls = 100 * time.Microsecond

// start starts writes, as soon as there is room for them.
func (s *writerSession) start(f *writerFabric, number uint64, rest []fabric.Write) error {
	var deadline time.Time
	for idle := 0; ; {
		n, err := f.end.Write(rest, number, uint32(number))
		if err != nil {
			return err
		}
		took, err := s.poll(f, f.events)
		f.active.Store(true)
		if rest = rest[n:]; err != nil || len(rest) == 0 {
			return err
		}
		if idle++; took > 0 || n > 0 {
			idle = 0
		}
		if idle < fullLooks {
			runtime.Gosched()
			continue
		}
		select {
		case <-s.gone:
			return net.ErrClosed
		case <-time.After(fullSleep):
		}
		if now := time.Now(); deadline.IsZero() {
			deadline = now.Add(s.w.o.FrameTimeout)
		} else if now.After(deadline) {
			return fmt.Errorf("%w: %d writes could not be started", ErrTimeout, len(rest))
		}
	}
}

func (s *writerSession) poll(f *writerFabric, events []fabric.Event) (n int, err error) {
	n, err = f.end.Poll(events)
	for _, e := range events[:n] {
		if e.Kind == fabric.Written {
			if b, done := f.over(e.Token, false); done {
				s.sent(b, nil)
			}
		}
	}
	return n, err
}

// pollFabric takes completions, and sleeps while nothing is on its way.
func (s *writerSession) pollFabric(f *writerFabric) error {
	events := make([]fabric.Event, 64)
	for {
		select {
		case <-s.gone:
			return nil
		default:
		}
		if f.active.Swap(false) { // two that poll only stand in each other's way
			time.Sleep(senderPolls)
			continue
		}
		n, err := s.poll(f, events)
		if err != nil {
			return err
		}
		if n > 0 {
			continue
		}
		f.mu.Lock()
		busy := len(f.frames) > 0
		f.mu.Unlock()
		if busy {
			f.end.Wait(fabricWait, writerLooks)
			continue
		}
		select {
		case <-f.wake:
		case <-s.gone:
		}
	}
}

// receiveLanded takes the reader's word for which frames have landed.
func (s *writerSession) receiveLanded(conn net.Conn, f *writerFabric) error {
	in, b := bufio.NewReaderSize(conn, maxUncopied*copiedSize), make([]byte, copiedSize)
	for {
		if _, err := io.ReadFull(in, b); err != nil {
			return err
		}
		if got := le.Uint32(b); got != magicCopied {
			return fmt.Errorf("%w: an acknowledgement starts with %08x", ErrProtocol, got)
		}
		if done, ok := f.over(le.Uint64(b[4:]), true); ok {
			s.sent(done, nil)
		}
	}
}
