package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/hub"
	"github.com/tandem-serving/tandem/internal/process"
	"github.com/tandem-serving/tandem/internal/regular"
)

// errAbsent is hub.ErrModel for a model that is not on this machine.
var errAbsent = fmt.Errorf("%w", hub.ErrModel)

// maxTemplate bounds a --chat-template file.
const maxTemplate = 4 << 20

// Model has the flags of the model that a process loads. The embedded options hold their values.
type Model struct {
	engine.LoadOptions
	ServedName         string // in the API, see Names
	revision, template string // of the Hugging Face cache; a file or its text
	ahead, download    bool
	speculation        config.Speculation
	lora               config.LoRA
}

// Register declares the flags.
func (m *Model) Register(s *config.Set) {
	s.ForNodes()
	s.Section("Model")
	s.Values("dtype", "auto", "float32", "float16", "bfloat16")
	s.Values("quantization", "none", "int8", "int4")
	s.Values("kv-cache-dtype", "auto", "float32", "bfloat16", "fp8")
	s.Values("device", "auto", "cpu", "cuda")
	s.Values("cublaslt", "auto", "none")
	s.Values("cpu-kernels", append([]string{"auto"}, cpu.Variants()...)...)
	s.StringVar(&m.Model, "model", "builtin", "Hugging Face folder, .gguf file, ORG/NAME of the local Hugging Face cache, or builtin")
	s.StringVar(&m.revision, "revision", "", "branch, tag or commit of ORG/NAME; default: main")
	s.BoolVar(&m.download, "download", false, "download ORG/NAME from the Hugging Face hub before the start if the local cache lacks a part of it, as tandem pull does")
	s.StringVar(&m.template, "chat-template", "", "chat template instead of the model's own: a file, or the template itself")
	s.StringVar(&m.ServedName, "served-model-name", "", "name in the API; default: the folder's or the file's name, or ORG/NAME. Further names with commas, or one behind another, on up, serve and gateway")
	s.Section("Device")
	s.StringVar(&m.Device, "device", "auto", "auto (a GPU where kernels, driver and GPU are there, else the CPU), cpu, cuda or cuda:N")
	s.StringVar(&m.CUDALibrary, "cuda-library", "", "shared object with the kernels for GPUs, as make cuda builds it; default: tandem-cuda.so next to the program")
	s.StringVar(&m.NCCLLibrary, "nccl-library", "libnccl.so.2", "NCCL, for --tensor-parallel-size on several GPUs")
	s.Float64Var(&m.GPUMemory, "gpu-memory-utilization", 0.9, "share of a GPU's memory to use; KV blocks get the part that weights and steps do not need")
	s.BoolVar(&m.EnforceEager, "enforce-eager", false, "start a GPU's operations one by one instead of as CUDA graphs: slower, for comparison")
	s.StringVar(&m.BLAS, "cublaslt", "auto", "library that multiplies more than 64 rows on a GPU: auto (cuBLASLt if it is installed, else Tandem's kernels), none, or its path")
	s.BoolVar(&m.OneOrder, "deterministic", false, "on a GPU: add in a fixed order, so that a request's logits do not depend on the requests in the same step; slower. CPUs always do")
	s.BoolVar(&m.ahead, "async-scheduling", true, "submit the next decoding step to a GPU while one runs; false is for comparison. CPUs run one step at a time")
	s.StringVar(&m.Kernels, "cpu-kernels", "auto", "auto, or one that the processor supports: avx512vnni, avx512, avxvnni, avx2, neon, generic or portable; auto never chooses amx, because it rounds activations to bf16")
	s.Section("Model")
	s.StringVar(&m.Quantization, "quantization", "none", "quantization of weights while they are loaded: none, int8 or int4, with a scale for each group of 32")
	s.Section("Device")
	s.CountVar(&m.Threads, "threads", 0, 0, "CPU threads of this node; 0: one per core, within the cgroup's quota")
	s.Section("KV cache and scheduling")
	s.Var((*config.Bytes)(&m.KVMemory), "kv-cache-memory-bytes", "memory for KV blocks of each process that computes the model, allocated as it is used; 0: 1GiB in all, or less if the memory of the machine or cgroup is short")
	s.Section("Device")
	s.CountVar(&m.TensorParallel.Size, "tensor-parallel-size", 1, 1, "processes on this machine that split each matrix of the model; on the CPU they share --threads")
	m.TensorParallel.Timeout = time.Minute
	s.SecondsVar(&m.TensorParallel.Timeout, "distributed-timeout-seconds", false, "how long one of these processes may delay the others before the node ends")
	s.Section("Model")
	s.StringVar(&m.DType, "dtype", "auto", "type of the weights: auto, or float32, float16 or bfloat16 if they are stored in it; float32 also expands integers, as of GGUF, for exact products")
	s.Section("KV cache and scheduling")
	s.StringVar(&m.KVDType, "kv-cache-dtype", "auto", "auto (as the weights), float32, bfloat16, or fp8: E4M3, half the memory of bfloat16, with the scales of keys and values that the model's files have, else 1")
	s.CountVar(&m.BlockTokens, "block-size", 16, 1, "tokens per KV block")
	s.AutoVar(&m.MaxModelLen, "max-model-len", "tokens of prompt and output, such as 4096, 32k (32000) or 32K (32768); 0, auto or -1: the model's own limit, or less if the memory for KV blocks is short")
	s.CountVar(&m.MaxSeqs, "max-num-seqs", 256, 1, "requests that run at once")
	s.CountVar(&m.MaxBatchedTokens, "max-num-batched-tokens", 512, 1, "tokens per step; more uses large machines better, fewer keeps steps short")
	s.CountVar(&m.MaxQueued, "max-num-queued-reqs", 1024, 1, "requests that may wait for the engine")
	s.Var(&m.speculation, "speculative-config", `speculative decoding, as in {"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":5,"prompt_lookup_min":3} or {"method":"draft_model","model":"./small","num_speculative_tokens":3}; it never changes an answer`)
	s.CountVar(&m.MaskWorkers, "grammar-threads", 2, 1, "goroutines that compute the masks of constrained requests")
	m.MaskCache = 512 << 20
	s.Var((*config.Bytes)(&m.MaskCache), "grammar-cache-memory", "memory for the masks and states of grammars, of which one may take an eighth; the least recently used go first")
	s.Section("Adapters")
	m.lora.Register(s)
}

