package engine

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/memory"
)

// The default of KV memory leaves the weights and as much again as it takes.
func TestDefaultKVFitsTheLimit(t *testing.T) {
	if got := defaultKV(0, 5<<30); got != kvMemory {
		t.Errorf("without a limit: %d", got)
	}
	for seed := range uint64(1000) {
		r := rand.New(rand.NewPCG(seed, 0))
		limit, weights := 1+r.Int64N(1<<35), r.Int64N(1<<35)
		got := defaultKV(limit, weights)
		if got < 0 || got > kvMemory || got > 0 && weights+2*got > limit {
			t.Fatalf("seed %d: %d bytes of KV with weights of %d in %d", seed, got, weights, limit)
		}
		if got < kvMemory && weights < limit && weights+2*(got+1) <= limit {
			t.Fatalf("seed %d: %d bytes of KV with weights of %d in %d, and more would fit", seed, got, weights, limit)
		}
	}
}

// What cannot be loaded is refused with its name, and options with their flag;
// neither leaves a device behind that Close would trip over.
func TestLoadRefuses(t *testing.T) {
	const dir = "model/testdata/mha"
	gguf := t.TempDir()
	if err := os.WriteFile(filepath.Join(gguf, "tiny-Q4_0.gguf"), []byte("GGUF\x03\x00\x00\x00\x01\x00"), 0o600); err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct {
		o    LoadOptions
		kind error
		want string
	}{
		"kernels":     {LoadOptions{Model: dir, Kernels: "sse"}, ErrOption, "--cpu-kernels sse"},
		"threads":     {LoadOptions{Model: dir, Threads: 9999}, ErrOption, "--threads 9999, want at most 1024"},
		"device":      {LoadOptions{Model: dir, Device: "tpu"}, ErrOption, `--device "tpu"`},
		"a format":    {LoadOptions{Model: dir, Quantization: "awq"}, ErrOption, `--quantization "awq"`},
		"another":     {LoadOptions{Model: "model/testdata/quantized/w4a16", Quantization: "gptq"}, ErrOption, `--quantization "gptq": the weights of w4a16 are stored as compressed-tensors`},
		"none":        {LoadOptions{Model: dir, Quantization: "compressed-tensors"}, ErrOption, `--quantization "compressed-tensors": the weights of mha are not quantized`},
		"GGUF":        {LoadOptions{Model: dir, Quantization: "gguf"}, ErrOption, "GGUF"},
		"a GGUF file": {LoadOptions{Model: filepath.Join(gguf, "tiny-Q4_0.gguf")}, ErrModel, "tiny-Q4_0.gguf: gguf: malformed file: number of tensors of 8 bytes at 8, the file has 2 more"},
		"its folder":  {LoadOptions{Model: gguf}, ErrModel, "holds tiny-Q4_0.gguf and no config.json: give the path of this file itself"},
		"no memory":   {LoadOptions{Model: dir, MemoryLimit: 1}, ErrOption, "--kv-cache-memory-bytes 0"},
		"no folder":   {LoadOptions{Model: "testdata/nowhere"}, ErrModel, "testdata/nowhere"},
	} {
		l, err := Load(c.o)
		if l != nil || !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %v with %q", what, err, c.kind, c.want)
		}
	}
	for q, want := range map[string]string{"none": "/cpu-", "int8": "/int8/cpu-", "int4": "/int4/cpu-"} {
		l, err := Load(LoadOptions{Model: dir, KVMemory: 4 << 20, Quantization: q})
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(l.Class, want) || (q == "none") == strings.Contains(l.Class, "/int") {
			t.Errorf("the class of %s is %s", q, l.Class)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
	for folder, formats := range map[string][]string{
		"w4a16": {"compressed-tensors"}, "w8a8": {"compressed-tensors"}, "nvfp4": {"compressed-tensors"}, "awq": {"awq", "awq_marlin"}, "gptq-8": {"gptq", "gptq_marlin"},
	} {
		for _, q := range formats {
			if _, err := Check(LoadOptions{Model: "model/testdata/quantized/" + folder, Quantization: q}); err != nil {
				t.Error(err)
			}
			if _, err := PlanMemory(PlanOptions{Model: "model/testdata/quantized/" + folder, Quantization: q, KVMemory: 16 << 20}); err != nil {
				t.Error(err)
			}
		}
	}
	l, err := Load(LoadOptions{Model: dir, KVMemory: 4 << 20, ChatTemplate: "{{ x }}"})
	if err != nil {
		t.Fatal(err)
	}
	if l.Bundle.ChatTemplate != "{{ x }}" {
		t.Errorf("the template is %q", l.Bundle.ChatTemplate)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

// A checkpoint in fp8 takes about the memory that it has on disk. Plans state this before
// weights exist, and it is a numerics class of its own.
func TestFP8TakesWhatItHasOnDisk(t *testing.T) {
	const dir = "model/testdata/deepseek-fp8"
	l, err := Load(LoadOptions{Model: dir, Device: "cpu", KVMemory: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	info, err := os.Stat(dir + "/model.safetensors")
	if err != nil {
		t.Fatal(err)
	}
	plan, err := PlanMemory(PlanOptions{Model: dir, KVMemory: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	const header = 16 << 10 // names, at most
	if n := l.WeightBytes; n > info.Size() || n < info.Size()-header {
		t.Errorf("%d bytes of weights, %d on disk", n, info.Size())
	}
	if want := memory.Bytes(l.WeightBytes); !strings.Contains(plan.Lines[0], fmt.Sprint(want)) {
		t.Errorf("planned: %s; loaded: %s", plan.Lines[0], want)
	}
	if !strings.Contains(l.Class, "/fp8/cpu-") {
		t.Errorf("the class is %s", l.Class)
	}
}

// The rotation is that of the longest sequence that is served: nodes with contexts on different
// sides of the training's compute different keys, and are of different classes.
func TestLoadContextChoosesRotation(t *testing.T) {
	classes := map[int]string{}
	for _, n := range []int{100, 128, 129, 0} {
		l, err := Load(LoadOptions{Model: "model/testdata/phi3", Threads: 1, KVMemory: 8 << 20, MaxModelLen: n, Device: "cpu"})
		if err != nil {
			t.Fatal(err)
		}
		if long := n == 0 || n > 128; l.Source.Config.Rope.Stretched != long {
			t.Errorf("a context of %d: long factors are %v", n, l.Source.Config.Rope.Stretched)
		}
		classes[n] = l.Class
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
	if classes[100] != classes[128] || classes[129] != classes[0] || classes[128] == classes[129] {
		t.Errorf("classes %v", classes)
	}
}

// KV memory that is asked for and has more blocks than a node can have is lowered, with a warning of
// both values.
func TestLoadWarnsOfBlocks(t *testing.T) {
	for asked, want := range map[int64]string{32 << 30: "", 100 << 40: `from="100 TiB" to="32 GiB" blocks=1048576`} {
		var log bytes.Buffer
		l, err := Load(LoadOptions{Model: "builtin", Device: "cpu", KVMemory: asked, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		if got := strings.Contains(log.String(), "KV memory is lowered"); got != (want != "") || !strings.Contains(log.String(), want) {
			t.Errorf("%d bytes: %s, want %q", asked, &log, want)
		}
	}
}

// KV memory that is asked for and exceeds the memory is served, with a warning.
func TestLoadWarnsOfMemory(t *testing.T) {
	for limit, want := range map[int64]bool{0: false, 1 << 30: false, 5 << 20: true} {
		var log bytes.Buffer
		l, err := Load(LoadOptions{Model: "builtin", KVMemory: 64 << 20, MemoryLimit: limit, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		if got := strings.Contains(log.String(), "KV memory and weights exceed the memory"); got != want {
			t.Errorf("with %d bytes: warned %t, want %t: %s", limit, got, want, &log)
		}
	}
}
