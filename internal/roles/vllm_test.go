package roles

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/tandem-serving/tandem/internal/cli"
	"github.com/tandem-serving/tandem/internal/config"
)

// newServe is a command of both sides, as `tandem serve` is.
func newServe() *config.Set {
	s := config.New("serve [flags]", "", "tandem serve", &bytes.Buffer{})
	var m cli.Model
	var g gatewayFlags
	var p processFlags
	m.Register(s)
	g.register(s, 0)
	p.register(s)
	return s
}

// Whatever the command line, each flag is taken, told or refused, as its class
// says, with dashes and with underscores.
func TestVLLMClassesHold(t *testing.T) {
	for _, g := range config.VLLM {
		for _, f := range g.Flags {
			if f.Class == config.Supported {
				continue
			}
			bad, good := "0.123", "7"
			if f.Switch() {
				bad, good = "true", "true"
			}
			if f.Fine != "" {
				good = strings.Fields(f.Fine)[0]
				if f.Switch() && good == "true" {
					bad = "false"
				}
			}
			for _, name := range []string{f.Name, strings.ReplaceAll(f.Name, "-", "_")} {
				refused := f.Class == config.Refused || f.Fine != ""
				s := newServe()
				err := s.Resolve([]string{"--" + name + "=" + bad}, nil)
				if refused && (!errors.Is(err, config.ErrValue) || !strings.Contains(err.Error(), f.Name) || !strings.Contains(err.Error(), f.Why)) {
					t.Errorf("--%s=%s: %v, want a refusal that says %q", name, bad, err, f.Why)
				}
				if !refused && (err != nil || len(s.Warnings()) != 1) {
					t.Errorf("--%s=%s: %v, warnings %q, want one", name, bad, err, s.Warnings())
				}
				if f.Class == config.Refused && f.Fine == "" {
					continue
				}
				s = newServe()
				err = s.Resolve([]string{"--" + name + "=" + good, "--" + name + "=" + good}, nil)
				if w := s.Warnings(); err != nil || len(w) != 1 || !strings.Contains(w[0], f.Name) || !strings.Contains(w[0], "has no effect: "+f.Why) {
					t.Errorf("--%s=%s twice: %v, warnings %q, want one that says %q", name, good, err, w, f.Why)
				}
			}
		}
	}
}

