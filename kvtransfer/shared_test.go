//go:build linux

package kvtransfer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestSharedIsSealed: what a reader is handed it can neither write, nor map writable, nor shrink under anybody.
func TestSharedIsSealed(t *testing.T) {
	m, s := sharedMemory(t, small, 4)
	if err := s.seal(); err != nil {
		t.Fatal(err)
	}
	f, err := s.readOnly()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	again, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), os.O_RDWR, 0) // the owner of the file may do that
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	for name, fd := range map[string]int{"as handed over": int(f.Fd()), "opened for writing": int(again.Fd())} {
		if b, err := unix.Mmap(fd, 0, small.PageBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
			t.Errorf("%s: it can be mapped writable", name)
			_ = unix.Munmap(b)
		}
		if _, err := unix.Pwrite(fd, []byte{1}, 0); err == nil {
			t.Errorf("%s: it can be written", name)
		}
		if err := unix.Ftruncate(fd, 0); err == nil {
			t.Errorf("%s: it can be shrunk", name)
		}
	}
	m[0][0] = 1 // the owner's own mapping stays writable
	if _, err := s.Map(1); !errors.Is(err, ErrArguments) {
		t.Errorf("mapping more of sealed memory: %v", err)
	}
	if at, ok := s.Place(m[1]); !ok || at != int64(len(m[0])) {
		t.Errorf("region 1 is at %d, %t", at, ok)
	}
	if _, ok := s.Place(make([]byte, 8)); ok {
		t.Error("other memory is in the file")
	}
	wo := WriterOptions{Layout: small, Memory: newMemory(small, 4), Shared: s}
	if _, err := NewWriter(wo); !errors.Is(err, ErrArguments) {
		t.Errorf("a writer whose memory is elsewhere: %v", err)
	}
	if _, err := NewWriter(WriterOptions{Layout: small, Memory: m, Transport: OverShared}); !errors.Is(err, ErrArguments) {
		t.Errorf("shared memory forced without any: %v", err)
	}
}

// sharedTransport is the one whose readers copy.
func sharedTransport(t testing.TB) transport {
	for _, tr := range transports(t) {
		if tr.shared {
			return tr
		}
	}
	t.Fatal("there is none")
	return transport{}
}

// TestFrozenReader: a reader that slept while its writer gave up, and whose copy is therefore of whatever the writer's pages hold by
// then, lets nothing arrive, not even without checksums.
func TestFrozenReader(t *testing.T) {
	p := newPair(t, sharedTransport(t), small, 32, func(r *ReaderOptions, _ *WriterOptions) { r.Unchecked = true })
	g := p.grant(t, time.Minute, 1, 2)
	d, err := decodeGrant(g.Wire)
	if err != nil {
		t.Fatal(err)
	}
	conns, up, err := newWriterSession(p.writer, d).connectAll(route{d.addrs[0], sharedConn})
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll(conns)
	write(t, conns[1], p.frameBytes(d.key, 0, 1, 0, 1))
	for p.reader.Stats().Pieces < 2 {
		time.Sleep(time.Millisecond)
	}
	up.close() // the writer has given up; the header below was on its way
	b := p.frameBytes(d.key, 1, 2, 0, 1)
	var f frame
	if err := f.decode(b); err != nil {
		t.Fatal(err)
	}
	f.loose = true
	f.encode(b)
	write(t, conns[1], b)
	p.wantEvent(t, g, Failed, ErrConnection)
	if s := p.reader.Stats(); s.Pieces != 2 || s.LeasesArrived != 0 {
		t.Errorf("%+v", s)
	}
	p.wantWorks(t, 1, 2)
}

