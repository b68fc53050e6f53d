// Package cuda runs forward passes on an NVIDIA GPU. It opens a shared object (cuda/,
// made by `make cuda`) at run time, so that one binary serves with and without a GPU.
//
// A step is a recorded list of operations over device memory. What varies from step to
// step is written into pinned memory that the shared object owns and the operations
// read. So decode steps replay one graph per bucket. The device samples the tokens and
// then writes the step's number, which the host polls. Two steps can be queued at once:
// the second reads the first one's tokens from device memory.
//
// Invariant: apart from the step's memory, the inputs of a plan's operations are fixed
// when they are recorded. The shared object may be the host twin, which runs the same
// kernels on the CPU. All code of this package is tested against the twin.
//
// The package does not schedule and does not know models. For the same seed and logits
// it samples the same tokens. It does not promise the same bits of logits for every
// batch.
package cuda

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/sample"
)

// KernelVersion is part of the numerics class. It increases with every change that
// can change a bit of any result or the layout of a KV page.
const KernelVersion = 7

// LibraryName is the file name of the shared object, next to the program.
const LibraryName = "tandem-cuda.so"

// Bounds on shapes.
const (
	maxHeadDim     = 512 // of values
	maxKeyDim      = 576 // of a latent's keys
	maxCols        = 1 << 22
	maxExperts     = 1024 // one thread each in the kernel that groups them
	maxBlockTokens = 256
)

// unknownBlock marks an entry of the host's block table that the device does not have.
const unknownBlock = -2

// Values of Options.BLAS other than a path.
const (
	BLASNone = ""
	BLASAuto = "auto"
)

// Options are the settings of New.
type Options struct {
	Library string              // path of the shared object; empty: LibraryName next to the program
	Device  int                 // number of the GPU
	Limits  backend.Limits      // largest step
	Eager   bool                // no graphs: every operation is a launch of its own
	NoGraph func(why error)     // called once, when a graph is not made and its steps run without; may be nil
	Group   backend.WorkerGroup // tensor-parallel workers, one GPU each; nil: this process is alone

	// BLAS selects cuBLASLt for products of many rows. BLASAuto uses it if the dynamic
	// linker finds it, or if it is in a folder of CUDA or of Python's packages. BLASNone does
	// not use it; any other value is the library's path.
	BLAS string
	// Deterministic fixes the order of every sum, so that the bits of a row do not
	// depend on how many rows share its step. It excludes cuBLASLt.
	Deterministic bool

	// Mirror keeps a copy of the KV blocks in pinned host memory, KVRegion, which the
	// network reads and writes. MapKV, if not nil, maps that memory.
	Mirror bool
	MapKV  func(bytes int) ([]byte, error)

	unfused bool  // for tests: nothing is fused
	graphs  bool  // for tests: every plan is a graph
	draws   int32 // for tests: drawsSlices or drawsAlone
	wide    bool  // for tests: results that only products read stay in fp32
}

// CUDA implements backend.Backend. It is not safe for concurrent use.
type CUDA struct {
	opts        Options
	info        info
	dev         *driver
	memory      [2]stepMemory // of steps with even and odd numbers
	step        stepState
	outputProbs []probs       // log-probabilities of the outputs of the last finished step
	outputDraws []draw        // the sampling parameters of the same outputs
	started     []startedStep // started steps, at most two, the oldest first

	buffers  []*buffer
	weights  []*weight
	angles   map[*backend.Rope]angles
	routes   []*routing
	tables   map[backend.Weight]address // expert tables, by their first matrix
	kv       kvStore
	gathered map[backend.Buf]address // scratch of AllGather, by its source
	sampling map[*buffer]*sampling   // by the logits
	delta    deltaMemory
	blas     int   // cuBLASLt's version; 0: not used
	noBLAS   error // why cuBLASLt is not used
	noGraph  error // why the last of the graphs that are missing was not made

	plans     map[backend.Key]*plan
	adapt     adapters
	recording *plan
	scratch   sample.Scratch
	row       []float32 // logits of one row, for sampling by the host
}

var (
	_ backend.Backend  = (*CUDA)(nil)
	_ backend.Capturer = (*CUDA)(nil)
	_ backend.Ahead    = (*CUDA)(nil)
	_ backend.Mirror   = (*CUDA)(nil)
	_ backend.Direct   = (*CUDA)(nil)
	_ backend.Scorer   = (*CUDA)(nil)
	_ backend.Ruler    = (*CUDA)(nil)
	_ backend.Adapters = (*CUDA)(nil)
)

