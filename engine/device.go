package engine

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/backend/cuda"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/memory"
	"github.com/tandem-serving/tandem/engine/model"
)

// Bytes of a GPU's memory that are left for code and the driver's own allocations, and
// for the graphs of all buckets.
const (
	codeReserve  = 256 << 20
	graphReserve = 512 << 20
)

// reserve returns the sum of these reserves. Adapters have each graph twice.
func reserve(o *LoadOptions) int64 {
	switch {
	case o.EnforceEager:
		return codeReserve
	case o.Adapters.Places > 0:
		return codeReserve + 2*graphReserve
	}
	return codeReserve + graphReserve
}

// captureInterval is how often a long capture of graphs logs its progress.
const captureInterval = 2 * time.Second

// mirrorShare is the most of the host's memory that a copy of a GPU's KV takes if no
// option sets the size of the KV.
const mirrorShare = 0.5

// choice is the device that computes a model.
type choice struct {
	gpu         bool
	number      int
	name        string
	total, free int64 // bytes of a GPU's memory
}

// choose parses --device and probes for a GPU unless it is cpu. If auto finds none, it
// logs why and returns the CPU. A GPU that was requested must exist.
func choose(o *LoadOptions) (choice, error) {
	if o.Device == "cpu" {
		warnWithoutC(o)
		return choice{}, nil
	}
	auto := o.Device == "" || o.Device == "auto"
	c := choice{gpu: true}
	if !auto {
		var ok bool
		if c.number, ok = cuda.Ordinal(o.Device); !ok {
			return c, fmt.Errorf("%w: --device %q; use auto, cpu, cuda or cuda:N", ErrOption, o.Device)
		}
	}
	p, err := cuda.Probe(o.CUDALibrary, c.number)
	switch {
	case err != nil && auto:
		gpus, _ := filepath.Glob("/proc/driver/nvidia/gpus/*/information") // the pattern is valid
		logOnCPU(o.Logger, err, len(gpus))
		warnWithoutC(o)
		return choice{}, nil
	case err != nil:
		return c, fmt.Errorf("%w: --device %s: %w", ErrOption, o.Device, err)
	}
	c.name, c.total, c.free = p.Name, p.Total, p.Free
	o.Logger.Info("computing on a GPU", "device", fmt.Sprintf("cuda:%d", c.number), "name", c.name, "memory", memory.Bytes(c.total), "free", memory.Bytes(c.free))
	if p.PTX {
		o.Logger.Warn("no machine code for this GPU; its driver compiled the kernels", "name", c.name, "compute_capability", p.Capability,
			"remedy", "add the architecture to Targets of cuda/kernels.go and run make cuda: compiled for it, kernels are faster, and nodes start sooner")
	}
	if o.BlockTokens%kvcache.DefaultBlockTokens != 0 {
		o.Logger.Warn("attention without tensor cores, which is slower: they need blocks of a multiple of 16 tokens", "block_size", o.BlockTokens,
			"remedy", "start all nodes with --block-size 16, or without it")
	}
	return c, nil
}

// logOnCPU logs why --device auto uses the CPU. That is a warning with a remedy if the machine has
// GPUs, because a node then is many times slower than its owner expects.
func logOnCPU(log *slog.Logger, err error, gpus int) {
	why := strings.TrimPrefix(err.Error(), backend.ErrNoDevice.Error()+": ")
	if gpus == 0 {
		log.Info("computing on the CPU", "why", why)
		return
	}
	remedy := "run `tandem doctor` and nvidia-smi; --device cuda makes this an error"
	switch {
	case strings.Contains(why, "driver version is insufficient"):
		remedy = "update NVIDIA's driver to R525 or newer, to R580 for kernels by make cuda-nvcc; --device cuda makes this an error"
	case strings.Contains(why, "compute capability"):
		remedy = "use a GPU of compute capability 8.0 or newer, and kernels by make cuda, which compiles for all; --device cuda makes this an error"
	case strings.Contains(why, "make cuda"):
		remedy = "put " + cuda.LibraryName + " of the same build next to the program; --device cuda makes this an error"
	}
	log.Warn("computing on the CPU", "why", why, "gpus", gpus, "remedy", remedy)
}

// warnWithoutC logs that the program was built without a C compiler, unless the portable kernels
// were requested. Builds by go install have no other hint.
func warnWithoutC(o *LoadOptions) {
	if cpu.Variants()[0] == cpu.Portable && o.Kernels != cpu.Portable {
		o.Logger.Warn("no C kernels: this build is many times slower than one with gcc", "kernels", cpu.Portable)
	}
}

// widen converts FP8 weights to bfloat16 if the device has no matrix products for them, and expands
// integers on GPUs and for --dtype float32.
func (c *choice) widen(s *model.Source, dtype string) {
	if c.gpu || typeName(dtype) == "float32" {
		s.ExpandIntegers()
	}
	if f := s.Config.FP8; c.gpu && f != nil && !cuda.FP8Blocks(f.Block[0], f.Block[1]) {
		s.ExpandFP8()
	}
}

