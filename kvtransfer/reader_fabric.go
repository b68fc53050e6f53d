package kvtransfer

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/kvtransfer/crc32c"
	"github.com/tandem-serving/tandem/kvtransfer/fabric"
	"github.com/tandem-serving/tandem/kvtransfer/lease"
)

// endpoint is a session's fabric endpoint. Tests inject faults by wrapping it.
type endpoint interface {
	Write(w []fabric.Write, token uint64, data uint32) (int, error)
	Poll(into []fabric.Event, spins int) (int, error)
	Close() error
}

// fabricDepth bounds a session's pages in flight: those of maxUncopied frames.
const fabricDepth = maxUncopied * maxBatch

// fabricTick is the interval of polls while leases may be written to but no frame is in flight.
const fabricTick = 5 * time.Millisecond

// readerFabric is a reader's memory, registered for writes by peers.
type readerFabric struct {
	d      *fabric.Device
	memory []fabric.Memory // [region]
	all    *fabric.Key     // of a provider with one key for all, held as long as the reader; nil: each lease has its own
	bases  []fabric.Target // [region] sent to sessions: keys only if all is set
}

func newReaderFabric(o *ReaderOptions, mem *regions) (*readerFabric, error) {
	if o.Fabric == nil {
		return nil, nil
	}
	f := &readerFabric{d: o.Fabric, memory: mem.fabricMemory(o.Device)}
	if most := f.d.Info().MostBytes; o.Layout.PageBytes > most {
		return nil, fmt.Errorf("%w: pages of %d bytes, provider %s writes at most %d at once", ErrArguments, o.Layout.PageBytes, f.d.Info().Provider, most)
	}
	k, err := f.d.Grant(f.memory) // fails here if the memory cannot be registered
	if err != nil {
		return nil, fmt.Errorf("kvtransfer: registering memory: %w", err)
	}
	f.bases = append(f.bases, k.Targets()...)
	if f.d.Info().ProviderKeys {
		f.all = k
		return f, nil
	}
	for i := range f.bases {
		f.bases[i].Key = 0
	}
	return f, k.Close()
}

func (f *readerFabric) close() error {
	if f == nil || f.all == nil {
		return nil
	}
	return f.all.Close()
}

// permitLocked permits a session's writer, once, to write to a lease's pages.
func (r *Reader) permitLocked(s *readerSession, k lease.Key) {
	l := r.leases[k]
	if s.fabric == nil || l.permitted || !r.table.Permit(k) {
		return
	}
	l.permitted = true
	s.fabric.live++
	signal(s.fabric.wake)
	m := control{kind: msgPermit, key: k}
	if r.rdma.all == nil {
		var err error
		if l.key, err = r.rdma.d.Grant(r.rdma.memory); err != nil {
			r.fenceLocked(k, l)
			r.endLocked(k, goneUnknown, fmt.Errorf("%w: registering memory: %w", ErrConnection, err))
			return
		}
		m.value = l.key.Targets()[0].Key
	}
	r.postLocked(s, m)
}

// fenceLocked records that no write of a lease's writer can land any more.
func (r *Reader) fenceLocked(k lease.Key, l *leaseInfo) {
	r.dropKeyLocked(l)
	if r.table.Fence(k) {
		r.releasedLocked(k)
	}
}

// dropKeyLocked closes a lease's key once its writer no longer needs it. Closed earlier, the key
// would make the provider refuse a write in flight, which ends the session.
func (r *Reader) dropKeyLocked(l *leaseInfo) {
	if l.key != nil {
		_ = l.key.Close() // a key that stays open gives access to the same pages, which the fence allows for
		l.key = nil
	}
	if f := l.session; l.permitted && !l.fenced && f != nil && f.fabric != nil {
		f.fabric.live--
	}
	l.fenced = l.permitted
}

// fabricReader receives a session's pages by RDMA. Each write carries the low half of its frame's
// number. A frame has landed when its header and one write for each of its pages have arrived, in
// any order. Then its pages are compared with their checksums.
type fabricReader struct {
	*dataReader
	end  endpoint
	wake chan struct{} // a header has arrived, or live is more than 0
	live int           // leases that may be written to; under Reader.mu

	mu     sync.Mutex // guards the fields below and dataReader
	base   uint64     // every frame before it has landed
	frames map[uint64]*incoming
	nWhole int    // frames after base that have landed
	copied []byte // acknowledgements to send
}

// incoming is a frame of which a header or a page has arrived.
type incoming struct {
	header []byte // nil: not yet
	count  int    // pages, by the header
	pages  int    // pages that have landed
	done   bool
}

