package process

import (
	"testing"
	"testing/fstest"
)

// Go's limit is the smallest of the cgroups', less what is not Go's, and never set
// against GOMEMLIMIT or without a cgroup that limits.
func TestGoLimit(t *testing.T) {
	const gib = 1 << 30
	for name, c := range map[string]struct {
		max      string
		environ  []string
		reserved int64
		want     int64
	}{
		"a cgroup's":     {"2147483648\n", nil, 0, 2 * gib * 9 / 10},
		"less KV":        {"2147483648\n", []string{"HOME=/"}, gib, gib * 9 / 10},
		"nearly all KV":  {"2147483648\n", nil, 2*gib - 1, gib / 2},
		"more than all":  {"2147483648\n", nil, 9 * gib, gib / 2},
		"GOMEMLIMIT set": {"2147483648\n", []string{"GOMEMLIMIT=1GiB"}, 0, 0},
		"no limit":       {"max\n", nil, 0, 0},
		"as the machine": {"99999999999999\n", nil, 0, 0},
	} {
		system := fstest.MapFS{}
		for file, text := range map[string]string{
			"proc/meminfo": "MemTotal:       16777216 kB\n", "proc/self/cgroup": "0::/pod\n", "proc/self/mountinfo": v2Mount, "sys/fs/cgroup/pod/memory.max": c.max,
		} {
			system[file] = &fstest.MapFile{Data: []byte(text)}
		}
		if got := goLimit(system, c.environ, c.reserved); got < c.want-1 || got > c.want+1 {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}
