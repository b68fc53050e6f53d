package kvtransfer

import (
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/tandem-serving/tandem/kvtransfer/crc32c"
	"github.com/tandem-serving/tandem/kvtransfer/lease"
)

// windowBytes bounds one read. The bytes are checksummed right after it, while they are in L2.
const windowBytes = 256 << 10

// windowPages bounds the pages that one read scatters to.
const windowPages = 8

// pageReader reads once into d.window, between d.begin and d.end. If d.begin refuses, it sets
// d.fenced and reads nothing.
type pageReader interface {
	read(d *dataReader) error
}

// dataReader receives one data connection's frames. It belongs to that connection's goroutine.
type dataReader struct {
	r    *Reader
	s    *readerSession
	conn net.Conn
	in   pageReader

	f       frame
	target  [maxBatch]int32 // page of each piece; lease.NoPage: scratch
	page    int             // of the frame, being read
	off     int             // bytes of that page read so far
	crc     uint32          // of those
	window  [][]byte        // destination of the next bytes
	claimed bool            // the window has a page of the lease, so that begin and end must ask the table
	landed  []uint32        // indexes completed by this read, and matched
	digests []Digest        // of these, where they landed in the device
	bad     error           // a piece that did not match
	fenced  bool            // the lease ended before the read
	refused lease.Key       // the last ended lease that this connection reported, so that it is reported once
	scratch []byte          // one page, for bytes that must not land
	ahead   bool            // a read of a frame's last pages also reads available bytes of the next header
	next    []byte          // that header; nNext bytes of it have come
	nNext   int
}

// receive reads a data connection until it ends.
func (r *Reader) receive(s *readerSession, conn net.Conn, kind connKind) error {
	if kind == sharedConn {
		m := r.useShared(s)
		if m == nil {
			return net.ErrClosed
		}
		defer m.drop()
		return newSharedReader(newDataReader(r, s, conn), m).run()
	}
	if kind == fabricConn {
		return newDataReader(r, s, conn).runFabric()
	}
	d := newDataReader(r, s, conn)
	d.in = newPageReader(conn)
	_, waits := d.in.(streamReader)
	d.ahead = !waits
	return d.run()
}

func newDataReader(r *Reader, s *readerSession, conn net.Conn) *dataReader {
	return &dataReader{
		r: r, s: s, conn: conn,
		window: make([][]byte, 0, windowPages+1), landed: make([]uint32, 0, windowPages),
		scratch: make([]byte, r.o.Layout.PageBytes),
	}
}

// run reads frames until the connection ends.
func (d *dataReader) run() error {
	d.next = make([]byte, frameSize)
	for {
		// A quiet data connection is fine: the control connection detects a dead writer.
		d.conn.SetReadDeadline(time.Time{})
		if _, err := io.ReadFull(d.conn, d.next[d.nNext:]); err != nil {
			return err
		}
		if err := d.header(d.next); err != nil {
			return err
		}
		d.nNext = 0
		d.conn.SetReadDeadline(time.Now().Add(d.r.o.FrameTimeout))
		if err := d.pages(); err != nil {
			return err
		}
	}
}

// header reads a frame's header and admits its pieces.
func (d *dataReader) header(b []byte) error {
	if err := d.f.decode(b); err != nil {
		return err
	}
	if d.f.loose && !d.r.o.Unchecked {
		return fmt.Errorf("%w: frame of lease %v without checksums", ErrProtocol, d.f.key)
	}
	d.page, d.off, d.crc = 0, 0, 0
	return d.admit()
}

// admit asks the table which of the frame's pieces may land, and in which pages.
func (d *dataReader) admit() error {
	r := d.r
	r.mu.Lock()
	defer r.mu.Unlock()
	if d.s.closed { // nothing would fail a lease that is bound to it now
		return net.ErrClosed
	}
	switch r.table.Admit(d.f.key, d.s.id, d.f.region, d.f.index[:d.f.count], d.target[:d.f.count]) {
	case lease.Invalid:
		return fmt.Errorf("%w: frame for region %d, pieces %v of lease %v", ErrProtocol, d.f.region, d.f.index[:d.f.count], d.f.key)
	case lease.Stale:
		d.drainLocked(0)
	case lease.Admitted:
		l := r.leases[d.f.key]
		if l.session = d.s; l.first == 0 {
			l.first = r.now()
		}
	}
	return nil
}

