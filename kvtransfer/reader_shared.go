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

// localListeners are where writers on this host connect: for sessions, and to hand over their memory. The names are random and
// stand in grants, but the kernel lists them to everyone on the host: what keeps others out is samePeer, the user of each connection.
type localListeners struct {
	name             string // of the first; memorySuffix behind it is the other
	sessions, memory net.Listener
}

const memorySuffix = "-memory"

// listenLocal opens them where the network and the transport allow it.
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

// addrs are a grant's. Writers that know no shared memory come to the unix socket last.
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

// serveMemory takes a writer's memory for a session that is there.
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
		_, _ = conn.Write(w.encode()) // a writer that does not read it has gone
	}
}

// takeMemory maps what a writer hands over and gives it to its session. A message comes back if it was one.
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

// useShared keeps a session's memory mapped until drop; nil: the session is over.
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

// ackFrames is how many frames may wait for their acknowledgement while more headers are there.
const ackFrames = 8

// sharedReader receives a data connection whose frames name pages of the writer's memory. What it reads into its own pages it copies itself,
// between the fence's beginning and end, so that no copy outlasts its lease by more than one window.
type sharedReader struct {
	*dataReader
	m      *mapping
	in     *bufio.Reader
	copied []byte // acknowledgements to be written
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
		if d.m.torn() {
			d.landed, d.bad = d.landed[:0], nil
			err = fmt.Errorf("%w: the writer gave up", net.ErrClosed)
		}
		d.end()
		if err != nil {
			return err
		}
	}
	return nil
}
