//go:build linux

package e2e

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// A dry run refuses what a start would refuse, all of it at once, and a start refuses it before the
// weights are read.
func TestBinaryDryRunValidates(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	broken := filepath.Join(dir, "vit")
	if err := os.Mkdir(broken, 0o755); err != nil {
		t.Fatal(err)
	}
	file("vit/config.json", `{"architectures": ["ViTForImageClassification"], "vocab_size": 1}`)
	if _, errOut, err := tandem(t, nil, "ca", filepath.Join(dir, "certs"), "gateway/gw", "node/d1"); err != nil {
		t.Fatalf("%v\n%s", err, errOut)
	}
	const model = "../../engine/model/testdata/gqa-tied"
	t.Setenv("HF_HUB_CACHE", t.TempDir())
	for name, c := range map[string]struct {
		args string
		want []string // parts of the refusals; none: it is accepted
	}{
		"nothing":        {"serve", nil},
		"a file":         {"serve --config " + file("a.yaml", "host: 0.0.0.0\npolicy: foo\nquantization: bitsandbytes\nkv-cache-dtype: fp8_e5m2\nchat-template: nope\n"), []string{"5 settings", "--host 0.0.0.0", `--policy "foo"`, `--quantization "bitsandbytes"`, `--kv-cache-dtype "fp8_e5m2"`, "--chat-template: stat nope"}},
		"a list":         {"serve --config " + file("b.yaml", "port: [1]\nmax-n: [2]\n"), []string{"2 settings", "b.yaml:1: port: want one value, not a list", "b.yaml:2: max-n"}},
		"of all sources": {"serve --max-n 0 --config " + file("c.yaml", "portt: 1\nlog-level: loud\n"), []string{"3 settings", "--max-n: 0 is too few", "did you mean port?", `--log-level "loud"`}},
		"key file":       {"serve --api-key-file nope", []string{"--api-key-file", "nope"}},
		"response keys":  {"serve --response-key-file nope", []string{"--response-key-file", "nope"}},
		"keys":           {"serve --api-key-file " + file("keys", "k weight=none\n"), []string{"--api-key-file", "keys"}},
		"template":       {"serve --chat-template " + file("t.jinja", "{% for %}"), []string{"template"}},
		"certificates":   {"serve --ssl-certfile nope.crt --ssl-keyfile nope.key", []string{"nope.crt"}},
		"admin port":     {"serve --admin-listen 9000", []string{"--admin-listen", "host:port"}},
		"a limit":        {"serve --max-n 1000", []string{"--max-n 1000: want 1 to 128"}},
		"parsers":        {"serve --tool-call-parser luck --reasoning-parser none --max-n 1000", []string{"2 settings", `--tool-call-parser: unknown tool call parser "luck": known are `, "--max-n 1000"}},
		"reasoning":      {"gateway --upstream http://127.0.0.1:1 --reasoning-parser luck", []string{`--reasoning-parser: unknown reasoning parser "luck": known are `}},
		"parser names":   {"serve --tool-call-parser hermes --reasoning-parser qwen3", nil},
		"traces":         {"serve --otlp-traces-endpoint grpc://a:4317", []string{"--otlp-traces-endpoint", "http://127.0.0.1:4318"}},
		"model":          {"serve --model " + broken, []string{"ViTForImageClassification"}},
		"no model":       {"serve --model ./nope", []string{"./nope", "not a checkpoint folder"}},
		"context":        {"serve " + model + " --max-model-len 1000", []string{"--max-model-len 1000", "256 positions"}},
		"type":           {"serve " + model + " --dtype float16", []string{"stored as bfloat16"}},
		"own type":       {"serve " + model + " --dtype bfloat16", nil},
		"early head":     {"serve --sse-early-head --sse-keep-alive 0", []string{"--sse-early-head", "--sse-keep-alive"}},
		"early head, on": {"serve --sse-early-head", nil},
		"ranks":          {"serve " + model + " --tensor-parallel-size 3", []string{"--tensor-parallel-size 3", "leave it out"}},
		"absent model":   {"serve org/name --max-model-len 32k", nil},
		"download":       {"serve --download org/name --max-model-len 32k", nil},
		"bad download":   {"serve --download name --policy foo", []string{"2 settings", "want ORG/NAME", "--policy"}},
		"adapters":       {"serve --enable-lora --lora-modules a=nope b=" + dir, []string{"2 settings", "--lora-modules a=nope", "adapter_config.json"}},
		"too many":       {"serve a b", []string{`unexpected argument "b"`}},
		"up":             {"up --decode 0 --policy foo --model " + broken, []string{"3 settings", "--decode 0", "--policy", "ViTForImageClassification"}},
		"node":           {"decode --kv-transport rdma --kv-tls --tls-dir " + filepath.Join(dir, "certs/d1"), []string{"--kv-tls"}},
		"node's files":   {"decode", []string{"give --tls-dir"}},
		"prefill":        {"prefill --tls-dir " + filepath.Join(dir, "certs/d1"), nil},
		"gateway":        {"gateway --tls-dir " + filepath.Join(dir, "certs/gw"), nil},
		"node's role":    {"gateway --tls-dir " + filepath.Join(dir, "certs/d1"), []string{"has the certificate of node"}},
		"upstream":       {"gateway --upstream localhost:8000 --upstream-protocol x", []string{"2 settings", "write http://localhost:8000", "--upstream-protocol"}},
		"short flag":     {"serve -p 1 -model x", []string{"unknown flag -p (did you mean --port?)", "unknown flag -model (did you mean --model?)"}},
		"part of a flag": {"serve --tensor-parallel 2", []string{"did you mean --tensor-parallel-size?"}},
	} {
		args := strings.Fields(c.args)
		out, errOut, err := tandem(t, nil, append(args, "--dry-run")...)
		if c.want == nil {
			if err != nil || !strings.Contains(out, "log-level: ") {
				t.Errorf("%s: %v\n%s", name, err, errOut)
			}
			continue
		}
		for _, dry := range []bool{true, false} {
			if !dry {
				out, errOut, err = tandem(t, nil, args...)
			}
			exit, ok := err.(*exec.ExitError)
			if out != "" || !ok || exit.ExitCode() != 2 || strings.Contains(errOut, "model loaded") {
				t.Errorf("%s, dry %t: %v\n%s%s", name, dry, err, out, errOut)
			}
			for _, w := range c.want {
				if !strings.Contains(errOut, w) {
					t.Errorf("%s, dry %t: no %q in\n%s", name, dry, w, errOut)
				}
			}
			for line := range strings.Lines(errOut) {
				if !strings.HasPrefix(line, "tandem ") {
					t.Errorf("%s, dry %t: %q", name, dry, line)
				}
			}
		}
	}
}