func TestVLLMSpellings(t *testing.T) {
	for name, c := range map[string]struct {
		args, env []string
		file      string
		warnings  string // parts of each, in order, with | between
		refused   string // part of the error
		positions int    // arguments left
	}{
		"short":                {args: []string{"-pp", "1", "-ep=false"}, warnings: "--pipeline-parallel-size|--no-enable-expert-parallel"},
		"short, refused":       {args: []string{"-pp=2"}, refused: "--pipeline-parallel-size 2 is not supported"},
		"a policy":             {args: []string{"--scheduling-policy", "priority"}, warnings: "--scheduling-policy"},
		"a policy, refused":    {args: []string{"--scheduling-policy=lifo"}, refused: "--scheduling-policy lifo is not supported"},
		"short switch":         {args: []string{"-ep"}, refused: "--enable-expert-parallel is not supported"},
		"numbers":              {args: []string{"--cudagraph-capture-sizes", "1", "2", "4", "folder"}, warnings: "--cudagraph-capture-sizes", positions: 1},
		"path into a value":    {args: []string{"-cc.mode=3", "--compilation_config.cudagraph_mode", "NONE"}, warnings: "--compilation-config"},
		"refused path":         {args: []string{"--hf-overrides.rope_theta=1e6"}, refused: "--hf-overrides 1e6 is not supported"},
		"level":                {args: []string{"-O3"}, warnings: "--optimization-level"},
		"no":                   {args: []string{"--no-enable-tower-connector-lora", "--no-enable-flashinfer-autotune"}, warnings: "--no-enable-tower-connector-lora|--no-enable-flashinfer-autotune"},
		"no, refused":          {args: []string{"--no-enable-prefix-caching"}, refused: "--no-enable-prefix-caching is not supported"},
		"bad switch":           {args: []string{"--enable-flashinfer-autotune=maybe"}, refused: `"maybe" is neither true nor false`},
		"without its value":    {args: []string{"--hf-overrides"}, refused: "--hf-overrides is not supported: edit"},
		"after the last flag":  {args: []string{"--", "-tp", "2"}, positions: 2},
		"environment":          {env: []string{"TANDEM_ENABLE_FLASHINFER_AUTOTUNE=1"}, warnings: "--enable-flashinfer-autotune"},
		"environment, refused": {env: []string{"TANDEM_HF_OVERRIDES=a=b"}, refused: "TANDEM_HF_OVERRIDES=a=b: --hf-overrides"},
		"file":                 {file: "enable_flashinfer_autotune: true\ncompilation-config: {mode: 3}\nno-enable-tower-connector-lora: true\ncudagraph-capture-sizes: [1, 2]\n", warnings: "--enable-flashinfer-autotune|--compilation-config|--no-enable-tower-connector-lora|--cudagraph-capture-sizes"},
		"file, refused":        {file: "port: 1\nhf-overrides: {a: 1}\n", refused: ":2: --hf-overrides"},
		"no value":             {args: []string{"--port", "--host", "127.0.0.1"}, refused: "--port needs a value"},
		"no value at the end":  {args: []string{"-tp"}, refused: "--tensor-parallel-size needs a value"},
		"three dashes":         {args: []string{"---port=3"}, refused: "unknown flag ---port (did you mean --port?)"},
		"several names":        {args: []string{"--model", "m", "--served-model-name", "a", "b", "--middleware", "[]"}, warnings: "--middleware"},
		"true behind a switch": {args: []string{"--enable-prefix-caching", "True", "--enable-lora", "false"}, warnings: "--enable-prefix-caching"},
		"own path":             {args: []string{"-sc.method", "ngram", "--speculative_config.num_speculative_tokens", "3"}},
		"removed":              {args: []string{"--rope-theta", "1e6"}, refused: "newer vLLM has removed it; edit config.json"},
		"removed, no effect":   {args: []string{"--swap-space", "4"}, warnings: "--swap-space has no effect: newer vLLM has removed it"},
		"all at once":          {args: []string{"--uds", "x", "--port", "y"}, file: "hf-overrides: 1\n", refused: "is not a port"},
		"nearly one of them":   {args: []string{"--enforce-eagre"}, refused: "did you mean --enforce-eager?"},
		"variable, mistyped":   {env: []string{"TANDEM_MAX_NUM_SEQ=1"}, warnings: "did you mean TANDEM_MAX_NUM_SEQS?"},
		"variable of no flag":  {env: []string{"TANDEM_SOAK=1", "TANDEM_BINARY=x"}},
	} {
		args := c.args
		if c.file != "" {
			args = append(args, "--config", writeFile(t, c.file))
		}
		s := newServe()
		err := s.Resolve(args, c.env)
		if c.refused != "" {
			if !errors.Is(err, config.ErrValue) || !strings.Contains(err.Error(), c.refused) {
				t.Errorf("%s: %v, want %q", name, err, c.refused)
			}
			continue
		}
		var want []string
		if c.warnings != "" {
			want = strings.Split(c.warnings, "|")
		}
		got := s.Warnings()
		ok := err == nil && len(got) == len(want) && s.NArg() == c.positions
		for i := range want {
			ok = ok && i < len(got) && strings.Contains(got[i], want[i])
		}
		if !ok {
			t.Errorf("%s: %v, warnings %q, arguments %q; want %q and %d", name, err, got, s.Args(), want, c.positions)
		}
	}
}

// A flag of the other side is refused with its place, but variables are shared.
func TestFlagsOfTheOtherSide(t *testing.T) {
	s, _ := newSet(&bytes.Buffer{}) // a decode node
	if err := s.Resolve([]string{"--api-key", "k"}, nil); !errors.Is(err, config.ErrValue) || !strings.Contains(err.Error(), "flag of `tandem gateway`") {
		t.Errorf("--api-key for a node: %v", err)
	}
	s, _ = newSet(&bytes.Buffer{})
	if err := s.Resolve(nil, []string{"TANDEM_API_KEY=k"}); err != nil || len(s.Warnings()) > 0 {
		t.Errorf("TANDEM_API_KEY around a node: %v, %q", err, s.Warnings())
	}
	g := config.New("gateway", "", "tandem gateway", &bytes.Buffer{})
	var gw gatewayFlags
	gw.register(g, 0)
	if err := g.Resolve([]string{"--max-model-len=1"}, nil); !errors.Is(err, config.ErrValue) || !strings.Contains(err.Error(), "`tandem decode`") {
		t.Errorf("--max-model-len for a gateway: %v", err)
	}
}

