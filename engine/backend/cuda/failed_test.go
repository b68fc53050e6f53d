//go:build cgo && linux

package cuda

import (
	"errors"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// An error of memory leaves a device usable. An error of a kernel does not, and says so.
func TestFailedForGood(t *testing.T) {
	dev := openGPU(t, Options{Limits: benchLimits, Eager: true})
	defer dev.Close()
	if dev.info.twin == 0 {
		t.Skip("an error of a kernel would end the GPU for the other tests")
	}
	if _, err := dev.Alloc(backend.TokenRows, maxCols); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := dev.reserve(1<<42, "too much"); !errors.Is(err, backend.ErrMemory) || errors.Is(err, backend.ErrDevice) {
			t.Fatalf("too much memory: %v", err)
		}
	}
	x, err := dev.Alloc(backend.TokenRows, 8)
	if err != nil {
		t.Fatal(err)
	}
	step := func(rows int, f func()) error {
		s := &backend.Step{Tokens: make([]int32, rows), Positions: make([]int32, rows)}
		return dev.Replay(backend.Key{Tokens: rows}, s, f, nil)
	}
	if err := step(1, func() { dev.Scale(x, 1) }); err != nil {
		t.Fatalf("a step after an error of memory: %v", err)
	}
	wrong := func() { dev.record(dev.buf(x), op{kind: opRoute, direct: 1, experts: 2, topK: 1}) }
	for i, f := range []func(){wrong, func() { dev.Scale(x, 1) }} {
		if err := step(9+i, f); !errors.Is(err, backend.ErrDevice) || !strings.Contains(err.Error(), "more rows than it supports") {
			t.Errorf("step %d after an error of a kernel: %v", i, err)
		}
	}
}

// Scales with which few_mxfp4 would not be exact are refused, unless their numbers are zero.
func TestFewScales(t *testing.T) {
	for _, c := range []struct {
		code, two byte
		ok        bool
	}{{27, 1, true}, {160, 1, true}, {26, 0x88, true}, {0, 0, true}, {26, 0x10, false}, {161, 1, false}, {255, 0, false}} {
		data := make([]byte, 2*2*17)
		for i := 64; i < 68; i++ {
			data[i] = 127
		}
		data[2*16+3], data[64+2] = c.two, c.code // of the second row's first group
		m := backend.Tensor{Name: "experts", DType: backend.MXFP4, Shape: []int{2, 64}, Data: data}
		dev := openGPU(t, Options{Limits: benchLimits})
		_, err := dev.Load(m)
		if (err == nil) != c.ok || err != nil && (!errors.Is(err, backend.ErrShape) || !strings.Contains(err.Error(), "in row 1")) {
			t.Errorf("scale %d of numbers %#x: %v", c.code, c.two, err)
		}
		dev.Close()
	}
}
