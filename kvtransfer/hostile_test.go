package kvtransfer

import (
	"bytes"
	"context"
	"errors"
	"hash/crc32"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/kvtransfer/lease"
)

// TestStrangers proves that who does not know the epoch gets nothing, and that silence is cut.
func TestStrangers(t *testing.T) {
	eachConnected(t, func(r *ReaderOptions, _ *WriterOptions) {
		r.MaxHandshakes, r.HandshakeTimeout = 2, 200*time.Millisecond
	}, func(t *testing.T, tr transport, p *pair) {
		g := p.grant(t, time.Minute, 1)
		words := [][]byte{[]byte("GET / HTTP/1.1\r\n\r\n" + strings.Repeat("x", helloSize)), make([]byte, helloSize), {1}, nil,
			(&hello{version: Version, kind: controlConn, session: 1, epoch: 12345, layout: p.layout}).encode()}
		for i, word := range words {
			c, err := tr.network.Dial(t.Context(), p.reader.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			c.SetDeadline(time.Now().Add(5 * time.Second))
			go c.Write(word) // the reader may close before it has read all
			got, err := io.ReadAll(c)
			if errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("stranger %d was kept", i)
			}
			c.Close()
			var w welcome
			if len(got) >= welcomeSize && w.decode(got) == nil && (w.status == welcomeOK || w.epoch != 0 || w.node != "" || w.layout != (Layout{})) {
				t.Errorf("stranger %d was told %+v", i, w)
			}
		}
		for p.reader.Stats().Refused != uint64(len(words)) { // each is counted, at once or when its time is up
			time.Sleep(time.Millisecond)
		}
		push := p.open(t, g)
		p.sendAll(t, push, 1)
		if err := push.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
}

// rawSession connects without the writer's loops, so that a test can say anything; conns[0] is the control connection.
func (p *pair) rawSession(t *testing.T, g Grant) []net.Conn {
	t.Helper()
	d, err := decodeGrant(g.Wire)
	if err != nil {
		t.Fatal(err)
	}
	way := route{d.addrs[0], dataConn}
	if p.shared {
		way.kind = sharedConn
	}
	conns, up, err := newWriterSession(p.writer, d).connectAll(way)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		closeAll(conns)
		up.close()
	})
	for _, c := range conns {
		c.SetDeadline(time.Now().Add(20 * time.Second))
	}
	return conns
}

func keyOf(t *testing.T, g Grant) lease.Key {
	t.Helper()
	d, err := decodeGrant(g.Wire)
	if err != nil {
		t.Fatal(err)
	}
	return d.key
}

// headerBytes is what a frame's header has.
func (p *pair) headerBytes() int {
	if p.shared {
		return sharedSize
	}
	return frameSize
}

// frameBytes is a frame with its pages, each filled with one byte; where the reader takes them from the writer's memory they are put there.
func (p *pair) frameBytes(k lease.Key, region uint32, fill byte, index ...uint32) []byte {
	f := frame{key: k, region: region, count: len(index)}
	page := bytes.Repeat([]byte{fill}, p.layout.PageBytes)
	b := make([]byte, p.headerBytes())
	for i := range index {
		f.index[i], f.crc[i] = index[i], crc32.Checksum(page, castagnoli)
		if p.shared {
			f.src[i] = uint32(p.nFrames) % 32
			copy(p.src.page(p.layout, min(int(region), p.layout.Regions-1), int32(f.src[i])), page)
			p.nFrames++
		} else {
			b = append(b, page...)
		}
	}
	f.encode(b[:p.headerBytes()])
	return b
}

// wantControl reads control messages until one of a kind comes.
func wantControl(t *testing.T, c net.Conn, kind msgType, k lease.Key) control {
	t.Helper()
	buf := make([]byte, controlSize)
	for {
		m, err := readControl(c, buf)
		if err != nil {
			t.Fatalf("waiting for a message of type %d about %v: %v", kind, k, err)
		}
		if m.kind == kind && m.key == k {
			return m
		}
	}
}

func write(t *testing.T, c net.Conn, b []byte) {
	t.Helper()
	if _, err := c.Write(b); err != nil {
		t.Fatal(err)
	}
}