// Foreign flags are neither in help nor in what --dry-run prints nor forwarded.
func TestForeignFlagsStayOutside(t *testing.T) {
	var out bytes.Buffer
	s, _ := newSet(&out)
	if err := s.Resolve([]string{"--dry-run", "--enable-flashinfer-autotune", "--seed=1"}, nil); !errors.Is(err, config.ErrDryRun) {
		t.Fatal(err)
	}
	if text := out.String() + s.FlagUsages(); strings.Contains(text, "enable-flashinfer-autotune") || strings.Contains(text, "seed") {
		t.Errorf("foreign flags are shown:\n%s", text)
	}
	to := newServe()
	if err := to.Resolve(nil, nil); err != nil { // which makes it know them
		t.Fatal(err)
	}
	for _, a := range s.Forward(to) {
		if strings.Contains(a, "eager") || strings.Contains(a, "seed") {
			t.Errorf("a foreign flag is forwarded: %s", a)
		}
	}
}

func TestServiceLinksSetNothing(t *testing.T) {
	for _, e := range []string{
		"TANDEM_PORT=tcp://10.0.0.1:8000", "TANDEM_SERVICE_HOST=10.0.0.1", "TANDEM_SERVICE_PORT=8000", "TANDEM_SERVICE_PORT_HTTP=8000",
		"TANDEM_PORT_8000_TCP=tcp://10.0.0.1:8000", "TANDEM_PORT_8000_TCP_PROTO=tcp", "TANDEM_PORT_8000_TCP_PORT=8000",
		"TANDEM_PORT_8000_TCP_ADDR=10.0.0.1", "TANDEM_NATS_PORT=tcp://10.0.0.1:4222", "TANDEM_RPC_PORT=tcp://1.2.3.4:5",
		"TANDEM_GOSSIP_PORT=udp://10.0.0.1:7946", "TANDEM_HTTP_PORT_80_TCP_ADDR=1.2.3.4", "TANDEM_HTTP_PORT_7946_UDP=udp://10.0.0.1:7946",
	} {
		s := newServe()
		if err := s.Resolve(nil, []string{e}); err != nil || len(s.Warnings()) > 0 {
			t.Errorf("%s: %v, %q", e, err, s.Warnings())
		}
		s.VisitAll(func(f *pflag.Flag) {
			if s.Origin(f.Name) != "default" {
				t.Errorf("%s set --%s", e, f.Name)
			}
		})
	}
}

// Arguments, variables and files are whatever a user types.
func FuzzResolve(f *testing.F) {
	f.Add("--port=1\x00-tp\x001", "TANDEM_PORT=tcp://a", "port: 1\n")
	f.Add("-O3\x00--cudagraph-capture-sizes\x001\x002", "TANDEM_ENABLE_FLASHINFER_AUTOTUNE=1", "a: {b: [c]}\n")
	f.Add("--\x00-q", "TANDEM_X_SERVICE_HOST=1", "no-enable-flashinfer-autotune: true\njoin: [a, b]\n")
	f.Add("--kv-cache-memory-bytes=1e3GiB\x00--shutdown-timeout=1h", "=", "&a [*a]")
	path := filepath.Join(f.TempDir(), "tandem.yaml") // one for all: making folders would take longer than reading them
	f.Fuzz(func(t *testing.T, args, env, file string) {
		if strings.Contains(args, "config") || strings.Contains(strings.ToLower(env), "config") {
			t.Skip("names other files")
		}
		if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
		s := newServe()
		err := s.Resolve(append([]string{"--config=" + path}, strings.Split(args, "\x00")...), strings.Split(env, "\x00"))
		if err != nil && !errors.Is(err, config.ErrValue) && !errors.Is(err, config.ErrHelp) && !errors.Is(err, config.ErrDryRun) {
			t.Errorf("%q: an error of no kind: %v", args, err)
		}
	})
}

