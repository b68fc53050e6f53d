package engine

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/backend/cuda"
	"github.com/tandem-serving/tandem/engine/builtin"
	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/masks"
	"github.com/tandem-serving/tandem/engine/memory"
	"github.com/tandem-serving/tandem/engine/model"
	"github.com/tandem-serving/tandem/engine/ngram"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/engine/workers"
	"github.com/tandem-serving/tandem/internal/regular"
)

// MaxLookup bounds Speculation's Lookup, in tokens.
const MaxLookup = 64

// Builtin is the name of the model that is embedded in the binary.
const Builtin = "builtin"

// ErrOption wraps refusals of LoadOptions.
var ErrOption = errors.New("engine: bad option")

// ErrModel wraps refusals of a model: its files are missing or incomplete, or its kind is not
// supported.
var ErrModel = errors.New("engine: cannot load the model")

// LoadOptions select a model and how it is served. Zero values take defaults.
type LoadOptions struct {
	Model   string // a Hugging Face folder, a GGUF file, or Builtin
	Device  string // "auto", "cpu", "cuda" or "cuda:N"
	Kernels string // "auto" or a kernel variant of the device

	// Quantization is what weights are turned into as they are loaded: "none" (as
	// the empty string), "int8" or "int4". The format in which they are stored is none, too.
	Quantization string
	Threads      int // 0: GOMAXPROCS
	Logger       *slog.Logger

	CUDALibrary  string  // the shared object with the kernels for GPUs; empty: in the program's folder
	NCCLLibrary  string  // by which several GPUs compute a model; empty: libnccl.so.2
	GPUMemory    float64 // share of a GPU's memory that may be taken; 0: 0.9
	EnforceEager bool    // no graphs on a GPU
	Synchronous  bool    // no step is given to a GPU while another one runs
	BLAS         string  // of a GPU: cuBLASLt's path, or auto or none; empty: auto
	OneOrder     bool    // a GPU's sums have one order, however many rows share a step
	SharedKV     bool    // other nodes read or write KV blocks

	// KVMemory is the bytes of KV blocks. Default 1 GiB: on a CPU they are
	// backed by memory only as they are first used. Where MemoryLimit is known the
	// default is at most half of what the weights leave of it; the other half is
	// for step buffers, the runtime and the page cache.
	KVMemory    int64
	MemoryLimit int64  // that the process may take, in bytes; 0: not known
	DType       string // "auto", or the type that the weights are stored in
	KVDType     string // "auto" (as the weights), "float32", "bfloat16" or "fp8"
	BlockTokens int    // 0: 16
	StateTokens int    // tokens between the kept states of a sequence; 0: memory.DefaultStateTokens

	// KVFile holds the KV blocks; nil: the device's own memory does. Close unmaps only the latter.
	KVFile KVFile

	TensorParallel TensorParallel

	MaxModelLen      int // 0: what the model was made for, or less if KVMemory is short
	MaxSeqs          int
	MaxBatchedTokens int
	MaxQueued        int

	Speculation Speculation // none where it is zero

	Adapters Adapters // none where it is zero

	MaskWorkers int   // see Options
	MaskCache   int64 // bytes; see Options.MaskCacheBytes

	ChatTemplate string // instead of the model's own; empty: that

	Progress func(done, total int64) // bytes of weights

	// FaultBatchOrder makes the CPU's reductions depend on the batch; for
	// tests that must notice.
	FaultBatchOrder bool
}

// Speculation configures guessed tokens. A draft model guesses them, or they are copied from behind
// an earlier occurrence of the same tokens. The model verifies several in one step and keeps those
// that it would have drawn.
type Speculation struct {
	Tokens int    // guesses per step and request, at most; 0: none
	Model  string // the draft model, as LoadOptions.Model; empty: Lookup
	Lookup Lookup
}

// KVFile is memory that other processes can map, which holds KV blocks: a region
// at a time is asked for.
type KVFile interface {
	Map(bytes int) ([]byte, error)
	File() *os.File
	Place(mem []byte) (at int64, ok bool) // of what Map gave, in the file
}

