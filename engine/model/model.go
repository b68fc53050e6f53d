package model

import (
	"cmp"
	"fmt"
	"math/bits"

	"github.com/tandem-serving/tandem/engine/backend"
)

// network is the computation of an architecture: weights to bind, buffers to allocate, and a
// forward pass to record.
type network interface {
	weights() []binding
	ignore(tensor string) bool // in the file but not needed
	alloc(memory) error
	forward(backend.Backend)
	logits() backend.Buf
	hidden() backend.Buf // what the output projection reads, [outputs, hidden]
}

// memory is the part of a backend that allocates a step's buffers.
type memory interface {
	Alloc(rows backend.Rows, cols int) (backend.Buf, error)
}

// Options are the options of Load.
type Options struct {
	// Quantization is the type that matrices are converted to.
	Quantization Quantization

	// Shard is the part that is loaded. The backend is configured with the ranks that load the others.
	Shard Shard

	// Progress is called with the bytes of weights loaded so far and in total, after each tensor,
	// on the caller's goroutine.
	Progress func(done, total int64)

	// Late, where set, returns the weight of a matrix whose numbers the backend gets after Load. t
	// is the matrix without Data. read returns it with Data, until the source is closed: all its
	// rows, or those that are listed. Matrices that are neither F32, BF16 nor F16 in the files are
	// loaded at once.
	Late func(t backend.Tensor, read func(rows []int) backend.Tensor) (backend.Weight, error)
}

// Model is a loaded checkpoint. Only the backend's goroutine may use it.
type Model struct {
	config  Config
	backend backend.Backend
	limits  backend.Limits
	net     network
	record  func()                // Forward, bound once so that a step does not allocate
	adapt   map[string][]*binding // matrices, by the names of their tensors, that adapters may have parts for; nil without adapters
}

// Load checks the checkpoint's tensors against its config, moves them to the
// backend and allocates the buffers of a step within limits. The caller allocates
// the KV store, for the layers of Config.KVLayers.
func Load(src *Source, b backend.Backend, limits backend.Limits, o Options) (*Model, error) {
	if limits.Tokens < 1 || limits.Outputs < 1 || limits.Seqs < 1 || limits.Blocks < 1 {
		return nil, fmt.Errorf("%w: every limit of a step must be positive: %+v", ErrConfig, limits)
	}
	checkpoint, err := src.weights()
	if err != nil {
		return nil, err
	}
	config, err := o.Shard.Of(&src.Config)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", src.Name, err)
	}
	m := &Model{config: config, backend: b, limits: limits}
	m.net = m.config.network()
	m.record = m.Forward
	targets := m.net.weights()
	var stacked []stack
	if s, ok := m.net.(stacker); ok {
		stacked = s.stacks()
	}
	tensors, err := match(targets, stacked, checkpoint, &m.config, m.net.ignore)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", src.Name, err)
	}
	done, total := int64(0), stackBytes(stacked)
	counted := map[string]bool{} // several weights may be parts of one tensor
	for i := range tensors {
		if counted[tensors[i].Name] {
			continue
		}
		counted[tensors[i].Name] = true
		total += int64(len(tensors[i].Data))
	}
	progress := func(n int64) {
		done += n
		if o.Progress != nil {
			o.Progress(done, total)
		}
	}
	for i := range tensors {
		t := &tensors[i]
		if *targets[i].target, err = m.load(t, &targets[i], o); err != nil {
			return nil, fmt.Errorf("%s: %w", src.Name, err)
		}
		if counted[t.Name] {
			counted[t.Name] = false
			progress(int64(len(t.Data)))
		}
	}
	for i := range stacked {
		if err := stacked[i].load(b, o); err != nil {
			return nil, fmt.Errorf("%s: %w", src.Name, err)
		}
		progress(stacked[i].bytes())
	}
	if err := m.net.alloc(b); err != nil {
		return nil, fmt.Errorf("%s: buffers for steps of %d tokens: %w", src.Name, limits.Tokens, err)
	}
	return m, nil
}