// TestLateFrames sends frames of leases that are over, were never there or are another writer's: none may land, each is counted.
func TestLateFrames(t *testing.T) {
	eachConnected(t, nil, func(t *testing.T, _ transport, p *pair) {
		old := p.grant(t, time.Minute, 1, 2)
		oldKey := keyOf(t, old)
		p.reader.Cancel(old.Lease)
		p.wantEvent(t, old, Failed, ErrCancelled)
		g := p.grant(t, time.Minute, 1, 2) // the same pages, and most likely the same slot
		k := keyOf(t, g)
		conns, thief := p.rawSession(t, g), p.rawSession(t, g)
		var b []byte
		b = append(b, p.frameBytes(oldKey, 0, 0xee, 0, 1)...)
		other := k
		other.Epoch++
		b = append(b, p.frameBytes(other, 0, 0xee, 0)...)
		other = k
		other.Gen++
		b = append(b, p.frameBytes(other, 0, 0xee, 0)...)
		b = append(b, p.frameBytes(k, 0, 1, 0, 1)...)
		b = append(b, p.frameBytes(k, 0, 0xee, 0, 1)...) // again
		b = append(b, p.frameBytes(k, 1, 2, 0)...)
		write(t, conns[1], b)
		wantControl(t, conns[0], msgGone, oldKey)
		wantControl(t, conns[0], msgGone, other)
		for p.reader.Stats().Pieces < 3 {
			time.Sleep(time.Millisecond)
		}
		write(t, thief[1], p.frameBytes(k, 1, 0xee, 1))
		wantControl(t, thief[0], msgGone, k)
		write(t, conns[2], p.frameBytes(k, 1, 2, 0, 1)) // one again, one new
		wantControl(t, conns[0], msgDone, k)
		p.wantEvent(t, g, Arrived, nil)
		write(t, conns[1], p.frameBytes(k, 1, 0xee, 1))
		wantControl(t, conns[0], msgGone, k)
		for region := range 2 {
			for _, page := range []int32{1, 2} {
				if want := bytes.Repeat([]byte{byte(region + 1)}, small.PageBytes); !bytes.Equal(p.dst.page(small, region, page), want) {
					t.Errorf("region %d, page %d: starts with %x, want %x", region, page, p.dst.page(small, region, page)[0], want[0])
				}
			}
		}
		s := p.reader.Stats()
		if s.StaleFrames != 5 || s.StalePieces != 6 || s.DuplicatePieces != 3 || s.Pieces != 4 || s.PayloadBytes != 4*4096 {
			t.Errorf("%+v", s)
		}
	})
}

func TestDamagedPageNeverArrives(t *testing.T) {
	eachConnected(t, nil, func(t *testing.T, _ transport, p *pair) {
		g := p.grant(t, time.Minute, 1, 2)
		conns := p.rawSession(t, g)
		k := keyOf(t, g)
		b := p.frameBytes(k, 0, 1, 0, 1)
		if b[len(b)-1] ^= 4; p.shared {
			b[len(b)-1] ^= 4
			p.src.page(p.layout, 0, 1)[0] ^= 4
		}
		write(t, conns[1], b)
		if m := wantControl(t, conns[0], msgGone, k); m.code != goneChecksum {
			t.Errorf("the writer was told %v", goneErrors[m.code])
		}
		p.wantEvent(t, g, Failed, ErrChecksum)
		if n := p.reader.Stats().ChecksumFailures; n != 1 {
			t.Errorf("%d checksum failures", n)
		}
		p.wantWorks(t, 1, 2)
	})
}

// TestViolationsEndTheSession says things no writer says.
func TestViolationsEndTheSession(t *testing.T) {
	eachConnected(t, nil, func(t *testing.T, _ transport, p *pair) {
		for name, say := range map[string]func(conns []net.Conn, k lease.Key){
			"region":  func(c []net.Conn, k lease.Key) { write(t, c[1], p.frameBytes(k, 2, 1, 0)[:p.headerBytes()]) },
			"index":   func(c []net.Conn, k lease.Key) { write(t, c[1], p.frameBytes(k, 0, 1, 0, 1)[:p.headerBytes()]) },
			"header":  func(c []net.Conn, k lease.Key) { write(t, c[1], make([]byte, p.headerBytes())) },
			"control": func(c []net.Conn, k lease.Key) { write(t, c[0], make([]byte, controlSize)) },
			"type": func(c []net.Conn, k lease.Key) {
				b := make([]byte, controlSize)
				(&control{kind: msgDone, key: k}).encode(b)
				write(t, c[0], b)
			},
		} {
			g := p.grant(t, time.Minute, 7)
			conns := p.rawSession(t, g)
			k := keyOf(t, g)
			b := make([]byte, controlSize)
			(&control{kind: msgRenew, key: k, value: 1}).encode(b)
			write(t, conns[0], b)
			for p.reader.sessionOf(k) == nil {
				time.Sleep(time.Millisecond)
			}
			say(conns, k)
			if e := p.log.over(g.Lease); e.Kind != Failed || !errors.Is(e.Err, ErrProtocol) {
				t.Errorf("%s: %v (%v)", name, e.Kind, e.Err)
			}
		}
		p.wantWorks(t, 7)
	})
}