// TestHostileMemory hands over what a reader must not take; it refuses, stays alive, and serves the next.
func TestHostileMemory(t *testing.T) {
	p := newPair(t, sharedTransport(t), small, 32, nil)
	g := p.grant(t, time.Minute, 1)
	d, err := decodeGrant(g.Wire)
	if err != nil {
		t.Fatal(err)
	}
	s := newWriterSession(p.writer, d)
	ctx := t.Context()
	s.id = random64()
	control, err := s.connect(ctx, d.addrs[0], controlConn)
	if err != nil {
		t.Fatal(err)
	}
	defer control.Close()
	if _, err := s.connect(ctx, d.addrs[0], sharedConn); !errors.Is(err, ErrRefused) {
		t.Errorf("frames before the memory they name: %v", err)
	}
	unsealed, err := NewShared()
	if err != nil {
		t.Fatal(err)
	}
	defer unsealed.Close()
	if _, err := unsealed.Map(small.Regions * 32 * small.PageBytes); err != nil {
		t.Fatal(err)
	}
	_, short := sharedMemory(t, small, 1)
	if err := short.seal(); err != nil {
		t.Fatal(err)
	}
	whole := p.writer.o.Shared
	up, err := newFlag()
	if err != nil {
		t.Fatal(err)
	}
	defer up.close()
	good := memoryMessage{session: s.id, epoch: s.epoch, nPages: 32, offsets: []uint64{0, uint64(32 * small.PageBytes)}}
	for name, c := range map[string]struct {
		change func(*memoryMessage)
		files  []*Shared
	}{
		"unsealed":        {nil, []*Shared{unsealed, up.Shared}},
		"short":           {nil, []*Shared{short, up.Shared}},
		"no flag":         {nil, []*Shared{whole}},
		"too many":        {nil, []*Shared{whole, up.Shared, up.Shared}},
		"none":            {nil, nil},
		"far away":        {func(m *memoryMessage) { m.offsets[1] = 1 << 63 }, []*Shared{whole, up.Shared}},
		"no pages":        {func(m *memoryMessage) { m.nPages = 0 }, []*Shared{whole, up.Shared}},
		"other epoch":     {func(m *memoryMessage) { m.epoch++ }, []*Shared{whole, up.Shared}},
		"unknown session": {func(m *memoryMessage) { m.session++ }, []*Shared{whole, up.Shared}},
		"fewer regions":   {func(m *memoryMessage) { m.offsets = m.offsets[:1] }, []*Shared{whole, up.Shared}},
	} {
		m := good
		m.offsets = append([]uint64(nil), good.offsets...)
		if c.change != nil {
			c.change(&m)
		}
		if err := handOverTo(ctx, d.addrs[0], &m, c.files); err == nil {
			t.Errorf("%s: it was taken", name)
		}
	}
	if err := handOverTo(ctx, d.addrs[0], &good, []*Shared{whole, up.Shared}); err != nil {
		t.Errorf("memory as it should be: %v", err)
	}
	if err := handOverTo(ctx, d.addrs[0], &good, []*Shared{whole, up.Shared}); err == nil {
		t.Error("memory was taken twice for one session")
	}
	data, err := s.connect(ctx, d.addrs[0], sharedConn)
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	f := frame{key: d.key, count: 1, src: [maxBatch]uint32{32}} // the page behind the last
	b := make([]byte, sharedSize)
	f.encode(b)
	write(t, data, b)
	p.wantEvent(t, g, Failed, ErrProtocol)
	p.wantWorks(t, 1)
}

// handOverTo hands over what it is told to; an answer that says no is an error.
func handOverTo(ctx context.Context, addr string, m *memoryMessage, files []*Shared) error {
	conn, err := TCP{}.Dial(ctx, addr+memorySuffix)
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(5 * time.Second))
	var open []*os.File
	for _, s := range files {
		f, err := s.readOnly()
		if err != nil {
			return err
		}
		defer f.Close()
		open = append(open, f)
	}
	if err := sendFiles(conn, m.encode(), open...); err != nil {
		return err
	}
	conn.(*net.UnixConn).CloseWrite() // a message that is too short ends here
	return welcomed(conn)
}