// A port in use ends the start before the model is loaded.
func TestBinaryPortsFirst(t *testing.T) {
	port := freePorts(t, 2)
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	certs := t.TempDir()
	if _, errOut, err := tandem(t, nil, "ca", certs, "node/d1"); err != nil {
		t.Fatalf("%v\n%s", err, errOut)
	}
	used, free := strconv.Itoa(port), strconv.Itoa(port+1)
	for _, c := range []struct{ flag, args string }{
		{"--port", "serve --port " + used},
		{"--admin-listen", "serve --port " + free + " --admin-listen 127.0.0.1:" + used},
		{"--rpc-port", "decode --rpc-port " + used + " --kv-port 0 --http-port 0 --gossip-port 0 --tls-dir " + certs + "/d1"},
		{"--kv-port", "decode --kv-port " + used + " --rpc-port 0 --http-port 0 --gossip-port 0 --tls-dir " + certs + "/d1"},
		{"--http-port", "prefill --http-port " + used + " --rpc-port 0 --gossip-port 0 --tls-dir " + certs + "/d1"},
		{"--gossip-port", "prefill --gossip-port " + used + " --rpc-port 0 --http-port 0 --tls-dir " + certs + "/d1"},
	} {
		_, errOut, err := tandem(t, nil, strings.Fields(c.args)...)
		if err == nil || !strings.Contains(errOut, c.flag) || !strings.Contains(errOut, "address already in use; another program listens there") || strings.Contains(errOut, "model loaded") {
			t.Errorf("%s: %v\n%s", c.args, err, errOut)
		}
	}
	// A dry run checks a configuration next to the process that runs with it.
	if _, errOut, err := tandem(t, nil, "serve", "--port", used, "--dry-run"); err != nil {
		t.Errorf("a dry run: %v\n%s", err, errOut)
	}
}

