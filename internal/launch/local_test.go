package launch

import (
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// flagOf is the last value of a flag, which is the one that counts.
func flagOf(args []string, name string) string {
	for i := len(args) - 2; i >= 0; i-- {
		if args[i] == name {
			return args[i+1]
		}
	}
	return ""
}

// The nodes share what the machine allows: the threads that Go itself would use,
// which follow a cgroup's quota, and the memory that was counted for them.
func TestNodesShareTheMachine(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(6))
	for _, c := range []struct {
		l       Local
		threads string
		kv      string
	}{
		{Local{Prefill: 1, Decode: 2, Port: 8000}, "2", ""},
		{Local{Prefill: 4, Decode: 4, Port: 8000}, "1", ""},
		{Local{Prefill: 1, Decode: 1, Port: 8000, Threads: 5, KVMemory: 1 << 20}, "5", "1048576"},
	} {
		ps, err := c.l.Processes()
		if err != nil {
			t.Fatal(err)
		}
		if len(ps) != 1+c.l.Prefill+c.l.Decode {
			t.Fatalf("%+v: %d processes", c.l, len(ps))
		}
		if flagOf(ps[0].Args, "--threads") != "" || flagOf(ps[0].Args, "--kv-cache-memory-bytes") != "" {
			t.Errorf("a gateway has no model: %q", ps[0].Args)
		}
		var ports []string
		for _, p := range ps[1:] {
			if got := flagOf(p.Args, "--threads"); got != c.threads {
				t.Errorf("%+v: %s has %s threads, want %s", c.l, p.Name, got, c.threads)
			}
			if got := flagOf(p.Args, "--kv-cache-memory-bytes"); got != c.kv {
				t.Errorf("%+v: %s has %q bytes of KV, want %q", c.l, p.Name, got, c.kv)
			}
			ports = append(ports, flagOf(p.Args, "--http-port"))
		}
		for i, port := range ports {
			if port != strconv.Itoa(c.l.Port+1+i) || slices.Contains(ports[:i], port) {
				t.Errorf("%+v: metrics at %q", c.l, ports)
			}
		}
	}
}

// What up prints is what works: with a key and a certificate of one's own, too.
func TestInvitation(t *testing.T) {
	l := Local{Prefill: 1, Decode: 2, Port: 8000}
	for _, c := range []struct{ url, key, cert, curl, chat string }{
		{"http://127.0.0.1:8000", "", "", "curl -sN http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type", "or " + os.Args[0] + " chat --url http://127.0.0.1:8000."},
		{"https://127.0.0.1:8000", "secret", "my cert.pem", "curl -sN https://127.0.0.1:8000/v1/chat/completions -H 'Authorization: Bearer secret' -k -H 'Content-Type",
			"or SSL_CERT_FILE='my cert.pem' " + os.Args[0] + " chat --url https://127.0.0.1:8000 --api-key secret."},
	} {
		text := l.invite(c.url, c.key, c.cert, "m", 300*time.Millisecond)
		if !strings.Contains(text, c.curl) || !strings.Contains(text, c.chat) || !strings.Contains(text, "after 0.3 s: 1 prefill and 2 decode") ||
			!strings.Contains(text, "ports 8001 to 8003") || strings.Contains(text, "%!") {
			t.Errorf("%s", text)
		}
	}
}

// Between the choice of the gossip port and its use, the system must not give it
// to another process.
func TestGossipPortIsNotEphemeral(t *testing.T) {
	first := firstEphemeral()
	if first < 8192 {
		t.Logf("ephemeral ports begin at %d: nothing to hold", first)
		return
	}
	for range 20 {
		p, err := freePort()
		if err != nil {
			t.Fatal(err)
		}
		if p >= first || p < first-4096 {
			t.Errorf("port %d, want one of the 4096 below %d", p, first)
		}
	}
}
