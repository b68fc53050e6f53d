package launch

import (
	"runtime"
	"slices"
	"strconv"
	"testing"
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
