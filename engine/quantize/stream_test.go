package quantize

import (
	"bytes"
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/model"
)

// The files are the same bytes whether matrices, buffers and KV stay in memory or are dropped after
// each operation, and whether the model writes all sequences at once or one after the other, from
// matrices that stay or that are read for each token.
func TestStreamed(t *testing.T) {
	for name, group := range map[string]int{"mha": 32, "phi3": 8, "gemma4-ple": 8, "gemma4-moe": 8, "qwen3-moe": 8, "deepseek-v2-lite": 8} {
		src, err := model.OpenDir(filepath.Join("../model/testdata", name))
		if err != nil {
			t.Fatal(err)
		}
		var want []byte
		for _, s := range []streaming{{resident: true, budget: math.MaxInt64 / 4}, {budget: 1}, {budget: 30 << 10}} {
			dir := filepath.Join(t.TempDir(), "out")
			o := Options{Group: group, Sequences: 3, Length: 12, Seed: 3, Threads: 1, streaming: s}
			if _, err := Write(context.Background(), src, dir, o); err != nil {
				t.Fatalf("%s, %+v: %v", name, s, err)
			}
			got, err := os.ReadFile(filepath.Join(dir, "model.safetensors"))
			if err != nil {
				t.Fatal(err)
			}
			if want == nil {
				want = got
			}
			if !bytes.Equal(got, want) {
				t.Errorf("%s, %+v: the file differs from that of a model that stays in memory", name, s)
			}
		}
		if err := src.Close(); err != nil {
			t.Error(err)
		}
	}
}

// A model that writes its text takes the memory that it may have, and no more than all of its
// matrices and KV take. One that is given a text takes none of it.
func TestMemoryOfTheWriter(t *testing.T) {
	src, err := engine.OpenModel(engine.Builtin)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	need := func(text string, memory int64) (n Need) {
		t.Helper()
		stop := errors.New("enough")
		ctx, cancel := context.WithCancelCause(t.Context())
		_, err := Write(ctx, src, filepath.Join(t.TempDir(), "out"), Options{
			Group: 32, Sequences: 1, Length: 12, Text: text, Threads: 1, Memory: memory,
			Start: func(got Need) { n = got; cancel(stop) },
		})
		if err == nil || n.Memory == 0 {
			t.Fatalf("%v: needs %+v", err, n)
		}
		return n
	}
	least, all, more := need("", 1).Memory, need("", 1<<40).Memory, need("", 1<<50).Memory
	if all <= least || more != all {
		t.Errorf("%d bytes at least, %d and %d of plenty", least, all, more)
	}
	const text = "one two three four five six seven eight nine ten eleven twelve thirteen"
	if without, with := need(text, 0).Memory, need(text, 1<<40).Memory; without != with {
		t.Errorf("with a text %d and %d bytes", without, with)
	}
}

// The weights have no name that loads before they are complete.
func TestIncomplete(t *testing.T) {
	src, err := model.OpenDir("../model/testdata/mha")
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	dir, seen, layers := filepath.Join(t.TempDir(), "out"), 0, 0
	var need Need
	_, err = Write(context.Background(), src, dir, Options{
		Group: 32, Sequences: 2, Length: 16, Threads: 2,
		Start: func(n Need) {
			need = n
			if left, _ := filepath.Glob(filepath.Join(dir+"*", "*")); left != nil {
				t.Errorf("before the start there is %v", left)
			}
		},
		Progress: func(done, total int) {
			seen++
			part, err := model.OpenDir(dir + ".part")
			if err == nil {
				_, err = part.Checkpoint()
			}
			if err == nil {
				t.Errorf("after %d of %d matrices the folder loads", done, total)
			}
		},
		Layer: func(done, total int) {
			if layers++; done != layers || total != src.Config.Layers {
				t.Errorf("layer %d of %d, want %d of %d", done, total, layers, src.Config.Layers)
			}
		},
	})
	if err != nil || seen == 0 || layers != src.Config.Layers {
		t.Fatalf("%d matrices, %d layers, %v", seen, layers, err)
	}
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		t.Fatal(err)
	}
	total := int64(0)
	for _, f := range files {
		info, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		total += info.Size()
	}
	if need.Disk > total || total > need.Disk+16<<10 { // config.json grows
		t.Errorf("the folder has %d bytes, the need was %d", total, need.Disk)
	}
}

// A pair of matrices that vLLM computes as one and that have different bits is found.
func TestApart(t *testing.T) {
	const a, e = "model.layers.0.self_attn.", "model.layers.1.mlp.experts."
	for _, c := range []struct {
		wide string
		want [2]string
	}{
		{"", [2]string{}},
		{a + "v_proj.weight", [2]string{a + "q_proj.weight", a + "v_proj.weight"}},
		{a + "o_proj.weight", [2]string{}},
		{"model.layers.0.mlp.up_proj.weight", [2]string{"model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"}},
		{"model.layers.0.mlp.down_proj.weight", [2]string{}},
		{e + "1.down_proj.weight", [2]string{e + "0.down_proj.weight", e + "1.down_proj.weight"}},
	} {
		j := &job{scales: map[string]scaling{}}
		for _, m := range []string{
			a + "q_proj.weight", a + "k_proj.weight", a + "v_proj.weight", a + "o_proj.weight", "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight",
			"model.layers.0.mlp.down_proj.weight", e + "0.down_proj.weight", e + "1.down_proj.weight",
		} {
			j.matrices, j.scales[m] = append(j.matrices, m), scaling{bits: 4}
			if m == c.wide {
				j.scales[m] = scaling{bits: 8}
			}
		}
		if got := j.apart(); got != c.want {
			t.Errorf("%q: %q, want %q", c.wide, got, c.want)
		}
	}
}
