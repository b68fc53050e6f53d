package config

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestServiceLinkNames(t *testing.T) {
	for _, e := range []string{
		"TANDEM_PORT=tcp://10.0.0.1:8000", "TANDEM_SERVICE_HOST=10.0.0.1", "TANDEM_SERVICE_PORT=8000", "TANDEM_SERVICE_PORT_HTTP=8000",
		"TANDEM_PORT_8000_TCP=tcp://10.0.0.1:8000", "TANDEM_PORT_8000_TCP_PROTO=tcp", "TANDEM_PORT_8000_TCP_PORT=8000",
		"TANDEM_PORT_8000_TCP_ADDR=10.0.0.1", "TANDEM_NATS_PORT=tcp://10.0.0.1:4222", "TANDEM_RPC_PORT=tcp://1.2.3.4:5",
		"TANDEM_GOSSIP_PORT=udp://10.0.0.1:7946", "TANDEM_HTTP_PORT_80_TCP_ADDR=1.2.3.4", "TANDEM_HTTP_PORT_7946_UDP=udp://10.0.0.1:7946",
	} {
		name, v, _ := strings.Cut(e, "=")
		if !serviceLink(name, v) {
			t.Errorf("%s is not taken for a service link", e)
		}
	}
	for _, e := range []string{"TANDEM_PORT=8000", "TANDEM_HTTP_PORT=1", "TANDEM_HOST=0.0.0.0", "TANDEM_NATS_URL=nats://a:1"} {
		name, v, _ := strings.Cut(e, "=")
		if serviceLink(name, v) {
			t.Errorf("%s is taken for a service link", e)
		}
	}
}

func TestPort(t *testing.T) {
	for in, want := range map[string]int{"0": 0, "1": 1, "65535": 65535, "-1": -1, "65536": -1, "x": -1, "": -1, "1.5": -1} {
		var p int
		s := New("x", "", "tandem x", io.Discard)
		s.PortVar(&p, "port", 0, "")
		if err := s.Set("port", in); (err == nil) != (want >= 0) || err == nil && p != want {
			t.Errorf("%q: %d, %v", in, p, err)
		}
	}
}

func TestBytes(t *testing.T) {
	for in, want := range map[string]Bytes{"1024": 1024, "1KiB": 1024, "1.5GB": 15e8, "4G": 4 << 30, "25.6k": 25600, "2g": 2e9, "2 GiB": 2 << 30, "0": 0, "12B": 12} {
		var b Bytes
		if err := b.Set(in); err != nil || b != want {
			t.Errorf("%q: got %d, %v; want %d", in, b, err, want)
		}
		var again Bytes
		if err := again.Set(b.String()); err != nil || again != b {
			t.Errorf("%q does not read back: %q gives %d, %v", in, b.String(), again, err)
		}
	}
	for _, in := range []string{"", "3XB", "1GiBs", "GiB", "-1GiB", "1 2", "NaN", "Inf", "9EiB", "1e300GiB"} {
		var b Bytes
		if err := b.Set(in); err == nil || b != 0 {
			t.Errorf("%q is taken as %d", in, b)
		}
	}
}

// Whole numbers are read as vllm serve reads them.
func TestWholeNumbers(t *testing.T) {
	for v, want := range map[string]int{
		"0": 0, "12": 12, "32k": 32000, "32K": 32768, "1.5k": 1500, "25.6k": 25600, "1.001k": 1001, "256k": 256000, "1m": 1e6, "1M": 1 << 20, "2g": 2e9, "1G": 1 << 30, "1T": 1 << 40,
		"": -1, "k": -1, "1.5K": -1, "1.5": -1, "1e3": -1, "1e3k": -1, "auto": -1, "-1k": -1, "0x1k": -1, "1kk": -1, "32kB": -1, "1.0001k": -1, "999999999999t": -1, ".k": -1, "infk": -1,
	} {
		n, ok := wholeNumber(v)
		if want >= 0 != ok || ok && n != want {
			t.Errorf("%q: %d, %v; want %d", v, n, ok, want)
		}
	}
	var length, batched int
	s := New("x", "", "tandem x", io.Discard)
	s.AutoVar(&length, "max-model-len", "")
	s.CountVar(&batched, "max-num-batched-tokens", 5, 1, "")
	for _, v := range []string{"auto", "-1", "0"} {
		length = 7
		if err := s.Set("max-model-len", v); err != nil || length != 0 {
			t.Errorf("%s: %d, %v", v, length, err)
		}
	}
	for name, v := range map[string]string{"max-model-len": "-2", "max-num-batched-tokens": "auto"} {
		if err := s.Set(name, v); err == nil {
			t.Errorf("--%s %s was accepted", name, v)
		}
	}
}

// A key that is in the file twice is refused, in either spelling.
func TestDuplicateKeys(t *testing.T) {
	file := filepath.Join(t.TempDir(), "x.yaml")
	if err := os.WriteFile(file, []byte("max-n: 2\nport: 1\nmax_n: abc\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"--config", file}, {"--config", file, "--max-n", "3"}} {
		var n, port int
		s := New("x", "", "tandem x", io.Discard)
		s.CountVar(&n, "max-n", 1, 1, "")
		s.PortVar(&port, "port", 0, "")
		if err := s.Resolve(args, nil); !errors.Is(err, ErrValue) || !strings.Contains(err.Error(), "x.yaml:3: max_n is set on line 1 already") {
			t.Errorf("%q: %v", args, err)
		}
	}
}

// The help lists each section once, and the flags of no section last.
func TestHelpListsSectionsOnce(t *testing.T) {
	var out strings.Builder
	s := New("serve [flags]", "Serves.", "tandem serve", &out)
	s.Section("API")
	s.Int("port", 8000, "the port")
	s.Section("Nodes")
	s.Int("threads", 1, "the threads")
	if err := s.Resolve([]string{"--help"}, nil); !errors.Is(err, ErrHelp) {
		t.Fatal(err)
	}
	var listed []string
	for line := range strings.SplitSeq(out.String(), "\n") {
		switch words := strings.Fields(line); {
		case strings.HasPrefix(line, "      --"):
			listed = append(listed, words[0])
		case strings.HasSuffix(line, ":") && !strings.HasPrefix(line, "Flags") && line != "Example:":
			listed = append(listed, line)
		}
	}
	if got, want := strings.Join(listed, " "), "API: --port Nodes: --threads General: --config --dry-run"; got != want {
		t.Errorf("got %s\nwant %s", got, want)
	}
}
