// Package cpu runs forward passes on the processor.
//
// A step is a recorded list of operations (plan.go) that one of several kernel variants
// repeats: portable Go, which is the oracle and the only one with CGO_ENABLED=0, or C
// for AVX-512, AVX2, NEON and any other processor. C packs each weight matrix at load
// into tiles of 16 outputs, k-major. So one vector lane is one output, and every output
// is one sequential chain of fused multiply-adds. Attention cuts the positions into
// segments at fixed absolute positions and merges them in order. A fixed set of threads
// claims work tile by tile from an atomic counter, and sleeps when there is none.
//
// Invariant: no reduction depends on the number of rows in a step, on the chunks of a
// prompt, on the number of threads or on the thread that claimed a tile. AVX2, AVX-512
// and NEON compile one source and give the same bits.
//
// Weights are float32, bfloat16, MXFP4, FP8 with the scales of the checkpoint (fp8.h),
// integers with those of the checkpoint (grid.h), or converted to int8 or int4 at load.
// Activations are float32; for integers they are also rounded to 8 bits in groups of 32.
// The sum over a group is an integer, so that all instruction sets agree on it, and only
// the chain of groups rounds (quant.h).
//
// The package does not schedule, does not own block tables and does not know models.
package cpu

import (
	"fmt"
	"runtime"
	"strings"
	"unsafe"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/sample"
)

// KernelVersion is part of the numerics class. It increases with every change that
// can change a bit of any result or the layout of a KV page.
const KernelVersion = 2

// Names of Options.Kernels.
const (
	Auto     = "auto"
	Portable = "portable"
	Generic  = "generic"
	AVX2     = "avx2"
	AVX512   = "avx512"
	NEON     = "neon"

	// The same with VNNI, for weights in 8 and 4 bits.
	AVXVNNI    = "avxvnni"
	AVX512VNNI = "avx512vnni"

	// AMX is AVX512VNNI with AMX's products for weights in bf16 and MXFP4, several times
	// as fast for long prompts. It rounds their inputs to bf16, which no other variant
	// does. So it is a numerics class of its own, and Auto never selects it.
	AMX = "amx"
)

// MaxThreads is the most threads of a backend.
const MaxThreads = 1024

// Bounds on shapes. They keep index arithmetic far from overflow and fix the
// size of the scratch that a thread keeps on its stack.
const (
	maxHeadDim = 512     // largest attention head of the supported families
	maxKeyDim  = 576     // of a latent's keys
	maxCols    = 1 << 22 // above any vocabulary or hidden size
	maxExperts = 1024    // of one layer; the largest family has 512

	maxBlockTokens = 256 // one block is at most one attention segment
)

// Options are the settings of New.
type Options struct {
	Threads int            // including the caller's; 0: GOMAXPROCS
	Limits  backend.Limits // largest step
	Kernels string         // a name of Variants, or Auto, the default: the fastest one

	// Mapped promises that Tensor.Data stays readable until Close, as a mapped
	// checkpoint does. Portable kernels then use matrices in place.
	Mapped bool

	// MapKV maps the zeroed bytes of a KV region instead of anonymous memory, so that
	// other processes can share them. They must stay mapped until Close.
	MapKV func(n int) ([]byte, error)

	// Group is the group of tensor-parallel workers; nil: this process is alone.
	Group backend.WorkerGroup

	// FaultBatchOrder is only for tests of other packages: Linear splits its
	// reduction in two halves if the step has more than one row. Results stay right to
	// rounding but depend on the batch, which a bit-identity test must catch.
	FaultBatchOrder bool
}

// CPU implements backend.Backend. It is not safe for concurrent use.
type CPU struct {
	opts    Options
	kernels runner
	mem     memory
	step    stepData

	buffers []*buffer
	weights []*weight
	ropes   []*ropeTable
	routes  []*routing
	kv      kvStore
	adapt   adapters
	orders  []*inputOrder

	plans     map[backend.Key]*plan
	recording *plan
	marked    *plan            // of which a mark's callback runs, or ran last
	markedAt  int              // the number of the mark's stop
	drawing   draws            // of the running step
	rows      *pool            // used by portable kernels and by rows of logits, never both at once
	scratch   []sample.Scratch // [threads]
	sampler   sample.Kernels
}