// fabricWindow bounds how far a writer may be ahead: frames that wait for acknowledgement, and the
// frames before them.
const fabricWindow = 2 * maxUncopied

// runFabric exchanges endpoints with the writer and receives until the connection ends. When it
// returns, no write of the writer can land any more, unless the library could not close the
// endpoint. Then the session's leases stay in quarantine.
func (d *dataReader) runFabric() (err error) {
	f := &fabricReader{dataReader: d, wake: make(chan struct{}, 1), frames: make(map[uint64]*incoming)}
	e, err := f.meet()
	if err != nil {
		return err
	}
	r := d.r
	if f.end = endpoint(e); r.wrap != nil {
		f.end = r.wrap(e)
	}
	r.mu.Lock()
	if d.s.closed {
		r.mu.Unlock()
		return errors.Join(net.ErrClosed, f.end.Close())
	}
	d.s.fabric = f
	for k, l := range r.leases { // the writer has the answer, and may have renewed leases already
		if l.session == d.s {
			r.permitLocked(d.s, k)
		}
	}
	r.mu.Unlock()
	stop, polled := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(polled)
		if err := f.poll(stop); err != nil {
			r.mu.Lock()
			r.closeSessionLocked(d.s, fmt.Errorf("%w: writer %q: %w", ErrConnection, d.s.node, err))
			r.mu.Unlock()
		}
	}()
	defer func() {
		close(stop)
		<-polled
		open := f.end.Close()
		err = errors.Join(err, open)
		r.mu.Lock()
		defer r.mu.Unlock()
		d.s.fabric = nil
		for k, l := range r.leases {
			if l.session == d.s && l.permitted && open == nil {
				r.fenceLocked(k, l)
			}
		}
	}()
	header, in := make([]byte, sharedSize), bufio.NewReaderSize(d.conn, 2*ackFrames*sharedSize)
	for {
		if _, err := io.ReadFull(in, header); err != nil {
			return err
		}
		if err := f.frame(header); err != nil {
			return err
		}
	}
}

// meet exchanges endpoints with the writer.
func (f *fabricReader) meet() (*fabric.Endpoint, error) {
	d := f.r.rdma.d
	f.conn.SetDeadline(time.Now().Add(f.r.o.HandshakeTimeout))
	b := make([]byte, fabricSize(0))
	if _, err := io.ReadFull(f.conn, b); err != nil {
		return nil, err
	}
	var theirs fabricMessage
	if err := theirs.decode(b, 0); err != nil {
		return nil, err
	}
	ours := fabricMessage{provider: d.Info().Provider, place: d.Place(), fixed: f.r.rdma.all != nil, targets: f.r.rdma.bases}
	var e *fabric.Endpoint
	var err error
	if theirs.provider != ours.provider || theirs.place != ours.place {
		err = fmt.Errorf("%w: writer has provider %q, reader %q, or not on one host", ErrRefused, theirs.provider, ours.provider)
	} else if e, err = d.Endpoint(fabricDepth); err == nil {
		ours.endpoint = string(e.Name())
		err = e.Peer([]byte(theirs.endpoint))
	}
	ours.refused = err != nil
	if _, werr := f.conn.Write(ours.encode()); err == nil {
		err = werr
	}
	if err != nil && e != nil {
		err = errors.Join(err, e.Close())
	}
	f.conn.SetDeadline(time.Time{})
	return e, err
}

// poll handles completions. A frame's header is sent before its pages, so without a header hardly
// any are expected, and none while no lease may be written to.
func (f *fabricReader) poll(stop <-chan struct{}) error {
	events, wait := make([]fabric.Event, 64), newBackoff()
	expects := false
	for {
		select {
		case <-stop:
			return nil
		default:
		}
		spins := 1
		if expects {
			spins = wait.spins()
		}
		n, err := f.end.Poll(events, spins)
		if err = errors.Join(err, f.took(events[:n])); err != nil {
			return err
		}
		if n > 0 {
			wait.reset()
			expects = true
			continue
		}
		f.mu.Lock()
		expects = len(f.frames) > f.nWhole
		f.mu.Unlock()
		if expects {
			wait.sleep(f.wake, stop)
			continue
		}
		f.r.mu.Lock()
		live := f.live
		f.r.mu.Unlock()
		if wait.reset(); live > 0 {
			expects = wait.sleepFor(fabricTick, f.wake, stop)
		} else {
			wait.wait(f.wake, stop)
			expects = true
		}
	}
}

