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

// endpoint is a session's end of a fabric; tests put faults between.
type endpoint interface {
	Write(w []fabric.Write, token uint64, data uint32) (int, error)
	Poll(into []fabric.Event, looks int) (int, error)
	Close() error
}

// fabricDepth is how many of a session's pages may be on their way: those of maxUncopied frames.
const fabricDepth = maxUncopied * maxBatch

// fabricTick is how often a reader lets its provider work while leases may be written to but no frame is on its way.
const fabricTick = 5 * time.Millisecond

// readerFabric is a reader's memory as writers may write to it.
type readerFabric struct {
	d      *fabric.Device
	memory []fabric.Memory // [region]
	all    *fabric.Key     // of a provider that gives one key to all, held for as long as the reader is; nil: each lease has its own
	bases  []fabric.Target // [region] what a session is told: keys only if all is set
}

func newReaderFabric(o *ReaderOptions, mem *regions) (*readerFabric, error) {
	if o.Fabric == nil {
		return nil, nil
	}
	f := &readerFabric{d: o.Fabric, memory: mem.fabricMemory(o.Device)}
	if most := f.d.Info().MostBytes; o.Layout.PageBytes > most {
		return nil, fmt.Errorf("%w: pages of %d bytes, provider %s writes at most %d at once", ErrArguments, o.Layout.PageBytes, f.d.Info().Provider, most)
	}
	k, err := f.d.Grant(f.memory) // that it can be registered shows here
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

// permitLocked lets a session's writer write to a lease's pages, once.
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

// fenceLocked takes it that nothing which a lease's writer wrote can land any more.
func (r *Reader) fenceLocked(k lease.Key, l *leaseInfo) {
	r.dropKeyLocked(l)
	if r.table.Fence(k) {
		r.releasedLocked(k)
	}
}

// dropKeyLocked takes a lease's key back, when its writer has no more use for it: before, a write under way would be refused and end the session.
func (r *Reader) dropKeyLocked(l *leaseInfo) {
	if l.key != nil {
		_ = l.key.Close() // a key that the provider keeps opens what it opened before: no more than the fence allows for
		l.key = nil
	}
	if f := l.session; l.permitted && !l.fenced && f != nil && f.fabric != nil {
		f.fabric.live--
	}
	l.fenced = l.permitted
}

// fabricReader receives a session's pages, which its writer writes by itself. Each brings the low half of its frame's number; a frame has
// landed when as many as it has pages have come, and its header, whichever is last. Then its pages are compared with their checksums.
type fabricReader struct {
	*dataReader
	end  endpoint
	wake chan struct{} // a header has come, or live is more than 0
	live int           // leases that may be written to; under Reader.mu

	mu     sync.Mutex // of all below and of dataReader
	base   uint64     // every frame before it has landed
	frames map[uint64]*incoming
	nWhole int    // frames that have landed but for base
	copied []byte // acknowledgements to be written
}

// incoming is a frame of which something has come.
type incoming struct {
	header []byte // nil: not yet
	count  int    // pages that it says there are
	pages  int    // that have landed
	done   bool
}

// fabricWindow is how far a writer may be ahead: frames that wait for acknowledgement, and those before them.
const fabricWindow = 2 * maxUncopied

// runFabric meets the writer's end and receives until the connection ends. When it returns nothing that the writer wrote can land any more, unless
// the library could not close the endpoint: then its leases stay in quarantine.
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
	for k, l := range r.leases { // the writer has the answer, and may have renewed already
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

// poll takes what lands. A frame's header leaves before its pages do, so without one there is hardly anything to look for; and nothing
// while no lease may be written to either.
func (f *fabricReader) poll(stop <-chan struct{}) error {
	events, nap := make([]fabric.Event, 64), newNap()
	expects := false
	for {
		select {
		case <-stop:
			return nil
		default:
		}
		looks := 1
		if expects {
			looks = nap.looks()
		}
		n, err := f.end.Poll(events, looks)
		if err = errors.Join(err, f.took(events[:n])); err != nil {
			return err
		}
		if n > 0 {
			nap.over()
			expects = true
			continue
		}
		f.mu.Lock()
		expects = len(f.frames) > f.nWhole
		f.mu.Unlock()
		if expects {
			nap.sleep(f.wake, stop)
			continue
		}
		f.r.mu.Lock()
		live := f.live
		f.r.mu.Unlock()
		if nap.over(); live > 0 {
			expects = nap.sleepFor(fabricTick, f.wake, stop)
		} else {
			nap.wait(f.wake, stop)
			expects = true
		}
	}
}

// at returns what has come of a frame; nil: the writer cannot have sent it now.
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

// landed counts a page; it needs f.mu.
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

// frame takes a header. One that comes again is counted as such, and changes nothing.
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

// admitFabric reads a header and claims its pieces, of a lease that its writer was permitted to write to.
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

// check looks at a frame's pages once all have landed, and says so.
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
		return nil // others are on their way, and bring this one's acknowledgement along
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

// judge compares a page with its checksum, or leaves that to the owner of the device that it is in.
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
