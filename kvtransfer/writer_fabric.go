package kvtransfer

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/kvtransfer/fabric"
)

// openFabric registers the source memory, once for all readers.
func (w *Writer) openFabric() error {
	if w.o.Fabric == nil || w.o.Transport != OverRDMA {
		return nil
	}
	w.from = w.mem.fabricMemory(w.o.Device)
	for _, m := range w.from {
		s, err := w.o.Fabric.Source(m)
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
	fixed   bool            // the targets' keys are the session's
	wake    chan struct{}   // the sender has work
	events  []fabric.Event  // buffer of the sender

	mu     sync.Mutex
	frames map[uint64]*outgoing // by number
	writes int                  // writes of frames that have not completed locally
	oldest uint64               // no frame before it is in frames
}

// outgoing is a frame whose pages the provider may still read, or that the reader has not
// acknowledged.
type outgoing struct {
	batch
	left  int  // writes that have not completed locally
	acked bool // all have landed at the reader
}

func (f *writerFabric) close() error {
	if f == nil {
		return nil
	}
	return f.end.Close()
}

// meet exchanges endpoints with the reader, on a connection after its hello.
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
	return f, nil
}

// permitLocked starts sending a push's pieces.
func (s *writerSession) permitLocked(p *Push, key uint64) {
	if p.ended || p.permitted {
		return
	}
	p.permitted, p.target = true, key
	if len(p.queue) > 0 && !p.waiting {
		p.waiting = true
		s.turn = append(s.turn, p)
		s.rdma.rouse()
	}
}

// headersAtOnce bounds the frames whose headers one write sends, if that many batches wait.
const headersAtOnce = 4

// sendFabric writes batches to the reader's memory until the session ends, and their headers to the
// data connection. A batch's pages are read until the provider has completed each write and the
// reader has acknowledged all.
func (s *writerSession) sendFabric(conn net.Conn) error {
	f := s.rdma
	var acks sync.WaitGroup
	acks.Go(func() { s.lost(s.receiveLanded(conn, f)) })
	if err := s.writeFabric(conn, f); err != nil {
		s.lost(err)
	}
	acks.Wait() // the session has ended, and its connections are closed
	err := f.close()
	for _, o := range f.frames { // their pages are no longer read
		s.sent(o.batch, net.ErrClosed)
	}
	return err
}

// writeFabric starts writes and handles their completions in one goroutine, because passing a write
// to another goroutine costs more than the write. It sleeps while nothing is in flight, and backs
// off while frames in flight need no progress from it.
func (s *writerSession) writeFabric(conn net.Conn, f *writerFabric) error {
	headers, most := make([]byte, headersAtOnce*sharedSize), make([]batch, headersAtOnce)
	wait := newBackoff()
	for number := uint64(0); ; {
		room := min(headersAtOnce, f.room(number))
		s.mu.Lock()
		dead := s.err != nil
		batches := s.takeLocked(most[:0:room], headersAtOnce*maxBatch)
		s.mu.Unlock()
		if dead {
			return nil
		}
		if len(batches) > 0 {
			if err := s.startFrames(conn, f, number, batches, headers); err != nil {
				return err
			}
			number += uint64(len(batches))
			wait.reset()
			if _, err := s.poll(f, 1); err != nil {
				return err
			}
			continue
		}
		inFlight, writes := f.inFlight()
		spins := 1
		if writes {
			spins = wait.spins()
		}
		if n, err := s.poll(f, spins); err != nil {
			return err
		} else if n > 0 {
			wait.reset()
		} else if inFlight {
			wait.sleep(f.wake, s.gone)
		} else {
			wait.wait(f.wake, s.gone)
		}
	}
}

// startFrames sends the batches' headers and starts their writes.
func (s *writerSession) startFrames(conn net.Conn, f *writerFabric, number uint64, batches []batch, headers []byte) error {
	f.add(number, batches)
	for i, b := range batches {
		h := s.frame(b)
		h.number = number + uint64(i)
		h.encode(headers[i*sharedSize:][:sharedSize])
	}
	conn.SetWriteDeadline(time.Now().Add(s.w.o.FrameTimeout))
	if _, err := conn.Write(headers[:len(batches)*sharedSize]); err != nil {
		return err
	}
	for i, b := range batches {
		if err := s.post(f, number+uint64(i), b); err != nil {
			return err
		}
	}
	return nil
}

// rouse wakes the sender: it has work, or there is room for more.
func (f *writerFabric) rouse() {
	if f != nil {
		signal(f.wake)
	}
}

// room returns how many frames may be started from number on without exceeding the reader's window.
func (f *writerFabric) room(number uint64) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	for f.oldest < number && f.frames[f.oldest] == nil {
		f.oldest++
	}
	return int(f.oldest + maxUncopied - number)
}

// add records frames that are about to be started.
func (f *writerFabric) add(number uint64, batches []batch) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, b := range batches {
		f.frames[number+uint64(i)] = &outgoing{batch: b, left: len(b.pages)}
		f.writes += len(b.pages)
	}
}

// inFlight reports whether frames are unacknowledged, and whether some of their writes have not
// completed locally.
func (f *writerFabric) inFlight() (frames, writes bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.frames) > 0, f.writes > 0
}

// over records that a write has completed locally or, with acked, that all of a frame have landed.
// It returns the batch when both are true.
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
		f.writes--
	}
	if !o.acked || o.left > 0 {
		return b, false
	}
	delete(f.frames, number)
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
			From: s.w.from[b.region].At + uintptr(page)*uintptr(size), Source: s.w.sources[b.region], Bytes: size,
			To: f.targets[b.region].At + uint64(b.p.grant.pages[b.first+i])*uint64(size), Key: key,
		}
	}
	return s.start(f, number, all[:len(b.pages)])
}

// start starts writes as soon as there is room for them.
func (s *writerSession) start(f *writerFabric, number uint64, rest []fabric.Write) error {
	wait := newBackoff()
	for began := time.Now(); ; {
		n, err := f.end.Write(rest, number, uint32(number))
		if err != nil {
			return err
		}
		if rest = rest[n:]; len(rest) == 0 {
			return nil
		}
		took, err := s.poll(f, wait.spins())
		if err != nil {
			return err
		}
		if took > 0 || n > 0 {
			wait.reset()
			continue
		}
		select {
		case <-s.gone:
			return net.ErrClosed
		default:
		}
		if wait.sleep(nil, s.gone); time.Since(began) > s.w.o.FrameTimeout {
			return fmt.Errorf("%w: %d writes could not be started", ErrTimeout, len(rest))
		}
	}
}

// poll handles completions, and polls at most spins times without one.
func (s *writerSession) poll(f *writerFabric, spins int) (n int, err error) {
	n, err = f.end.Poll(f.events, spins)
	for _, e := range f.events[:n] {
		if e.Kind == fabric.Written {
			if b, done := f.over(e.Token, false); done {
				s.sent(b, nil)
			}
		}
	}
	return n, err
}

// receiveLanded reads the reader's acknowledgements of landed frames.
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
		if in.Buffered() < copiedSize {
			f.rouse() // there is room
		}
	}
}
