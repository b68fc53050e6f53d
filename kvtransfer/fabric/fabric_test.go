//go:build cgo && linux

package fabric

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/build"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"
)

// software are the providers that run everywhere.
var software = []string{"tcp", "shm"}

func open(t testing.TB, provider string) *Device {
	t.Helper()
	address := ""
	if provider == "tcp" {
		address = "127.0.0.1"
	}
	d, err := Open(Options{Provider: provider, Address: address})
	if err != nil {
		if errors.Is(err, ErrLibrary) {
			t.Skipf("needs libfabric (apt-get install libfabric1): %v", err)
		}
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// ends are two endpoints that know each other, and memory of each.
type ends struct {
	from, to *Endpoint
	src, dst []byte
	source   *Source
	key      *Key
}

func join(t testing.TB, a, b *Device, depth, nBytes int) *ends {
	t.Helper()
	e := &ends{src: make([]byte, nBytes), dst: make([]byte, nBytes)}
	var err error
	if e.from, err = a.Endpoint(depth); err != nil {
		t.Fatal(err)
	}
	if e.to, err = b.Endpoint(depth); err != nil {
		t.Fatal(err)
	}
	if e.source, err = a.Source(Of(e.src)); err != nil {
		t.Fatal(err)
	}
	if e.key, err = b.Grant([]Memory{Of(e.dst)}); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(e.from.Peer(e.to.Name()), e.to.Peer(e.from.Name())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(e.from.Close(), e.to.Close(), e.source.Close(), e.key.Close()); err != nil {
			t.Error(err)
		}
	})
	return e
}

// page is the write of one page of n bytes.
func (e *ends) page(from, to, n int) Write {
	target := e.key.Targets()[0]
	return Write{From: uintptr(unsafe.Pointer(&e.src[from*n])), To: target.At + uint64(to*n), Key: target.Key, Bytes: n, Source: e.source}
}

// post starts one write, which takes as long as the two need to meet.
func (e *ends) post(t *testing.T, w Write) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Microsecond) {
		n, err := e.from.Write([]Write{w}, 0, 7)
		if n == 1 {
			return
		}
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("the write was not started: %v", err)
		}
		for _, end := range []*Endpoint{e.from, e.to} {
			if _, err := end.Poll(make([]Event, 1), 1); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestWrites: pages land where they are to, each bringing its 32 bits, however many are sent at once and in whatever order.
func TestWrites(t *testing.T) {
	for _, provider := range software {
		t.Run(provider, func(t *testing.T) {
			const page, nPages, batch = 32 << 10, 256, 16
			e := join(t, open(t, provider), open(t, provider), 64, page*nPages)
			for i := range e.src {
				e.src[i] = byte(i/page) ^ byte(i*7)
			}
			var landed, written [nPages / batch]int
			events := make([]Event, 32)
			deadline := time.Now().Add(time.Minute)
			for next, done := 0, 0; done < 2*nPages; {
				for next < nPages {
					var w []Write
					for i := next; i < next/batch*batch+batch; i++ {
						w = append(w, e.page(i, nPages-1-i, page))
					}
					n, err := e.from.Write(w, uint64(next/batch), uint32(next/batch)|0xabcd0000)
					if err != nil {
						t.Fatal(err)
					}
					if next += n; n < len(w) {
						break
					}
				}
				for _, end := range []*Endpoint{e.from, e.to} {
					n, err := end.Poll(events, 1)
					if err != nil || time.Now().After(deadline) {
						t.Fatal(err, done)
					}
					for _, ev := range events[:n] {
						switch done++; {
						case ev.Kind == Landed && end == e.to && ev.Data>>16 == 0xabcd:
							landed[ev.Data&0xffff]++
						case ev.Kind == Written && end == e.from:
							written[ev.Token]++
						default:
							t.Fatalf("%+v", ev)
						}
					}
				}
			}
			for i := range landed {
				if landed[i] != batch || written[i] != batch {
					t.Errorf("batch %d: %d written, %d landed, want %d", i, written[i], landed[i], batch)
				}
			}
			for i := range nPages {
				if !bytes.Equal(e.src[i*page:][:page], e.dst[(nPages-1-i)*page:][:page]) {
					t.Fatalf("page %d differs", i)
				}
			}
		})
	}
}

// lateRound is what the test tells the process that writes.
type lateRound struct {
	Peer   []byte
	Target Target
}

const latePage, latePages = 64 << 10, 32

// lateWriter is that process: it writes whatever it can to each peer it is told of, and goes on with it until it is told of the next.
func lateWriter(t *testing.T, provider string) {
	d := open(t, provider)
	src := bytes.Repeat([]byte{0xff}, latePage*latePages)
	source, err := d.Source(Of(src))
	if err != nil {
		t.Fatal(err)
	}
	defer source.Close()
	rounds := make(chan lateRound)
	go func() {
		defer close(rounds)
		for in := json.NewDecoder(os.Stdin); ; {
			var r lateRound
			if in.Decode(&r) != nil {
				return
			}
			rounds <- r
		}
	}()
	e, err := d.Endpoint(latePages)
	if err != nil {
		t.Fatal(err)
	}
	events := make([]Event, 8)
	for next, r := latePages, (lateRound{}); ; {
		select {
		case told, ok := <-rounds:
			if err := e.Close(); err != nil {
				t.Fatal(err)
			}
			if !ok {
				return
			}
			if e, err = d.Endpoint(latePages); err != nil {
				t.Fatal(err)
			}
			r, next = told, 0
			if err := e.Peer(r.Peer); err != nil {
				t.Fatal(err)
			}
			fmt.Printf("name %x\n", e.Name())
		default:
		}
		if next < latePages {
			at := next * latePage
			n, err := e.Write([]Write{{uintptr(unsafe.Pointer(&src[at])), r.Target.At + uint64(at), r.Target.Key, latePage, source}}, 0, 0)
			if err != nil {
				next = latePages
			}
			next += n
		}
		if _, err := e.Poll(events, 1); err != nil { // that the peer is gone
			next = latePages
		}
		time.Sleep(20 * time.Microsecond)
	}
}

// TestLateWritesDoNotLand: another process writes; none, some or most of it has landed when the endpoint is closed. From then on nothing changes
// here, though that process goes on for as long as its side lets it, nor if it was stopped in the middle and runs again later.
func TestLateWritesDoNotLand(t *testing.T) {
	if provider := os.Getenv("TANDEM_FABRIC_TEST_WRITER"); provider != "" {
		lateWriter(t, provider)
		return
	}
	for _, provider := range software {
		t.Run(provider, func(t *testing.T) {
			cmd := exec.Command(os.Args[0], "-test.run=^TestLateWritesDoNotLand$")
			cmd.Env = append(os.Environ(), "TANDEM_FABRIC_TEST_WRITER="+provider)
			cmd.Stderr = os.Stderr
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			d, said, tell := open(t, provider), bufio.NewScanner(out), json.NewEncoder(in)
			dst, partly := make([]byte, latePage*latePages), 0
			for n := range 24 {
				if lateRoundLands(t, d, cmd.Process, said, tell, dst, n, n%4 == 3) {
					partly++
				}
			}
			t.Logf("%d times something had landed, but not everything", partly)
			in.Close()
			for said.Scan() {
			}
			if err := cmd.Wait(); err != nil {
				t.Errorf("the writer: %v", err)
			}
			if d.InUse() != 0 {
				t.Errorf("%d in use", d.InUse())
			}
		})
	}
}

// lateRoundLands closes an endpoint after n looks at what has landed, and says whether that was a part. With frozen the writer is stopped meanwhile.
func lateRoundLands(t *testing.T, d *Device, writer *os.Process, said *bufio.Scanner, tell *json.Encoder, dst []byte, n int, frozen bool) bool {
	t.Helper()
	clear(dst)
	e, err := d.Endpoint(latePages)
	if err != nil {
		t.Fatal(err)
	}
	k, err := d.Grant([]Memory{Of(dst)})
	if err != nil {
		t.Fatal(err)
	}
	if err := tell.Encode(lateRound{e.Name(), k.Targets()[0]}); err != nil {
		t.Fatal(err)
	}
	var name []byte
	for name == nil && said.Scan() {
		_, _ = fmt.Sscanf(said.Text(), "name %x", &name) // other lines are the test's own
	}
	if err := e.Peer(name); err != nil {
		t.Fatal(err)
	}
	events, landed := make([]Event, 1), 0
	for deadline := time.Now().Add(10 * time.Second); landed < n && landed < latePages; time.Sleep(10 * time.Microsecond) {
		got, err := e.Poll(events, 1)
		if err != nil || time.Now().After(deadline) {
			t.Fatal(landed, err)
		}
		landed += got
	}
	if frozen {
		if err := writer.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	partly := landed > 0 && bytes.IndexByte(dst, 0) >= 0
	for i := range dst { // they are somebody else's now, and the key still says otherwise
		dst[i] = 0xdd
	}
	if frozen {
		if err := writer.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(10 * time.Millisecond)
	if i := bytes.IndexByte(dst, 0xff); i >= 0 {
		t.Fatalf("round %d: byte %d of page %d was written after the endpoint was closed", n, i%latePage, i/latePage)
	}
	if err := k.Close(); err != nil {
		t.Fatal(err)
	}
	return partly
}

// TestKeys: a key that is closed, or was never given, lets nobody write; others go on.
func TestKeys(t *testing.T) {
	for _, provider := range software {
		t.Run(provider, func(t *testing.T) {
			a, b := open(t, provider), open(t, provider)
			for name, spoil := range map[string]func(*ends, *Write){
				"closed": func(e *ends, w *Write) {
					if err := e.key.Close(); err != nil {
						t.Fatal(err)
					}
				},
				"guessed":   func(e *ends, w *Write) { w.Key ^= 1 << 40 },
				"beyond":    func(e *ends, w *Write) { w.To += uint64(len(e.dst)) - 10 },
				"before":    func(e *ends, w *Write) { w.To -= 10 },
				"another's": func(e *ends, w *Write) { w.To += 1 << 20 },
			} {
				e := join(t, a, b, 8, 4096)
				for i := range e.src {
					e.src[i] = 0xff
				}
				w := e.page(0, 0, 64)
				spoil(e, &w)
				nFailed := 0
				e.post(t, w)
				events := make([]Event, 8)
				for range 200 {
					for _, end := range []*Endpoint{e.from, e.to} {
						n, _ := end.Poll(events, 1)
						for _, ev := range events[:n] {
							if ev.Kind == Landed {
								t.Errorf("%s: a write landed", name)
							}
							if ev.Kind == Failed {
								nFailed++
							}
						}
					}
					time.Sleep(50 * time.Microsecond)
				}
				if i := bytes.IndexByte(e.dst, 0xff); i >= 0 {
					t.Errorf("%s: byte %d was written", name, i)
				}
				t.Logf("%s: %d failures told", name, nFailed)
			}
			if a.InUse() == 0 {
				t.Error("nothing is counted")
			}
		})
	}
}

// TestRegistrations: what is written from is registered once; what may be written to has keys that differ each time.
func TestRegistrations(t *testing.T) {
	d := open(t, "tcp")
	b := make([]byte, 4096)
	one, err := d.Source(Of(b))
	if err != nil {
		t.Fatal(err)
	}
	two, err := d.Source(Of(b))
	if err != nil || one != two || d.InUse() != 1 {
		t.Errorf("registered %d times: %v", d.InUse(), err)
	}
	seen := make(map[uint64]bool)
	var keys []*Key
	for range 50 {
		k, err := d.Grant([]Memory{Of(b[:1024]), Of(b[1024:])})
		if err != nil {
			t.Fatal(err)
		}
		for _, target := range k.Targets() {
			if seen[target.Key] {
				t.Errorf("key %x comes again", target.Key)
			}
			seen[target.Key] = true
		}
		keys = append(keys, k)
	}
	if d.InUse() != 101 {
		t.Errorf("%d in use", d.InUse())
	}
	if err := d.Close(); err == nil {
		t.Error("a device was closed under its registrations")
	}
	for _, k := range keys {
		if err := errors.Join(k.Close(), k.Close()); err != nil {
			t.Error(err)
		}
	}
	if err := errors.Join(one.Close(), two.Close()); err != nil || d.InUse() != 0 {
		t.Errorf("%d left: %v", d.InUse(), err)
	}
}

// TestNothingLeaks opens and closes until a leak of descriptors would show.
func TestNothingLeaks(t *testing.T) {
	count := func() int {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(fds)
	}
	for _, provider := range software {
		d, other := open(t, provider), open(t, provider)
		round := func() {
			e := join(t, d, other, 8, 4096)
			e.post(t, e.page(0, 0, 512))
			events := make([]Event, 4)
			for landed, deadline := false, time.Now().Add(10*time.Second); !landed; { // a connection that is being made when its endpoint is closed costs a descriptor with libfabric 1.17
				for _, end := range []*Endpoint{e.from, e.to} {
					n, err := end.Poll(events, 1)
					if err != nil || time.Now().After(deadline) {
						t.Fatal(provider, err)
					}
					landed = landed || n > 0 && events[0].Kind == Landed
				}
			}
			if err := errors.Join(e.from.Close(), e.to.Close(), e.source.Close(), e.key.Close()); err != nil {
				t.Fatal(err)
			}
			e.source.r.users = 1 << 30 // the cleanup's turn
		}
		round()
		before := count()
		for range 20 {
			round()
		}
		if after := count(); after > before+4 {
			t.Errorf("%s: %d descriptors before, %d after", provider, before, after)
		}
		if d.InUse()+other.InUse() != 0 {
			t.Errorf("%s: %d in use", provider, d.InUse())
		}
	}
}

// TestClosedTwice: what is closed stays closed, and takes nothing along that came after it.
func TestClosedTwice(t *testing.T) {
	for _, provider := range software {
		d := open(t, provider)
		e, err := d.Endpoint(8)
		if err != nil {
			t.Fatal(err)
		}
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		later := new(Endpoint)
		inside.Lock()
		inside.ends[string(e.name)] = later
		inside.Unlock()
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		inside.Lock()
		if inside.ends[string(e.name)] != later {
			t.Errorf("%s: an endpoint closed twice made another of its name forgotten", provider)
		}
		delete(inside.ends, string(e.name))
		inside.Unlock()
		if err := errors.Join(d.Close(), d.Close()); err != nil {
			t.Error(err)
		}
		_, endpoint := d.Endpoint(8)
		_, grant := d.Grant([]Memory{Of(make([]byte, 4096))})
		for _, err := range []error{endpoint, grant} {
			if !errors.Is(err, ErrFabric) {
				t.Errorf("%s: a closed device says %v", provider, err)
			}
		}
	}
}

// A peer of this process that has closed already is refused: libfabric would read memory that is
// unmapped. Later endpoints are peers as before.
func TestClosedPeer(t *testing.T) {
	for _, provider := range software {
		d := open(t, provider)
		e, err := d.Endpoint(8)
		if err != nil {
			t.Fatal(err)
		}
		peer, err := d.Endpoint(8)
		if err != nil {
			t.Fatal(err)
		}
		if err := peer.Close(); err != nil {
			t.Fatal(err)
		}
		if err := e.Peer(peer.Name()); err == nil && provider == "shm" {
			t.Error("a closed endpoint of this process is taken for a peer")
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		join(t, d, d, 8, 4096)
	}
}

// TestBuildsElsewhere: where no Go file here uses cgo, the build would refuse C.
func TestBuildsElsewhere(t *testing.T) {
	c := build.Default
	c.GOOS, c.CgoEnabled = "darwin", true
	p, err := c.ImportDir(".", 0)
	if err != nil {
		t.Fatal(err)
	}
	if len(p.CgoFiles) != 0 || len(p.CFiles) != 0 {
		t.Errorf("cgo on darwin: %v and %v, want none", p.CgoFiles, p.CFiles)
	}
}

// TestRefusals name what is missing.
func TestRefusals(t *testing.T) {
	if d, err := Open(Options{Provider: "shm"}); errors.Is(err, ErrLibrary) {
		t.Skipf("needs libfabric (apt-get install libfabric1): %v", err)
	} else if err == nil {
		_ = d.Close() // only whether there is a library counts
	}
	for want, o := range map[string]Options{
		"want one of":                     {Provider: "pigeon"},
		"verbs":                           {Provider: "verbs", Address: "127.0.0.1"},
		"efa":                             {Provider: "efa"},
		"(tcp, address \"203.0.113.77\")": {Provider: "tcp", Address: "203.0.113.77"},
		"(tcp":                            {Provider: "tcp", GPU: true},
	} {
		d, err := Open(o)
		if err == nil {
			t.Errorf("%+v: opened %v", o, d.Info())
			_ = d.Close()
		} else if !errors.Is(err, ErrProvider) || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	d := open(t, "tcp")
	b := make([]byte, 64)
	m := Of(b)
	m.GPU = 0
	if _, err := d.Grant([]Memory{m}); err == nil || !strings.Contains(err.Error(), "FI_HMEM") {
		t.Errorf("GPU memory: %v", err)
	}
	m.GPU, m.OfDMABuf = Host, true
	if _, err := d.Grant([]Memory{m}); err == nil {
		t.Error("a dma-buf that there is not")
	}
	e, err := d.Endpoint(4)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range [][]byte{nil, make([]byte, 3), make([]byte, MaxName+1), bytes.Repeat([]byte{1}, 40)} {
		if err := e.Peer(name); err == nil {
			t.Errorf("a name of %d bytes was taken", len(name))
		}
	}
	if err := errors.Join(e.Close(), e.Close()); err != nil {
		t.Error(err)
	}
	if _, err := e.Poll(make([]Event, 1), 1); !errors.Is(err, ErrClosed) {
		t.Errorf("polling a closed endpoint: %v", err)
	}
	if _, err := e.Write(make([]Write, 1), 0, 0); !errors.Is(err, ErrClosed) {
		t.Errorf("writing to a closed endpoint: %v", err)
	}
	if err := e.Peer([]byte("x")); err == nil {
		t.Error("a closed endpoint took a peer")
	}
}

// TestLibraryMissing runs a program of its own, since a process opens the library once.
func TestLibraryMissing(t *testing.T) {
	if path := os.Getenv("TANDEM_FABRIC_TEST_LIBRARY"); path != "" {
		_, err := Open(Options{Provider: "tcp", Library: path})
		fmt.Println("said:", err, errors.Is(err, ErrLibrary))
		return
	}
	libc := "libc.so.6"
	for path, want := range map[string]string{"libnone.so": "libnone.so", libc: "has no fi_getinfo@FABRIC_1.3"} {
		cmd := exec.Command(os.Args[0], "-test.run=^TestLibraryMissing$", "-test.v")
		cmd.Env = append(os.Environ(), "TANDEM_FABRIC_TEST_LIBRARY="+path)
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), want) || !strings.Contains(string(out), " true\n") {
			t.Errorf("%s: %v\n%s", path, err, out)
		}
	}
}

// TestABI compiles abi.h beside the headers of the installed library: every size, offset and constant must be theirs.
func TestABI(t *testing.T) {
	file := filepath.Join(t.TempDir(), "abi.c")
	if err := os.WriteFile(file, []byte(abiCheck()), 0o600); err != nil {
		t.Fatal(err)
	}
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("gcc", "-std=gnu11", "-fsyntax-only", "-I", here, file).CombinedOutput()
	if strings.Contains(string(out), "rdma/fabric.h: No such file") {
		t.Skip("needs libfabric's headers (apt-get install libfabric-dev)")
	}
	if err != nil {
		t.Errorf("%v (it needs gcc)\n%s", err, out)
	}
}
