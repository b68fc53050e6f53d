package process

import (
	"io/fs"
	"log/slog"
	"os"
	"runtime/debug"
	"strings"
)

// Shares of a cgroup's memory limit.
const (
	goShare = 0.9  // of the memory for Go: the rest is for stacks of C, the kernel and fragmentation
	goFloor = 0.25 // of the whole limit, at least, so that the collector does not run all the time
)

// LimitMemory sets Go's soft memory limit from the cgroup's memory limit, less the
// reserved bytes that the process takes outside of Go's heap (KV cache, weights), and
// logs it. It does nothing if environ has GOMEMLIMIT, or no cgroup limits memory.
func LimitMemory(log *slog.Logger, environ []string, reserved int64) {
	if n := goLimit(os.DirFS("/"), environ, reserved); n > 0 {
		debug.SetMemoryLimit(n)
		log.Info("Go's memory limit follows the cgroup's", "limit", n, "reserved", reserved)
	}
}

// goLimit returns the limit that LimitMemory sets; 0: none.
func goLimit(system fs.FS, environ []string, reserved int64) int64 {
	for _, e := range environ {
		if strings.HasPrefix(e, "GOMEMLIMIT=") {
			return 0
		}
	}
	limit := MemoryLimit(system)
	if total := memTotal(system); limit == 0 || total > 0 && limit >= total {
		return 0
	}
	return max(int64(goFloor*float64(limit)), int64(goShare*float64(limit-reserved)))
}
