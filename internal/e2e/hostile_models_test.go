//go:build linux

package e2e

import (
	"bytes"
	"context"
	le "encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// hostileFolder is a folder that an attacker prepared, and a part of the message that
// refuses it.
type hostileFolder struct {
	name, want string
	spoil      func(t *testing.T, dir string)
}

const (
	folderBound = 20 * time.Second // until a folder is refused, on a busy machine
	folderRoom  = 64 << 20         // resident memory beyond that of a sound folder
)

// replaceBy removes a file of the folder and has f make another in its place.
func replaceBy(file string, f func(path string) error) func(*testing.T, string) {
	return func(t *testing.T, dir string) {
		path := filepath.Join(dir, file)
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		if err := f(path); err != nil {
			t.Fatal(err)
		}
	}
}

func fifo(path string) error   { return syscall.Mkfifo(path, 0o600) }
func folder(path string) error { return os.Mkdir(path, 0o700) }

func linkTo(target string) func(string) error {
	return func(path string) error { return os.Symlink(target, path) }
}

func written(text string) func(string) error {
	return func(path string) error { return os.WriteFile(path, []byte(text), 0o600) }
}

// sparse writes 64 MiB that take no memory here.
func sparse(path string) error {
	return errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, 64<<20))
}

// socketAt leaves a socket's file behind.
func socketAt(path string) error {
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(fd)
	wd, err := os.Getwd()
	if err != nil {
		return err
	}
	defer os.Chdir(wd) // the name of a socket is short
	if err := os.Chdir(filepath.Dir(path)); err != nil {
		return err
	}
	return syscall.Bind(fd, &syscall.SockaddrUnix{Name: filepath.Base(path)})
}

// withKeys sets keys of config.json.
func withKeys(keys map[string]any) func(*testing.T, string) {
	return func(t *testing.T, dir string) { editConfig(t, dir, keys) }
}

// withTensor changes one tensor of the header.
func withTensor(edit func(tensor map[string]any)) func(*testing.T, string) {
	return func(t *testing.T, dir string) {
		editHeader(t, dir, func(h map[string]map[string]any) { edit(h[hostileTensor]) })
	}
}

const hostileTensor = "model.norm.weight"

// withHeader writes a header of that text, and the length that it claims; 0: its own.
func withHeader(text string, length uint64) func(*testing.T, string) {
	return func(t *testing.T, dir string) {
		if length == 0 {
			length = uint64(len(text))
		}
		put(t, filepath.Join(dir, "model.safetensors"), append(le.LittleEndian.AppendUint64(nil, length), text...))
	}
}

// withIndex replaces the weights by an index that names a file.
func withIndex(file string) func(*testing.T, string) {
	return func(t *testing.T, dir string) {
		if err := os.Rename(filepath.Join(dir, "model.safetensors"), filepath.Join(dir, "part.bin")); err != nil {
			t.Fatal(err)
		}
		put(t, filepath.Join(dir, "model.safetensors.index.json"), []byte(`{"weight_map":{"`+hostileTensor+`":`+file+`}}`))
	}
}