// at returns the state of a frame; nil if the writer cannot have sent the frame yet.
func (f *fabricReader) at(number uint64) *incoming {
	if number < f.base || number >= f.base+fabricWindow {
		return nil
	}
	in := f.frames[number]
	if in == nil {
		in = new(incoming)
		f.frames[number] = in
	}
	return in
}

// took counts the pages that have landed.
func (f *fabricReader) took(events []fabric.Event) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, e := range events {
		if e.Kind != fabric.Landed {
			continue
		}
		if err := f.landed(e.Data); err != nil {
			return err
		}
	}
	return nil
}

// landed counts a page. The caller holds f.mu.
func (f *fabricReader) landed(low uint32) error {
	number := f.base + uint64(int64(int32(low-uint32(f.base))))
	in := f.at(number)
	if in == nil || in.done || in.pages == maxBatch {
		return fmt.Errorf("%w: a page of frame %d landed, expected are those of %d to %d", ErrProtocol, number, f.base, f.base+fabricWindow-1)
	}
	if in.pages++; in.header != nil && in.pages < in.count {
		return nil
	}
	return f.check(number, in)
}

// frame handles a header. It counts a repeated header, and otherwise ignores it.
func (f *fabricReader) frame(b []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.f.decode(b); err != nil {
		return err
	}
	number := f.f.number
	in := f.at(number)
	if in == nil && number >= f.base {
		return fmt.Errorf("%w: frame %d, expected are %d to %d", ErrProtocol, number, f.base, f.base+fabricWindow-1)
	}
	if in == nil || in.done {
		return f.admitFabric(b)
	}
	if in.header != nil {
		f.r.mu.Lock()
		defer f.r.mu.Unlock()
		f.r.stats.DuplicatePieces += uint64(f.f.count)
		return nil
	}
	in.header, in.count = append([]byte(nil), b...), f.f.count
	signal(f.wake)
	return f.check(number, in)
}

// admitFabric decodes a header and claims its pieces, of a lease that its writer may write to.
func (f *fabricReader) admitFabric(b []byte) error {
	if err := f.f.decode(b); err != nil {
		return err
	}
	f.r.mu.Lock()
	l := f.r.leases[f.f.key]
	early := l != nil && (l.session == nil || l.session == f.s) && !l.permitted
	f.r.mu.Unlock()
	if early {
		return fmt.Errorf("%w: frame of lease %v, whose pages it was not permitted to write", ErrProtocol, f.f.key)
	}
	return f.header(b)
}

// check checks a frame's pages once all have landed, and acknowledges the frame.
func (f *fabricReader) check(number uint64, in *incoming) error {
	if in.header == nil {
		return nil
	}
	if err := f.f.decode(in.header); err != nil {
		return err
	}
	if in.pages > f.f.count {
		return fmt.Errorf("%w: %d pages of frame %d landed, it has %d", ErrProtocol, in.pages, number, f.f.count)
	}
	if in.pages < f.f.count {
		return nil
	}
	if err := f.admitFabric(in.header); err != nil {
		return err
	}
	f.verify()
	in.done, in.header = true, nil
	f.nWhole++
	for f.frames[f.base] != nil && f.frames[f.base].done {
		delete(f.frames, f.base)
		f.base++
		f.nWhole--
	}
	f.copied = le.AppendUint64(le.AppendUint32(f.copied, magicCopied), number)
	if len(f.frames) > f.nWhole && len(f.copied) < ackFrames*copiedSize {
		return nil // a frame in flight will carry this acknowledgement along
	}
	f.conn.SetWriteDeadline(time.Now().Add(f.r.o.PeerTimeout))
	_, err := f.conn.Write(f.copied)
	f.copied = f.copied[:0]
	return err
}

// verify compares the frame's pages with their checksums, a window at a time.
func (f *fabricReader) verify() {
	for f.page < f.f.count {
		f.aim()
		f.fenced = false
		if !f.begin() {
			f.r.mu.Lock()
			f.drainLocked(f.page)
			f.r.mu.Unlock()
			return
		}
		for _, page := range f.window {
			if to := f.target[f.page]; to != lease.NoPage {
				f.judge(to, page)
			}
			f.page++
		}
		f.dataReader.end()
	}
}

// judge compares a page with its checksum. For a page in a device, it records the expected checksum
// for the owner.
func (f *fabricReader) judge(to int32, page []byte) {
	switch {
	case f.f.loose:
		f.whole(0)
	case f.r.o.Device != nil:
		f.digests = append(f.digests, Digest{Region: int(f.f.region), Page: to, CRC: f.f.crc[f.page]})
		f.whole(f.f.crc[f.page])
	default:
		f.whole(crc32c.Update(0, page))
	}
}
