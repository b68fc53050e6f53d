//go:build cgo && linux

package cuda

import (
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/model"
)

// Neighbouring operations in the layers of these models are fused, and the marks stay after
// the operations that store KV.
func TestFuse(t *testing.T) {
	for _, dir := range []string{"gqa-tied", "qwen3", "gpt-oss-mxfp4"} {
		src, err := model.OpenDir("../../model/testdata/" + dir)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { src.Close() })
		dev := openGPU(t, Options{Limits: modelLimits, Eager: true})
		if _, err := sit(t, src, dev, backend.F32).Capture(1, nil); err != nil {
			t.Fatal(err)
		}
		p := dev.plans[backend.Key{Tokens: 1, Outputs: 1}]
		if p == nil || len(p.marks) != src.Config.Layers {
			t.Fatalf("%s: %d layers, plan %+v", dir, src.Config.Layers, p)
		}
		begin := 0
		for _, m := range p.marks {
			var kinds []opKind
			for _, o := range p.ops[begin:m.at] {
				kinds = append(kinds, o.kind)
			}
			n := len(kinds)
			if n < 2 || !slices.Equal(kinds[n-2:], []opKind{opLinear, opPlace}) || p.ops[m.at-2].more[1].n == 0 || p.ops[m.at].kind != opAttention ||
				slices.Contains(kinds, opRope) || slices.Contains(kinds, opStoreKV) {
				t.Errorf("%s: layer %d up to its KV is %v", dir, m.layer, kinds)
			}
			begin = m.at
		}
		gated := 0
		for _, o := range p.ops {
			if o.kind == opGatedAct {
				t.Errorf("%s: a gate is by itself", dir)
			}
			if o.kind == opLinear && o.act > 0 {
				gated++
			}
		}
		if gated != src.Config.Layers {
			t.Errorf("%s: %d of %d gates are a product with what they let through", dir, gated, src.Config.Layers)
		}
	}
}

// A layer of a plan of one row is six operations where norms and residuals are within products, or
// thirteen with experts; of other plans it is eight. cuda/model.md counts these as launches.
func TestFuseRow(t *testing.T) {
	t.Setenv("TD_KERNELS", "fused")
	for _, c := range []struct {
		dir        string
		rows, each int
	}{{"../../builtin/model", 1, 6}, {"../../builtin/model", 2, 8}, {"../../model/testdata/gpt-oss-mxfp4", 1, 13}} {
		src, err := model.OpenDir(c.dir)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { src.Close() })
		dev := openGPU(t, Options{Limits: modelLimits, Eager: true})
		if _, err := sit(t, src, dev, backend.F32).Capture(c.rows, nil); err != nil {
			t.Fatal(err)
		}
		p := dev.plans[backend.Key{Tokens: c.rows, Outputs: c.rows}]
		for i := range max(1, src.Config.Layers-2) { // the last one has its own buffers
			if n := p.marks[i+1].at - p.marks[i].at; n != c.each {
				t.Errorf("%s, %d rows: layer %d has %d operations, want %d", c.dir, c.rows, i, n, c.each)
			}
		}
		if v := dev.Variant(); !strings.Contains(v, "-tried4-") {
			t.Errorf("variant %s", v)
		}
	}
}

// Nothing is fused across a mark, and what is fused leaves the marks in order.
func TestFuseMarks(t *testing.T) {
	linear := func(dst address) op { return op{kind: opLinear, n: 8, k: 4, a: 1, w: 2, dst: dst} }
	ops := []op{linear(10), linear(11), {kind: opAngles, dst: 5}, linear(12), linear(13), linear(14)}
	got, marks := fuse(ops, []stop{{2, 0}, {3, 1}, {6, 2}})
	var counts []int
	for _, o := range got {
		n := 1
		for _, m := range o.more {
			if m.n > 0 {
				n++
			}
		}
		counts = append(counts, n)
	}
	if !slices.Equal(counts, []int{1, 2, 3}) || got[0].kind != opAngles || !slices.Equal(marks, []stop{{2, 0}, {2, 1}, {3, 2}}) {
		t.Errorf("%v, marks %v", counts, marks)
	}
}

// A gate is not fused if a later operation reads its other half.
func TestFuseUnread(t *testing.T) {
	linear := func(from, to address) op { return op{kind: opLinear, n: 8, k: 4, a: from, w: 2, dst: to} }
	gate := []op{linear(1, 10), linear(1, 11), {kind: opGatedAct, n: 8, dst: 10, a: 10, b: 11}}
	for read, next := range map[bool]op{false: linear(1, 11), true: {kind: opAdd, n: 8, dst: 1, a: 1, b: 11}} {
		got, _ := fuse(append(slices.Clone(gate), next, linear(11, 12)), nil)
		if (got[0].act > 0) == read {
			t.Errorf("read %v: %+v", read, got)
		}
	}
}

// A fused operation has the bits of the operations that it replaces, with KV of either type.
func TestFusedBits(t *testing.T) {
	cases := []kernelCase{placeCase(backend.BF16, false), placeCase(backend.BF16, true), placeCase(backend.F32, true)}
	for _, c := range kernelCases() {
		if strings.HasPrefix(c.name, "gated/") && c.rows < 4 || strings.HasPrefix(c.name, "joined/") && c.rows < 4 {
			cases = append(cases, c)
		}
	}
	for _, c := range cases {
		var results [2][][]float32
		for i, apart := range []bool{false, true} {
			dev := openGPU(t, Options{Limits: benchLimits, unfused: apart})
			var err error
			if results[i], err = c.run(dev, 3); err != nil {
				t.Fatal(err)
			}
			dev.Close()
		}
		if d := off(results[0], results[1]); d != 0 {
			t.Errorf("%s: off by %.2g", c.name, d)
		}
	}
}