// buffer is fp32 [rows, cols], with as many rows as the limits allow.
type buffer struct {
	rows backend.Rows
	cols int
	data address
}

// weight is a matrix [out, in] in the checkpoint's type or, with in 0, a vector [out]
// of fp32.
type weight struct {
	name    string
	dtype   int32
	out, in int
	first   int // row of the whole matrix that row 0 is
	of      int // rows of the whole matrix
	scales  scales
	data    address
}

// angles is a rotation's table for the step, [tokens, 2·half], and its frequencies.
type angles struct{ table, freq address }

// kvStore is the paged KV. A page is K [kvHeads, blockTokens, headDim], then V of the
// same shape. A latent's page is [blockTokens, headDim]: K is all columns and V the first
// ones. Bytes of a page that a group does not need are unused.
type kvStore struct {
	spec    backend.KVSpec
	regions []address  // [Regions] of [Blocks, PageBytes]
	mirror  [][]byte   // the host's copy of regions; nil: none
	digests [][]uint32 // [Regions] of [Blocks], if there is a mirror
	refused error      // why the network cannot access regions; nil: it can
	pieces  []piece    // scratch
	copies  uint32     // calls of copy
	landing []uint32   // [Blocks] the call of copy that last copied the block to the device
	landed  uint32     // the last such call
	follow  bool       // the step uses a block that is being copied

	scales []kvScales // [layers]; nil unless the type is FP8
}

// kvScales are the scales of a KV layer's keys and values, [KVHeads] each.
type kvScales struct{ k, v address }

// group returns the group of a KV layer.
func (kv *kvStore) group(layer int) *backend.KVGroup {
	return &kv.spec.Groups[kv.spec.Layers[layer].Group]
}

// Device describes a device for Probe.
type Device struct {
	Name        string
	Total, Free int64  // bytes of memory
	Capability  string // compute capability, as in 9.0
	PTX         bool   // the driver has compiled the kernels, which have no machine code for it
}

// Probe opens a device, reads its description and closes it.
func Probe(library string, number int) (Device, error) {
	c, err := New(Options{Library: library, Device: number, Limits: backend.Limits{Tokens: 1, Outputs: 1, Seqs: 1, Blocks: 1}})
	if err != nil {
		return Device{}, err
	}
	d := Device{
		Name: c.Name(), Total: c.info.total, Free: c.info.free,
		Capability: fmt.Sprintf("%d.%d", c.info.capability/10, c.info.capability%10), PTX: c.info.ptx != 0,
	}
	return d, c.Close()
}

func open(path string) (*library, error) {
	if path == "" {
		exe, err := os.Executable()
		if err != nil {
			return nil, fmt.Errorf("%w: %w", backend.ErrNoDevice, err)
		}
		path = filepath.Join(filepath.Dir(exe), LibraryName)
	}
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) && filepath.Base(path) != path {
		return nil, fmt.Errorf("%w: no GPU kernels at %s (`make cuda` builds them)", backend.ErrNoDevice, path)
	}
	l, err := openLibrary(path)
	if err != nil {
		return nil, fmt.Errorf("%w: the CUDA kernels cannot be opened (`make cuda` builds them): %w", backend.ErrNoDevice, err)
	}
	return l, nil
}

// Ordinal parses a device's name, "cuda" or "cuda:N".
func Ordinal(name string) (n int, ok bool) {
	if name == "cuda" {
		return 0, true
	}
	number, ok := strings.CutPrefix(name, "cuda:")
	n, err := strconv.Atoi(number)
	return n, ok && err == nil && n >= 0
}