// TestTransportsChosen: shared memory is used where both ends have it, and TCP where one has not; who forces one gets it or an error.
func TestTransportsChosen(t *testing.T) {
	tr := transport{name: "auto", network: TCP{}, listen: "127.0.0.1:0"}
	for _, c := range []struct {
		reader, writer Transport
		memory         bool // the writer's lies in a file
		want           connKind
	}{
		{Auto, Auto, true, sharedConn}, {Auto, OverShared, true, sharedConn}, {OverShared, Auto, true, sharedConn},
		{Auto, Auto, false, dataConn}, {OverTCP, Auto, true, dataConn}, {Auto, OverTCP, true, dataConn},
		{OverTCP, OverShared, true, 0}, {OverShared, OverTCP, true, 0}, {OverShared, Auto, false, 0},
	} {
		p := newPair(t, tr, small, 4, func(r *ReaderOptions, w *WriterOptions) {
			r.Transport, w.Transport = c.reader, c.writer
			if c.memory {
				w.Memory, w.Shared = sharedMemory(t, small, 4)
			}
		})
		g := p.grant(t, time.Minute, 1)
		push, err := p.writer.Open(t.Context(), g.Wire, PushOptions{})
		if c.want == 0 {
			if !errors.Is(err, ErrArguments) {
				t.Errorf("%+v: %v", c, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%+v: %v", c, err)
			continue
		}
		p.sendAll(t, push, 1)
		if err := push.Wait(t.Context()); err != nil {
			t.Errorf("%+v: %v", c, err)
		}
		if got := p.writer.Stats().SharedBytes > 0; got != (c.want == sharedConn) {
			t.Errorf("%+v: shared is %t", c, got)
		}
	}
}

// TestFallsBackToTCP: where the unix socket cannot be reached, as from another host, the grant's other address is taken.
func TestFallsBackToTCP(t *testing.T) {
	tr := transport{name: "auto", network: TCP{}, listen: "127.0.0.1:0"}
	for name, change := range map[string]func(*Reader) error{
		"neither socket": func(r *Reader) error { return r.local.close() },
		"no memory":      func(r *Reader) error { return r.local.memory.Close() },
	} {
		p := newPair(t, tr, small, 4, func(_ *ReaderOptions, w *WriterOptions) { w.Memory, w.Shared = sharedMemory(t, small, 4) })
		if err := change(p.reader); err != nil {
			t.Fatal(err)
		}
		push := p.open(t, p.grant(t, time.Minute, 1))
		p.sendAll(t, push, 1)
		if err := push.Wait(t.Context()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if s := p.writer.Stats(); s.SharedBytes != 0 || s.PayloadBytes == 0 {
			t.Errorf("%s: %+v", name, s)
		}
		_ = p.reader.local.close() // one may be closed already
		p.reader.local = nil
	}
}

// TestSharedUnderTLS: the connections prove who they are to each other, as over TCP.
func TestSharedUnderTLS(t *testing.T) {
	tr := sharedTransport(t)
	tr.server, tr.client = testTLS(t)
	p := newPair(t, tr, small, 8, func(r *ReaderOptions, w *WriterOptions) { r.Transport = Auto })
	p.wantWorks(t, 3, 1, 2)
	if p.writer.Stats().SharedBytes == 0 {
		t.Error("the pages went over TCP")
	}
	other, _ := testTLS(t)
	other.RootCAs = tr.client.RootCAs
	stranger, err := NewWriter(WriterOptions{Layout: small, Memory: p.src, Shared: p.writer.o.Shared, Transport: OverShared, TLS: other})
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close()
	if push, err := stranger.Open(t.Context(), p.grant(t, time.Minute, 1).Wire, PushOptions{}); err == nil {
		err = push.Wait(t.Context())
		if err == nil {
			t.Error("a stranger's certificate was taken")
		}
	}
}

// Memory is handed to processes of the same user alone: anybody on a host can take the name that a reader which is gone had.
func TestMemoryStaysWithItsUser(t *testing.T) {
	if os.Geteuid() != 0 {
		return // nobody else can be made up; that readers of the same user are served every other test here shows
	}
	const name = "@tandem-kv-test-of-another-user"
	listening := make(chan net.Listener)
	go func() {
		runtime.LockOSThread() // for good: the thread is another user's, and ends with this function
		var l net.Listener
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), 65534, ^uintptr(0)); e == 0 {
			l, _ = listenMemory(name + memorySuffix)
		}
		listening <- l
	}()
	l := <-listening
	if l == nil {
		t.Fatal("another user could not listen")
	}
	defer l.Close()
	_, shared := sharedMemory(t, small, 4)
	f, err := newFlag()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s := &writerSession{w: &Writer{o: WriterOptions{Shared: shared}}}
	if err := s.handOverFiles(t.Context(), LocalScheme+name, make([]byte, 64), f); !errors.Is(err, ErrRefused) {
		t.Fatalf("memory for another user: %v", err)
	}
}