// load hands a weight to the backend, or to Options.Late.
func (m *Model) load(t *stored, b *binding, o Options) (backend.Weight, error) {
	if o.Late == nil || len(b.parts) != 2 || !t.plain() || o.Quantization != AsStored {
		w := m.config.tensor(t, b, o.Quantization)
		if err := t.checkExponents(&w); err != nil {
			return backend.NoWeight, err
		}
		id, err := m.backend.Load(w)
		if err != nil {
			err = fmt.Errorf("loading %s: %w", t.Name, err)
		}
		return id, err
	}
	late := backend.Tensor{Name: t.Name, DType: cmp.Or(dtypes[t.DType], backend.F32), Shape: []int{b.parts[0].n, b.parts[1].n}}
	if b.ofVocabulary() {
		late.First, late.Of = b.parts[0].from, b.parts[0].of
	}
	id, err := o.Late(late, func(rows []int) backend.Tensor {
		some := *b
		if rows != nil {
			some.rows, some.parts = rows, []part{{n: len(rows), of: b.parts[0].of}, b.parts[1]}
		}
		return m.config.tensor(t, &some, AsStored)
	})
	if err != nil {
		err = fmt.Errorf("loading %s: %w", t.Name, err)
	}
	return id, err
}

// tensor returns a weight as it is loaded.
func (c *Config) tensor(s *stored, b *binding, q Quantization) backend.Tensor {
	if c.fourBits(q) && len(b.shape) == 2 && b.ofVocabulary() {
		return narrowVocabulary(s.part(b, q.of(b)))
	}
	return s.part(b, q.converted(c, s, b))
}

// Forward issues the operations of the forward pass; Step has the backend
// record them.
func (m *Model) Forward() { m.net.forward(m.backend) }

// Step runs one step. onMark, when set, is called with each layer whose KV has been stored.
func (m *Model) Step(step *backend.Step, onMark func(layer int)) error {
	key, err := m.key(step)
	if err != nil {
		return err
	}
	return m.backend.Replay(key, step, m.record, onMark)
}

// key returns the plan of a step.
func (m *Model) key(step *backend.Step) (backend.Key, error) {
	if len(step.Tokens) < 1 || len(step.Tokens) > m.limits.Tokens || len(step.Outputs) > m.limits.Outputs {
		return backend.Key{}, fmt.Errorf("%w: a step of %d tokens and %d outputs, limits are %d and %d",
			backend.ErrShape, len(step.Tokens), len(step.Outputs), m.limits.Tokens, m.limits.Outputs)
	}
	return backend.Key{
		Tokens:  min(bucket(len(step.Tokens)), m.limits.Tokens),
		Outputs: min(bucket(len(step.Outputs)), m.limits.Outputs),
	}, nil
}

// StartsAhead reports whether a step can be submitted while another one runs.
func (m *Model) StartsAhead() bool {
	_, ok := m.backend.(backend.Ahead)
	return ok
}

// Start submits a step without waiting for it; Finish waits. See backend.Ahead.
func (m *Model) Start(step *backend.Step) error {
	key, err := m.key(step)
	if err != nil {
		return err
	}
	return m.backend.(backend.Ahead).Start(key, step, m.record)
}

// Finish waits for the oldest step in flight and writes the tokens that it sampled.
func (m *Model) Finish(sampled []int32) error { return m.backend.(backend.Ahead).Finish(sampled) }

// bucket returns the smallest size of a plan for n rows: 0, a power of two, or from 24 on also
// 1.5 times a power of two. So there are few plans, and none is more than twice as large as needed.
func bucket(n int) int {
	if n == 0 {
		return 0
	}
	most := 1 << bits.Len(uint(n-1))
	if between := most / 4 * 3; most >= 32 && n <= between {
		return between
	}
	return most
}