// Options completes the options that the flags hold. A name of the Hugging Face cache becomes
// the folder there, and the name in the API unless another is given.
// With --download, it downloads what the cache lacks.
func (m *Model) Options(ctx context.Context, environ []string, log *slog.Logger) (engine.LoadOptions, error) {
	o, absent, err := m.options(environ, log, m.pull(ctx, environ, log))
	return o, errors.Join(absent[0], absent[1], err)
}

// pullFunc downloads a model and returns its folder.
type pullFunc func(name, revision string) (string, error)

// pull returns the function that downloads, or nil without --download.
func (m *Model) pull(ctx context.Context, environ []string, log *slog.Logger) pullFunc {
	if !m.download {
		return nil
	}
	return func(name, revision string) (string, error) {
		dir, err := hub.Pull(ctx, hub.Options{Name: name, Revision: revision, Environ: environ, Agent: "tandem", Log: log, Progress: downloading(os.Stderr, log)})
		if err != nil && ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		return dir, err
	}
}

// options returns the errors of the model and of the draft model that are errAbsent in absent, and
// all others as err.
func (m *Model) options(environ []string, log *slog.Logger, pull pullFunc) (o engine.LoadOptions, absent [2]error, err error) {
	o = m.LoadOptions
	var errs [6]error
	var name string
	o.Model, name, errs[0] = findModel(m.Model, m.revision, environ, pull)
	m.ServedName = cmp.Or(m.ServedName, name)
	o.Speculation = engine.Speculation{Model: m.speculation.Model, Tokens: m.speculation.Tokens, Lookup: engine.Lookup{Min: m.speculation.Min, Max: m.speculation.Max}}
	if draft, _, err := findModel(m.speculation.Model, "", environ, pull); err != nil {
		errs[1] = fmt.Errorf("--speculative-config: %w", err)
	} else {
		o.Speculation.Model = draft
	}
	for i := range absent {
		if errors.Is(errs[i], errAbsent) {
			absent[i], errs[i] = errs[i], nil
		}
	}
	o.ChatTemplate, errs[2] = ReadTemplate(m.template)
	o.Adapters.Places, errs[3] = m.lora.Places()
	o.Adapters.Rank = m.lora.MaxRank
	if m.lora.Root != "" {
		if o.Adapters.Root, err = filepath.EvalSymlinks(m.lora.Root); err == nil {
			o.Adapters.Root, err = filepath.Abs(o.Adapters.Root)
		}
		if err != nil {
			errs[4] = fmt.Errorf("%w: --lora-root: %w", config.ErrValue, err)
		}
	}
	for _, a := range m.lora.Modules {
		o.Adapters.Modules = append(o.Adapters.Modules, engine.AdapterModule{Name: a.Name, Path: a.Path})
	}
	o.Progress, o.Logger, o.MemoryLimit, o.Synchronous = loading(os.Stderr, log), log, process.MemoryLimit(os.DirFS("/")), !m.ahead
	errs[5] = tensorParallel(&o.TensorParallel)
	return o, absent, errors.Join(errs[:]...)
}

// Download downloads what the cache lacks if --download is given.
func (m *Model) Download(ctx context.Context, environ []string, log *slog.Logger) error {
	if !m.download {
		return nil
	}
	_, err := m.Options(ctx, environ, log)
	return err
}

