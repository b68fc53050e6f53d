package doctor

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"math"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// leastMemory is what a node needs next to its weights: 1 GiB of KV and some for the process.
const leastMemory = 2 << 30

func machine(_ context.Context, o *Options) []Line {
	info := read(o.System, "proc/cpuinfo")
	model := cmp.Or(field(info, "model name"), field(info, "CPU part"), runtime.GOARCH)
	lines := []Line{ok("system", "Linux %s, %s", cmp.Or(read(o.System, "proc/sys/kernel/osrelease"), "of unknown version"), runtime.GOARCH)}
	cores, used := runtime.NumCPU(), runtime.GOMAXPROCS(0)
	l := ok("cores", "%d, %s", cores, model)
	if used < cores {
		l = ok("cores", "%d of %d by the cgroup's quota, %s", used, cores, model)
	}
	if used < 2 {
		l = l.but(Warning, "one core computes and serves: give a node at least two")
	}
	lines = append(lines, l, memory(o), hugePages(o))
	return append(lines, numa(o))
}

// kilobytes returns a figure of /proc/meminfo in bytes.
func kilobytes(meminfo, key string) int64 {
	n, err := strconv.ParseInt(strings.TrimSuffix(field(meminfo, key), " kB"), 10, 64)
	if err != nil || n < 0 || n > math.MaxInt64>>10 {
		return 0
	}
	return n << 10
}

func memory(o *Options) Line {
	info := read(o.System, "proc/meminfo")
	total, free := kilobytes(info, "MemTotal"), kilobytes(info, "MemAvailable")
	if total == 0 {
		return ok("memory", "unknown").but(Warning, "/proc/meminfo cannot be read")
	}
	l := ok("memory", "%s, %s available", size(total), size(free))
	if o.MemoryLimit > 0 && o.MemoryLimit < total {
		l.Figure += fmt.Sprintf(", at most %s in this cgroup", size(o.MemoryLimit))
		free = min(free, o.MemoryLimit)
	}
	if used := kilobytes(info, "SwapTotal") - kilobytes(info, "SwapFree"); used > 1<<30 {
		return l.but(Warning, fmt.Sprintf("%s are swapped out: weights or KV on a disk make every step slow", size(used)))
	}
	if free < leastMemory {
		return l.but(Warning, "a node needs its weights, 1 GiB of KV and some more: end other programs, or lower --kv-cache-memory-bytes")
	}
	return l
}

func hugePages(o *Options) Line {
	info := read(o.System, "proc/meminfo")
	mode := "unknown"
	if text := read(o.System, "sys/kernel/mm/transparent_hugepage/enabled"); text != "" {
		if _, rest, found := strings.Cut(text, "["); found {
			mode, _, _ = strings.Cut(rest, "]")
		}
	}
	l := ok("huge pages", "transparent: %s; reserved: %s of %s", mode, cmp.Or(field(info, "HugePages_Total"), "0"), cmp.Or(field(info, "Hugepagesize"), "unknown size"))
	if mode == "never" {
		return l.but(Warning, "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: weights in small pages cost time in each step")
	}
	return l
}

func numa(o *Options) Line {
	nodes, err := fs.Glob(o.System, "sys/devices/system/node/node[0-9]*")
	if err != nil || len(nodes) < 2 {
		return ok("NUMA", "one node")
	}
	return ok("NUMA", "%d nodes", len(nodes)).but(OK, "run one process on each: numactl --cpunodebind=N --membind=N tandem …")
}

func kernels(_ context.Context, o *Options) []Line {
	l := ok("instructions", "%s", strings.Join(o.Kernels, " "))
	if slices.Equal(o.Kernels, []string{"portable"}) || len(o.Kernels) == 0 {
		return []Line{l.but(Warning, "this build has no C kernels, or the processor none of their instructions: install gcc and `make build`")}
	}
	return []Line{l}
}

