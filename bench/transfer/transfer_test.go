package transfer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/tandem-serving/tandem/kvtransfer/fabric"
)

// output is what a side prints, for another goroutine to look at.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
	ch chan string // the listener's first line
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	n, err := o.b.Write(p)
	if o.ch != nil {
		o.ch <- o.b.String()
		o.ch = nil
	}
	return n, err
}

// listen starts a listener on any port of loopback.
func listen(t *testing.T, memory int64) (addr string) {
	ctx, cancel := context.WithCancel(t.Context())
	out := &output{ch: make(chan string, 1)}
	done := make(chan error, 1)
	first := out.ch
	go func() { done <- Listen(ctx, Options{Listen: "127.0.0.1:0", MemoryBytes: memory, Out: out}) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return strings.TrimSpace(strings.TrimPrefix(<-first, "listening on "))
}

func options(peer string) Options {
	return Options{
		Peer: peer, Transport: "tcp", Pages: 48, PageBytes: 4096, Layers: 4, Streams: 2, Rounds: 3, SmallPages: 8, Smalls: 5, JSON: true,
	}
}

// TestMeasure runs both sides of every transport, and reads the report.
func TestMeasure(t *testing.T) {
	addr := listen(t, 1<<20)
	ways := []string{"tcp", "shm", "auto"}
	if fabric.Built {
		if d, err := fabric.Open(fabric.Options{Provider: "shm"}); errors.Is(err, fabric.ErrLibrary) {
			t.Skipf("needs libfabric (apt-get install libfabric1): %v", err)
		} else if err == nil {
			_ = d.Close() // the test opens its own
		}
		ways = append(ways, "rdma")
	}
	for _, transport := range ways {
		for _, unchecked := range []bool{false, true} {
			var out bytes.Buffer
			o := options(addr)
			o.Transport, o.Provider, o.NoChecksum, o.Out = transport, "tcp", unchecked, &out
			if err := Push(t.Context(), o); err != nil {
				t.Fatalf("%s: %v", transport, err)
			}
			var r Report
			if err := json.Unmarshal(out.Bytes(), &r); err != nil {
				t.Fatal(err)
			}
			if r.Transport != transport && transport != "auto" || r.Checksum == unchecked || len(r.Rounds) != 3 || r.Bytes != 48*4096 || r.GBps <= 0 || len(r.SmallMillis) != 5 || r.SmallMillis[0] > r.SmallMillis[4] {
				t.Errorf("%s: %+v", transport, r)
			}
		}
	}
}

// TestRefusals: what cannot be measured is said, with the value, and the listener serves the next
// peer.
func TestRefusals(t *testing.T) {
	addr := listen(t, 1<<20)
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("GET / HTTP/1.1\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	if b, _ := io.ReadAll(c); len(b) > 0 {
		t.Errorf("a stranger was told %q", b)
	}
	c.Close()
	for want, change := range map[string]func(*Options){
		"--layers 0":         func(o *Options) { o.Layers = 0 },
		"--pages 50":         func(o *Options) { o.Pages = 50 },
		"--small-pages 3":    func(o *Options) { o.SmallPages = 3 },
		"--page-bytes 12":    func(o *Options) { o.PageBytes = 12 },
		"--streams 99":       func(o *Options) { o.Streams = 99 },
		"--rounds 0":         func(o *Options) { o.Rounds = 0 },
		`transport "pigeon"`: func(o *Options) { o.Transport = "pigeon" },
		"--fabric-provider":  func(o *Options) { o.Transport, o.Provider = "rdma", "pigeon" },
		"--memory":           func(o *Options) { o.Pages = 4 << 10 },
		"--peer":             func(o *Options) { o.Peer = "127.0.0.1:1" },
	} {
		o := options(addr)
		o.Out = io.Discard
		change(&o)
		if err := Push(t.Context(), o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	o := options(addr)
	o.Out = io.Discard
	if err := Push(t.Context(), o); err != nil {
		t.Error(err)
	}
}

// TestWrongBytesAreSeen: one byte of one page, a page in another's place, and a page that did not
// come.
func TestWrongBytesAreSeen(t *testing.T) {
	s := &setup{Layers: 2, Positions: 8, PageBytes: 64, Seed: 3}
	from, err := newMemory(s, false)
	if err != nil {
		t.Fatal(err)
	}
	to, err := newMemory(s, false)
	if err != nil {
		t.Fatal(err)
	}
	from.fill()
	src, dst := s.pages(1, 5)
	move := func() {
		to.spoil(dst)
		for layer := range s.Layers {
			for i := range src {
				copy(to.page(layer, dst[i]), from.page(layer, src[i]))
			}
		}
	}
	move()
	if err := to.compare(src, dst); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(){
		"a bit":         func() { to.page(1, dst[2])[17] ^= 8 },
		"another page":  func() { copy(to.page(0, dst[1]), from.page(0, src[0])) },
		"another layer": func() { copy(to.page(0, dst[1]), from.page(1, src[1])) },
		"none":          func() { to.spoil(dst[4:]) },
	} {
		move()
		spoil()
		if err := to.compare(src, dst); !errors.Is(err, ErrWrong) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
