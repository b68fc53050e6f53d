//go:build cgo && linux

package cuda

import (
	"errors"
	"hash/crc32"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/model"
	"github.com/tandem-serving/tandem/engine/sample"
)

// A prompt continues on another device whose memory the network writes to. Each layer's
// checksums are complete when its mark is called, and the host's copies are not touched. The
// second device detects a flipped bit, and without one its logits are the first one's.
func TestDirect(t *testing.T) {
	for _, late := range []string{"0", "5"} {
		t.Run(late, func(t *testing.T) {
			t.Setenv("TANDEM_TWIN_LATE", late)
			src, err := model.OpenDir("../../model/testdata/mistral-window")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { src.Close() })
			a, b := openGPU(t, Options{Limits: modelLimits, Mirror: true}), openGPU(t, Options{Limits: modelLimits, Mirror: true})
			from, to := sit(t, src, a, backend.F32), sit(t, src, b, backend.F32)
			passesDirectly(t, src, from, to, a, b)
			for r := range a.kv.spec.Regions {
				if slices.ContainsFunc(append(slices.Clone(a.KVRegion(r)), b.KVRegion(r)...), func(x byte) bool { return x != 0 }) {
					t.Errorf("region %d was copied to the host", r)
				}
			}
		})
	}
}

func passesDirectly(t *testing.T, src *model.Source, from, to *seat, a, b *CUDA) {
	const total = 41
	spec := kvSpec(src, backend.F32)
	step := func(start, end int) *backend.Step {
		s := &backend.Step{}
		span := backend.Span{Tokens: int32(end - start), Start: int32(start)}
		for g, group := range spec.Groups {
			var table []int32
			for p := range (end + group.BlockTokens - 1) / group.BlockTokens {
				table = append(table, int32(g*modelLimits.Blocks+p*5%modelLimits.Blocks))
			}
			span.Tables = append(span.Tables, table)
		}
		for p := start; p < end; p++ {
			s.Tokens, s.Positions = append(s.Tokens, int32(p*7%90)), append(s.Positions, int32(p))
		}
		s.Spans = []backend.Span{span}
		if end == total {
			s.Outputs, s.Sampled = []backend.Output{{Row: int32(end - start - 1), Position: total, Params: sample.Params{}}}, make([]int32, 1)
		}
		return s
	}
	castagnoli := crc32.MakeTable(crc32.Castagnoli)
	s := step(0, total-1)
	s.Digest = s.Spans[0].Tables
	var pages []backend.PageDigest
	if err := from.Step(s, func(layer int) {
		place := spec.Layers[layer]
		for _, block := range s.Digest[place.Group] {
			p := backend.PageDigest{Region: place.Region, Page: block, CRC: a.KVDigest(place.Region, block)}
			if want := crc32.Checksum(a.there(place.Region, int(block)), castagnoli); p.CRC != want {
				t.Errorf("layer %d: block %d has %08x, want %08x", layer, block, p.CRC, want)
			}
			pages = append(pages, p)
			b.write(t, place.Region, int(block), a.there(place.Region, int(block))) // the network
		}
	}); err != nil {
		t.Fatal(err)
	}
	if err := settle(b.Verify(pages)); err != nil || len(pages) < 2*len(spec.Layers) {
		t.Fatalf("%d pages: %v", len(pages), err)
	}
	p := pages[len(pages)/2]
	page := slices.Clone(b.there(p.Region, int(p.Page)))
	page[len(page)/3] ^= 4
	b.write(t, p.Region, int(p.Page), page)
	if err := settle(b.Verify(pages)); !errors.Is(err, backend.ErrDigest) {
		t.Errorf("a flipped bit: %v", err)
	}
	b.write(t, p.Region, int(p.Page), a.there(p.Region, int(p.Page)))
	if err := to.Step(step(total-1, total), nil); err != nil {
		t.Fatal(err)
	}
	got := to.Download(nil, to.Logits())
	if err := from.Step(step(total-1, total), nil); err != nil {
		t.Fatal(err)
	}
	if want := from.Download(nil, from.Logits()); !slices.Equal(got, want) {
		t.Errorf("logits are not those of the device that computed the prompt: %v, want %v", got[:4], want[:4])
	}
	if err := a.Digest(s.Digest); err != nil || a.KVDigest(p.Region, p.Page) != p.CRC {
		t.Errorf("computed again: %08x, want %08x: %v", a.KVDigest(p.Region, p.Page), p.CRC, err)
	}
	for _, err := range []error{
		a.Digest(nil), a.Digest(slices.Repeat([][]int32{{int32(spec.Blocks)}}, len(spec.Groups))),
		settle(a.Verify([]backend.PageDigest{{Region: spec.Regions}})), settle(a.Verify([]backend.PageDigest{{Page: -1}})), settle(a.Verify([]backend.PageDigest{{Page: int32(spec.Blocks)}})),
	} {
		if !errors.Is(err, backend.ErrShape) {
			t.Errorf("blocks that there are not: %v", err)
		}
	}
}

// Memory that the driver does not prepare for the network refuses direct transfers and serves
// everything else. A page that has arrived is flushed before its checksum is computed.
func TestDirectRefused(t *testing.T) {
	lib := openTwin(t)
	t.Cleanup(func() { lib.refuse("", false, 0, 0) })
	for _, refused := range []bool{true, false} {
		dev := openGPU(t, Options{Limits: benchLimits, Mirror: true})
		defer dev.Close()
		if dev.info.twin == 0 {
			t.Skip("a GPU refuses nothing")
		}
		if refused {
			lib.refuse("direct", false, 1, 1)
		}
		if err := dev.AllocKV(backend.UniformKV(3, 4, 16, 1, 8, backend.F32)); err != nil {
			t.Fatal(err)
		}
		if err := dev.KVError(); refused != (err != nil) || refused && !strings.Contains(err.Error(), "region 2 of 3: direct: out of memory") {
			t.Errorf("refused %v: %v", refused, err)
		}
		page := backend.PageDigest{Region: 2, Page: 1, CRC: crc32.Checksum(dev.there(2, 1), crc32.MakeTable(crc32.Castagnoli))}
		lib.refuse("flush", false, 0, 1)
		if err := settle(dev.Verify([]backend.PageDigest{page})); !errors.Is(err, backend.ErrMemory) || errors.Is(err, backend.ErrDevice) || dev.KVDigest(2, 1) != 0 {
			t.Errorf("not flushed: checksum %08x: %v", dev.KVDigest(2, 1), err)
		}
		if err := settle(dev.Verify([]backend.PageDigest{page})); err != nil {
			t.Errorf("flushed: %v", err)
		}
	}
}

// write puts a page to the device as a network does.
func (c *CUDA) write(t *testing.T, region, block int, page []byte) {
	at := c.kv.regions[region] + address(block*c.kv.spec.PageBytes)
	if c.info.twin != 0 {
		copy(c.dev.memory(at, len(page)), page)
	} else if !c.dev.upload(at, page) || !c.dev.wait() {
		t.Fatal(c.failed("writing a page"))
	}
}