// Capture has the backend record the plans of steps that decode up to seqs sequences. The largest
// comes first, so that the others fit into the memory that it allocated. progress, if set, is
// called after each with the number recorded and the total. Capture returns how many plans became
// graphs; 0 from a backend that has none.
func (m *Model) Capture(seqs int, progress func(done, of int)) (graphs int, err error) {
	c, ok := m.backend.(backend.Capturer)
	if !ok {
		return 0, nil
	}
	var keys []backend.Key
	for n := min(seqs, m.limits.Tokens, m.limits.Outputs); n > 0; {
		b := bucket(n)
		keys = append(keys, backend.Key{Tokens: min(b, m.limits.Tokens), Outputs: min(b, m.limits.Outputs)})
		for n > 0 && bucket(n) == b {
			n--
		}
	}
	for i := range keys {
		n, err := c.Capture(keys[i:i+1], m.record)
		if graphs += n; err != nil {
			return graphs, err
		}
		if progress != nil {
			progress(i+1, len(keys))
		}
	}
	return graphs, nil
}

// Logits returns the buffer [outputs, vocab] of the last step.
func (m *Model) Logits() backend.Buf { return m.net.logits() }

// Hidden returns the buffer [outputs, HiddenSize] with the last step's rows behind the last norm.
// The output projection reads it.
func (m *Model) Hidden() backend.Buf { return m.net.hidden() }

// HiddenSize returns the number of columns of Hidden.
func (m *Model) HiddenSize() int { return m.config.Hidden }

// VocabSize returns the number of token ids; all tokens of a step are below it.
func (m *Model) VocabSize() int { return m.config.Vocab }

// Config returns the configuration of this rank's part of the model.
func (m *Model) Config() Config { return m.config }

// window returns how many positions a token attends to in layer i, its own included; 0: all.
func (c *Config) window(i int) int {
	if i < len(c.FullLayers) && c.FullLayers[i] {
		return 0
	}
	return c.Window
}

// KVLayers returns the shape of each KV layer. Memory planning needs it before the
// model is loaded. Layers that read the KV of another one have no entry.
func (c *Config) KVLayers() []backend.KVShape {
	if c.Delta != nil {
		return c.statesAndKV()
	}
	stored := c.Layers
	if c.Gemma4 != nil {
		stored -= c.Gemma4.Shared
	}
	layers := make([]backend.KVShape, stored)
	for i := range layers {
		layers[i] = c.shape(i)
	}
	return layers
}

// statesAndKV is KVLayers with layers that have a state.
func (c *Config) statesAndKV() (layers []backend.KVShape) {
	spec := c.DeltaSpec()
	for i := range c.Layers {
		if !c.Delta.layer(i) {
			layers = append(layers, c.shape(i))
			continue
		}
		for range spec.Parts {
			layers = append(layers, backend.KVShape{Window: 2, State: spec.State()})
		}
	}
	return layers
}

// StepBytes returns the memory of a step's buffers within limits.
func (c *Config) StepBytes(limits backend.Limits) int64 {
	count := counter{limits: limits}
	_ = c.network().alloc(&count) // the counter refuses nothing
	return count.bytes
}

// counter is a memory that only adds up the sizes of its buffers.
type counter struct {
	limits backend.Limits
	bytes  int64
}

func (c *counter) Alloc(rows backend.Rows, cols int) (backend.Buf, error) {
	n := c.limits.Tokens
	if rows == backend.OutputRows {
		n = c.limits.Outputs
	}
	c.bytes += int64(n) * int64(cols) * int64(backend.F32.Size())
	return 0, nil
}

// allocator allocates buffers until the first error, which it keeps.
type allocator struct {
	to  memory
	err error
}

func (a *allocator) alloc(rows backend.Rows, cols int) backend.Buf {
	if a.err != nil {
		return 0
	}
	var buf backend.Buf
	buf, a.err = a.to.Alloc(rows, cols)
	return buf
}

// logits allocates the buffers of all logits and of those that this rank computes. They are one
// buffer where the rank computes all.
func (a *allocator) logits(c *Config) (all, share backend.Buf) {
	all = a.alloc(backend.OutputRows, c.Vocab)
	if p := c.dims().vocab; !p.whole() {
		return all, a.alloc(backend.OutputRows, p.n)
	}
	return all, all
}
