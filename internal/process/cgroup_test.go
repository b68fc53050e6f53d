package process

import (
	"os"
	"strings"
	"testing"
	"testing/fstest"
)

// system is a Linux file system of these files.
func system(files map[string]string) fstest.MapFS {
	m := fstest.MapFS{}
	for name, text := range files {
		m[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return m
}

const (
	gib       = 1 << 30
	v2Mount   = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
	v1Mounts  = "33 25 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n36 25 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
	rootMount = "23 1 254:1 / / rw - ext4 /dev/vda rw\n"
	meminfo   = "MemTotal:       16777216 kB\nMemFree:        1 kB\n" // 16 GiB
)

func TestMemoryLimit(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		want  int64
	}{
		"nothing":      {nil, 0},
		"machine only": {map[string]string{"proc/meminfo": meminfo}, 16 * gib},
		"v2": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/pod/app\n", "proc/self/mountinfo": rootMount + v2Mount,
			"sys/fs/cgroup/pod/app/memory.max": "2147483648\n", "sys/fs/cgroup/pod/memory.max": "max\n",
		}, 2 * gib},
		"v2, the limit is above": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/pod/app\n", "proc/self/mountinfo": v2Mount,
			"sys/fs/cgroup/pod/app/memory.max": "4294967296\n", "sys/fs/cgroup/pod/memory.max": "3221225472\n",
		}, 3 * gib},
		"v2, none":                 {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "0::/\n", "proc/self/mountinfo": v2Mount, "sys/fs/cgroup/memory.max": "max\n"}, 16 * gib},
		"v2, more than there is":   {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "0::/\n", "proc/self/mountinfo": v2Mount, "sys/fs/cgroup/memory.max": "99999999999\n"}, 16 * gib},
		"v2 without meminfo":       {map[string]string{"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": v2Mount, "sys/fs/cgroup/memory.max": "1073741824\n"}, gib},
		"v2, a container's own":    {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "0::/\n", "proc/self/mountinfo": strings.Replace(v2Mount, " / ", " /pod/app ", 1), "sys/fs/cgroup/memory.max": "1073741824\n"}, gib},
		"v2, outside of the mount": {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "0::/../../other\n", "proc/self/mountinfo": v2Mount, "sys/fs/cgroup/memory.max": "1073741824\n"}, gib},
		"v1": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "9:cpu,cpuacct:/x\n8:memory:/docker/abc\n0::/\n", "proc/self/mountinfo": v1Mounts,
			"sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "5368709120\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
		}, 5 * gib},
		"v1 in docker": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "8:memory:/docker/abc\n", "proc/self/mountinfo": strings.ReplaceAll(v1Mounts, " / ", " /docker/abc "),
			"sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n",
		}, gib},
		"v1, none": {map[string]string{
			"proc/self/cgroup": "8:memory:/\n", "proc/self/mountinfo": v1Mounts, "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
		}, 0},
		"a blank in the path": {map[string]string{
			"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": `30 23 0:26 / /my\040cgroup rw - cgroup2 cgroup2 rw` + "\n", "my cgroup/memory.max": "1073741824\n",
		}, gib},
		"nonsense": {map[string]string{
			"proc/meminfo": "MemTotal: -5 kB\nMemTotal: x kB\n", "proc/self/cgroup": "::\n0\n0::\n8:memory\n", "proc/self/mountinfo": "-\n - \n1 2 3 - cgroup2\n" + v2Mount,
			"sys/fs/cgroup/memory.max": "-1\n",
		}, 0},
	} {
		if got := MemoryLimit(system(c.files)); got != c.want {
			t.Errorf("%s: %d bytes, want %d", name, got, c.want)
		}
	}
	if got := MemoryLimit(os.DirFS("/")); got < 0 {
		t.Errorf("this machine: %d", got)
	}
}

// The files of /proc are the kernel's, but paths in them are chosen by others.
func FuzzMemoryLimit(f *testing.F) {
	f.Add("0::/pod/app\n", v2Mount, "1073741824\n", meminfo)
	f.Add("8:memory:/docker/abc\n", v1Mounts, "max", "MemTotal: 1 kB")
	f.Add("0::/../..\n", `1 2 3 /a /b\040c rw - cgroup2 c rw`, "9223372036854775807", "")
	f.Fuzz(func(t *testing.T, cgroup, mountinfo, limit, meminfo string) {
		got := MemoryLimit(system(map[string]string{
			"proc/self/cgroup": cgroup, "proc/self/mountinfo": mountinfo, "proc/meminfo": meminfo,
			"sys/fs/cgroup/memory.max": limit, "sys/fs/cgroup/memory/memory.limit_in_bytes": limit,
		}))
		if got < 0 || got >= noLimit {
			t.Errorf("a limit of %d bytes", got)
		}
	})
}