// kvMemory returns the default memory for KV. On a GPU that is what
// --gpu-memory-utilization leaves after memory already in use, the weights and a step
// of each model.
func (c *choice) kvMemory(o *LoadOptions, weights int64, models ...*model.Config) (int64, error) {
	if !c.gpu {
		n := int64(max(1, o.TensorParallel.Size)) // each worker has a part of it
		return defaultKV(o.MemoryLimit, weights*n) / n, nil
	}
	var step int64
	for _, m := range models {
		outputs := o.MaxSeqs + extraOutputs
		limits := backend.Limits{Tokens: o.MaxBatchedTokens, Outputs: outputs}
		step += m.StepBytes(limits) + int64(outputs)*cuda.OutputBytes(m.Vocab)
		if m.HasStates() {
			step += cuda.DeltaStepBytes(m.DeltaSpec(), limits)
		}
	}
	if o.Adapters.Places > 0 {
		step += cuda.AdapterStepBytes(o.Adapters.Rank, backend.Limits{Tokens: o.MaxBatchedTokens, Outputs: o.MaxSeqs + extraOutputs})
	}
	if o.BLAS != "none" && !o.OneOrder {
		step += 32<<20 + step/8    // cuBLASLt's workspace, and activations in half their width
		for _, m := range models { // and, of weights in 8 and 4 bits, a matrix in 16
			if m.FP8 != nil || o.Quantization != "" && o.Quantization != "none" {
				step += 2 * m.LargestMatrix()
			}
		}
	}
	left := int64(float64(c.total)*o.GPUMemory) - (c.total - c.free) - weights - step - reserve(o)
	if left <= 0 {
		return 0, fmt.Errorf("%w: --gpu-memory-utilization %.2f of %s leaves nothing for KV: %s are in use, weights need %s, a step %s, and %s are reserved",
			ErrOption, o.GPUMemory, memory.Bytes(c.total), memory.Bytes(c.total-c.free), memory.Bytes(weights), memory.Bytes(step), memory.Bytes(reserve(o)))
	}
	if most := int64(float64(o.MemoryLimit) * mirrorShare); o.SharedKV && most > 0 && left > most {
		o.Logger.Warn("KV memory limited by host memory: nodes that transfer KV keep a pinned copy of it on the host; --kv-cache-memory-bytes sets it",
			"kv_memory", memory.Bytes(most), "gpu", memory.Bytes(left), "limit", memory.Bytes(o.MemoryLimit))
		left = most
	}
	return left, nil
}

// open makes the backend.
func (c *choice) open(o *LoadOptions, limits backend.Limits, group backend.WorkerGroup, mapKV func(int) ([]byte, error)) (backend.Backend, error) {
	if c.gpu {
		blas := o.BLAS
		switch blas {
		case "":
			blas = cuda.BLASAuto
		case "none":
			blas = cuda.BLASNone
		}
		b, err := cuda.New(cuda.Options{
			Library: o.CUDALibrary, Device: c.number, Limits: limits, Eager: o.EnforceEager, Mirror: o.SharedKV, MapKV: mapKV, Group: group, BLAS: blas, Deterministic: o.OneOrder,
			NoGraph: func(why error) {
				o.Logger.Warn("some steps run without a graph, which is slower: a lower --gpu-memory-utilization leaves memory for graphs, --enforce-eager makes none", "why", why)
			},
		})
		if err != nil {
			return nil, fmt.Errorf("%w: --device %s: %w", ErrOption, o.Device, err)
		}
		if version, why := b.BLAS(); version != 0 {
			o.Logger.Info("cuBLASLt used for large matrix products", "version", version)
		} else {
			o.Logger.Info("cuBLASLt not used for large matrix products", "why", why)
		}
		return b, nil
	}
	b, err := cpu.New(cpu.Options{
		Threads: o.TensorParallel.threads(o.Threads), Limits: limits, Kernels: o.Kernels, Mapped: true, MapKV: mapKV, Group: group, FaultBatchOrder: o.FaultBatchOrder,
	})
	if err != nil {
		return nil, fmt.Errorf("%w: --cpu-kernels %s, --threads %d: %w", ErrOption, o.Kernels, o.Threads, err)
	}
	return b, nil
}

// capture records the graphs of decode steps, so that no step waits for a recording.
func (c *choice) capture(o *LoadOptions, l *Loaded) error {
	gpu, ok := l.Backend.(*cuda.CUDA)
	if !ok {
		return nil
	}
	began, before := time.Now(), gpu.Free()
	logged := began
	n, err := l.Model.Capture(o.MaxSeqs, func(done, of int) {
		if now := time.Now(); now.Sub(logged) >= captureInterval {
			logged = now
			o.Logger.Info("capturing graphs", "done", done, "of", of)
		}
	})
	if err != nil {
		return fmt.Errorf("%w %s: recording graphs: %w", ErrModel, o.Model, err)
	}
	o.Logger.Info("graphs captured", "graphs", n, "seconds", fmt.Sprintf("%.2f", time.Since(began).Seconds()),
		"memory", memory.Bytes(before-gpu.Free()), "free", memory.Bytes(gpu.Free()))
	return nil
}