// Adapters bound the low-rank adapters (LoRA) that a node may have loaded.
type Adapters struct {
	Places  int // 0: none
	Rank    int // the largest
	Modules []AdapterModule
	Root    string // see Options.AdapterRoot
}

// Lookup is re-exported so that other packages need not import engine/ngram.
type Lookup = ngram.Lookup

// Loaded is a model on a device, ready to be given to New.
type Loaded struct {
	Source      *model.Source
	Model       *model.Model
	Backend     backend.Backend
	Bundle      *model.Bundle
	KV          backend.KVSpec
	Scheduler   scheduler.Config
	Plan        memory.Plan
	Fingerprint uint64
	Class       string // numerics class
	LoadTime    time.Duration

	Quantization model.Quantization
	WeightBytes  int64 // as the device holds them, of the rank that has most
	Adapters     Adapters
	Synchronous  bool // as LoadOptions has it

	classifier []float32 // see Options

	Draft   *Loaded // the draft model; nil: none
	Drafter Drafter

	maskWorkers int
	maskCache   int64

	workers *workers.Leader // nil: this process computes the model alone
	shared  [][]byte        // [regions × ranks] KV pages, where ranks have some
	groupID []byte          // the name by which ranks' GPUs find each other
	own     *workers.Memory // holds the pages, unless LoadOptions.KVFile does
}

// OpenModel opens a checkpoint folder or the built-in model.
func OpenModel(name string) (*model.Source, error) {
	if name == "" || name == Builtin {
		return model.OpenFS(builtin.FS(), builtin.Name)
	}
	return model.OpenDir(name)
}

// ReadTokenizer is the tokenizer and the chat template of a Hugging Face folder, or
// of Builtin; it needs neither config.json nor weights.
func ReadTokenizer(folder string) (*model.Bundle, error) {
	files := builtin.FS()
	if folder != Builtin {
		switch info, err := os.Stat(folder); {
		case err != nil:
			return nil, fmt.Errorf("%w: %w", model.ErrSource, err)
		case !info.IsDir():
			return nil, fmt.Errorf("%w: %s is a file; give the folder that holds tokenizer.json", model.ErrSource, folder)
		}
		files = regular.Dir(folder)
	}
	return model.ReadTokenizer(files)
}

// Load opens a checkpoint and puts it on the device.
func Load(o LoadOptions) (*Loaded, error) {
	began := time.Now()
	o.setDefaults()
	if err := o.check(); err != nil {
		return nil, err
	}
	// Scheduler and device have the same bound, and every running request gets
	// at least its one token into a step.
	o.MaxBatchedTokens = max(o.MaxBatchedTokens, o.MaxSeqs)
	src, err := OpenModel(o.Model)
	if err != nil {
		return nil, refuse(o.Model, err)
	}
	l := &Loaded{Source: src, maskWorkers: o.MaskWorkers, maskCache: o.MaskCache}
	if err := checkStored(o.DType, src); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	if o.Quantization, err = asStored(o.Quantization, src.Name, &src.Config); err == nil {
		err = l.load(o)
	}
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	l.LoadTime = time.Since(began)
	return l, nil
}

