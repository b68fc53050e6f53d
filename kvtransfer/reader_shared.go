package kvtransfer

import (
	"bufio"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/tandem-serving/tandem/kvtransfer/crc32c"
	"github.com/tandem-serving/tandem/kvtransfer/lease"
)

// localListeners accept writers on this host: for sessions, and to receive their memory. Their
// names are random and part of grants, but the kernel lists them to every process on the host.
// samePeer, which checks the user of each connection, keeps others out.
type localListeners struct {
	name             string // of the first; the second has the suffix memorySuffix
	sessions, memory net.Listener
}

const memorySuffix = "-memory"

// listenLocal opens the listeners where the network and the transport allow it.
func (r *Reader) listenLocal() error {
	_, tcp := r.o.Network.(TCP)
	if !tcp || r.o.Transport == OverTCP || r.o.Transport == OverRDMA {
		if r.o.Transport == OverShared {
			return fmt.Errorf("%w: shared memory needs the network TCP, not %T", ErrArguments, r.o.Network)
		}
		return nil
	}
	var b [16]byte
	rand.Read(b[:])
	l := &localListeners{name: "@tandem-kv-" + hex.EncodeToString(b[:])}
	var err error
	if l.memory, err = listenMemory(l.name + memorySuffix); err == nil {
		if l.sessions, err = r.o.Network.Listen(LocalScheme + l.name); err != nil {
			err = errors.Join(err, l.memory.Close())
		}
	}
	if err != nil {
		if r.o.Transport == OverShared {
			return fmt.Errorf("kvtransfer: listening for writers on this host: %w", err)
		}
		return nil // a system without these sockets
	}
	r.local = l
	r.loops.Go(func() { r.acceptLoop(l.sessions, r.serve) })
	r.loops.Go(func() { r.acceptLoop(l.memory, r.serveMemory) })
	return nil
}

func (l *localListeners) close() error {
	if l == nil {
		return nil
	}
	return errors.Join(l.sessions.Close(), l.memory.Close())
}

// addrs returns a grant's addresses. The unix socket is last for writers without shared memory.
func (r *Reader) addrs() []string {
	if r.local == nil {
		return r.o.Advertise
	}
	local := LocalScheme + r.local.name
	if r.o.Transport == OverShared {
		return []string{local}
	}
	return append(r.o.Advertise[:len(r.o.Advertise):len(r.o.Advertise)], local)
}

// serveMemory receives a writer's memory for an existing session.
func (r *Reader) serveMemory(conn net.Conn) {
	defer func() {
		conn.Close()
		r.mu.Lock()
		delete(r.open, conn)
		r.mu.Unlock()
	}()
	conn.SetDeadline(time.Now().Add(r.o.HandshakeTimeout))
	w := welcome{version: Version, status: refusedSession}
	m, err := r.takeMemory(conn)
	r.mu.Lock()
	r.nHello--
	if err == nil {
		w.status = welcomeOK
	} else {
		r.stats.Refused++
	}
	r.mu.Unlock()
	if m != nil || err == nil {
		_, _ = conn.Write(w.encode()) // the writer may have closed the connection
	}
}

// takeMemory maps a writer's memory and adds it to the session. It returns the message if it was
// valid.
func (r *Reader) takeMemory(conn net.Conn) (*memoryMessage, error) {
	if err := samePeer(conn); err != nil {
		return nil, err
	}
	b := make([]byte, memorySize(r.o.Layout.Regions))
	n, files, err := receiveFiles(conn, b)
	if err != nil {
		return nil, err
	}
	m := new(memoryMessage)
	if _, err = io.ReadFull(conn, b[n:]); err == nil {
		err = m.decode(b, r.o.Layout.Regions)
	}
	if err != nil {
		for _, f := range files {
			f.Close()
		}
		return nil, err
	}
	shared, err := mapShared(r.o.Layout, m, files)
	if err != nil {
		return m, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.sessions[m.session]
	if m.epoch != r.epoch || s == nil || s.shared != nil {
		shared.unmap()
		return m, fmt.Errorf("%w: memory for session %016x", ErrRefused, m.session)
	}
	shared.users.Store(1)
	s.shared = shared
	return m, nil
}

// useShared keeps a session's memory mapped until drop; nil: the session has ended.
func (r *Reader) useShared(s *readerSession) *mapping {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s.closed || s.shared == nil {
		return nil
	}
	s.shared.users.Add(1)
	return s.shared
}

func (s *mapping) drop() {
	if s != nil && s.users.Add(-1) == 0 {
		s.unmap()
	}
}

// ackFrames bounds the frames whose acknowledgement waits while more headers are available.
const ackFrames = 8

// sharedReader receives a data connection whose frames name pages of the writer's memory. It copies
// them itself, between the fence's begin and end, so that no copy outlasts its lease by more than
// one window.
type sharedReader struct {
	*dataReader
	m      *mapping
	in     *bufio.Reader
	copied []byte // acknowledgements to send
}

func newSharedReader(d *dataReader, m *mapping) *sharedReader {
	return &sharedReader{dataReader: d, m: m, in: bufio.NewReaderSize(d.conn, 2*ackFrames*sharedSize)}
}

func (d *sharedReader) run() error {
	header := make([]byte, sharedSize)
	for {
		if _, err := io.ReadFull(d.in, header); err != nil {
			return err
		}
		if err := d.header(header); err != nil {
			return err
		}
		if err := d.copyPages(); err != nil {
			return err
		}
		d.copied = le.AppendUint64(le.AppendUint32(d.copied, magicCopied), d.f.number)
		if len(d.copied) < ackFrames*copiedSize && d.in.Buffered() >= sharedSize {
			continue
		}
		d.conn.SetWriteDeadline(time.Now().Add(d.r.o.PeerTimeout))
		if _, err := d.conn.Write(d.copied); err != nil {
			return err
		}
		d.copied = d.copied[:0]
	}
}

// copyPages copies the frame's pages, a window at a time.
func (d *sharedReader) copyPages() error {
	for _, p := range d.f.src[:d.f.count] {
		if int(p) >= d.m.nPages {
			return fmt.Errorf("%w: source page %d of %d", ErrProtocol, p, d.m.nPages)
		}
	}
	for d.page < d.f.count {
		d.aim()
		d.fenced = false
		if !d.begin() {
			d.r.mu.Lock()
			d.drainLocked(d.page)
			d.r.mu.Unlock()
			return nil // nothing waits in the connection
		}
		for _, to := range d.window {
			if d.target[d.page] != lease.NoPage {
				d.whole(crc32c.Copy(0, to, d.m.page(d.r.o.Layout, int(d.f.region), int(d.f.src[d.page]))))
			}
			d.page++
		}
		var err error
		if d.m.revoked() {
			d.landed, d.bad = d.landed[:0], nil
			err = fmt.Errorf("%w: the writer cleared its flag", net.ErrClosed)
		}
		d.end()
		if err != nil {
			return err
		}
	}
	return nil
}