// A flag that docs/flags.md calls supported takes every value of vllm serve that the page does not
// except.
func TestSupportedNeverRefuses(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "t.jinja"), []byte("{{ messages }}"), 0o600); err != nil {
		t.Fatal(err)
	}
	samples := map[string][]string{ // with spaces between arguments; a switch needs none
		"served-model-name": {"a", "a b c"}, "model": {"builtin", "org/name"}, "revision": {"main --model org/name"},
		"dtype":         {"auto", "float16 --model org/name", "half --model org/name", "bfloat16 --model org/name", "float --model org/name", "float32 --model org/name"},
		"max-model-len": {"auto", "-1", "2k", "1024"}, "quantization": {"none", "int8", "int4", "fp8 --model org/name", "mxfp4 --model org/name", "compressed-tensors --model org/name", "gptq_marlin --model org/name", "awq --model org/name"},
		"max-logprobs": {"1", "20", "256"}, "chat-template": {filepath.Join(dir, "t.jinja"), "{{messages}}"},
		"distributed-timeout-seconds": {"600"}, "tensor-parallel-size": {"1", "2"},
		"block-size": {"1", "8", "16", "32", "64", "128", "256"}, "gpu-memory-utilization": {"0.1", "0.9", "1.0"},
		"kv-cache-memory-bytes": {"1073741824", "2GiB", "4G", "25.6k"}, "kv-cache-dtype": {"auto", "float32", "bfloat16"},
		"max-loras": {"4"}, "max-lora-rank": {"1", "8", "320", "512"}, "max-cpu-loras": {"8"}, "lora-modules": {"a=x b=y --enable-lora --model org/name"},
		"log-level": {"debug", "info", "INFO", "warning", "error"}, "otlp-traces-endpoint": {"http://127.0.0.1:4318", "https://collector:4318/v1/traces"},
		"max-num-batched-tokens": {"1", "512", "8k", "131072"}, "max-num-seqs": {"1", "256", "1024"}, "max-num-queued-reqs": {"10"},
		"shutdown-timeout": {"0", "30"}, "config": {writeFile(t, "port: 1\n")},
		"speculative-config": {`{"method":"ngram","num_speculative_tokens":5}`, `{"method":"draft_model","model":"builtin","num_speculative_tokens":3}`},
		"port":               {"0", "8000"}, "api-key": {"k", "k l"}, "max-log-len": {"0", "100"}, "host": {"127.0.0.1", "localhost", "0.0.0.0 --insecure"},
		"structured-outputs-config": {`{"backend":"auto"}`, `{"disable_any_whitespace":true}`},
		"allowed-origins":           {`["https://a.example"]`, `["*"] --api-key k`},
		"tool-call-parser":          {"hermes", "qwen3_xml", "openai"}, "reasoning-parser": {"qwen3", "glm45", "openai_gptoss"},
	}
	t.Setenv("HF_HUB_CACHE", dir)
	for _, g := range config.VLLM {
		for _, f := range g.Flags {
			values := samples[f.Name]
			switch {
			case f.Class != config.Supported:
				continue
			case f.Switch():
				values = []string{"", "true", "false"}
			case strings.HasPrefix(f.Name, "ssl-"):
				continue // TestClientCertificates of internal/tlsconf
			case values == nil:
				t.Errorf("--%s is called supported, and no value of it is tried", f.Name)
			}
			for _, v := range values {
				args := append([]string{"serve", "--dry-run", "--" + f.Name}, strings.Fields(v)...)
				if !strings.Contains(v, "--model") && f.Name != "model" {
					args = slices.Insert(args, 1, "builtin")
				}
				var errOut bytes.Buffer
				if status := table().Main("test", args, os.Environ(), io.Discard, &errOut); status != 0 {
					t.Errorf("%q: status %d\n%s", args, status, &errOut)
				}
			}
		}
	}
}
