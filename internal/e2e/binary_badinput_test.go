//go:build linux

package e2e

import (
	le "encoding/binary"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// refusedStart runs a command that must end by itself with exit status 2 (or the
// one given), in one line that says what was wrong, and without a crash.
func refusedStart(t *testing.T, what string, status int, want []string, args ...string) {
	t.Helper()
	_, errOut, err := tandem(t, nil, args...)
	var exit *exec.ExitError
	lines := strings.Split(strings.TrimSpace(errOut), "\n")
	last := lines[len(lines)-1]
	if !errors.As(err, &exit) || exit.ExitCode() != status {
		t.Errorf("%s: %v, want exit status %d\n%s", what, err, status, errOut)
		return
	}
	if !strings.HasPrefix(last, "tandem "+args[0]+": ") || strings.Contains(errOut, "goroutine ") {
		t.Errorf("%s: does not end in one line of its own:\n%s", what, errOut)
	}
	said := last
	if i := slices.IndexFunc(lines, func(line string) bool { return strings.HasSuffix(line, " settings cannot be used:") }); i >= 0 {
		said = strings.Join(lines[i+1:], "\n")
	}
	for _, w := range want {
		if !strings.Contains(said, w) {
			t.Errorf("%s: no %q in %q", what, w, said)
		}
	}
}

// goodModel copies a checkpoint, for tests to break; a second file system link
// would change the committed one.
func goodModel(t *testing.T, from string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "broken")
	if err := os.CopyFS(dir, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
	return dir
}

func put(t *testing.T, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

// editConfig changes keys of config.json; nil removes one.
func editConfig(t *testing.T, dir string, keys map[string]any) {
	t.Helper()
	path := filepath.Join(dir, "config.json")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var c map[string]any
	if err := json.Unmarshal(text, &c); err != nil {
		t.Fatal(err)
	}
	for k, v := range keys {
		if c[k] = v; v == nil {
			delete(c, k)
		}
	}
	if text, err = json.Marshal(c); err != nil {
		t.Fatal(err)
	}
	put(t, path, text)
}

// editHeader changes the header of model.safetensors.
func editHeader(t *testing.T, dir string, edit func(map[string]map[string]any)) {
	t.Helper()
	path := filepath.Join(dir, "model.safetensors")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	n := le.LittleEndian.Uint64(data)
	var h map[string]map[string]any
	if err := json.Unmarshal(data[8:8+n], &h); err != nil {
		t.Fatal(err)
	}
	edit(h)
	text, err := json.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	put(t, path, append(append(le.LittleEndian.AppendUint64(nil, uint64(len(text))), text...), data[8+n:]...))
}

// Whatever is wrong with a model's folder, the start ends with a line that names
// the folder, the file or tensor, and the value.
func TestBinaryBadModels(t *testing.T) {
	const weights = "model.safetensors"
	cut := func(keep int) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			data, err := os.ReadFile(filepath.Join(dir, weights))
			if err != nil {
				t.Fatal(err)
			}
			if keep < 0 {
				keep = len(data) / 2
			}
			put(t, filepath.Join(dir, weights), data[:keep])
		}
	}
	file := func(name, text string) func(*testing.T, string) {
		return func(t *testing.T, dir string) { put(t, filepath.Join(dir, name), []byte(text)) }
	}
	config := func(key string, value any) func(*testing.T, string) {
		return func(t *testing.T, dir string) { editConfig(t, dir, map[string]any{key: value}) }
	}
	without := func(name string) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			if err := os.Remove(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for what, c := range map[string]struct {
		spoil func(t *testing.T, dir string)
		want  []string
	}{
		"no config.json":         {without("config.json"), []string{"has no config.json"}},
		"no weights":             {without(weights), []string{"no model.safetensors", "copy or download"}},
		"torn data":              {cut(-1), []string{weights, "bytes of data", "copy or download"}},
		"torn header":            {cut(100), []string{weights, "in a file of 100", "copy or download"}},
		"empty weights":          {cut(0), []string{weights, "want at least 8"}},
		"garbage weights":        {file(weights, strings.Repeat("\xff", 64)), []string{weights, "header of 18446744073709551615 bytes"}},
		"torn config":            {file("config.json", `{"architectures": [`), []string{"config.json", "unexpected end"}},
		"config of another kind": {file("config.json", `[]`), []string{"config.json"}},
		"torn generation config": {file("generation_config.json", `{`), []string{"generation_config.json"}},
		"torn tokenizer":         {file("tokenizer.json", `{"model"`), []string{"tokenizer.json"}},
		"torn tokenizer config":  {file("tokenizer_config.json", `{`), []string{"tokenizer_config.json"}},
		"unsupported kind":       {config("architectures", []string{"MambaForCausalLM"}), []string{"architectures is MambaForCausalLM", "LlamaForCausalLM"}},
		"no kind": {func(t *testing.T, dir string) {
			editConfig(t, dir, map[string]any{"architectures": nil, "model_type": nil})
		}, []string{"architectures is []"}},
		"unsupported quantizing":  {config("quantization_config", map[string]any{"quant_method": "bitsandbytes"}), []string{"quantization_config is bitsandbytes", "bfloat16"}},
		"unsupported activation":  {config("hidden_act", "gelu"), []string{"hidden_act is gelu", "silu"}},
		"unsupported rotation":    {config("rope_parameters", map[string]any{"rope_type": "luck", "rope_theta": 1e4}), []string{`rope_type is "luck"`, "llama3"}},
		"a rotation by nothing":   {config("rope_parameters", map[string]any{"rope_type": "yarn", "rope_theta": 1e4}), []string{"yarn with factor 0"}},
		"a number as text":        {config("hidden_size", "64"), []string{"hidden_size", "string"}},
		"absurd layers":           {config("num_hidden_layers", 1<<30), []string{"num_hidden_layers is 1073741824", "at most"}},
		"heads that do not split": {config("num_key_value_heads", 3), []string{"num_attention_heads 4", "num_key_value_heads 3"}},
		"another vocabulary":      {config("vocab_size", 264), []string{"model.embed_tokens.weight: want shape [264 64], got [256 64]"}},
		"a tensor that is not there": {func(t *testing.T, dir string) {
			editHeader(t, dir, func(h map[string]map[string]any) {
				h["model.norm.luck"] = h["model.norm.weight"]
				delete(h, "model.norm.weight")
			})
		}, []string{"model.norm.weight"}},
		"a tensor of another shape": {func(t *testing.T, dir string) {
			editHeader(t, dir, func(h map[string]map[string]any) { h["model.norm.weight"]["shape"] = []int{32, 2} })
		}, []string{"model.norm.weight: want shape [64], got [32 2]"}},
		"a tensor of another type": {func(t *testing.T, dir string) {
			editHeader(t, dir, func(h map[string]map[string]any) { h["model.norm.weight"]["dtype"] = "F8_E4M3" })
		}, []string{"model.norm.weight", "F8_E4M3"}},
		"a folder as a file": {func(t *testing.T, dir string) {
			without("config.json")(t, dir)
			if err := os.Mkdir(filepath.Join(dir, "config.json"), 0o700); err != nil {
				t.Fatal(err)
			}
		}, []string{"config.json", "not a regular file but a folder"}},
		"unreadable weights": {func(t *testing.T, dir string) { // even for root
			without(weights)(t, dir)
			if err := os.Symlink(weights, filepath.Join(dir, weights)); err != nil {
				t.Fatal(err)
			}
		}, []string{weights, "too many levels"}},
	} {
		dir := goodModel(t, "../../engine/model/testdata/mha")
		c.spoil(t, dir)
		refusedStart(t, what, 2, append(c.want, "cannot load the model "+dir), "serve", dir, "--port", "0")
	}
	// A template needs a tokenizer to matter.
	dir := goodModel(t, "../../engine/builtin/model")
	put(t, filepath.Join(dir, "chat_template.jinja"), []byte("{% for x %}{{"))
	refusedStart(t, "a torn template", 2, []string{"cannot load the model " + dir, "template"}, "serve", dir, "--port", "0")
	for what, c := range map[string]struct{ model, want string }{
		"nothing there": {"./nowhere", "stat ./nowhere"},
		"a file":        {"../../README.md", "give the folder that holds config.json"},
		"a name":        {"nobody/nothing", "Nothing is downloaded"},
	} {
		refusedStart(t, what, 2, []string{c.want}, "serve", c.model, "--port", "0")
	}
}

// Flags that cannot be are refused with the value and what would do.
func TestBinaryBadFlags(t *testing.T) {
	dir := t.TempDir()
	for what, c := range map[string]struct {
		args string
		want []string
	}{
		"too little KV memory":    {"serve --port 0 --kv-cache-memory-bytes 1KiB", []string{"--kv-cache-memory-bytes 1024", "needs 128 blocks", "give more memory"}},
		"more than the context":   {"serve --port 0 --max-model-len 100000000", []string{"--max-model-len 100000000", "made for"}},
		"KV type":                 {"serve --port 0 --kv-cache-dtype nvfp4", []string{`"nvfp4"`, "bfloat16"}},
		"another fp8 of KV":       {"serve --port 0 --kv-cache-dtype fp8_e5m2", []string{`"fp8_e5m2"`, "E4M3"}},
		"device":                  {"serve --port 0 --device tpu", []string{`--device "tpu"`, "cpu"}},
		"a GPU that is not there": {"serve --port 0 --device cuda:99", []string{"--device cuda:99", "not available"}},
		"kernels":                 {"serve --port 0 --cpu-kernels sse", []string{"--cpu-kernels sse", "portable"}},
		"threads":                 {"serve --port 0 --threads 1000000", []string{"--threads 1000000"}},
		"negative":                {"serve --port 0 --max-num-seqs=-1", []string{"--max-num-seqs: -1", "at least 1"}},
		"log level":               {"serve --port 0 --log-level loud", []string{`"loud"`, "warning"}},
		"port":                    {"serve --port 99999", []string{`"99999"`, "65535"}},
		"ports past the last":     {"up --port 65535", []string{"--port 65535"}},
		"open to all":             {"serve --host 0.0.0.0", []string{"--host 0.0.0.0", "--insecure"}},
		"half a certificate":      {"serve --ssl-certfile x", []string{"--ssl-keyfile"}},
		"no such certificate":     {"serve --ssl-certfile /no/x --ssl-keyfile /no/y", []string{"--ssl-certfile /no/x", "no such file"}},
		"no such config":          {"serve --config /no/x.yaml", []string{"--config", "/no/x.yaml"}},
		"no such template":        {"serve --chat-template /no/x", []string{"--chat-template", "/no/x"}},
		"no such tokenizer":       {"gateway --upstream http://127.0.0.1:1 --tokenizer /no/x", []string{"--tokenizer /no/x", "no such file"}},
		"no certificates":         {"decode", []string{"--tls-dir", "tandem ca"}},
		"a name to be reached by": {"decode --advertise nobody:1", []string{"--advertise", `"nobody:1"`, "10.0.0.1"}},
		"no such folder":          {"decode --tls-dir " + dir + "/none", []string{"--tls-dir " + dir + "/none", "no such file", "tandem ca"}},
		"an empty folder":         {"gateway --tls-dir " + dir, []string{"ca.crt", "no such file", "tandem ca"}},
		"a flag of vllm serve":    {"serve --pipeline-parallel-size 2", []string{"--pipeline-parallel-size 2 is not supported"}},
		"nearly a flag":           {"serve --max-nums-seqs 2", []string{"did you mean --max-num-seqs?"}},
		"an argument too many":    {"serve a b", []string{`unexpected argument "b"`}},
		"tokens that are no ids":  {"logits builtin --tokens 1,x", []string{`"1,x"`}},
	} {
		refusedStart(t, what, 2, c.want, strings.Fields(c.args)...)
	}
}

// A port that another program has is named with its flag or address; the status
// is 1, since the same command may succeed later.
func TestBinaryPortsInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	busy := strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
	certs := t.TempDir()
	if _, errOut, err := tandem(t, nil, "ca", certs, "n"); err != nil {
		t.Fatalf("%v\n%s", err, errOut)
	}
	want := []string{busy, "address already in use", "choose another port"}
	refusedStart(t, "serve", 1, want, "serve", "--port", busy)
	refusedStart(t, "up", 1, want, "up", "--port", busy, "--state-dir", certs)
	for flag, command := range map[string]string{
		"port": "gateway", "nats-port": "gateway", "gossip-port": "gateway",
		"rpc-port": "decode", "kv-port": "decode", "http-port": "decode",
	} {
		args := []string{command, "--tls-dir", filepath.Join(certs, "n"), "--gossip-port", "0"}
		if command == "gateway" {
			args = append(args, "--port", "0", "--nats-port", "0")
		} else {
			args = append(args, "--rpc-port", "0", "--kv-port", "0", "--http-port", "0")
		}
		refusedStart(t, flag, 1, want, append(args, "--"+flag, busy)...)
	}
}