var hostileModels = []hostileFolder{
	{"weights are a FIFO", "FIFO", replaceBy("model.safetensors", fifo)},
	{"weights are a folder", "folder", replaceBy("model.safetensors", folder)},
	{"weights are a socket", "socket", replaceBy("model.safetensors", socketAt)},
	{"weights are /dev/zero", "device", replaceBy("model.safetensors", linkTo("/dev/zero"))},
	{"weights are /etc/passwd", "model.safetensors", replaceBy("model.safetensors", linkTo("/etc/passwd"))},
	{"weights are a loop of links", "too many levels", replaceBy("model.safetensors", linkTo("model.safetensors"))},
	{"weights link to nothing", "safetensors", replaceBy("model.safetensors", linkTo("nowhere"))},
	{"weights are empty", "model.safetensors", replaceBy("model.safetensors", written(""))},
	{"weights are 7 bytes", "model.safetensors", replaceBy("model.safetensors", written("1234567"))},
	{"configuration is a FIFO", "FIFO", replaceBy("config.json", fifo)},
	{"configuration is a folder", "folder", replaceBy("config.json", folder)},
	{"configuration is a socket", "socket", replaceBy("config.json", socketAt)},
	{"configuration is /dev/zero", "device", replaceBy("config.json", linkTo("/dev/zero"))},
	{"configuration is /dev/tty", "config.json", replaceBy("config.json", linkTo("/dev/tty"))},
	{"configuration is /etc/passwd", "config.json", replaceBy("config.json", linkTo("/etc/passwd"))},
	{"configuration is a loop of links", "too many levels", replaceBy("config.json", linkTo("config.json"))},
	{"configuration is empty", "config.json", replaceBy("config.json", written(""))},
	{"configuration is deep", "config.json", replaceBy("config.json", written(strings.Repeat("[", 1<<20)))},
	{"configuration is a list", "config.json", replaceBy("config.json", written("[]"))},
	{"configuration is 64 MiB", "config.json", replaceBy("config.json", sparse)},
	{"generation configuration is a FIFO", "FIFO", replaceBy("generation_config.json", fifo)},
	{"header is longer than the file", "model.safetensors", withHeader("{}", 1<<20)},
	{"header of 2^63 bytes", "model.safetensors", withHeader("{}", 1<<63)},
	{"header of 2^64-1 bytes", "model.safetensors", withHeader("{}", 1<<64-1)},
	{"header is not JSON", "model.safetensors", withHeader("{{{{", 0)},
	{"header is deep", "model.safetensors", withHeader(strings.Repeat(`{"a":`, 100_000), 0)},
	{"header is empty", "model.", withHeader("{}", 0)},
	{"tensor twice", "model.safetensors", withHeader(`{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}1234`, 0)},
	{"tensor with a negative shape", hostileTensor, withTensor(func(m map[string]any) { m["shape"] = []int{-64} })},
	{"tensor with an overflowing shape", hostileTensor, withTensor(func(m map[string]any) { m["shape"] = []int{1 << 40, 1 << 40, 1 << 40} })},
	{"tensor with a shape of 2^62", hostileTensor, withTensor(func(m map[string]any) { m["shape"] = []int{1 << 62} })},
	{"tensor that ends before it begins", hostileTensor, withTensor(func(m map[string]any) { m["data_offsets"] = []int{64, 0} })},
	{"tensor beyond the file", hostileTensor, withTensor(func(m map[string]any) { m["data_offsets"] = []int{1 << 50, 1<<50 + 256} })},
	{"tensor before the file", hostileTensor, withTensor(func(m map[string]any) { m["data_offsets"] = []int{-256, 0} })},
	{"tensor of an unknown type", hostileTensor, withTensor(func(m map[string]any) { m["dtype"] = "F4096" })},
	{"tensor with another shape", hostileTensor, withTensor(func(m map[string]any) { m["shape"] = []int{8, 8} })},
	{"index names ../", "..", withIndex(`"../part.bin"`)},
	{"index names /etc/passwd", "/etc/passwd", withIndex(`"/etc/passwd"`)},
	{"index names no file", "index", withIndex(`{}`)},
	{"index is deep", "index", withIndex(strings.Repeat("[", 1<<20))},
	{"layers of 2^40", "num_hidden_layers", withKeys(map[string]any{"num_hidden_layers": 1 << 40})},
	{"no layers", "num_hidden_layers", withKeys(map[string]any{"num_hidden_layers": 0})},
	{"negative heads", "num_attention_heads", withKeys(map[string]any{"num_attention_heads": -4})},
	{"width of 2^31", "hidden_size", withKeys(map[string]any{"hidden_size": 1 << 31})},
	{"vocabulary of 2^40", "vocab_size", withKeys(map[string]any{"vocab_size": 1 << 40})},
	{"vocabulary is a text", "vocab_size", withKeys(map[string]any{"vocab_size": "many"})},
	{"context of 2^62", "max_position_embeddings", withKeys(map[string]any{"max_position_embeddings": 1 << 62})},
	{"unknown architecture", "EvilForCausalLM", withKeys(map[string]any{"architectures": []string{"EvilForCausalLM"}})},
}

// withNormalizer writes a small tokenizer.json with a normalizer.
func withNormalizer(text string) func(*testing.T, string) {
	return func(t *testing.T, dir string) {
		put(t, filepath.Join(dir, "tokenizer.json"), []byte(`{"normalizer":`+text+`,"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false},"decoder":{"type":"ByteLevel"},"model":{"type":"BPE","vocab":{"a":0},"merges":[]}}`))
	}
}

const doubling = `{"type":"Replace","pattern":{"String":"a"},"content":"aa"}`