// New opens a device.
func New(o Options) (*CUDA, error) {
	l := o.Limits
	if l.Tokens < 1 || l.Outputs < 1 || l.Seqs < 1 || l.Blocks < 1 || l.Tokens > maxCols || l.Outputs > maxCols ||
		int64(l.Seqs)*int64(l.Blocks) > 1<<31-1 {
		return nil, fmt.Errorf("%w: limits %+v", backend.ErrShape, l)
	}
	if o.Deterministic && o.Group != nil && o.Group.Size() > 2 {
		return nil, fmt.Errorf("%w: a fixed order of sums needs one or two GPUs, not %d: NCCL chooses the order of ranks by the size of a sum", backend.ErrShape, o.Group.Size())
	}
	lib, err := open(o.Library)
	if err != nil {
		return nil, err
	}
	c := &CUDA{opts: o, plans: make(map[backend.Key]*plan), angles: make(map[*backend.Rope]angles), tables: make(map[backend.Weight]address), sampling: make(map[*buffer]*sampling)}
	n, err := lib.count()
	if err == nil && o.Device >= n {
		err = fmt.Errorf("there is no device %d, only %d", o.Device, n)
	}
	if err == nil {
		c.dev, err = lib.open(o.Device, c.limits())
	}
	if err != nil {
		return nil, fmt.Errorf("%w: GPU %d: %w", backend.ErrNoDevice, o.Device, err)
	}
	c.info = c.dev.describe()
	var ok bool
	if c.memory, ok = c.dev.groups(0, c.limits()); !ok {
		return nil, errors.Join(c.failed("the step's memory"), c.Close())
	}
	if err := c.openBLAS(); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func (c *CUDA) limits() limits {
	l := c.opts.Limits
	one := int32(0)
	if c.opts.Deterministic {
		one = 1
	}
	return limits{int32(l.Tokens), int32(l.Outputs), int32(l.Seqs), int32(l.Blocks), one, c.opts.draws}
}

// openBLAS opens cuBLASLt. It is an error if a path is set and cannot be opened.
func (c *CUDA) openBLAS() error {
	path := c.opts.BLAS
	switch {
	case path == BLASNone:
		c.noBLAS = errors.New("not requested")
		return nil
	case c.opts.Deterministic && path != BLASAuto:
		return fmt.Errorf("%w: cuBLASLt does not fix the order of sums, so that it cannot be deterministic", backend.ErrShape)
	case c.opts.Deterministic:
		c.noBLAS = errors.New("it does not fix the order of sums")
		return nil
	case path == BLASAuto:
		c.blas, c.noBLAS = c.dev.blas("")
		for _, path := range findBLAS("/", os.Getenv) {
			if c.noBLAS != nil {
				c.blas, c.noBLAS = c.dev.blas(path)
			}
		}
		return nil
	}
	if c.blas, c.noBLAS = c.dev.blas(path); c.noBLAS != nil {
		return fmt.Errorf("%w: cuBLASLt at %s: %w", backend.ErrNoDevice, path, c.noBLAS)
	}
	return nil
}

// BLAS returns the version of cuBLASLt in use, as in 130002, or 0 and the reason.
func (c *CUDA) BLAS() (version int, why error) { return c.blas, c.noBLAS }

// failed returns the device's last error, with the operation that failed. It wraps
// backend.ErrDevice after errors that the driver repeats for every later call.
func (c *CUDA) failed(what string) error {
	err := c.dev.err()
	if _, lost := c.dev.poll(); lost != nil {
		return fmt.Errorf("%w: cuda: %s: %w", backend.ErrDevice, what, err)
	}
	if strings.Contains(err.Error(), "out of memory") {
		return fmt.Errorf("%w: %s: %w", backend.ErrMemory, what, err)
	}
	return fmt.Errorf("cuda: %s: %w", what, err)
}

// Variant returns, for the numerics class, the chip's generation and the other settings
// that determine the order of sums.
func (c *CUDA) Variant() string {
	chip := fmt.Sprintf("sm%d", c.info.capability)
	if c.info.twin != 0 {
		chip = "twin"
	}
	if c.opts.Deterministic {
		chip += "-one-order"
	}
	if c.blas != 0 {
		chip += fmt.Sprintf("-lt%d", c.blas)
	}
	return fmt.Sprintf("cuda-%s-%d", chip, KernelVersion)
}

// Name returns the device's name.
func (c *CUDA) Name() string {
	name, _, _ := bytes.Cut(c.info.name[:], []byte{0})
	return string(name)
}

// Free returns the free memory of the device in bytes.
func (c *CUDA) Free() int64 { return c.dev.describe().free }

// limit returns the largest number of rows of a row set.
func (c *CUDA) limit(rows backend.Rows) int {
	if rows == backend.OutputRows {
		return c.opts.Limits.Outputs
	}
	return c.opts.Limits.Tokens
}

// reserve allocates n bytes on the device.
func (c *CUDA) reserve(n int, what string) (address, error) {
	a := c.dev.alloc(n)
	if a == 0 {
		return 0, c.failed(fmt.Sprintf("%d bytes for %s", n, what))
	}
	return a, nil
}

// Alloc reserves an activation buffer.
func (c *CUDA) Alloc(rows backend.Rows, cols int) (backend.Buf, error) {
	if (rows != backend.TokenRows && rows != backend.OutputRows) || cols < 1 || cols > maxCols {
		return -1, fmt.Errorf("%w: buffer of row kind %d with %d columns", backend.ErrShape, rows, cols)
	}
	a, err := c.reserve(c.limit(rows)*cols*4, fmt.Sprintf("a buffer [%d, %d]", c.limit(rows), cols))
	if err != nil {
		return -1, err
	}
	c.buffers = append(c.buffers, &buffer{rows, cols, a})
	return backend.Buf(len(c.buffers) - 1), nil
}

// Load copies a vector, converted to fp32, or a matrix in its own type or, with Tensor.As,
// in 8 or 4 bits. FP8 with blocks that are too narrow for the kernels becomes bf16.
func (c *CUDA) Load(t backend.Tensor) (backend.Weight, error) {
	w := &weight{name: t.Name, first: t.First, of: t.Of}
	if t.DType == backend.FP8 {
		var err error
		if w.scales, err = shareScales(&t); err != nil {
			return backend.NoWeight, err
		}
	}
	data := t.Data
	switch len(t.Shape) {
	case 1:
		w.out = t.Shape[0]
	case 2:
		w.out, w.in = t.Shape[0], t.Shape[1]
	}
	known := true
	switch t.DType {
	case backend.F32:
		w.dtype = typeF32
	case backend.BF16:
		w.dtype = typeBF16
	case backend.MXFP4:
		w.dtype = typeMXFP4
		known = w.in > 0 && w.in%32 == 0
	case backend.FP8:
		w.dtype = typeFP8
		known = w.in > 0
	default:
		known = false
	}
	if !known || w.out < 1 || w.out > maxCols || (len(t.Shape) == 2 && w.in < 1) || w.in > maxCols ||
		len(data) != t.DType.MatrixBytes(w.out, max(w.in, 1)) {
		return backend.NoWeight, fmt.Errorf("%w: tensor %s %s %v of %d bytes", backend.ErrShape, t.Name, t.DType, t.Shape, len(data))
	}
	if w.dtype == typeMXFP4 {
		if err := fewScales(&t); err != nil {
			return backend.NoWeight, err
		}
	}
	switch {
	case t.As != 0 && (!t.As.Quantized() || w.in == 0 || t.DType != backend.F32 && t.DType != backend.BF16):
		return backend.NoWeight, fmt.Errorf("%w: tensor %s %s %v as %s", backend.ErrShape, t.Name, t.DType, t.Shape, t.As)
	case t.As != 0:
		data, w.dtype = quantize(&t), quantized[t.As]
	case w.dtype == typeFP8:
		data = packFP8(&t, w.scales)
	case w.in == 0 && w.dtype == typeBF16:
		data = widen(data)
		w.dtype = typeF32
	}
	if w.of == 0 {
		w.of = w.out
	}
	var err error
	if w.data, err = c.put(data, "tensor "+t.Name); err != nil {
		return backend.NoWeight, err
	}
	c.weights = append(c.weights, w)
	// put copies bytes into newly allocated device memory.
	return backend.Weight(len(c.weights) - 1), nil
}

// put copies bytes into memory of their own.
func (c *CUDA) put(data []byte, what string) (address, error) {
	a, err := c.reserve(len(data), what)
	if err == nil && !c.dev.upload(a, data) {
		err = c.failed(what)
	}
	// widen converts bf16 to fp32.
	return a, err
}

// widen makes fp32 of bf16.
func widen(data []byte) []byte {
	wide := make([]byte, 0, 2*len(data))
	for ; len(data) > 0; data = data[2:] {
		wide = append(wide, 0, 0, data[0], data[1])
	}
	// raw returns numbers as bytes.
	return wide
}

// raw sees numbers as bytes.
func raw[T float32 | int32 | expert | state](s []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(s[0])))
}