// Check returns the tokenizer, chat template and limits of the model, or the errors with which Load
// would refuse the options and the model's files. It reads the headers of the weights only.
func Check(o LoadOptions) (_ *model.Bundle, err error) {
	o.setDefaults()
	src, err := OpenModel(o.Model)
	if err != nil {
		return nil, errors.Join(CheckOptions(o), refuse(o.Model, err))
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	c := &src.Config
	q, err := stored(o.Quantization, src.Name, c)
	errs := []error{o.check(), err, checkStored(o.DType, src)}
	if _, err := kvDType(o.KVDType, c.DType); err != nil {
		errs = append(errs, err)
	}
	if o.MaxModelLen > c.MaxPositions {
		errs = append(errs, tooLong(o.MaxModelLen, c))
	}
	if _, err := o.TensorParallel.shard(0).Of(c); err != nil {
		errs = append(errs, indivisible(o, err))
	} else if _, err := src.RankBytes(q, o.TensorParallel.shard(0)); err != nil {
		errs = append(errs, refuse(o.Model, err))
	}
	errs = append(errs, checkModules(&o.Adapters), checkStates(&o, c))
	b, err := src.Bundle()
	if err != nil {
		errs = append(errs, refuse(o.Model, err))
	} else if o.ChatTemplate != "" {
		b.ChatTemplate = o.ChatTemplate
	}
	return b, errors.Join(errs...)
}

// checkStates refuses guesses for a model whose layers have a state, which a rejected guess would
// have changed.
func checkStates(o *LoadOptions, c *model.Config) error {
	if c.HasStates() && o.Speculation.Tokens > 0 {
		return fmt.Errorf("%w: --speculative-config: the model %s has layers with a state, which a rejected guess would change; leave the flag out", ErrOption, o.Model)
	}
	return nil
}

// checkModules refuses adapters whose folders are not those of PEFT.
func checkModules(a *Adapters) error {
	var errs []error
	for _, m := range a.Modules {
		folder := m.Path
		if a.Root != "" && !filepath.IsAbs(folder) {
			folder = filepath.Join(a.Root, folder)
		}
		if _, err := os.Stat(filepath.Join(folder, "adapter_config.json")); err != nil {
			errs = append(errs, fmt.Errorf("%w: --lora-modules %s=%s: the folder has no adapter_config.json that can be read; give the folder that PEFT saved", ErrOption, m.Name, m.Path))
		}
	}
	return errors.Join(errs...)
}

// CheckOptions returns the errors with which Load would refuse the options with every model.
func CheckOptions(o LoadOptions) error {
	o.setDefaults()
	errs := []error{o.check()}
	if _, err := kvDType(o.KVDType, ""); err != nil {
		errs = append(errs, err)
	}
	if name := typeName(o.DType); name != "" {
		errs = append(errs, checkDType(o.DType, name))
	}
	if _, err := quantization(o.Quantization); err != nil && !slices.Contains(model.Formats, o.Quantization) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// asStored returns "none" for the format in which a checkpoint stores its weights, and refuses
// other formats.
func asStored(quantization, name string, c *model.Config) (string, error) {
	switch {
	case c.StoredIn(quantization):
		return "none", nil
	case !slices.Contains(model.Formats, quantization):
		return quantization, nil
	}
	form := "are not quantized"
	if f := c.Format(); f != "" {
		form = "are stored as " + f
	}
	return "", fmt.Errorf("%w: --quantization %q: the weights of %s %s; leave the flag out, or give int8 or int4 to convert them", ErrOption, quantization, name, form)
}

// stored is quantization for a checkpoint.
func stored(name, of string, c *model.Config) (model.Quantization, error) {
	name, err := asStored(name, of, c)
	if err != nil {
		return 0, err
	}
	return quantization(name)
}

// indivisible refuses a --tensor-parallel-size that the model does not allow.
func indivisible(o LoadOptions, err error) error {
	return fmt.Errorf("%w: --tensor-parallel-size %d: %w; give another one, or leave it out", ErrOption, o.TensorParallel.Size, err)
}

// tooLong refuses a --max-model-len that the model was not made for.
func tooLong(n int, c *model.Config) error {
	return fmt.Errorf("%w: --max-model-len %d, but the model was made for %d positions; leave it out, or give at most that", ErrOption, n, c.MaxPositions)
}

// checkStored is checkDType for a model. Integers can be expanded to float32.
func checkStored(flag string, s *model.Source) error {
	if typeName(flag) == "float32" && s.Integers() != "" {
		return nil
	}
	return checkDType(flag, s.Config.DType)
}

// checkDType refuses a --dtype other than the stored type, because weights are not converted.
func checkDType(flag, stored string) error {
	switch name := typeName(flag); {
	case name == "":
		return nil
	case !slices.Contains([]string{"float32", "float16", "bfloat16"}, name):
		return fmt.Errorf("%w: --dtype %s, want auto, float32, float16 or bfloat16", ErrOption, flag)
	case stored == "":
		return fmt.Errorf("%w: --dtype %s: config.json does not name the type that the weights are stored in; leave --dtype out", ErrOption, flag)
	case name != stored:
		return fmt.Errorf("%w: --dtype %s: the weights are stored as %s and are not converted; leave --dtype out, or convert the checkpoint", ErrOption, flag, stored)
	}
	return nil
}

// typeName returns the type of a --dtype; empty for auto.
func typeName(flag string) string {
	switch flag {
	case "auto":
		return ""
	case "half":
		return "float16"
	case "float":
		return "float32"
	}
	return flag
}

// refuse wraps the error of loading a model with its name and, for files that are incomplete, the
// remedy.
func refuse(name string, err error) error {
	for _, kind := range []error{model.ErrSource, model.ErrConfig, model.ErrUnsupported, model.ErrWeights} {
		if errors.Is(err, kind) {
			return fmt.Errorf("%w %s: %w", ErrModel, name, err)
		}
	}
	if errors.Is(err, model.ErrPointer) {
		return fmt.Errorf("%w %s: %w", ErrModel, name, err)
	}
	if other := otherWeights(name); errors.Is(err, model.ErrNoWeights) && other != "" {
		return fmt.Errorf("%w %s: %w; the folder has %s, which is not read: download the model's safetensors, or convert the file to model.safetensors", ErrModel, name, err, other)
	}
	return fmt.Errorf("%w %s: %w; copy or download its files again if they are not whole", ErrModel, name, err)
}

// otherWeights returns the name of a file in the folder with weights in a format other than
// safetensors, or "".
func otherWeights(folder string) string {
	files, _ := os.ReadDir(folder) // of a folder that cannot be read, none is named
	for _, f := range files {
		switch filepath.Ext(f.Name()) {
		case ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx":
			return f.Name()
		}
	}
	return ""
}

func (o *LoadOptions) setDefaults() {
	set := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	set(&o.BlockTokens, kvcache.DefaultBlockTokens)
	set(&o.MaxSeqs, scheduler.DefaultMaxSeqs)
	set(&o.MaxBatchedTokens, cpuBatchedTokens)
	set(&o.MaxQueued, scheduler.DefaultMaxQueued)
	if o.NCCLLibrary == "" {
		o.NCCLLibrary = cuda.NCCLName
	}
	if o.GPUMemory == 0 {
		o.GPUMemory = defaultGPUMemory
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

// check names the option that cannot be, where a plan made from it would not.
func (o *LoadOptions) check() error {
	for _, v := range []struct {
		flag         string
		value, least int64
	}{
		{"--block-size", int64(o.BlockTokens), 1}, {"--max-num-seqs", int64(o.MaxSeqs), 1},
		{"--max-num-batched-tokens", int64(o.MaxBatchedTokens), 1}, {"--max-num-queued-reqs", int64(o.MaxQueued), 1},
		{"--max-model-len", int64(o.MaxModelLen), 0}, {"--threads", int64(o.Threads), 0}, {"--kv-cache-memory-bytes", o.KVMemory, 0},
	} {
		if v.value < v.least {
			return fmt.Errorf("%w: %s %d, want at least %d, or leave it out for the default", ErrOption, v.flag, v.value, v.least)
		}
	}
	if o.Threads > cpu.MaxThreads {
		return fmt.Errorf("%w: --threads %d, want at most %d, or leave it out for the default", ErrOption, o.Threads, cpu.MaxThreads)
	}
	if !(o.GPUMemory > 0 && o.GPUMemory <= 1) {
		return fmt.Errorf("%w: --gpu-memory-utilization %v, want a share above 0, at most 1", ErrOption, o.GPUMemory)
	}
	if s := o.Speculation; s.Tokens < 0 || s.Tokens > scheduler.DraftLimit || s.Tokens > 0 && s.Model == "" && (s.Lookup.Min < 1 || s.Lookup.Max < s.Lookup.Min || s.Lookup.Max > MaxLookup) {
		return fmt.Errorf("%w: --speculative-config with num_speculative_tokens %d, prompt_lookup_min %d and prompt_lookup_max %d: want at most %d tokens, and 1 <= min <= max <= %d",
			ErrOption, s.Tokens, s.Lookup.Min, s.Lookup.Max, scheduler.DraftLimit, MaxLookup)
	}
	if a := o.Adapters; a.Places < 0 || a.Places > MaxAdapters || len(a.Modules) > a.Places {
		return fmt.Errorf("%w: --max-cpu-loras: %d adapters of --lora-modules in %d places, at most %d", ErrOption, len(a.Modules), a.Places, MaxAdapters)
	}
	return o.checkTensorParallel()
}

// Options are those of an engine of this model, to be completed.
func (l *Loaded) Options() Options {
	o := Options{
		Model: l.Model, Backend: l.Backend, KV: l.KV, Scheduler: l.Scheduler, Synchronous: l.Synchronous, Workers: l.Workers(),
		Adapters: l.Model, AdapterPlaces: l.Adapters.Places, AdapterRoot: l.Adapters.Root, Modules: l.Adapters.Modules, Drafter: l.Drafter, Classifier: l.classifier,
	}
	if l.workers != nil {
		o.WorkerLost = l.workers.Lost()
	}
	if b := l.Bundle; masks.Check(b.TokenizerJSON, b.EOSTokenIDs) == nil {
		o.GrammarLimits, o.MaskWorkers, o.MaskCacheBytes = grammar.DefaultLimits(), l.maskWorkers, int(l.maskCache)
		o.Vocabulary = func() (masks.Vocabulary, error) { return masks.ReadVocabulary(b.TokenizerJSON, b.EOSTokenIDs) }
	}
	return o
}

func (l *Loaded) load(o LoadOptions) error {
	device, err := choose(&o)
	if err != nil {
		return err
	}
	if err := checkStates(&o, &l.Source.Config); err != nil {
		return err
	}
	l.Synchronous = o.Synchronous
	if l.Quantization, err = quantization(o.Quantization); err != nil {
		return err
	}
	config, err := o.TensorParallel.shard(0).Of(&l.Source.Config) // of each rank alike, but for a few rows
	if err != nil {
		return indivisible(o, err)
	}
	device.widen(l.Source, o.DType)
	for r := range max(1, o.TensorParallel.Size) {
		n, err := l.Source.RankBytes(l.Quantization, o.TensorParallel.shard(r))
		if err != nil {
			return refuse(o.Model, err)
		}
		l.WeightBytes = max(l.WeightBytes, n)
	}
	given := o.KVMemory
	drafts, err := l.lookAtDraft(&o, device)
	if err != nil {
		return err
	}
	if o.KVMemory == 0 {
		models := []*model.Config{&config}
		if drafts.config.Vocab > 0 {
			models = append(models, &drafts.config)
		}
		weights := l.WeightBytes + drafts.weights
		if a := o.Adapters; a.Places > 0 {
			weights += config.AdapterBytes(a.Places, a.Rank)
		}
		if o.KVMemory, err = device.kvMemory(&o, weights, models...); err != nil {
			return err
		}
		if o.KVMemory*int64(max(1, o.TensorParallel.Size)) < kvMemory && !device.gpu {
			o.Logger.Warn("KV memory is less than the default, because memory is short; --kv-cache-memory-bytes sets it",
				"kv_memory", memory.Bytes(o.KVMemory), "limit", memory.Bytes(o.MemoryLimit), "weights", memory.Bytes(l.WeightBytes))
		}
	}
	stored := l.Source.Config.FP8 != nil && l.Quantization == model.AsStored && !l.Source.Config.FP8.Wide
	if l.Source.Config.FP8 != nil && !stored {
		as := "bfloat16"
		if l.Quantization != model.AsStored {
			as = l.Quantization.String()
		}
		o.Logger.Info("weights stored in fp8 are kept in another type", "type", as, "weights", memory.Bytes(l.WeightBytes))
	}
	keeps := l.Source.KeepsIntegers(l.Quantization)
	if from := l.Source.Integers(); keeps {
		o.Logger.Info("weights stay as integers", "stored", from, "weights", memory.Bytes(l.WeightBytes))
	} else if from != "" {
		as := "bfloat16 or float32" // of the scales, or of GGUF's blocks
		if l.Quantization != model.AsStored {
			as = l.Quantization.String()
		}
		o.Logger.Info("weights stored as integers are expanded", "stored", from, "type", as, "weights", memory.Bytes(l.WeightBytes))
	}
	forDraft, err := drafts.share(&o, &config)
	if err != nil {
		return err
	}
	o.KVMemory -= forDraft
	if err := l.plan(o, &config); err != nil {
		return err
	}
	kv := int64(l.KV.Blocks) * int64(l.KV.BlockBytes())
	if given > 0 && l.KV.Blocks >= maxBlocks && kv <= o.KVMemory-int64(l.KV.BlockBytes()) {
		o.Logger.Warn("KV memory is lowered to the most blocks that a node has; a larger --block-size makes use of more",
			"from", memory.Bytes(o.KVMemory), "to", memory.Bytes(kv), "blocks", l.KV.Blocks)
	}
	if !device.gpu && o.MemoryLimit > 0 && kv+l.WeightBytes > o.MemoryLimit {
		o.Logger.Warn("KV memory and weights exceed the memory: the system may end the process when they fill; --kv-cache-memory-bytes sets it",
			"kv_memory", memory.Bytes(kv), "weights", memory.Bytes(l.WeightBytes), "limit", memory.Bytes(o.MemoryLimit))
	}
	l.Source.SetContext(l.Scheduler.MaxModelLen)
	smallest := slices.MinFunc(l.KV.Groups, func(a, b backend.KVGroup) int { return a.BlockTokens - b.BlockTokens }).BlockTokens
	limits := backend.Limits{
		Tokens: o.MaxBatchedTokens, Outputs: o.MaxSeqs + extraOutputs, Seqs: o.MaxSeqs,
		Blocks: (l.Scheduler.MaxModelLen + smallest - 1) / smallest,
	}
	group, err := l.startWorkers(&o, device, limits)
	if err != nil {
		return err
	}
	if l.Backend, err = device.open(&o, limits, group, l.mapKV(&o)); err != nil {
		return err
	}
	if l.Model, err = model.Load(l.Source, l.Backend, limits, model.Options{
		Quantization: l.Quantization, Progress: o.Progress, Shard: o.TensorParallel.shard(0),
	}); err != nil {
		return refuse(o.Model, err)
	}
	if l.Adapters = o.Adapters; o.Adapters.Places > 0 {
		bytes, err := l.Model.Adapters(o.Adapters.Places, o.Adapters.Rank)
		if err != nil {
			return fmt.Errorf("%w: --enable-lora: %w", ErrOption, err)
		}
		o.Logger.Info("room for adapters", "adapters", o.Adapters.Places, "rank", o.Adapters.Rank, "memory", memory.Bytes(bytes))
	}
	if err := l.Backend.AllocKV(l.KV); err != nil {
		return err
	}
	if l.KV.DType == backend.FP8 {
		if err := l.Model.ScaleKV(l.Source); err != nil {
			return refuse(o.Model, err)
		}
	}
	if err := l.readyWorkers(&o); err != nil {
		return err
	}
	if err := device.capture(&o, l); err != nil {
		return err
	}
	if l.Bundle, err = l.Source.Bundle(); err != nil {
		return refuse(o.Model, err)
	}
	if l.classifier, err = l.Source.Classifier(); err != nil {
		return refuse(o.Model, err)
	}
	l.Bundle.MaxModelLen = l.Scheduler.MaxModelLen
	if o.ChatTemplate != "" {
		l.Bundle.ChatTemplate = o.ChatTemplate
	}
	if l.Fingerprint, err = l.Source.Fingerprint(); err != nil {
		return err
	}
	// Equal classes give equal bits: weights, quantization, kernels, parallel
	// degree and KV type. Only what this build can vary is spelled out.
	l.Class = fmt.Sprintf("%016x/%s/kv-%s/tp%d", l.Fingerprint, l.Backend.Variant(), l.KV.DType, l.Workers())
	as := l.Quantization.String()
	if stored {
		as = backend.FP8.String()
	} else if keeps && l.Quantization != model.AsStored { // earlier versions converted integers of 4 bits, too
		as += "-" + backend.GRID.String()
	} else if keeps {
		as = backend.GRID.String()
	}
	if stored || keeps || l.Quantization != model.AsStored {
		l.Class = fmt.Sprintf("%016x/%s/%s/kv-%s/tp%d", l.Fingerprint, as, l.Backend.Variant(), l.KV.DType, l.Workers())
	}
	return l.loadDraft(o, &drafts, forDraft)
}

// plan sizes the KV pool and the context, for a rank's part of the model.
func (l *Loaded) plan(o LoadOptions, c *model.Config) error {
	dtype, err := kvDType(o.KVDType, c.DType)
	if err != nil {
		return err
	}
	need := memory.Need{
		Budget: o.KVMemory, Layers: c.KVLayers(), BlockTokens: o.BlockTokens, StateTokens: o.StateTokens, DType: dtype,
		Context: c.MaxPositions, MaxModelLen: o.MaxModelLen, MaxBatchedTokens: o.MaxBatchedTokens, MaxBlocks: maxBlocks,
	}
	switch {
	case o.MaxModelLen > c.MaxPositions:
		return tooLong(o.MaxModelLen, c)
	case o.MaxModelLen == 0:
		need.MaxModelLen = c.MaxPositions
		kv := memory.Arrange(need)
		fits := scheduler.LongestFit(memory.Groups(kv), int(min(o.KVMemory/int64(kv.BlockBytes()), maxBlocks)), o.MaxBatchedTokens)
		if fits >= 1 {
			need.MaxModelLen = min(need.MaxModelLen, fits)
		}
		if need.MaxModelLen < c.MaxPositions {
			o.Logger.Warn("context shortened to what the KV memory holds", "max_model_len", need.MaxModelLen, "model", c.MaxPositions, "kv_memory", memory.Bytes(o.KVMemory))
		}
	}
	if l.Plan, err = memory.Fit(need); err != nil {
		return fmt.Errorf("%w: --kv-cache-memory-bytes %d: %w", ErrOption, o.KVMemory, err)
	}
	l.KV = l.Plan.KV
	l.Scheduler = scheduler.Config{
		Pool:             kvcache.Config{Blocks: l.KV.Blocks, BlockTokens: o.BlockTokens, Groups: memory.Groups(l.KV)},
		MaxBatchedTokens: o.MaxBatchedTokens, MaxSeqs: o.MaxSeqs, MaxOutputs: o.MaxSeqs + extraOutputs, MaxQueued: o.MaxQueued, MaxModelLen: need.MaxModelLen,
	}
	if l.Scheduler.MaxDrafts = o.Speculation.Tokens; o.Speculation.Tokens > 0 && o.Speculation.Model == "" {
		l.Scheduler.Draft = o.Speculation.Lookup.Draft
	}
	return nil
}

// defaultGPUMemory is the share of a GPU's memory that is taken by default.
const defaultGPUMemory = 0.9

// kvMemory is the default memory for KV blocks where there is enough.
const kvMemory = 1 << 30

// defaultKV is the KV memory that fits with the weights into a limit, which is
// in bytes as all of it, or 0 for none.
func defaultKV(limit, weights int64) int64 {
	if limit == 0 {
		return kvMemory
	}
	return min(kvMemory, max(0, limit-weights)/2)
}

// cpuBatchedTokens is the default step on a CPU: matrix kernels have reached
// their speed by then, and a step that decode shares with a chunk stays short.
const cpuBatchedTokens = 512

// extraOutputs is how many rows of logits a step has beyond one for each running
// request: for prompts that are scored and for guesses. Each costs a vocabulary
// of fp32; where fewer requests run, theirs are free too.
const extraOutputs = 64

// maxBlocks bounds the block table's own memory when a tiny model meets a large
// budget: a million blocks are 16 million tokens.
const maxBlocks = 1 << 20

// quantization reads --quantization. What it cannot do is refused by name: formats
// that only a checkpoint can bring are not made here.
func quantization(name string) (model.Quantization, error) {
	switch name {
	case "", "none":
		return model.AsStored, nil
	case "int8":
		return model.INT8, nil
	case "int4":
		return model.INT4, nil
	}
	return 0, fmt.Errorf("%w: --quantization %q: weights can be made int8 or int4 as they are loaded, or none to keep them as they are stored; "+
		"other formats (bitsandbytes, NVFP4, …) are not made, and that of a checkpoint (fp8, GPTQ, AWQ, compressed-tensors, GGUF) is read from its files: leave --quantization out", ErrOption, name)
}

// kvDType resolves the type that KV is stored in.
func kvDType(flag, weights string) (backend.DType, error) {
	switch flag {
	case "float32", "fp32":
		return backend.F32, nil
	case "bfloat16", "bf16":
		return backend.BF16, nil
	case "fp8", "fp8_e4m3":
		return backend.FP8, nil
	case "fp8_e5m2", "fp8_inc", "fp8_ds_mla":
		return 0, fmt.Errorf("%w: --kv-cache-dtype %q: of the forms of fp8 only E4M3 is stored; use fp8 or fp8_e4m3", ErrOption, flag)
	case "auto", "":
		if strings.HasPrefix(weights, "float32") {
			return backend.F32, nil
		}
		return backend.BF16, nil
	}
	return 0, fmt.Errorf("%w: --kv-cache-dtype %q; use auto, float32, bfloat16 or fp8", ErrOption, flag)
}

// LayoutHash names the meaning of a page's bytes: nodes whose hashes are equal
// can write into each other's pages.
func (l *Loaded) LayoutHash() uint64 {
	s := l.KV
	s.Blocks = 0 // pools may differ in size
	// Versions before states hashed neither field, and exchange pages with this one.
	text := strings.ReplaceAll(fmt.Sprintf("%s %+v", l.Class, s), " State:0 Every:0", "")
	return xxhash.Sum64String(text)
}

// KVText describes the layout of a page's bytes, for logs of nodes whose LayoutHash differ.
func (l *Loaded) KVText() string {
	var sizes []string
	for _, g := range l.KV.Groups {
		if s := strconv.Itoa(g.BlockTokens); !slices.Contains(sizes, s) {
			sizes = append(sizes, s)
		}
	}
	return fmt.Sprintf("blocks of %s tokens in %v, %d regions of pages of %d bytes", strings.Join(sizes, " and "), l.KV.DType, l.Regions(), l.KV.PageBytes)
}

// Regions is how many regions of pages all ranks have together, for kvtransfer to
// register. A KV region has one of each rank, in the order of ranks.
func (l *Loaded) Regions() int { return l.KV.Regions * l.Workers() }

// Region is one of them.
func (l *Loaded) Region(i int) []byte {
	if l.shared != nil {
		return l.shared[i]
	}
	return l.Backend.KVRegion(i / l.Workers())
}

// Direct is the backend where the network can go past Region to the device's own
// memory, nil elsewhere: of several ranks each has a part of a page.
func (l *Loaded) Direct() backend.Direct {
	if l.shared != nil {
		return nil
	}
	return directOf(mirrorOf(l.Backend))
}

// Close frees the device and the files.
func (l *Loaded) Close() error {
	var err error
	if l.Draft != nil {
		err = l.Draft.Close()
	}
	if l.Backend != nil {
		err = errors.Join(err, l.Backend.Close())
	}
	if l.workers != nil {
		err = errors.Join(err, l.workers.Close())
	}
	if l.own != nil {
		err = errors.Join(err, l.own.Close())
	}
	return errors.Join(err, l.Source.Close())
}