var (
	_ backend.Backend   = (*CPU)(nil)
	_ backend.RowReader = (*CPU)(nil)
)

// buffer is fp32 [rows, cols], with as many rows as the limits allow.
type buffer struct {
	rows backend.Rows
	cols int
	data []float32 // [limit, cols], mapped
	q    []byte    // [limit] rows of quant.go, mapped; nil until an operation needs them
}

// weight is a matrix [out, in] or, with in 0, a vector [out].
type weight struct {
	name    string
	dtype   backend.DType
	from    backend.DType // type in the checkpoint, if dtype is INT8 or INT4
	out, in int
	vector  []float32       // [out], when in is 0; mapped
	matrix  []byte          // row-major for portable kernels, packed for C
	scales  *backend.Scales // of FP8
	grid    *backend.Grid   // of GRID; its rows are those of matrix for portable kernels
	order   *inputOrder     // of GRID: which input each number of a quantized row is; nil: in order
	renewed bool            // the matrix is loaded more than once, so that its memory may not be borrowed
	first   int             // row of the whole matrix that row 0 is
	of      int             // rows of the whole matrix
}

// kvStore is the paged KV. A page is K [kvHeads, headDim, blockTokens] then
// V [kvHeads, blockTokens, headDim], so that the vector lanes of a score or of an
// output are contiguous. A latent's page is [blockTokens, headDim]: K is all columns
// and V the first ones. Bytes of a page that a group does not need are unused.
type kvStore struct {
	spec    backend.KVSpec
	regions [][]byte  // [Regions] of [Blocks, PageBytes], mapped
	groups  []kvGroup // [Groups]

	scales []kvScales // [layers]; nil unless the type is FP8
}

// kvScales are 256 times the scales of a KV layer, for each head. Kernels read E4M3 as a 256th of
// its value.
type kvScales struct{ k256, v256 []float32 } // [KVHeads]; mapped

// kvGroup is a group with the step's slots and tables.
type kvGroup struct {
	backend.KVGroup
	half   int     // bytes of K, after which V begins; 0 for a latent
	slots  []int32 // [Limits.Tokens] block*BlockTokens + offset, where a row's KV goes; mapped
	tables []int32 // [Limits.Seqs, Limits.Blocks] block tables; mapped
}

// group returns the group of a KV layer.
func (kv *kvStore) group(layer int) *kvGroup { return &kv.groups[kv.spec.Layers[layer].Group] }

// memory returns a KV layer's pages.
func (kv *kvStore) memory(layer int) []byte { return kv.regions[kv.spec.Layers[layer].Region] }

// ropeTable holds cosine then sine of one rotation for the rows of a step.
type ropeTable struct {
	rope  *backend.Rope
	half  int
	table []float32 // [Limits.Tokens, 2*half]: cosines, then sines; mapped
}

// runner executes recorded operations with one kernel variant.
type runner interface {
	// load stores a matrix in the variant's own layout into w.matrix.
	load(c *CPU, w *weight, data []byte) error
	// size returns the bytes of a matrix of F32 or BF16 in that layout.
	size(w *weight) int
	// compile allocates scratch for a plan and returns its form for run, in mapped
	// memory. The caller stores it in p.native.
	compile(c *CPU, p *plan) (unsafe.Pointer, error)
	// run executes operations [lo, hi) of a compiled plan.
	run(c *CPU, p *plan, lo, hi int)
	close()
}

