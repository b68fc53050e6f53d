package quantize

import (
	"github.com/tandem-serving/tandem/engine/backend"
)

// Need is what a conversion takes.
type Need struct {
	Memory int64 // bytes, about
	Disk   int64 // bytes of the folder
	Free   int64 // bytes of its disk; 0: not known
	Tokens int   // of the calibration, at most
	Layers int
}

// process is the memory of the process without the model, about.
const process = 64 << 20

// need estimates what a conversion takes. The memory is that of the process, of the step's buffers
// in two models, and of the operation that takes most.
func (j *job) need() Need {
	c := &j.src.Config
	limits := limitsOf(j.src, j.o.Sequences, j.o.Length)
	tokens := int64(limits.Tokens)
	buffers := c.StepBytes(backend.Limits{Tokens: limits.Tokens, Seqs: limits.Seqs, Outputs: 1, Blocks: 1})
	kv := int64(0)
	for _, l := range c.KVLayers() {
		kv = max(kv, shapeBytes(l, limits.Seqs, j.o.Length))
	}
	most := 2 * 3 * int64(c.MoE.Experts) * int64(c.MoE.FFN) * int64(c.Hidden) * j.width() // the experts of a layer in two models
	for _, m := range j.matrices {
		t, _ := j.files.Tensor(m)
		out, in := int64(t.Shape[0]), int64(t.Shape[1])
		factor := 6*in*in + 8*tokens*min(in, leftColumns+rightColumns)
		most = max(most, factor+out*in*(1+3*j.width()))
	}
	n := Need{Memory: process + 2*(buffers+kv) + most, Disk: j.layout.bytes, Tokens: limits.Tokens, Layers: c.Layers}
	if j.o.Text == "" { // at least one sequence is written at a time, and matrices stay in Options.Memory
		n.Memory = max(n.Memory, process+j.kvBytes()+j.head(), process+j.head()+min(j.o.Memory-j.head(), j.resident()))
	}
	if _, copies, err := j.others(); err == nil { // the error returns when they are copied
		n.Disk += copies
	}
	return n
}

// width returns the bytes of a weight as it is multiplied.
func (j *job) width() int64 {
	if j.src.Config.DType == "bfloat16" {
		return 2
	}
	return 4
}

// resident returns the memory of a model that writes all sequences at once from matrices that stay.
func (j *job) resident() int64 {
	n := int64(j.o.Sequences) * j.kvBytes()
	for _, name := range j.files.Names() {
		t, _ := j.files.Tensor(name)
		elements := j.width()
		for _, d := range t.Shape {
			elements *= int64(d)
		}
		n += elements
	}
	return n
}

// head returns the memory of the output projection, which is the largest matrix of most models, and
// of what it is made of.
func (j *job) head() int64 {
	return 2 * int64(j.src.Config.Vocab) * int64(j.src.Config.Hidden) * j.width()
}

// kvBytes returns the bytes that a sequence of the calibration stores in all layers.
func (j *job) kvBytes() (n int64) {
	for _, l := range j.src.Config.KVLayers() {
		n += shapeBytes(l, 1, j.o.Length)
	}
	return n
}

// shapeBytes returns the bytes that a layer stores of sequences.
func shapeBytes(l backend.KVShape, sequences, length int) int64 {
	g := backend.KVGroup{KVHeads: l.KVHeads, HeadDim: l.HeadDim, Latent: l.Latent, State: l.State}
	if l.State > 0 {
		return int64(sequences) * int64(g.PageBytes(backend.F32))
	}
	return int64(sequences) * int64(length) * int64(g.TokenBytes(backend.F32))
}
