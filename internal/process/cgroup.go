package process

import (
	"io/fs"
	"path"
	"strconv"
	"strings"
)

// MemoryLimit returns the memory that this process may use, in bytes: the machine's, or the
// smallest limit of its cgroups, version 1 or 2. It is 0 if system, the root of a Linux file
// system, has neither.
//
// The CPU quota of a cgroup needs no such function: GOMAXPROCS follows it.
func MemoryLimit(system fs.FS) int64 {
	limit := memTotal(system)
	mounts := read(system, "proc/self/mountinfo")
	for line := range strings.Lines(read(system, "proc/self/cgroup")) {
		// 0::/a/b in version 2, 7:memory:/a/b in version 1.
		hierarchy, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		controllers, group, ok := strings.Cut(rest, ":")
		if !ok {
			continue
		}
		file, v2 := "memory.limit_in_bytes", false
		switch {
		case hierarchy == "0" && controllers == "":
			file, v2 = "memory.max", true
		case !has(controllers, "memory"):
			continue
		}
		for _, dir := range groupDirs(mounts, group, v2) {
			n, err := strconv.ParseInt(strings.TrimSpace(read(system, path.Join(dir, file))), 10, 64)
			// Version 2 writes "max" for no limit, version 1 a number larger than any
			// machine's memory.
			if err == nil && n > 0 && (limit == 0 || n < limit) {
				limit = n
			}
		}
	}
	if limit >= noLimit {
		return 0
	}
	return limit
}

// noLimit is less than the number that version 1 writes for no limit, the largest number of
// whole pages.
const noLimit = 1 << 62

// groupDirs returns the folders of a cgroup and of its ancestors that this process sees,
// without the leading slash.
func groupDirs(mounts, group string, v2 bool) (dirs []string) {
	for line := range strings.Lines(mounts) {
		// 36 35 0:32 /root /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
		mount, super, ok := strings.Cut(strings.TrimSpace(line), " - ")
		m, s := strings.Fields(mount), strings.Fields(super)
		if !ok || len(m) < 5 || len(s) < 3 {
			continue
		}
		if v2 && s[0] != "cgroup2" || !v2 && (s[0] != "cgroup" || !has(s[2], "memory")) {
			continue
		}
		root, point := m[3], strings.TrimPrefix(unescape(m[4]), "/")
		// In a container without its own path, the mount's root is its group or an
		// ancestor of it.
		below, inside := strings.CutPrefix(group, strings.TrimSuffix(root, "/"))
		if !inside || strings.Contains(below, "..") || below != "" && below[0] != '/' {
			below = "/"
		}
		for at := path.Clean("/" + below); ; at = path.Dir(at) {
			dirs = append(dirs, path.Join(point, at))
			if at == "/" {
				return dirs
			}
		}
	}
	return nil
}

// unescape decodes mountinfo's escapes of blanks in paths.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// has reports whether a comma-separated list contains the word.
func has(list, word string) bool {
	return strings.Contains(","+list+",", ","+word+",")
}

// memTotal returns the machine's memory in bytes, or 0.
func memTotal(system fs.FS) int64 {
	for line := range strings.Lines(read(system, "proc/meminfo")) {
		// MemTotal:       65842336 kB
		f := strings.Fields(line)
		if len(f) == 3 && f[0] == "MemTotal:" && f[2] == "kB" {
			if n, err := strconv.ParseInt(f[1], 10, 64); err == nil && n > 0 && n < noLimit>>10 {
				return n << 10
			}
		}
	}
	return 0
}

// read returns a file's text, or "" if it cannot be read.
func read(system fs.FS, name string) string {
	text, err := fs.ReadFile(system, name)
	if err != nil {
		return ""
	}
	return string(text)
}