// drainLocked directs the rest of the frame to scratch, and notifies the writer that its lease is
// over.
func (d *dataReader) drainLocked(from int) {
	for i := from; i < d.f.count; i++ {
		d.target[i] = lease.NoPage
	}
	if d.refused != d.f.key {
		d.refused = d.f.key
		d.r.postLocked(d.s, control{kind: msgGone, code: goneUnknown, key: d.f.key})
	}
}

// pages reads the pages that follow the header.
func (d *dataReader) pages() error {
	for d.page < d.f.count {
		d.aim()
		d.fenced = false
		if err := d.in.read(d); err != nil {
			return err
		}
		if d.fenced {
			d.r.mu.Lock()
			d.drainLocked(d.page)
			d.r.mu.Unlock()
		}
	}
	return nil
}

// aim sets the window to the destination of the next bytes.
func (d *dataReader) aim() {
	d.window, d.claimed = d.window[:0], false
	off, size := d.off, d.r.o.Layout.PageBytes
	for i := d.page; i < d.f.count && len(d.window) < windowPages && (i == d.page || (i-d.page+1)*size <= windowBytes); i++ {
		to := d.scratch
		if d.target[i] != lease.NoPage {
			to = d.r.mem.page(int(d.f.region), d.target[i])
			d.claimed = true
		}
		d.window = append(d.window, to[off:])
		off = 0
	}
	if d.ahead && d.page+len(d.window) == d.f.count {
		d.window = append(d.window, d.next)
	}
}

// begin reports whether the window's pages may still be written.
func (d *dataReader) begin() bool {
	if !d.claimed {
		return true
	}
	d.r.mu.Lock()
	defer d.r.mu.Unlock()
	d.fenced = !d.r.table.BeginRead(d.f.key, d.f.count-d.page)
	return !d.fenced
}

// took accounts for n bytes read into the window. It runs before end, while the pages are fenced.
func (d *dataReader) took(n int) {
	for _, w := range d.window {
		if n == 0 {
			return
		}
		w = w[:min(n, len(w))]
		n -= len(w)
		if d.page == d.f.count {
			d.nNext = len(w)
			return
		}
		d.off += len(w)
		lands := d.target[d.page] != lease.NoPage
		if lands && !d.f.loose {
			d.crc = crc32c.Update(d.crc, w)
		}
		if d.off < d.r.o.Layout.PageBytes {
			return
		}
		if lands {
			d.whole(d.crc)
		}
		d.page, d.off, d.crc = d.page+1, 0, 0
	}
}

// whole checks a page of which all bytes have been read.
func (d *dataReader) whole(crc uint32) {
	if d.f.loose || crc == d.f.crc[d.page] {
		d.landed = append(d.landed, d.f.index[d.page])
	} else {
		d.bad = fmt.Errorf("%w: piece %d of region %d has %08x, its header has %08x",
			ErrChecksum, d.f.index[d.page], d.f.region, crc, d.f.crc[d.page])
	}
}

// end reports the landed pieces to the table.
func (d *dataReader) end() {
	if !d.claimed {
		return
	}
	r, k := d.r, d.f.key
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stats.Pieces += uint64(len(d.landed))
	n := uint64(len(d.landed)) * uint64(r.o.Layout.PageBytes)
	r.stats.PayloadBytes += n
	if d.s.shared != nil {
		r.stats.SharedBytes += n
	}
	if d.s.rdma {
		r.stats.FabricBytes += n
	}
	if l := r.leases[k]; l != nil {
		l.digests = append(l.digests, d.digests...)
	}
	st := r.table.EndRead(r.now(), k, d.f.region, d.landed)
	d.landed, d.digests = d.landed[:0], d.digests[:0]
	switch st {
	case lease.Complete:
		r.arrivedLocked(d.s, k)
	case lease.Released:
		r.releasedLocked(k)
	}
	if d.bad != nil {
		r.stats.ChecksumFailures++
		r.endLocked(k, goneChecksum, d.bad)
		d.bad = nil
	}
}

// streamReader reads from connections that have only Read, one page at a time. A read may wait in
// the middle of a page.
type streamReader struct{ conn net.Conn }

func (c streamReader) read(d *dataReader) error {
	if !d.begin() {
		return nil
	}
	n, err := c.conn.Read(d.window[0])
	d.took(n)
	d.end()
	if n > 0 && errors.Is(err, io.EOF) {
		return nil // the next read returns the error again
	}
	return err
}