func limits(_ context.Context, o *Options) []Line {
	var lines []Line
	if o.Descriptors != nil {
		limit, clients, err := o.Descriptors()
		l := ok("file descriptors", "%d, enough for %d clients of a gateway", limit, clients)
		switch {
		case err != nil:
			l = Line{Name: "file descriptors", State: Problem, Figure: err.Error(), Do: "ulimit -n 65536; systemd: LimitNOFILE=, Docker: --ulimit nofile="}
		case clients < 1000:
			l = l.but(Warning, "ulimit -n 65536; systemd: LimitNOFILE=, Docker: --ulimit nofile=")
		}
		lines = append(lines, l)
	}
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r); err == nil {
		l := ok("locked memory", "%s", limitOf(r.Cur))
		if r.Cur != unix.RLIM_INFINITY && devices(o) {
			l = l.but(Warning, "RDMA and GPUs pin the KV memory: ulimit -l unlimited; systemd: LimitMEMLOCK=infinity")
		}
		lines = append(lines, l)
	}
	return lines
}

func limitOf(n uint64) string {
	if n == unix.RLIM_INFINITY {
		return "unlimited"
	}
	return size(int64(min(n, math.MaxInt64)))
}

// devices reports whether the machine has devices that pin memory.
func devices(o *Options) bool {
	rdma, err := fs.Glob(o.System, "sys/class/infiniband/*")
	return err == nil && len(rdma) > 0 || read(o.System, "proc/driver/nvidia/version") != ""
}

func clock(_ context.Context, _ *Options) []Line {
	var t unix.Timex
	if _, err := unix.Adjtimex(&t); err != nil {
		return []Line{ok("synchronized", "unknown: %v", err)}
	}
	if t.Status&unix.STA_UNSYNC != 0 {
		return []Line{ok("synchronized", "the kernel reports no synchronization").but(Warning, "run chrony or systemd-timesyncd on the host: certificates and logs of several machines need one time")}
	}
	return []Line{ok("synchronized", "yes, within %d ms", t.Maxerror/1000)}
}

func fabric(_ context.Context, o *Options) []Line {
	if o.Fabric == nil {
		return nil
	}
	var lines []Line
	if rdma, err := fs.Glob(o.System, "sys/class/infiniband/*"); err == nil && len(rdma) > 0 {
		for i := range rdma {
			rdma[i] = strings.TrimPrefix(rdma[i], "sys/class/infiniband/")
		}
		lines = append(lines, ok("RDMA devices", "%s", strings.Join(rdma, " ")))
	}
	found, err := o.Fabric()
	switch {
	case len(found) > 0:
		lines = append(lines, ok("libfabric", "%s", strings.Join(found, "; ")))
	case len(lines) > 0:
		lines = append(lines, ok("libfabric", "%v", err).but(Warning, "install libfabric1 for --kv-transport rdma; without it KV blocks travel over TCP"))
	default:
		lines = append(lines, ok("libfabric", "not usable, and no RDMA device: KV blocks travel over TCP or shared memory (%v)", err))
	}
	return lines
}

func gpu(_ context.Context, o *Options) []Line {
	driver, _, _ := strings.Cut(read(o.System, "proc/driver/nvidia/version"), "\n")
	cards, err := fs.Glob(o.System, "proc/driver/nvidia/gpus/*/information")
	if err != nil {
		cards = nil
	}
	if driver == "" {
		return []Line{ok("driver", "none: models are computed on the CPU")}
	}
	lines := []Line{ok("driver", "%s", strings.Join(strings.Fields(strings.TrimPrefix(driver, "NVRM version:")), " "))}
	for _, c := range cards {
		lines = append(lines, ok("GPU", "%s", cmp.Or(field(read(o.System, c), "Model"), "of unknown model")))
	}
	if o.GPU == nil {
		return lines
	}
	name, total, free, err := o.GPU()
	if err != nil {
		return append(lines, ok("kernels", "%v", err).but(Warning, "`make cuda` builds the kernels; put tandem-cuda.so next to the program"))
	}
	l := ok("kernels", "%s, %s, %s free", name, size(total), size(free))
	if free < total*8/10 {
		l = l.but(Warning, "other processes hold memory of the GPU: nvidia-smi shows them; or lower --gpu-memory-utilization")
	}
	return append(lines, l)
}
