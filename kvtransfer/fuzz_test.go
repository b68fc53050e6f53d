package kvtransfer

import (
	"bytes"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/kvtransfer/fabric"
	"github.com/tandem-serving/tandem/kvtransfer/lease"
)

var someKey = lease.Key{Epoch: 0x1122334455667788, Slot: 3, Gen: 9}

// FuzzGrant decodes anything, with and without a right checksum; what it accepts must encode to the same bytes and keep its bounds.
func FuzzGrant(f *testing.F) {
	g := grant{key: someKey, layout: small, duration: time.Second, tls: true, node: "decode-0", addrs: []string{"10.0.0.1:7000", "[::1]:7000"}, pages: []int32{5, 0, 77}}
	f.Add(g.encode())
	g = grant{key: someKey, layout: small, duration: 1, addrs: []string{""}, pages: make([]int32, 300)}
	f.Add(g.encode())
	g = grant{key: someKey, layout: small, duration: 1, node: "d", addrs: []string{"a:1"}, pages: make([]int32, 5), runs: []Run{{Pages: 3, Regions: small.Regions}, {Pages: 2, Regions: 1}}}
	f.Add(g.encode())
	f.Add([]byte("TKVG"))
	f.Add(make([]byte, grantFixed+4))
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, err := decodeGrant(b); err != nil && !errors.Is(err, ErrGrant) && !errors.Is(err, ErrVersion) {
			t.Fatalf("error of no kind: %v", err)
		}
		b = bytes.Clone(b)
		if len(b) >= grantFixed+4 {
			b[5] &= grantTLS | grantUnchecked
			seal(b)
		}
		g, err := decodeGrant(b)
		if err != nil {
			return
		}
		if len(g.pages) > len(b)/4 || len(g.addrs) > maxGrantAddrs || g.duration <= 0 || g.layout.validate() != nil {
			t.Fatalf("accepted %+v", g)
		}
		inRuns := 0
		for _, r := range g.runs {
			if inRuns += r.Pages; r.Pages < 1 || r.Regions < 1 || r.Regions > g.layout.Regions {
				t.Fatalf("accepted %+v", g)
			}
		}
		if len(g.runs) > 0 && inRuns != len(g.pages) {
			t.Fatalf("accepted %+v", g)
		}
		if again := g.encode(); !bytes.Equal(again, b) {
			t.Fatalf("%x decodes to %+v, which encodes to %x", b, g, again)
		}
	})
}

// FuzzMessages decodes anything as each message of a connection; what is accepted must survive another round.
func FuzzMessages(f *testing.F) {
	h := hello{version: Version, kind: dataConn, session: 4, epoch: 5, layout: small, node: "prefill-0"}
	f.Add(h.encode())
	w := welcome{version: Version, status: refusedLayout, epoch: 5, layout: small, node: "decode-0"}
	f.Add(w.encode())
	b := make([]byte, max(controlSize, sharedSize))
	(&control{kind: msgAbort, code: goneChecksum, key: someKey, value: 6, text: "why"}).encode(b)
	f.Add(bytes.Clone(b[:controlSize]))
	(&frame{key: someKey, region: 7, count: 2, index: [maxBatch]uint32{1, 2}, crc: [maxBatch]uint32{3, 4}}).encode(b[:frameSize])
	f.Add(bytes.Clone(b[:frameSize]))
	(&frame{key: someKey, region: 7, count: 2, index: [maxBatch]uint32{1, 2}, src: [maxBatch]uint32{5, 6}, number: 7}).encode(b[:sharedSize])
	f.Add(bytes.Clone(b[:sharedSize]))
	f.Add((&memoryMessage{session: 4, epoch: 5, nPages: 6, offsets: []uint64{0, 1 << 20}}).encode())
	f.Add((&fabricMessage{provider: "verbs", endpoint: "\x02\x00", place: 3}).encode())
	f.Add((&fabricMessage{fixed: true, provider: "verbs", endpoint: "x", targets: []fabric.Target{{At: 1, Key: 2}, {At: 3, Key: 4}}}).encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		b = append(bytes.Clone(b), make([]byte, 1024)...)
		for _, reseal := range []bool{false, true} {
			fuzzMessage(t, b[:helloSize], reseal, magicHello, new(hello), (*hello).decode, (*hello).encode)
			fuzzMessage(t, b[:welcomeSize], reseal, magicWelcome, new(welcome), (*welcome).decode, (*welcome).encode)
			fuzzMessage(t, b[:controlSize], reseal, magicControl, new(control), (*control).decode, func(c *control) []byte {
				b := make([]byte, controlSize)
				c.encode(b)
				return b
			})
			for _, size := range []int{frameSize, sharedSize} {
				fuzzMessage(t, b[:size], reseal, magicFrame, new(frame), (*frame).decode, func(f *frame) []byte {
					b := make([]byte, size)
					f.encode(b)
					return b
				})
			}
			fuzzMessage(t, b[:memorySize(2)], reseal, magicMemory, new(memoryMessage),
				func(m *memoryMessage, b []byte) error { return m.decode(b, 2) }, (*memoryMessage).encode)
			for _, targets := range []int{0, 2} {
				fuzzMessage(t, b[:fabricSize(targets)], reseal, magicFabric, new(fabricMessage),
					func(m *fabricMessage, b []byte) error { return m.decode(b, targets) }, (*fabricMessage).encode)
			}
		}
	})
}

