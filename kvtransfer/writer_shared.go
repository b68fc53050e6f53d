package kvtransfer

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/kvtransfer/crc32c"
)

// maxUncopied bounds the frames of a connection that wait for the reader's copies: 16 MiB of pages
// of 32 KiB.
const maxUncopied = 32

// routes returns the grant's addresses in the order in which a session tries them.
func (s *writerSession) routes(addrs []string) (all []route) {
	mode := s.w.o.Transport
	if s.w.sources != nil && s.fabric {
		for _, a := range addrs {
			if !strings.HasPrefix(a, LocalScheme) {
				all = append(all, route{a, fabricConn})
			}
		}
	}
	if s.w.o.Shared != nil && (mode == Auto || mode == OverShared) {
		for _, a := range addrs {
			if strings.HasPrefix(a, LocalScheme) {
				all = append(all, route{a, sharedConn})
			}
		}
	}
	if mode != OverShared {
		for _, a := range addrs {
			if !strings.HasPrefix(a, LocalScheme) {
				all = append(all, route{a, dataConn})
			}
		}
	}
	return all
}

// route is an address of a reader and the transport to use there.
type route struct {
	addr string
	kind connKind // of the data connections
}

// handOver sends the writer's memory to the session's reader.
func (s *writerSession) handOver(ctx context.Context, addr string) (*flag, error) {
	shared := s.w.o.Shared
	m := memoryMessage{session: s.id, epoch: s.epoch, nPages: s.w.mem.nPages}
	for i := range s.w.o.Layout.Regions {
		at, _ := shared.Place(s.w.mem.mem[i]) // NewWriter has checked that it is there
		m.offsets = append(m.offsets, uint64(at))
	}
	f, err := newFlag()
	if err != nil {
		return nil, err
	}
	if err := s.handOverFiles(ctx, addr, m.encode(), f); err != nil {
		f.Close()
		return nil, fmt.Errorf("%w: handing memory to %q: %w", ErrConnection, addr, err)
	}
	return f, nil
}

func (s *writerSession) handOverFiles(ctx context.Context, addr string, message []byte, f *flag) error {
	conn, err := TCP{}.Dial(ctx, addr+memorySuffix)
	if err != nil {
		return err
	}
	defer conn.Close()
	// All processes of this host can see the names of sockets, which are free once their reader exits.
	if err := samePeer(conn); err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })()
	var files []*os.File
	for _, of := range []*Shared{s.w.o.Shared, f.Shared} {
		file, err := of.readOnly()
		if err != nil {
			return err
		}
		defer file.Close()
		files = append(files, file)
	}
	if err := sendFiles(conn, message, files...); err != nil {
		return err
	}
	return welcomed(conn)
}

// welcomed reads a reader's answer to a memory message.
func welcomed(conn net.Conn) error {
	b := make([]byte, welcomeSize)
	if _, err := io.ReadFull(conn, b); err != nil {
		return err
	}
	var w welcome
	if err := w.decode(b); err != nil {
		return err
	}
	if w.status != welcomeOK {
		return fmt.Errorf("%w: %v", ErrRefused, w.status)
	}
	return nil
}

// uncopied holds the batches of one connection that its reader has not copied yet.
type uncopied struct {
	mu      sync.Mutex
	room    *sync.Cond
	batches map[uint64]batch // by the frame's number
	ended   bool
}

// add waits for room; false: nothing is copied any more.
func (y *uncopied) add(number uint64, b batch) bool {
	y.mu.Lock()
	defer y.mu.Unlock()
	for len(y.batches) == maxUncopied && !y.ended {
		y.room.Wait()
	}
	if !y.ended {
		y.batches[number] = b
	}
	return !y.ended
}

// take removes a batch. A repeated frame is acknowledged twice.
func (y *uncopied) take(number uint64) (batch, bool) {
	y.mu.Lock()
	defer y.mu.Unlock()
	b, ok := y.batches[number]
	delete(y.batches, number)
	y.room.Signal()
	return b, ok
}

// end returns the remaining batches.
func (y *uncopied) end() (left []batch) {
	y.mu.Lock()
	defer y.mu.Unlock()
	for _, b := range y.batches {
		left = append(left, b)
	}
	y.batches, y.ended = nil, true
	y.room.Broadcast()
	return left
}

// sendShared sends frames on one data connection until the session ends. A batch's pages are read
// until the reader has copied them, or the flag is clear.
func (s *writerSession) sendShared(conn net.Conn) error {
	y := &uncopied{batches: make(map[uint64]batch)}
	y.room = sync.NewCond(&y.mu)
	acks := make(chan struct{})
	go func() {
		defer close(acks)
		err := s.receiveCopied(conn, y)
		s.lost(err) // clears the flag
		for _, b := range y.end() {
			s.sent(b, err)
		}
	}()
	header, one := make([]byte, sharedSize), make([]batch, 0, 1)
	for number := random64(); ; number++ {
		one = s.next(one[:0])
		if len(one) == 0 {
			break
		}
		b := one[0]
		f := s.frame(b)
		for i, page := range b.pages {
			f.src[i] = uint32(page)
		}
		f.number = number
		f.encode(header)
		if !y.add(number, b) {
			s.sent(b, net.ErrClosed)
			break
		}
		conn.SetWriteDeadline(time.Now().Add(s.w.o.FrameTimeout))
		if _, err := conn.Write(header); err != nil {
			s.lost(err)
			break
		}
	}
	<-acks // the session has ended, and its connections are closed
	return nil
}

// receiveCopied reads the reader's acknowledgements of copied frames.
func (s *writerSession) receiveCopied(conn net.Conn, y *uncopied) error {
	in, b := bufio.NewReaderSize(conn, maxUncopied*copiedSize), make([]byte, copiedSize)
	for {
		if _, err := io.ReadFull(in, b); err != nil {
			return err
		}
		if got := le.Uint32(b); got != magicCopied {
			return fmt.Errorf("%w: an acknowledgement starts with %08x", ErrProtocol, got)
		}
		if done, ok := y.take(le.Uint64(b[4:])); ok {
			s.sent(done, nil)
		}
	}
}

// frame returns a batch's header.
func (s *writerSession) frame(b batch) *frame {
	f := &frame{key: b.p.key, region: uint32(b.region), count: len(b.pages), loose: s.w.o.Unchecked && b.p.grant.loose}
	for i, page := range b.pages {
		f.index[i] = uint32(b.first + i)
		switch {
		case f.loose:
		case s.direct():
			f.crc[i] = s.w.o.Device.KVDigest(b.region, page)
		default:
			f.crc[i] = crc32c.Update(0, s.w.mem.page(b.region, page))
		}
	}
	return f
}
