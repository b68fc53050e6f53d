//go:build cgo && linux

package cuda

import (
	"os"
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
// ten with experts; of other plans it is eight. cuda/model.md counts these as launches. With one
// order of sums nothing is within products, and neither are sums of many rows' experts. The
// model with experts has two layers: the second one has buffers of its own, so that the norm between
// them is by itself.
func TestFuseRow(t *testing.T) {
	for _, c := range []struct {
		dir           string
		rows, each    int
		deterministic bool
		as            model.Quantization
	}{
		{"../../builtin/model", 1, 8, false, 0}, {"../../builtin/model", 2, 8, false, model.INT4},
		{"../../builtin/model", 1, 8, true, model.INT4}, {"../../builtin/model", 1, 6, false, model.INT4},
		{"../../model/testdata/gpt-oss-mxfp4", 1, 12, true, 0}, {"../../model/testdata/gpt-oss-mxfp4", 1, 10, false, 0},
		{"../../model/testdata/gpt-oss-mxfp4", 2, 10, false, 0}, {"../../model/testdata/gpt-oss-mxfp4", 16, 13, false, 0},
	} {
		src, err := model.OpenDir(c.dir)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { src.Close() })
		dev := openGPU(t, Options{Limits: modelLimits, Eager: true, Deterministic: c.deterministic})
		if _, err := sitAs(t, src, dev, backend.F32, model.Options{Quantization: c.as}).Capture(c.rows, nil); err != nil {
			t.Fatal(err)
		}
		p := dev.plans[backend.Key{Tokens: c.rows, Outputs: c.rows}]
		for i := range max(1, src.Config.Layers-2) { // the last one has its own buffers
			if n := p.marks[i+1].at - p.marks[i].at; n != c.each {
				t.Errorf("%s, %d rows, deterministic %v: layer %d has %d operations, want %d", c.dir, c.rows, c.deterministic, i, n, c.each)
			}
		}
	}
}

// A layer with experts between other such layers is ten operations in a plan of one row.
func TestFuseMoE(t *testing.T) {
	src, err := model.OpenDir("../../model/testdata/gpt-oss-mxfp4")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { src.Close() })
	dev := openGPU(t, Options{Limits: modelLimits, Eager: true, unfused: true})
	if _, err := sit(t, src, dev, backend.F32).Capture(1, nil); err != nil {
		t.Fatal(err)
	}
	key := backend.Key{Tokens: 1, Outputs: 1}
	p := dev.plans[key]
	layer := slices.DeleteFunc(slices.Clone(p.ops[p.marks[0].at:p.marks[1].at]), func(o op) bool { return o.kind == opAngles })
	var ops []op
	var marks []stop
	for i := range 4 {
		ops = append(ops, layer...)
		marks = append(marks, stop{len(ops), i})
	}
	ops, marks = fuse(ops, marks)
	ops, marks = fuseMoE(ops, marks, key, true)
	want := []opKind{opAttention, opLinear, opNorm, opLinear, opRoute, opLinear, opLinear, opNorm, opLinear, opPlace}
	for i := range 2 {
		got := ops[marks[i].at:marks[i+1].at]
		if !slices.EqualFunc(got, want, func(o op, k opKind) bool { return o.kind == k }) {
			t.Fatalf("layer %d: %+v", i, got)
		}
		if got[4].direct != 1 || got[5].direct != 1 || got[6].from != 1 || got[6].b != got[2].a || got[7].a != got[2].a || got[7].b != 0 {
			t.Errorf("layer %d: %+v", i, got)
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

// Kernels that overlap have the bits of kernels one after the other: on the twin those of a graph on a
// device of an older capability, on a GPU those without a graph.
func TestOverlapBits(t *testing.T) {
	ran, gpu := 0, os.Getenv("TANDEM_CUDA_LIBRARY") != ""
	for _, c := range kernelCases() {
		if c.kv != nil && (gpu || c.name != "attention/8-2-64/bfloat16/0") {
			continue
		}
		ran++
		var results [2][][]float32
		for i, capability := range []string{"90", "89"} {
			t.Setenv("TANDEM_TWIN_CAPABILITY", capability)
			dev, err := c.open(Options{Limits: benchLimits, Eager: gpu && i == 1})
			if err != nil {
				t.Fatal(err)
			}
			if !gpu && dev.info.overlap != int32(1-i) {
				t.Fatalf("capability %s: overlap %d", capability, dev.info.overlap)
			}
			if results[i], err = c.run(dev, 3); err != nil {
				t.Fatal(err)
			}
			dev.Close()
		}
		if d := off(results[0], results[1]); d != 0 {
			t.Errorf("%s: off by %.2g", c.name, d)
		}
	}
	if ran < 50 {
		t.Errorf("%d cases", ran)
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