var hostileTokenizers = []hostileFolder{
	{"a million characters for one", "normalizer", withNormalizer(`{"type":"Replace","pattern":{"String":"a"},"content":"` + strings.Repeat("a", 1_000_000) + `"}`)},
	{"60 doublings", "normalizer", withNormalizer(`{"type":"Sequence","normalizers":[` + strings.Repeat(doubling+",", 59) + doubling + `]}`)},
	{"10,000 replacements", "normalizer", withNormalizer(`{"type":"Sequence","normalizers":[` + strings.Repeat(`{"type":"NFC"},`, 9_999) + `{"type":"NFC"}]}`)},
	{"long prefix", "normalizer", withNormalizer(`{"type":"Prepend","prepend":"` + strings.Repeat("a", 1_000_000) + `"}`)},
	{"deep normalizer", "tokenizer", withNormalizer(strings.Repeat(`{"type":"Sequence","normalizers":[`, 100_000))},
	{"empty pattern", "normalizer", withNormalizer(`{"type":"Replace","pattern":{"String":""},"content":"a"}`)},
	{"unknown normalizer", "Evil", withNormalizer(`{"type":"Evil"}`)},
	{"tokenizer is a FIFO", "FIFO", replaceBy("tokenizer.json", fifo)},
	{"tokenizer is /dev/zero", "device", replaceBy("tokenizer.json", linkTo("/dev/zero"))},
	{"tokenizer is a folder", "folder", replaceBy("tokenizer.json", folder)},
	{"id of 2^31-1", "tokenizer", replaceBy("tokenizer.json", written(`{"pre_tokenizer":{"type":"ByteLevel"},"decoder":{"type":"ByteLevel"},"model":{"type":"BPE","vocab":{"a":2147483647},"merges":[]}}`))},
	{"tokenizer is not JSON", "tokenizer", replaceBy("tokenizer.json", written("{"))},
}

// Hostile folders of models and tokenizers are refused by name, at once and in bounded
// memory, next to streams that notice nothing. A seeded sample runs without soaking.
func TestBinaryHostileModels(t *testing.T) {
	if len(hostileModels) != 48 || len(hostileTokenizers) != 12 {
		t.Fatalf("%d models and %d tokenizers, want 48 and 12", len(hostileModels), len(hostileTokenizers))
	}
	models := sample(hostileModels, 12, 15)
	tokenizers := sample(hostileTokenizers, 4, 15)
	f := startHostileFleet(t, hostileFlags{})
	b := newBystanders(f.cluster, 15)
	b.during("hostile folders", func() {
		_, idle := runFolder(t, "logits", goodModel(t, hostileBase), "--tokens", "1")
		for _, c := range models {
			dir := goodModel(t, hostileBase)
			c.spoil(t, dir)
			refusedFolder(t, c, idle, "logits", dir, "--tokens", "1")
		}
		for _, c := range tokenizers {
			dir := t.TempDir()
			c.spoil(t, dir)
			refusedFolder(t, c, idle, "gateway", "--port", "0", "--upstream", "http://127.0.0.1:1", "--tokenizer", dir)
		}
	})
}

const hostileBase = "../../engine/model/testdata/mha"

// runFolder runs a command to its end and returns its messages, empty where it
// succeeded, and its peak resident memory, at least this process's at the start.
func runFolder(t *testing.T, args ...string) (message string, peak int64) {
	t.Helper()
	path := binary(t)
	ctx, cancel := context.WithTimeout(t.Context(), folderBound)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	var out bytes.Buffer
	cmd.Stderr = &out
	err := cmd.Run()
	if usage, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
		peak = usage.Maxrss << 10
	}
	if ctx.Err() != nil {
		return "still running after " + folderBound.String() + ": " + out.String(), peak
	}
	if err == nil {
		return "", peak
	}
	return out.String(), peak
}

// refusedFolder checks that the command refuses its folder in a line of its own.
func refusedFolder(t *testing.T, c hostileFolder, idle int64, args ...string) {
	t.Helper()
	message, peak := runFolder(t, args...)
	lines := strings.Split(strings.TrimSpace(message), "\n")
	last := lines[len(lines)-1]
	if !strings.HasPrefix(last, "tandem "+args[0]+": ") || !strings.Contains(last, c.want) || strings.Contains(message, "goroutine ") || len(last) > 4096 {
		t.Errorf("%s: want a refusal with %q:\n%.2000s", c.name, c.want, message)
	}
	if peak > idle+folderRoom {
		t.Errorf("%s: %d MiB resident at the peak, a sound folder takes %d", c.name, peak>>20, idle>>20)
	}
}