// sessionOf returns the session a lease is bound to.
func (r *Reader) sessionOf(k lease.Key) *readerSession {
	r.mu.Lock()
	defer r.mu.Unlock()
	if l := r.leases[k]; l != nil {
		return l.session
	}
	return nil
}

// TestStuckMidPage cancels a lease whose writer stopped inside a page. Plain TCP releases at once, since no read waits in the page;
// the others quarantine, close the session, and release.
func TestStuckMidPage(t *testing.T) {
	eachConnected(t, func(r *ReaderOptions, _ *WriterOptions) { r.QuarantineTimeout = 100 * time.Millisecond }, func(t *testing.T, tr transport, p *pair) {
		if p.shared {
			return // no read waits for the writer: TestFrozenReader
		}
		g := p.grant(t, time.Minute, 1)
		conns := p.rawSession(t, g)
		b := p.frameBytes(keyOf(t, g), 0, 1, 0)
		write(t, conns[1], b[:len(b)-100])
		for p.reader.Stats().Arriving == 0 {
			time.Sleep(time.Millisecond)
		}
		time.Sleep(20 * time.Millisecond) // let the read begin
		start := time.Now()
		p.reader.Cancel(g.Lease)
		p.wantEvent(t, g, Failed, ErrCancelled)
		if d := time.Since(start); d > 5*time.Second { // PeerTimeout, twice that, would end it too
			t.Errorf("released after %v", d)
		}
		s := p.reader.Stats()
		if plain := tr.name == "tcp"; plain != (s.LeasesQuarantined == 0) || plain != (s.Sessions == 1) {
			t.Errorf("%d quarantined, %d sessions left", s.LeasesQuarantined, s.Sessions)
		}
		poison := bytes.Repeat([]byte{0xdd}, small.PageBytes)
		copy(p.dst.page(small, 0, 1), poison)
		conns[1].Write(b[len(b)-100:]) // thawed; the connection may be gone
		time.Sleep(20 * time.Millisecond)
		if !bytes.Equal(p.dst.page(small, 0, 1), poison) {
			t.Error("a late write landed")
		}
	})
}

// TestUnchecked: a reader that did not allow it takes no page without a checksum; one that did takes them.
func TestUnchecked(t *testing.T) {
	for _, allowed := range []bool{false, true} {
		eachConnected(t, func(r *ReaderOptions, w *WriterOptions) { r.Unchecked, w.Unchecked = allowed, true }, func(t *testing.T, _ transport, p *pair) {
			p.wantWorks(t, 1, 2) // the writer asks its grant
			g := p.grant(t, time.Minute, 3)
			conns := p.rawSession(t, g)
			b := p.frameBytes(keyOf(t, g), 0, 1, 0)
			var f frame
			head := b[:p.headerBytes()]
			if err := f.decode(head); err != nil {
				t.Fatal(err)
			}
			f.loose, f.crc = true, [maxBatch]uint32{}
			f.encode(head)
			if allowed {
				write(t, conns[1], b)
				for p.reader.Stats().Pieces < uint64(2*small.Regions+1) {
					time.Sleep(time.Millisecond)
				}
				return
			}
			renew := make([]byte, controlSize)
			(&control{kind: msgRenew, key: f.key, value: 1}).encode(renew)
			write(t, conns[0], renew)
			for p.reader.sessionOf(f.key) == nil {
				time.Sleep(time.Millisecond)
			}
			write(t, conns[1], head)
			p.wantEvent(t, g, Failed, ErrProtocol)
		})
	}
}
