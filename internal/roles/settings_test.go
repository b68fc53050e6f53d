package roles

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/internal/cli"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/limits"
	"github.com/tandem-serving/tandem/internal/process"
)

type opts struct {
	m cli.Model
	p processFlags
	c clusterFlags
}

func newSet(out *bytes.Buffer) (*config.Set, *opts) {
	s := config.New("decode [flags]", "Runs a decode node.", "tandem decode --join 10.0.0.1:7946", out)
	var o opts
	o.m.Register(s)
	o.p.register(s)
	o.c.register(s, &o.p.Options, 7946)
	return s, &o
}

func writeFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tandem.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestPrecedence(t *testing.T) {
	file := writeFile(t, "max_num_seqs: 1\nthreads: 2\nblock-size: 32\njoin: [a:1, b:2]\nkv-cache-memory-bytes: 2GiB\n")
	var out bytes.Buffer
	s, o := newSet(&out)
	err := s.Resolve([]string{"--config", file, "--max_num_seqs", "3"},
		[]string{"TANDEM_MAX_NUM_SEQS=4", "TANDEM_THREADS=5", "TANDEM_SHUTDOWN_TIMEOUT=7", "OTHER=1"})
	if err != nil {
		t.Fatal(err)
	}
	if o.m.MaxSeqs != 3 || o.m.Threads != 5 || o.m.BlockTokens != 32 || o.m.MaxBatchedTokens != 512 {
		t.Errorf("got seqs %d, threads %d, block %d, batched %d; want 3 from the flag, 5 from the environment, 32 from the file, 512 by default",
			o.m.MaxSeqs, o.m.Threads, o.m.BlockTokens, o.m.MaxBatchedTokens)
	}
	if o.p.shutdownTimeout != 7*time.Second || strings.Join(o.c.join, " ") != "a:1 b:2" || o.m.KVMemory != 2<<30 {
		t.Errorf("got timeout %v, join %v, memory %v", o.p.shutdownTimeout, o.c.join, o.m.KVMemory)
	}
	for name, want := range map[string]string{
		"max-num-seqs": "flag", "threads": "environment TANDEM_THREADS", "block-size": "file " + file + ":3", "device": "default",
	} {
		if got := s.Origin(name); got != want {
			t.Errorf("origin of %s: got %q, want %q", name, got, want)
		}
	}
}