// New returns a backend. It refuses kernels that this build or processor lacks.
func New(o Options) (*CPU, error) {
	if o.Threads == 0 {
		o.Threads = runtime.GOMAXPROCS(0)
	}
	if o.Threads < 1 || o.Threads > MaxThreads {
		return nil, fmt.Errorf("%w: %d threads, want 1 to %d", backend.ErrShape, o.Threads, MaxThreads)
	}
	l := o.Limits
	if l.Tokens < 1 || l.Outputs < 1 || l.Seqs < 1 || l.Blocks < 1 ||
		l.Tokens > 1<<20 || l.Outputs > 1<<20 || l.Seqs > 1<<20 || l.Blocks > 1<<24 {
		return nil, fmt.Errorf("%w: limits %+v", backend.ErrShape, l)
	}
	if o.Kernels == "" || o.Kernels == Auto {
		o.Kernels = Variants()[0]
	}
	if !Has(o.Kernels) {
		names := Variants()
		if hasAMX() {
			names = append(names, AMX)
		}
		return nil, fmt.Errorf("%w: no %q kernels: this build and processor have %s", backend.ErrNoDevice, o.Kernels, strings.Join(names, ", "))
	}
	c := &CPU{opts: o, plans: make(map[backend.Key]*plan), rows: newPool(o.Threads), scratch: make([]sample.Scratch, o.Threads)}
	var err error
	if err = c.step.alloc(&c.mem, l); err == nil {
		c.kernels, err = newRunner(c)
	}
	if err != nil {
		c.rows.close()
		c.mem.free()
		return nil, err
	}
	c.sampler = newSampler(c.opts.Kernels)
	for i := range c.scratch {
		c.scratch[i].Kernels = c.sampler
	}
	return c, nil
}

// Variants returns the kernels that New accepts here, fastest first, without AMX.
func Variants() []string { return append(nativeVariants(), Portable) }

// Has reports whether New accepts kernels of that name here.
func Has(name string) bool {
	if name == AMX {
		return hasAMX()
	}
	for _, v := range Variants() {
		if v == name {
			return true
		}
	}
	return false
}

func newRunner(c *CPU) (runner, error) {
	if c.opts.Kernels == Portable {
		return newPortable(c), nil
	}
	return newNative(c)
}

// Variant returns the kernels, for the numerics class, and the architecture, because
// Go's own math functions differ in their last bits between architectures.
func (c *CPU) Variant() string {
	return fmt.Sprintf("cpu-%s-%s-%d", c.opts.Kernels, runtime.GOARCH, KernelVersion)
}

// Limits returns the limits of a step.
func (c *CPU) Limits() backend.Limits { return c.opts.Limits }

// limit returns the largest number of rows of a row set.
func (c *CPU) limit(rows backend.Rows) int {
	if rows == backend.OutputRows {
		return c.opts.Limits.Outputs
	}
	return c.opts.Limits.Tokens
}

// Alloc reserves an activation buffer; its pages are touched on first use.
func (c *CPU) Alloc(rows backend.Rows, cols int) (backend.Buf, error) {
	if (rows != backend.TokenRows && rows != backend.OutputRows) || cols < 1 || cols > maxCols {
		return -1, fmt.Errorf("%w: buffer of row kind %d with %d columns", backend.ErrShape, rows, cols)
	}
	data, err := c.mem.floats(c.limit(rows) * cols)
	if err != nil {
		return -1, fmt.Errorf("buffer [%d, %d]: %w", c.limit(rows), cols, err)
	}
	c.buffers = append(c.buffers, &buffer{rows: rows, cols: cols, data: data})
	return backend.Buf(len(c.buffers) - 1), nil
}