func fuzzMessage[M any](t *testing.T, b []byte, reseal bool, magic uint32, m *M, decode func(*M, []byte) error, encode func(*M) []byte) {
	b = bytes.Clone(b)
	if reseal {
		le.PutUint32(b, magic)
		seal(b)
	}
	if err := decode(m, b); err != nil {
		if !errors.Is(err, ErrProtocol) {
			t.Fatalf("error of no kind: %v", err)
		}
		return
	}
	again := new(M)
	if err := decode(again, encode(m)); err != nil || !reflect.DeepEqual(m, again) {
		t.Fatalf("%+v became %+v, %v", m, again, err)
	}
}

// TestGrantOfRunsThatLieIsRefused seals grants that no reader writes: runs that do not cover the pages, or that the version does not
// have.
func TestGrantOfRunsThatLieIsRefused(t *testing.T) {
	sealed := func(runs []Run, change func(b []byte)) error {
		g := grant{key: someKey, layout: small, duration: 1, node: "d", addrs: []string{"a"}, pages: make([]int32, 4), runs: runs}
		b := g.encode()
		change(b)
		seal(b)
		_, err := decodeGrant(b)
		return err
	}
	same := func([]byte) {}
	good := []Run{{Pages: 3, Regions: small.Regions}, {Pages: 1, Regions: 1}}
	if err := sealed(good, same); err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{
		"too few pages":     sealed([]Run{{Pages: 3, Regions: 1}}, same),
		"too many pages":    sealed([]Run{{Pages: 3, Regions: 1}, {Pages: 2, Regions: 1}}, same),
		"no pages":          sealed([]Run{{Pages: 4, Regions: 1}, {Pages: 0, Regions: 1}}, same),
		"2^32-1 pages":      sealed([]Run{{Pages: 4, Regions: 1}, {Pages: -1, Regions: 1}}, same),
		"no regions":        sealed([]Run{{Pages: 4, Regions: 0}}, same),
		"too many regions":  sealed([]Run{{Pages: 4, Regions: small.Regions + 1}}, same),
		"cut off":           sealed(good, func(b []byte) { b[7] = maxRuns }),
		"runs in version 1": sealed(good, func(b []byte) { b[4] = Version }),
		"none in version 2": sealed(nil, func(b []byte) { b[4] = grantVersion }),
	} {
		if !errors.Is(err, ErrGrant) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestEveryFlippedBitIsFound damages each bit of each message.
func TestEveryFlippedBitIsFound(t *testing.T) {
	h := hello{version: Version, kind: controlConn, session: 1, epoch: 2, layout: small, node: strings.Repeat("n", maxName)}
	w := welcome{version: Version, layout: small, node: "x"}
	c := control{kind: msgRenew, key: someKey, value: 1, text: strings.Repeat("y", maxName+50)}
	f := frame{key: someKey, region: 1, count: maxBatch}
	g := grant{key: someKey, layout: small, duration: 1, node: "n", addrs: []string{"a"}, pages: []int32{1, 2}}
	runs := g
	runs.runs = []Run{{Pages: 1, Regions: small.Regions}, {Pages: 1, Regions: 1}}
	cb, fb, sb := make([]byte, controlSize), make([]byte, frameSize), make([]byte, sharedSize)
	c.encode(cb)
	f.encode(fb)
	f.encode(sb)
	mm := memoryMessage{session: 1, epoch: 2, nPages: 3, offsets: []uint64{0, 1 << 20}}
	fm := fabricMessage{provider: "p", endpoint: "e", targets: []fabric.Target{{At: 1, Key: 2}}}
	for name, m := range map[string]struct {
		b      []byte
		decode func([]byte) error
	}{
		"hello":   {h.encode(), new(hello).decode},
		"welcome": {w.encode(), new(welcome).decode},
		"control": {cb, new(control).decode},
		"frame":   {fb, new(frame).decode},
		"shared":  {sb, new(frame).decode},
		"memory":  {mm.encode(), func(b []byte) error { return new(memoryMessage).decode(b, 2) }},
		"fabric":  {fm.encode(), func(b []byte) error { return new(fabricMessage).decode(b, 1) }},
		"runs":    {runs.encode(), func(b []byte) error { _, err := decodeGrant(b); return err }},
		"grant":   {g.encode(), func(b []byte) error { _, err := decodeGrant(b); return err }},
	} {
		if err := m.decode(m.b); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for bit := range len(m.b) * 8 {
			m.b[bit/8] ^= 1 << (bit % 8)
			if m.decode(m.b) == nil {
				t.Errorf("%s: bit %d flipped and nobody saw", name, bit)
			}
			m.b[bit/8] ^= 1 << (bit % 8)
		}
	}
	var cut control
	if err := cut.decode(cb); err != nil || cut.text != strings.Repeat("y", maxName) {
		t.Errorf("a long text became %q, %v", cut.text, err)
	}
}
