//go:build cgo && linux

package kvtransfer

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	mrand "math/rand/v2"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/tandem-serving/tandem/kvtransfer/fabric"
)

// deviceMemory stands for a GPU's: memory beside that of the host.
type deviceMemory struct {
	memory
	gpu   int
	wrong uint32 // what its checksums are wrong by
	err   error
}

func (d *deviceMemory) KVError() error { return d.err }

func (d *deviceMemory) KVAddress(i int) (uintptr, int) {
	return uintptr(unsafe.Pointer(&d.memory[i][0])), d.gpu
}

func (d *deviceMemory) KVDigest(region int, page int32) uint32 {
	return crc32.Checksum(d.page(small, region, page), crc32.MakeTable(crc32.Castagnoli)) ^ d.wrong
}

// TestDeviceToDevice: pages go from one device's memory to the other's, past the hosts', with what their owner compares them with. A writer or a
// reader that has no device, and one to whom they travel over TCP, has the same pages in its own memory.
func TestDeviceToDevice(t *testing.T) {
	pages, from := []int32{5, 2, 7}, []int32{0, 1, 3}
	for _, tr := range fabricTransports(t) {
		for _, c := range []struct {
			name     string
			out, in  bool // there is a device
			tcp      bool
			wantFrom bool // out of the writer's device
			wantTo   bool // into the reader's
		}{
			{"both", true, true, false, true, true}, {"writer", true, false, false, true, false}, {"reader", false, true, false, false, true}, {"over TCP", true, true, true, false, false},
		} {
			t.Run(tr.name+"/"+c.name, func(t *testing.T) {
				there, here := &deviceMemory{memory: newMemory(small, 8), gpu: -1}, &deviceMemory{memory: newMemory(small, 8), gpu: -1}
				p := newPair(t, tr, small, 8, func(r *ReaderOptions, w *WriterOptions) {
					if c.out {
						w.Device = there
					}
					if c.in {
						r.Device = here
					}
					if c.tcp {
						w.Transport = OverTCP
					}
				})
				rng := mrand.New(mrand.NewPCG(3, 4))
				p.src.randomize(rng)
				there.randomize(rng)
				g := p.grant(t, time.Minute, pages...)
				push := p.open(t, g)
				p.sendAll(t, push, from...)
				if err := push.Wait(t.Context()); err != nil || push.Direct() != c.wantFrom {
					t.Fatalf("direct %v: %v", push.Direct(), err)
				}
				e := p.log.over(g.Lease)
				src, dst, other := p.src, p.dst, here.memory
				if c.wantFrom {
					src = there.memory
				}
				if c.wantTo {
					dst, other = other, dst
				}
				for region := range small.Regions {
					for i, page := range pages {
						if !bytes.Equal(dst.page(small, region, page), src.page(small, region, from[i])) {
							t.Errorf("region %d, page %d differs", region, page)
						}
					}
					if bytes.ContainsFunc(other[region], func(r rune) bool { return r != 0 }) {
						t.Errorf("region %d of the other memory was written", region)
					}
				}
				if n := len(e.Digests); (n == small.Regions*len(pages)) != c.wantTo || !c.wantTo && n > 0 {
					t.Errorf("%d digests", n)
				}
				for _, d := range e.Digests {
					if d.CRC != here.KVDigest(d.Region, d.Page) {
						t.Errorf("page %d of region %d has %08x, its digest is %08x", d.Page, d.Region, here.KVDigest(d.Region, d.Page), d.CRC)
					}
				}
			})
		}
	}
}

// TestDeviceChecksums: a page that is not what its writer says is for the owner of a device to notice, and is noticed here where it lands in the host's memory.
func TestDeviceChecksums(t *testing.T) {
	for _, in := range []bool{true, false} {
		t.Run(fmt.Sprint("into a device ", in), func(t *testing.T) {
			there, here := &deviceMemory{memory: newMemory(small, 8), gpu: -1, wrong: 1}, &deviceMemory{memory: newMemory(small, 8), gpu: -1}
			p := newPair(t, fabricTransports(t)[1], small, 8, func(r *ReaderOptions, w *WriterOptions) {
				if w.Device = there; in {
					r.Device = here
				}
			})
			g := p.grant(t, time.Minute, 4)
			push := p.open(t, g)
			p.sendAll(t, push, 1)
			err := push.Wait(t.Context())
			e := p.log.over(g.Lease)
			if !in && (!errors.Is(err, ErrChecksum) || e.Kind != Failed) {
				t.Errorf("%v: %+v", err, e)
			}
			if in {
				e.Mismatch()
			}
			if s := p.reader.Stats(); s.ChecksumFailures != 1 {
				t.Errorf("%d checksum failures", s.ChecksumFailures)
			}
			if in && (err != nil || len(e.Digests) != small.Regions || e.Digests[0].CRC == here.KVDigest(e.Digests[0].Region, e.Digests[0].Page)) {
				t.Errorf("%v: %+v", err, e)
			}
		})
	}
}

// TestDeviceRefused: memory that a provider does not reach is refused where it is registered, and nothing stays; so is a device without checksums.
func TestDeviceRefused(t *testing.T) {
	gpu := &deviceMemory{memory: newMemory(small, 8)}
	for _, tr := range fabricTransports(t) {
		reader, writer := fabricDevices(t, tr.fabric) // its end looks for what is left
		ro := ReaderOptions{Node: "d", Layout: small, Memory: gpu.memory, Device: gpu, OnEvent: func(Event) {}, Listen: tr.listen, Transport: OverRDMA, Fabric: reader}
		_, rerr := NewReader(ro)
		_, werr := NewWriter(WriterOptions{Node: "p", Layout: small, Memory: gpu.memory, Device: gpu, Transport: OverRDMA, Fabric: writer})
		for _, err := range []error{rerr, werr, CheckDevice(reader, gpu)} {
			if !errors.Is(err, fabric.ErrFabric) || !strings.Contains(err.Error(), "FI_HMEM") {
				t.Errorf("%s: %v", tr.name, err)
			}
		}
		if err := CheckDevice(reader, &deviceMemory{memory: gpu.memory, gpu: -1, err: ErrArguments}); !errors.Is(err, ErrArguments) {
			t.Errorf("%s: memory that the network cannot access: %v", tr.name, err)
		}
		ro.Unchecked = true
		if _, err := NewReader(ro); !errors.Is(err, ErrArguments) {
			t.Errorf("%s: without checksums: %v", tr.name, err)
		}
	}
}
