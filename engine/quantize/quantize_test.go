package quantize_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/model"
	"github.com/tandem-serving/tandem/engine/quantize"
	"github.com/tandem-serving/tandem/engine/tokenizer"
)

// chats returns the questions and answers of a file of the built-in model's training, as prompts.
func chats(t *testing.T, file string) string {
	t.Helper()
	f, err := os.Open(filepath.Join("../builtin/train", file))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var b strings.Builder
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var q struct{ Prompt, Answer string }
		if err := json.Unmarshal(lines.Bytes(), &q); err != nil {
			t.Fatal(err)
		}
		if q.Answer != "" {
			fmt.Fprintf(&b, "<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n%s<|im_end|>\n", q.Prompt, q.Answer)
		}
	}
	return b.String()
}

// write converts a model into a new folder.
func write(t *testing.T, name string, o quantize.Options) (string, quantize.Result) {
	t.Helper()
	src, err := engine.OpenModel(name)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	dir := filepath.Join(t.TempDir(), "out")
	o.Threads = 2
	r, err := quantize.Write(context.Background(), src, dir, o)
	if err != nil {
		t.Fatal(err)
	}
	return dir, r
}

// logits returns the logits of each position of sequences, and the bytes of the model's weights.
func logits(t *testing.T, name, quantization string, sequences [][]int32) (all [][]float32, bytes int64) {
	t.Helper()
	l, err := engine.Load(engine.LoadOptions{Model: name, Device: "cpu", Threads: 2, KVMemory: 16 << 20, KVDType: "float32", Quantization: quantization})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, s := range sequences {
		if err := l.Logits(s, 0, func(_ int, row []float32) error { all = append(all, slices.Clone(row)); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	return all, l.WeightBytes
}

// divergence returns the mean Kullback-Leibler divergence of probabilities, and the largest.
func divergence(p, q [][]float32) (mean, most float64) {
	probabilities := func(row []float32) []float64 {
		logs, top, sum := make([]float64, len(row)), float64(slices.Max(row)), 0.0
		for _, v := range row {
			sum += math.Exp(float64(v) - top)
		}
		for i, v := range row {
			logs[i] = float64(v) - top - math.Log(sum)
		}
		return logs
	}
	for i := range p {
		a, b, kl := probabilities(p[i]), probabilities(q[i]), 0.0
		for j := range a {
			kl += math.Exp(a[j]) * (a[j] - b[j])
		}
		mean, most = mean+kl/float64(len(p)), max(most, kl)
	}
	return mean, most
}

// The built-in model's weights take at most 4.8 bits in all, and at 600 positions of questions that
// neither training nor calibration saw its probabilities diverge by at most 0.06 from those of the
// weights as they are stored.
func TestBuiltin(t *testing.T) {
	b, err := engine.ReadTokenizer(engine.Builtin)
	if err != nil {
		t.Fatal(err)
	}
	tok, err := tokenizer.Load(b.TokenizerJSON)
	if err != nil {
		t.Fatal(err)
	}
	ids := tok.Encode(chats(t, "heldout2.jsonl"), false)
	held := [][]int32{ids[:300], ids[300:600]}
	exact, stored := logits(t, engine.Builtin, "none", held)
	dir, r := write(t, engine.Builtin, quantize.Options{Group: quantize.Group, Text: chats(t, "trained.jsonl"), Sequences: 32, Length: 256})
	small, bytes := logits(t, dir, "int4", held)
	mean, most := divergence(exact, small)
	bits := 8 * float64(bytes) / (float64(stored) / 2)
	plain, _ := logits(t, engine.Builtin, "int4", held)
	before, worst := divergence(exact, plain)
	t.Logf("%+v: %.3f bits in all, divergence %.4f, at most %.2f; int4 made at load %.4f, %.2f", r, bits, mean, most, before, worst)
	if !(mean <= 0.06) || !(bits <= 4.8) {
		t.Errorf("the probabilities diverge by %.4f at %.3f bits a weight, at most 0.06 at 4.8 is allowed", mean, bits)
	}
}

// Models with fused matrices, reordered rows, experts and latents are nearer to the weights as they
// are stored than with int4 made at load. The models sample the calibration text.
func TestFamilies(t *testing.T) {
	for name, group := range map[string]int{"mha": 32, "gqa-tied": 32, "qwen3": 32, "phi3": 8, "glm4": 8, "gemma3": 8, "deepseek-v2-lite": 8} {
		path := filepath.Join("../model/testdata", name)
		dir, got := write(t, path, quantize.Options{Group: group, Sequences: 32, Length: 64})
		r, ids := rand.New(rand.NewPCG(1, 5)), make([]int32, 96)
		for i := range ids {
			ids[i] = r.Int32N(90)
		}
		exact, _ := logits(t, path, "none", [][]int32{ids})
		small, _ := logits(t, dir, "none", [][]int32{ids})
		plain, _ := logits(t, path, "int4", [][]int32{ids})
		a, _ := divergence(exact, small)
		b, _ := divergence(exact, plain)
		t.Logf("%s: %d matrices, %d tokens, divergence %.4f, int4 made at load %.4f", name, got.Matrices, got.Tokens, a, b)
		if !(a <= b) {
			t.Errorf("%s: the divergence is %.4f, of int4 made at load %.4f", name, a, b)
		}
	}
}

// Options and models that cannot be converted are refused, and leave no folder.
func TestRefusals(t *testing.T) {
	good := quantize.Options{Group: 32, Sequences: 2, Length: 16}
	with := func(f func(*quantize.Options)) quantize.Options { o := good; f(&o); return o }
	for name, c := range map[string]struct {
		model string
		o     quantize.Options
		says  string
	}{
		"integers":  {"../model/testdata/quantized/awq", good, "already"},
		"GGUF":      {"../model/testdata/gguf/llama.gguf", good, "already"},
		"fp8":       {"../model/testdata/deepseek-fp8", good, "already"},
		"gpt-oss":   {"../model/testdata/gpt-oss", good, "could not be loaded with integers"},
		"wrapped":   {"../model/testdata/gemma3-multimodal", good, "within a larger one"},
		"groups":    {engine.Builtin, with(func(o *quantize.Options) { o.Group = 512 }), "no multiple of groups of 512"},
		"inputs":    {"../model/testdata/glm4-moe", with(func(o *quantize.Options) { o.Group = 8 }), "no multiple of 8 divides them"},
		"odd group": {engine.Builtin, with(func(o *quantize.Options) { o.Group = 12 }), "multiple of 8"},
		"long":      {engine.Builtin, with(func(o *quantize.Options) { o.Length = 1 << 20 }), "at most 2048"},
		"many":      {engine.Builtin, with(func(o *quantize.Options) { o.Sequences = 1 << 30 }), "1048576 in all"},
		"short":     {engine.Builtin, with(func(o *quantize.Options) { o.Text = "few words" }), "fewer than a sequence"},
	} {
		src, err := engine.OpenModel(c.model)
		if err != nil {
			t.Fatal(name, err)
		}
		dir := filepath.Join(t.TempDir(), "out")
		_, err = quantize.Write(context.Background(), src, dir, c.o)
		if !errors.Is(err, quantize.ErrOption) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want %q", name, err, c.says)
		}
		if left, _ := filepath.Glob(dir + "*"); left != nil {
			t.Errorf("%s: %v is left", name, left)
		}
		_ = src.Close()
	}
	src, err := engine.OpenModel(engine.Builtin)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	if _, err := quantize.Write(context.Background(), src, t.TempDir(), good); !errors.Is(err, quantize.ErrOption) {
		t.Errorf("a folder that exists: %v", err)
	}
	for after := range 5 { // matrices
		ctx, stop := context.WithCancel(context.Background())
		dir, o, most := filepath.Join(t.TempDir(), "out"), good, 0
		o.Progress = func(done, _ int) {
			if most = done; done == after {
				stop()
			}
		}
		if after == 0 {
			stop()
		}
		if _, err := quantize.Write(ctx, src, dir, o); !errors.Is(err, context.Canceled) || most != after {
			t.Errorf("cancelled after %d matrices: %d, %v", after, most, err)
		}
		if left, _ := filepath.Glob(dir + "*"); left != nil {
			t.Errorf("%v is left", left)
		}
	}
}

// copyOf returns a copy of a model's folder, in which change replaces the content of each file.
func copyOf(t *testing.T, from string, change func(name string, data []byte) []byte) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.IsDir() {
			continue
		}
		path := filepath.Join(dir, e.Name())
		data, err := os.ReadFile(path)
		if err == nil {
			err = os.WriteFile(path, change(e.Name(), data), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// Weights that are NaN are refused by the name of their matrix, also where the calibration does not
// reach it.
func TestNaN(t *testing.T) {
	for name, matrix := range map[string]string{"mha": "model.layers.1.mlp.down_proj.weight", "mixtral": "model.layers.1.block_sparse_moe.experts.1.w2.weight"} {
		folder := copyOf(t, filepath.Join("../model/testdata", name), func(name string, data []byte) []byte {
			if name != "model.safetensors" {
				return data
			}
			var header map[string]struct {
				Offsets [2]int `json:"data_offsets"`
			}
			end := 8 + int(binary.LittleEndian.Uint64(data))
			if err := json.Unmarshal(data[8:end], &header); err != nil || header[matrix].Offsets[1] == 0 {
				t.Fatal(err, matrix)
			}
			at := end + header[matrix].Offsets[1]
			data[at-2], data[at-1] = 0xff, 0x7f
			return data
		})
		src, err := engine.OpenModel(folder)
		if err != nil {
			t.Fatal(err)
		}
		dir := filepath.Join(t.TempDir(), "out")
		_, err = quantize.Write(context.Background(), src, dir, quantize.Options{Group: 8, Sequences: 2, Length: 16, Threads: 2})
		if !errors.Is(err, quantize.ErrOption) || !strings.Contains(err.Error(), matrix+" has weights that are NaN") {
			t.Errorf("%s: %v", name, err)
		}
		if err := src.Close(); err != nil {
			t.Error(err)
		}
	}
}

// A name that ends in a slash is that of the folder. What an interrupted process left, or another
// one writes, stays as it is.
func TestFolder(t *testing.T) {
	src, err := engine.OpenModel("../model/testdata/mha")
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	o := quantize.Options{Group: 32, Sequences: 2, Length: 16, Threads: 2}
	dir := filepath.Join(t.TempDir(), "new", "out")
	if _, err := quantize.Write(context.Background(), src, dir+"/", o); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(dir), "*")); !slices.Equal(left, []string{dir}) {
		t.Errorf("the folder has %v", left)
	}
	dir = filepath.Join(t.TempDir(), "out")
	file := filepath.Join(dir+".part", "notes.txt")
	if err := errors.Join(os.Mkdir(dir+".part", 0o700), os.WriteFile(file, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := quantize.Write(context.Background(), src, dir, o); !errors.Is(err, quantize.ErrOption) || !strings.Contains(err.Error(), "out.part exists") {
		t.Errorf("next to a folder of an earlier run: %v", err)
	}
	if _, err := os.Stat(file); err != nil {
		t.Error(err)
	}
}

// The folders that modules.json names are part of a model for vectors.
func TestVectors(t *testing.T) {
	vectors := func(name string) model.Vectors {
		src, err := engine.OpenModel(name)
		if err != nil {
			t.Fatal(err)
		}
		b, err := src.Bundle()
		if err := errors.Join(err, src.Close()); err != nil {
			t.Fatal(err)
		}
		return b.Vectors
	}
	for _, name := range []string{"last", "mean", "scores"} {
		path := filepath.Join("../model/testdata/vectors", name)
		dir, _ := write(t, path, quantize.Options{Group: 8, Sequences: 2, Length: 16})
		if got, want := vectors(dir), vectors(path); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, want %+v", name, got, want)
		}
	}
}