// A reload names what it changed, and what needs a restart.
func TestBinaryReloadSays(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	file := filepath.Join(c.state, "serve.yaml")
	write := func(text string) {
		t.Helper()
		err := os.WriteFile(file+".new", []byte(text), 0o600)
		if err == nil {
			err = os.Rename(file+".new", file)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	write(fmt.Sprintf("port: %d\nmax-n: 4\n", c.port))
	c.start(binary(t), "serve", "--config", file)
	c.wait(startBound, "serve is ready", func() bool { return c.body("/readyz") != "" })
	says := func(what ...string) {
		t.Helper()
		c.wait(startBound, fmt.Sprintf("the log has %q", what), func() bool {
			for _, w := range what {
				if !strings.Contains(c.stderr.String(), w) {
					return false
				}
			}
			return true
		})
	}
	write(fmt.Sprintf("port: %d\nmax-n: 2\napi-key: [SECRET]\n", c.port+1))
	says("INFO", `reloaded part=config changed="[max-n: 4 → 2]"`,
		fmt.Sprintf(`changed settings need a restart settings="[port: %d → %d api-key]"`, c.port, c.port+1))
	if strings.Contains(c.stderr.String(), "SECRET") {
		t.Error("the log has a key")
	}
	write(fmt.Sprintf("port: %d\nmax-n: 2\n", c.port))
	says("reloaded part=config changed=[]")
	if n := strings.Count(c.stderr.String(), "need a restart"); n != 1 {
		t.Errorf("%d warnings", n)
	}
	c.signal(syscall.SIGINT)
	c.waitGone(stopBound)
}

// Help has the flags that one needs first, then all in groups, within 100 columns.
func TestBinaryHelpGroups(t *testing.T) {
	for command, first := range map[string]string{
		"serve":   "model host port api-key max-model-len config",
		"up":      "model prefill decode port max-model-len api-key",
		"gateway": "tls-dir host port ssl-certfile ssl-keyfile api-key-file",
		"decode":  "tls-dir join host model max-model-len device",
	} {
		out, errOut, err := tandem(t, nil, "help", command)
		_, flags, found := strings.Cut(out, "in --config FILE):\n")
		if err != nil || !found {
			t.Fatalf("%v\n%s%s", err, out, errOut)
		}
		head, rest, _ := strings.Cut(flags, "\n\n")
		var names []string
		for line := range strings.Lines(head) {
			if name, ok := strings.CutPrefix(strings.TrimSpace(line), "--"); ok && strings.HasPrefix(line, "      --") {
				names = append(names, strings.Fields(name)[0])
			}
		}
		if got := strings.Join(names, " "); got != first {
			t.Errorf("%s: first %q, want %q", command, got, first)
		}
		if !strings.Contains(rest, "\nLog, traces and shutdown:\n") || strings.Count(rest, ":\n  ") < 4 {
			t.Errorf("%s: no groups in\n%s", command, rest)
		}
		for line := range strings.Lines(out) {
			if len([]rune(line)) > 110 && !strings.Contains(line, "{") && !strings.Contains(line, "tandem ") {
				t.Errorf("%s: %d columns: %s", command, len(line), line)
			}
		}
	}
	for args, want := range map[string][]string{
		"serve --help=adapters":   {"--enable-lora", "--max-loras"},
		"serve --help=max-num":    {"--max-num-seqs", "--max-num-batched-tokens"},
		"serve --help=nothing-of": {"No flag of tandem serve", "Adapters"},
		"bench --help":            {"serve", "compare", "sweep", "throughput", "latency", "transfer", "mock", "truth"},
		"help bench compare":      {"Usage: tandem bench compare A.json B.json"},
	} {
		out, errOut, err := tandem(t, nil, strings.Fields(args)...)
		for _, w := range want {
			if err != nil || !strings.Contains(out, w) || strings.HasPrefix(args, "serve") && strings.Contains(out, "--port") {
				t.Errorf("%s: %v, no %q in\n%s%s", args, err, w, out, errOut)
			}
		}
	}
}

// A load test of which every request failed prints the reason and no zeros.
func TestBinaryBenchWithoutResult(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/models" {
			fmt.Fprint(w, `{"data": [{"id": "m"}]}`)
			return
		}
		http.Error(w, `{"error": {"message": "on fire"}}`, http.StatusInternalServerError)
	}))
	defer server.Close()
	out, errOut, err := tandem(t, nil, "bench", "serve", "--base-url", server.URL, "--num-prompts", "2", "--tokenizer", "builtin", "--ready-check-timeout-sec", "0")
	if err == nil || !strings.Contains(out, "on fire") || !strings.Contains(out, "No request succeeded") || strings.Contains(out, "throughput") || strings.Contains(out, "(ms)") {
		t.Errorf("%v\n%s%s", err, out, errOut)
	}
}

// make lists its targets in groups, within 100 columns.
func TestMakeHelp(t *testing.T) {
	out, err := exec.Command("make", "-C", "../..", "--no-print-directory").CombinedOutput()
	for _, want := range []string{"Run\n", "Check\n", "Measure\n", "  make up  ", "LISTEN="} {
		if err != nil || !strings.Contains(string(out), want) {
			t.Errorf("%v: no %q", err, want)
		}
	}
	for line := range strings.Lines(string(out)) {
		if len(strings.TrimSpace(line)) > 100 || len(line) > 102 {
			t.Errorf("%d columns: %s", len(line), line)
		}
	}
}