// Load stores a vector as fp32, or a matrix in the kernels' layout.
func (c *CPU) Load(t backend.Tensor) (backend.Weight, error) {
	w := &weight{name: t.Name, dtype: t.DType, from: t.DType, scales: t.Scales, grid: t.Grid, first: t.First, of: t.Of}
	switch len(t.Shape) {
	case 1:
		w.out = t.Shape[0]
	case 2:
		w.out, w.in = t.Shape[0], t.Shape[1]
	}
	if err := checkFP8(&t); err != nil {
		return backend.NoWeight, err
	}
	whole := t.DType == backend.F32 || t.DType == backend.FP8 || t.DType == backend.BF16 || t.DType == backend.MXFP4 && w.in > 0 && w.in%32 == 0
	if t.DType == backend.GRID {
		whole = len(t.Data) == 0 && t.As == 0 && t.Grid.Fit(w.out, w.in)
	}
	if !whole || w.out < 1 || w.out > maxCols || (len(t.Shape) == 2 && w.in < 1) || w.in > maxCols ||
		t.DType != backend.GRID && len(t.Data) != t.DType.MatrixBytes(w.out, max(w.in, 1)) {
		return backend.NoWeight, fmt.Errorf("%w: tensor %s %s %v of %d bytes",
			backend.ErrShape, t.Name, t.DType, t.Shape, len(t.Data))
	}
	if w.of == 0 {
		w.of = w.out
	}
	if t.DType == backend.GRID && len(t.Grid.Order) > 0 {
		var err error
		if w.order, err = c.inputOrder(t.Grid.Order); err != nil {
			return backend.NoWeight, fmt.Errorf("tensor %s: %w", t.Name, err)
		}
	}
	if w.first < 0 || w.first > w.of-w.out {
		return backend.NoWeight, fmt.Errorf("%w: tensor %s %v is rows from %d on of %d", backend.ErrShape, t.Name, t.Shape, t.First, t.Of)
	}
	if t.As != 0 {
		if !t.As.Quantized() || w.in == 0 || t.DType == backend.MXFP4 || t.DType == backend.FP8 {
			return backend.NoWeight, fmt.Errorf("%w: tensor %s %s %v as %s", backend.ErrShape, t.Name, t.DType, t.Shape, t.As)
		}
		w.dtype = t.As
	}
	if w.in == 0 {
		v, err := c.mem.floats(w.out)
		if err != nil {
			return backend.NoWeight, fmt.Errorf("tensor %s: %w", t.Name, err)
		}
		decode(v, t.Data, t.DType)
		w.vector = v
	} else if err := c.kernels.load(c, w, t.Data); err != nil {
		return backend.NoWeight, fmt.Errorf("tensor %s %v: %w", t.Name, t.Shape, err)
	}
	c.weights = append(c.weights, w)
	return backend.Weight(len(c.weights) - 1), nil
}

// Reserve is Load for a matrix of F32 or BF16 without Data. Its numbers come with Reload before
// each product, and take memory until Unload.
func (c *CPU) Reserve(t backend.Tensor) (backend.Weight, error) {
	if len(t.Shape) != 2 || t.DType != backend.F32 && t.DType != backend.BF16 || t.As != 0 || t.Of != 0 || len(t.Data) != 0 || c.opts.Mapped ||
		min(t.Shape[0], t.Shape[1]) < 1 || max(t.Shape[0], t.Shape[1]) > maxCols {
		return backend.NoWeight, fmt.Errorf("%w: reserving %s %s %v", backend.ErrShape, t.Name, t.DType, t.Shape)
	}
	w := &weight{name: t.Name, dtype: t.DType, from: t.DType, out: t.Shape[0], in: t.Shape[1], of: t.Shape[0]}
	var err error
	if w.matrix, err = c.mem.bytes(c.kernels.size(w), true); err != nil {
		return backend.NoWeight, fmt.Errorf("tensor %s %v: %w", t.Name, t.Shape, err)
	}
	c.weights = append(c.weights, w)
	return backend.Weight(len(c.weights) - 1), nil
}

// Unload frees the memory of the numbers of a matrix that Reserve returned.
func (c *CPU) Unload(id backend.Weight) { dropBytes(c.weight(id).matrix) }

// UnloadKV frees the memory of the pages of a KV layer. Other layers of its region lose theirs,
// too.
func (c *CPU) UnloadKV(layer int) { dropBytes(c.kv.memory(layer)) }

// Reload replaces the numbers of a matrix of F32 or BF16, which Options.Mapped must not have left
// where the checkpoint has it. No operation may run.
func (c *CPU) Reload(id backend.Weight, data []byte) error {
	w := c.weight(id)
	if w.in == 0 || w.dtype != backend.F32 && w.dtype != backend.BF16 || len(data) != w.dtype.MatrixBytes(w.out, w.in) || c.opts.Mapped {
		return fmt.Errorf("%w: %s %s [%d, %d] cannot get %d bytes", backend.ErrShape, w.name, w.dtype, w.out, w.in, len(data))
	}
	return c.kernels.load(c, w, data)
}