// CheckIn makes v's Parse check the flags and call check with their options. The first argument, if
// any, names the model. A model that is not on this machine is a warning in a dry run, so that a
// configuration can be checked elsewhere. With --download, Options downloads it after the checks.
func (m *Model) CheckIn(v *Invocation, check func(engine.LoadOptions) error) {
	v.Check(func() error {
		if v.NArg() > 0 {
			m.Model = v.Args()[0]
		}
		var pull pullFunc
		why := "is not in the Hugging Face cache of this machine"
		if m.download {
			pull, why = later, "is downloaded at the start"
		}
		o, absent, err := m.options(v.Environ, slog.New(slog.DiscardHandler), pull)
		missing := errors.Join(absent[:]...)
		if missing == nil && err == nil {
			return check(o)
		}
		err = errors.Join(err, engine.CheckOptions(o))
		if !v.DryRun() && !m.download {
			return errors.Join(missing, err)
		}
		for i, model := range []string{m.Model, m.speculation.Model} {
			if v.DryRun() && absent[i] != nil {
				v.Warn("model "+model, fmt.Sprintf("%s %s, so that its files are not checked", model, why))
			}
		}
		if absent[0] == nil && err == nil {
			o.Speculation = engine.Speculation{} // its model is absent
			return check(o)
		}
		return err
	})
}

// later is a pullFunc that downloads nothing. Its error is errAbsent unless the name is refused.
func later(name, _ string) (string, error) {
	if _, _, err := hub.SplitRevision(name); err != nil {
		return "", err
	}
	return "", errAbsent
}

// Names returns the names in the API. The model is listed under the first.
func (m *Model) Names() []string { return strings.Split(m.ServedName, ",") }

// RankCommand is the argument that makes this program a tensor-parallel worker of a node.
const RankCommand = "rank"

// tensorParallel makes t start this program as tensor-parallel workers, which end with this
// process.
func tensorParallel(t *engine.TensorParallel) (err error) {
	if t.Size <= 1 {
		return nil
	}
	if t.Timeout == 0 {
		return fmt.Errorf("%w: --distributed-timeout-seconds 0: want a time, such as 60", config.ErrValue)
	}
	self, err := os.Executable()
	t.Command, t.Start = []string{self, RankCommand}, func(c *exec.Cmd) error { return process.StartChild(c, syscall.SIGKILL) }
	return err
}

// ReadTemplate returns the chat template of --chat-template: the text of that file or, as with vllm
// serve, given itself where it cannot be a file's name. Empty means none.
func ReadTemplate(given string) (string, error) {
	if given == "" {
		return "", nil
	}
	text, err := regular.ReadFile(given, maxTemplate)
	switch {
	case err != nil && strings.ContainsAny(given, "{}\n"):
		return given, nil
	case err != nil:
		return "", fmt.Errorf("%w: --chat-template: %w; want a file with a Jinja template", config.ErrValue, err)
	case len(text) == 0:
		return "", fmt.Errorf("%w: --chat-template %s: the file is empty; want a Jinja template", config.ErrValue, given)
	}
	return string(text), nil
}

// findModel returns the folder of a model, and its name if that is not the folder's. A path
// that exists is the folder; org/name, or its address on the hub, is looked up in the local
// Hugging Face cache. If the cache lacks a part of it and pull is not nil, pull downloads it and
// returns its folder.
func findModel(model, revision string, environ []string, pull pullFunc) (path, name string, err error) {
	model, named := hub.Name(model)
	if _, err := os.Stat(model); model == "" || model == engine.Builtin || err == nil || !named {
		if revision != "" {
			return "", "", fmt.Errorf("%w: --revision %s: only an ORG/NAME of the Hugging Face cache has revisions, and the model is %s; leave --revision out", config.ErrValue, revision, cmp.Or(model, engine.Builtin))
		}
		return model, "", nil // engine.Load refuses a path that does not exist
	}
	cache, err := hub.DefaultCache(environ)
	if err != nil {
		return "", "", err
	}
	dir, err := cache.Find(model, revision)
	if pull != nil && (err != nil || !cache.Complete(dir)) {
		dir, err = pull(model, revision)
	}
	if pull == nil && errors.Is(err, fs.ErrNotExist) {
		download := model
		if !strings.Contains(model, "/") {
			download = "ORG/NAME"
		}
		return "", "", fmt.Errorf("%w: there is no folder %s here, and the Hugging Face cache %s does not have that model. "+
			"Nothing is downloaded unless --download is given: run `tandem pull %s` where there is network, or copy a folder with config.json, *.safetensors and tokenizer.json to this machine and give its path",
			errAbsent, model, cache.Dir, download)
	} else if err != nil {
		return "", "", err
	}
	if _, err := os.Stat(filepath.Join(dir, "config.json")); err != nil {
		// A repository of GGUF files has no config.json, and downloading it again adds none.
		if files, _ := filepath.Glob(filepath.Join(dir, "*.gguf")); len(files) > 0 {
			return "", "", fmt.Errorf("%w: %s has GGUF files and no config.json: give the path of one of them, such as %s", hub.ErrModel, model, files[0])
		}
		return "", "", fmt.Errorf("%w: %s is in the Hugging Face cache without its config.json (%w): download it again by `tandem pull %s`", hub.ErrModel, model, err, model)
	}
	return dir, model, nil
}