func TestDryRunIsAConfigFile(t *testing.T) {
	var out bytes.Buffer
	s, _ := newSet(&out)
	if err := s.Resolve([]string{"--dry-run", "--threads=3", "--join=x:1"}, []string{"TANDEM_BLOCK_SIZE=8"}); !errors.Is(err, config.ErrDryRun) {
		t.Fatal(err)
	}
	for _, want := range []string{"threads: 3", "# flag", "# environment TANDEM_BLOCK_SIZE", "# default"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
	again, o := newSet(&bytes.Buffer{})
	if err := again.Resolve([]string{"--config", writeFile(t, out.String())}, nil); err != nil {
		t.Fatalf("the output does not load: %v\n%s", err, &out)
	}
	if o.m.Threads != 3 || o.m.BlockTokens != 8 || len(o.c.join) != 1 || o.c.join[0] != "x:1" || o.m.MaxSeqs != 256 {
		t.Errorf("the output loads as something else: %+v", o)
	}
}

// What --dry-run prints ends up in CI logs and tickets.
func TestDryRunShowsNoSecret(t *testing.T) {
	for _, args := range [][]string{
		{"--api-key", "HUSH"}, {"--api-key", "a,HUSH"}, {"--upstream-api-key=HUSH"},
		{"--nats-url", "nats://user:HUSH@host:4222"}, {"--upstream", "http://a:1,http://user:HUSH@b:2/v1"},
	} {
		var out bytes.Buffer
		s := config.New("gateway", "", "", &out)
		new(gatewayFlags).register(s, 0)
		new(upstreamFlags).register(s, new(limits.Limits))
		new(clusterFlags).register(s, new(process.Options), 1)
		if err := s.Resolve(append(args, "--dry-run"), nil); !errors.Is(err, config.ErrDryRun) {
			t.Fatalf("%q: %v", args, err)
		}
		name, _, _ := strings.Cut(strings.TrimPrefix(args[0], "--"), "=")
		if strings.Contains(out.String(), "HUSH") || !strings.Contains(out.String(), "# "+name+": set, not shown") {
			t.Errorf("%q:\n%s", args, &out)
		}
		again := config.New("gateway", "", "", &bytes.Buffer{})
		new(gatewayFlags).register(again, 0)
		new(upstreamFlags).register(again, new(limits.Limits))
		new(clusterFlags).register(again, new(process.Options), 1)
		if err := again.Resolve([]string{"--config", writeFile(t, out.String())}, nil); err != nil || again.Changed(name) {
			t.Errorf("%q: the output loads with %v, %s set %v", args, err, name, again.Changed(name))
		}
	}
}

// A key that is empty, such as that of an unset variable, does not open a gateway to all. A list
// without entries is how --dry-run prints a gateway without keys.
func TestEmptyKey(t *testing.T) {
	for _, c := range []struct {
		args, env []string
		file      string
		refused   bool
	}{
		{args: []string{"--api-key", ""}, refused: true},
		{args: []string{"--api-key", ","}, refused: true},
		{args: []string{"--api-key", "k,"}, refused: true},
		{args: []string{"--api-key", "k", "--api-key", ""}, refused: true},
		{env: []string{"TANDEM_API_KEY="}, refused: true},
		{env: []string{"TANDEM_API_KEY=,"}, refused: true},
		{env: []string{"TANDEM_API_KEY=a,,b"}, refused: true},
		{file: `api-key: [""]`, refused: true},
		{file: `api-key: ["", ""]`, refused: true},
		{file: `api-key: [k, " "]`, refused: true},
		{file: "api-key:\n- k\n-\n", refused: true},
		{file: `api-key: ""`, refused: true},
		{file: "api-key:", refused: true},
		{file: "api-key: k,", refused: true},
		{file: `api-key: [""]`, args: []string{"--api-key", "k"}}, // the flag's key is in use
		{file: "api-key: []"},                                     // as --dry-run prints it
		{file: "api-key: [k, l]"},
		{args: []string{"--api-key", "k,l"}},
		{env: []string{"TANDEM_API_KEY=k"}},
		{},
	} {
		args := c.args
		if c.file != "" {
			args = append(args, "--config", writeFile(t, c.file))
		}
		s := config.New("gateway", "", "", &bytes.Buffer{})
		new(gatewayFlags).register(s, 0)
		err := s.Resolve(args, c.env)
		refused := errors.Is(err, config.ErrValue) && strings.Contains(err.Error(), "the gateway would be open to all")
		if refused != c.refused || err != nil && !refused {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// A setting counts as the user's, except for a default in a file as --dry-run writes it.
func TestAsked(t *testing.T) {
	for _, c := range []struct {
		args, env []string
		file      string
		want      bool
	}{
		{},
		{args: []string{"--max-connections", "65536"}, want: true},
		{env: []string{"TANDEM_MAX_CONNECTIONS=65536"}, want: true},
		{file: "max-connections: 65536"},
		{file: "max-connections: 65537", want: true},
	} {
		s := newGatewayCommand(&bytes.Buffer{})
		if c.file != "" {
			c.args = append(c.args, "--config", writeFile(t, c.file))
		}
		if err := s.Resolve(append(c.args, "--upstream", "http://a:1"), c.env); err != nil {
			t.Fatal(err)
		}
		if got := asked(s.Set, "max-connections"); got != c.want {
			t.Errorf("%+v: %t", c, got)
		}
	}
}

// An error ends up in logs, so that it names a variable with a secret and not its value.
func TestErrorsShowNoSecret(t *testing.T) {
	for _, v := range []string{"TANDEM_API_KEY=a,\"HUSH", `TANDEM_UPSTREAM="http://user:HUSH@b:2/v1`, `TANDEM_UPSTREAM="http://a:1,http://user:HUSH@b:2/v1`} {
		name, _, _ := strings.Cut(v, "=")
		s := config.New("gateway", "", "", &bytes.Buffer{})
		new(gatewayFlags).register(s, 0)
		new(upstreamFlags).register(s, new(limits.Limits))
		err := s.Resolve(nil, []string{v})
		if !errors.Is(err, config.ErrValue) || strings.Contains(err.Error(), "HUSH") || !strings.Contains(err.Error(), name+": --") {
			t.Errorf("%s: %v", v, err)
		}
	}
}

func TestRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		args, env []string
		file      string
		want      string
	}{
		"unknown flag":      {args: []string{"--max-num-seq=1"}, want: "did you mean --max-num-seqs"},
		"far-off flag":      {args: []string{"--zzzzzz"}, want: "unknown flag --zzzzzz; "},
		"bad number":        {args: []string{"--threads=two"}, want: "threads"},
		"bad environment":   {env: []string{"TANDEM_THREADS=x"}, want: `TANDEM_THREADS=x: --threads: "x" is not a whole number`},
		"unknown key":       {file: "thread: 1\n", want: ":1: no flag is called \"thread\" (did you mean threads?)"},
		"value of a key":    {file: "a: 1\n", want: "no flag is called"},
		"not a mapping":     {file: "- 1\n", want: "mapping"},
		"nested":            {file: "threads: {a: 1}\n", want: "want a value or a list"},
		"not YAML":          {file: "\t:", want: "tandem.yaml"},
		"size":              {args: []string{"--kv-cache-memory-bytes=1 potato"}, want: "not a size"},
		"not above zero":    {args: []string{"--max-num-seqs=0"}, want: "--max-num-seqs: 0 is too few; want at least 1"},
		"negative":          {args: []string{"--threads=-1"}, want: "--threads: -1 is too few; want at least 0"},
		"negative duration": {args: []string{"--shutdown-timeout=-3s"}, want: "not a duration"},
	} {
		args := c.args
		if c.file != "" {
			args = append(args, "--config", writeFile(t, c.file))
		}
		s, _ := newSet(&bytes.Buffer{})
		err := s.Resolve(args, c.env)
		if !errors.Is(err, config.ErrValue) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want ErrValue with %q", name, err, c.want)
		}
	}
}

// A wrong --chat-template is reported as such, and not as a model's.
func TestBadTemplate(t *testing.T) {
	for _, args := range [][]string{
		{"serve", "builtin"},
		{"gateway", "--upstream", "http://a:1"},
	} {
		var out, errOut strings.Builder
		status := Main("0", append(args, "--dry-run", "--chat-template", "{{ messages"), nil, &out, &errOut)
		want := "tandem " + args[0] + ": --chat-template: line 1: syntax error: a tag is not closed\n"
		if status != 2 || errOut.String() != want {
			t.Errorf("%q: status %d, %q, want %q", args, status, errOut.String(), want)
		}
	}
}

// A bound that would be nothing is refused wherever it stands, and those that
// may be 0 say what it means.
func TestLeastValues(t *testing.T) {
	for flag, least := range map[string]int{
		"max-num-seqs": 1, "block-size": 1, "max-num-batched-tokens": 1, "max-num-queued-reqs": 1, "max-attempts": 1, "max-queued-tokens": 1,
		"max-request-body": 1, "max-logprobs": 1, "threads": 0, "max-model-len": -1, "max-log-len": 0, "min-remote-prefill-tokens": 0,
	} {
		resolve := func(args, env []string) error {
			s := config.New("serve", "", "tandem serve", &bytes.Buffer{})
			var m cli.Model
			var g gatewayFlags
			m.Register(s)
			g.register(s, 64)
			return s.Resolve(args, env)
		}
		low := strconv.Itoa(least - 1)
		if err := resolve([]string{"--" + flag, low}, nil); !errors.Is(err, config.ErrValue) || !strings.Contains(err.Error(), "--"+flag) || !strings.Contains(err.Error(), low) {
			t.Errorf("--%s %s: %v", flag, low, err)
		}
		if err := resolve(nil, []string{config.EnvName(flag) + "=" + low}); !errors.Is(err, config.ErrValue) || !strings.Contains(err.Error(), config.EnvName(flag)+"="+low) {
			t.Errorf("%s=%s: %v", config.EnvName(flag), low, err)
		}
		if err := resolve([]string{"--" + flag, strconv.Itoa(least)}, nil); err != nil {
			t.Errorf("--%s %d: %v", flag, least, err)
		}
	}
}

func TestServiceLinksAreIgnored(t *testing.T) {
	s := config.New("gateway", "", "tandem gateway", &bytes.Buffer{})
	var g gatewayFlags
	g.register(s, 64)
	if err := s.Resolve(nil, []string{"TANDEM_PORT=tcp://10.0.0.9:8000"}); err != nil || g.Port != 8000 {
		t.Errorf("a Kubernetes service link was taken for --port: %v, %d", err, g.Port)
	}
}

func TestHelpHasAnExample(t *testing.T) {
	var out bytes.Buffer
	s, _ := newSet(&out)
	if err := s.Resolve([]string{"--help"}, nil); !errors.Is(err, config.ErrHelp) {
		t.Fatal(err)
	}
	for _, want := range []string{"Usage: tandem decode", "Example:\n  tandem decode --join", "--max-num-seqs"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
}

func TestForward(t *testing.T) {
	s, _ := newSet(&bytes.Buffer{})
	if err := s.Resolve([]string{"--threads=2", "--join=a:1,b:2", "--log-level=debug"}, []string{"TANDEM_BLOCK_SIZE=8"}); err != nil {
		t.Fatal(err)
	}
	to := config.New("x", "", "x", &bytes.Buffer{})
	var m cli.Model
	var c clusterFlags
	m.Register(to)
	c.register(to, new(process.Options), 1)
	args := s.Forward(to)
	if got, want := strings.Join(args, " "), "--threads=2 --block-size=8 --join=a:1,b:2"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if err := to.Resolve(args, nil); err != nil || len(c.join) != 2 || m.BlockTokens != 8 {
		t.Errorf("does not read back: %v, %+v, %+v", err, m, c)
	}
}