// AllocKV reserves the paged KV, once.
func (c *CUDA) AllocKV(spec backend.KVSpec) error {
	if c.kv.regions != nil {
		return fmt.Errorf("%w: KV allocated twice", backend.ErrShape)
	}
	if !spec.Valid() {
		return fmt.Errorf("%w: KV %+v", backend.ErrShape, spec)
	}
	for _, g := range spec.Groups {
		if g.State == 0 && g.BlockTokens > maxBlockTokens || g.ValueDim() > maxHeadDim || g.HeadDim > maxKeyDim || g.HeadDim%2 != 0 || g.Latent%2 != 0 || int64(spec.Blocks)*int64(g.BlockTokens) > math.MaxInt32 {
			return fmt.Errorf("%w: KV %+v", backend.ErrShape, spec)
		}
	}
	var ok bool
	if c.memory, ok = c.dev.groups(len(spec.Groups), c.limits()); !ok {
		return c.failed("block tables")
	}
	for i := range c.memory[0].tables { // both steps share the tables
		c.memory[0].tables[i] = unknownBlock
	}
	for i := range spec.Regions {
		a, err := c.reserve(spec.Blocks*spec.PageBytes, fmt.Sprintf("KV region %d of %d", i+1, spec.Regions))
		if err != nil {
			return err
		}
		c.kv.regions = append(c.kv.regions, a)
		if c.opts.Mirror {
			m, err := c.mapMirror(spec.Blocks * spec.PageBytes)
			if err != nil {
				return fmt.Errorf("the host's copy of KV region %d of %d: %w", i+1, spec.Regions, err)
			}
			d, err := c.kvDigests(spec.Blocks)
			if err != nil {
				return fmt.Errorf("checksums of KV region %d of %d: %w", i+1, spec.Regions, err)
			}
			if c.kv.refused == nil && !c.dev.direct(a) {
				c.kv.refused = c.failed(fmt.Sprintf("RDMA with KV region %d of %d", i+1, spec.Regions))
			}
			c.kv.mirror, c.kv.digests = append(c.kv.mirror, m), append(c.kv.digests, d)
		}
	}
	c.kv.spec, c.kv.landing = spec, make([]uint32, spec.Blocks)
	if spec.DType != backend.FP8 {
		return nil
	}
	c.kv.scales = make([]kvScales, len(spec.Layers))
	for i := range spec.Layers {
		if c.kv.group(i).State > 0 {
			continue
		}
		if err := c.ScaleKV(i, []float32{1}, []float32{1}); err != nil {
			return err
		}
	}
	return nil
}