// AllocKV reserves the paged KV, once. Pages take memory when they are first written.
func (c *CPU) AllocKV(spec backend.KVSpec) error {
	const most = 1 << 20
	if c.kv.regions != nil {
		return fmt.Errorf("%w: KV allocated twice", backend.ErrShape)
	}
	if !spec.Valid() || len(spec.Layers) > most || len(spec.Groups) > most {
		return fmt.Errorf("%w: KV %+v", backend.ErrShape, spec)
	}
	kv := kvStore{spec: spec}
	for _, g := range spec.Groups {
		if g.State == 0 && g.BlockTokens > maxBlockTokens || g.ValueDim() > maxHeadDim || g.HeadDim > maxKeyDim || g.KVHeads > most ||
			int64(spec.Blocks)*int64(g.BlockTokens) > 1<<31-1 {
			return fmt.Errorf("%w: KV %+v", backend.ErrShape, spec)
		}
		kg := kvGroup{KVGroup: g}
		if g.Latent == 0 && g.State == 0 {
			kg.half = g.BlockTokens * g.TokenBytes(spec.DType) / 2
		}
		var err error
		if kg.slots, err = c.mem.ints(c.opts.Limits.Tokens); err == nil {
			kg.tables, err = c.mem.ints(c.opts.Limits.Seqs * c.opts.Limits.Blocks)
		}
		if err != nil {
			return fmt.Errorf("block tables: %w", err)
		}
		kv.groups = append(kv.groups, kg)
	}
	for i := range spec.Regions {
		n := spec.Blocks * spec.PageBytes
		var b []byte
		var err error
		if c.opts.MapKV != nil {
			b, err = c.opts.MapKV(n)
		} else {
			b, err = c.mem.bytes(n, false)
		}
		if err != nil {
			return fmt.Errorf("KV region %d of %d: %w", i, spec.Regions, err)
		}
		kv.regions = append(kv.regions, b)
	}
	if spec.DType == backend.FP8 {
		for _, place := range spec.Layers {
			n := max(1, spec.Groups[place.Group].KVHeads) // a state has none
			both, err := c.mem.floats(2 * n)
			if err != nil {
				return fmt.Errorf("KV scales: %w", err)
			}
			for i := range both {
				both[i] = 256
			}
			kv.scales = append(kv.scales, kvScales{both[:n], both[n:]})
		}
	}
	c.kv = kv
	return nil
}

// ScaleKV sets a layer's scales; see backend.Backend.
func (c *CPU) ScaleKV(layer int, k, v []float32) error {
	k, v, err := c.kv.spec.KVScales(layer, k, v)
	if err != nil {
		return err
	}
	s := c.kv.scales[layer]
	for i := range k {
		s.k256[i], s.v256[i] = 256*k[i], 256*v[i]
	}
	return nil
}

// KVRegion returns one region's pages.
func (c *CPU) KVRegion(region int) []byte { return c.kv.regions[region] }

// Download copies the live rows of the last step into dst, which it grows when
// it is too short, and returns the part that it filled.
func (c *CPU) Download(dst []float32, src backend.Buf) []float32 {
	b := c.buffers[src]
	return append(dst[:0], b.data[:c.step.live(b.rows)*b.cols]...)
}

// View returns the live rows of the last step; see backend.RowReader.
func (c *CPU) View(src backend.Buf) []float32 {
	b := c.buffers[src]
	return b.data[:c.step.live(b.rows)*b.cols]
}

// EachRow calls look on the pool's threads; see backend.RowReader.
func (c *CPU) EachRow(n int, look func(row int)) { c.rows.run(eachRow(look), n) }

// Kernels returns the variant's loops over rows of logits.
func (c *CPU) Kernels() sample.Kernels { return c.sampler }

// eachRow is a task whose items are rows.
type eachRow func(row int)

func (look eachRow) item(_, row int) { look(row) }

// Close ends the threads and frees all memory. Slices from KVRegion become invalid.
func (c *CPU) Close() error {
	if c.kernels == nil {
		return nil
	}
	c.kernels.close()
	c.rows.close()
	c.kernels = nil
	c.buffers, c.weights, c.orders, c.ropes, c.routes, c.plans = nil, nil, nil, nil, nil, nil
	c.kv, c.adapt = kvStore{}, adapters{}
	c.step, c.marked = stepData{}, nil
	return c.mem.free()
}
