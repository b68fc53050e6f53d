//go:build cgo && linux

package cuda

import (
	"bytes"
	"errors"
	"math"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/model"
	"github.com/tandem-serving/tandem/engine/sample"
)

// there is one page as the device has it, here is the host's copy.
func (c *CUDA) there(region, block int) []byte {
	n := c.kv.spec.PageBytes
	if c.info.twin == 0 {
		page := make([]byte, n)
		c.dev.download(page, c.kv.regions[region]+address(block*n))
		return page
	}
	return c.dev.memory(c.kv.regions[region]+address(block*n), n)
}

func (c *CUDA) here(region, block int) []byte {
	n := c.kv.spec.PageBytes
	return c.KVRegion(region)[block*n : (block+1)*n]
}

// A prompt that one device computes continues on another. Each layer's pages are in the
// first one's host memory when its mark is called, while later layers are still to be
// computed. They are in the second one's device memory before its next step, however late
// both are.
func TestMirror(t *testing.T) {
	for _, dir := range []string{"gqa-tied", "mistral-window", "qwen3-next"} {
		for _, late := range []string{"0", "3", "8"} {
			if dir != "gqa-tied" && late != "3" {
				continue
			}
			t.Run(dir+"/"+late, func(t *testing.T) {
				t.Setenv("TANDEM_TWIN_LATE", late)
				src, err := model.OpenDir("../../model/testdata/" + dir)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { src.Close() })
				mapped := 0
				a := openGPU(t, Options{Limits: modelLimits, Mirror: true, MapKV: func(n int) ([]byte, error) {
					mapped += n
					return make([]byte, n+1), nil
				}})
				b := openGPU(t, Options{Limits: modelLimits, Mirror: true})
				from, to := sit(t, src, a, backend.F32), sit(t, src, b, backend.F32)
				passes(t, src, from, to, a, b)
				if want := a.kv.spec.Blocks * a.kv.spec.PageBytes * a.kv.spec.Regions; mapped != want {
					t.Errorf("%d bytes were mapped, want %d", mapped, want)
				}
			})
		}
	}
}

// settle waits for an arrival.
func settle(a backend.Arrival, err error) error {
	for complete := false; err == nil && !complete; {
		complete, err = a()
	}
	return err
}

// passes has a prompt computed in two chunks at one seat and its last token at another.
func passes(t *testing.T, src *model.Source, from, to *seat, a, b *CUDA) {
	const total = 41
	spec := kvSpec(src, backend.F32)
	step := func(start, end, shift int) *backend.Step { // blocks are shift places on
		s := &backend.Step{}
		span := backend.Span{Tokens: int32(end - start), Start: int32(start)}
		for g, group := range spec.Groups {
			var table []int32
			for p := range (end + group.BlockTokens - 1) / group.BlockTokens {
				table = append(table, int32(g*modelLimits.Blocks+(p*5+shift)%modelLimits.Blocks))
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
	layers, fetched := 0, 0
	for _, chunk := range [][2]int{{0, 20}, {20, total - 1}} {
		s := step(chunk[0], chunk[1], 0)
		s.Fetch = s.Spans[0].Tables
		if err := from.Step(s, func(layer int) {
			layers++
			place := spec.Layers[layer]
			for _, block := range s.Fetch[place.Group] {
				if fetched++; !bytes.Equal(a.here(place.Region, int(block)), a.there(place.Region, int(block))) {
					t.Errorf("layer %d: block %d is not in the host's memory", layer, block)
				}
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	if layers != 2*len(spec.Layers) || fetched == 0 {
		t.Fatalf("%d marks and %d pages of %d layers", layers, fetched, len(spec.Layers))
	}
	// The network.
	land := make([][]int32, len(spec.Groups))
	old, now := step(0, total-1, 0).Spans[0].Tables, step(0, total-1, 3).Spans[0].Tables
	for _, place := range spec.Layers {
		for i, block := range old[place.Group] {
			copy(b.here(place.Region, int(now[place.Group][i])), a.here(place.Region, int(block)))
		}
		land[place.Group] = now[place.Group]
	}
	arrival, err := b.Land(land)
	if err != nil {
		t.Fatal(err)
	}
	other := step(0, 3, 9) // uses none of the blocks
	if err := to.Step(other, nil); err != nil || b.kv.follow {
		t.Errorf("a step without the blocks waits for them: %v, %v", b.kv.follow, err)
	}
	complete := b.copied(b.kv.copies)
	if err := to.Step(step(total-1, total, 3), nil); err != nil || b.kv.follow == complete {
		t.Errorf("a step with the blocks waits for them: %v, copied before: %v, %v", b.kv.follow, complete, err)
	}
	if err := settle(arrival, nil); err != nil {
		t.Error(err)
	}
	got := to.Download(nil, to.Logits())
	if err := from.Step(step(total-1, total, 0), nil); err != nil {
		t.Fatal(err)
	}
	if want := from.Download(nil, from.Logits()); !slices.Equal(got, want) || math.IsNaN(float64(got[0])) {
		t.Errorf("logits are not those of the device that computed the prompt: %v, want %v", got[:4], want[:4])
	}
	// All layers at once, as of a prompt that was computed before.
	for r := range spec.Regions {
		clear(a.KVRegion(r))
	}
	if err := a.Fetch(old); err != nil {
		t.Fatal(err)
	}
	for _, place := range spec.Layers {
		for _, block := range old[place.Group] {
			if !bytes.Equal(a.here(place.Region, int(block)), a.there(place.Region, int(block))) {
				t.Errorf("block %d was not fetched", block)
			}
		}
	}
	for what, blocks := range map[string][][]int32{"no groups": {}, "a block that there is not": slices.Repeat([][]int32{{int32(spec.Blocks)}}, len(spec.Groups))} {
		if err := errors.Join(a.Fetch(blocks), settle(a.Land(blocks))); !errors.Is(err, backend.ErrShape) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