// ScaleKV sets a layer's scales; see backend.Backend.
func (c *CUDA) ScaleKV(layer int, k, v []float32) (err error) {
	if k, v, err = c.kv.spec.KVScales(layer, k, v); err != nil {
		return err
	}
	s := &c.kv.scales[layer]
	if s.k, err = c.put(float32Bytes(k), "scales of keys"); err == nil {
		s.v, err = c.put(float32Bytes(v), "scales of values")
	}
	return err
}

// Download copies the live rows of the last step into dst, which it grows when it
// is too short, and returns the part that it filled.
func (c *CUDA) Download(dst []float32, src backend.Buf) []float32 {
	b := c.buffers[src]
	n := c.step.live(b.rows) * b.cols
	if cap(dst) < n {
		dst = make([]float32, n)
	}
	dst = dst[:n]
	if n > 0 && !c.dev.download(raw(dst), b.data) {
		panic(c.failed("reading a buffer"))
	}
	return dst
}

// Close waits for the device's work and frees its memory.
func (c *CUDA) Close() error {
	if c.dev != nil {
		c.dev.close()
	}
	c.dev = nil
	c.buffers, c.weights, c.routes, c.plans, c.sampling = nil, nil, nil, nil, nil
	c.memory, c.kv, c.started, c.outputProbs, c.outputDraws, c.adapt = [2]stepMemory{}, kvStore{}, nil, nil, nil, adapters{}
	return nil
}

// float32Bytes returns numbers as bytes, for tables that are uploaded once.
func float32Bytes(v []float32) []byte {
	b := make([]byte, 0, 4*len(v))
	for _, f := range v {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(f))
	}
	return b
}
