// Package backend is the interface between model files and the device that runs
// them. It has about a dozen coarse operations over buffers that are allocated once,
// and Replay, which records a forward pass the first time and repeats it after.
//
// Invariant: what an operation computes for one row depends only on that row, the
// weights and the KV of its own sequence. It depends neither on the other rows of the
// step nor on the chunks of a prompt. So the same token at the same position gives the
// same bits on every path.
//
// The package decides nothing and computes nothing. It holds the interface and the
// plain types of its calls. backend/cpu is the CPU implementation.
package backend

import (
	"errors"
	"math"

	"github.com/tandem-serving/tandem/engine/sample"
)

// DType is an element type of weights and KV.
type DType uint8

// Element types. Activations are always F32.
const (
	F32 DType = iota + 1
	BF16
	// MXFP4 is a type of weights: groups of 32 inputs share a power of two. The data
	// of a matrix is [out, in/32, 16] bytes, the first of each two inputs in the low
	// half, then [out, in/32] exponents with a bias of 127.
	MXFP4
	// INT8 and INT4 are types of weights that a backend makes at Load (Tensor.As):
	// integers with a scale for each group of 32 inputs.
	INT8
	INT4
	// FP8 is a type of matrices, one E4M3 byte each, multiplied by Tensor.Scales. It is also a
	// type of KV.
	FP8
	// GRID is a type of matrices: the integers of a checkpoint with its scales, Tensor.Grid.
	GRID
)

// Quantized reports whether weights of the type are made at Load.
func (d DType) Quantized() bool { return d == INT8 || d == INT4 }

// MatrixBytes returns the size of a matrix [out, in], for FP8 without its scales. Grid has a method
// of its own.
func (d DType) MatrixBytes(out, in int) int {
	groups := 2 * ((in + 63) / 64) // an even number, the last ones padded
	switch d {
	case MXFP4:
		return out * in / 32 * 17
	case INT8:
		return out * groups * 34
	case INT4:
		return out * groups * 18
	}
	return out * in * d.Size()
}

// Size returns the bytes of one element of F32, BF16 or FP8.
func (d DType) Size() int {
	switch d {
	case BF16:
		return 2
	case FP8:
		return 1
	}
	return 4
}

// String returns the name used by flags and logs.
func (d DType) String() string {
	switch d {
	case F32:
		return "float32"
	case BF16:
		return "bfloat16"
	case MXFP4:
		return "mxfp4"
	case INT8:
		return "int8"
	case INT4:
		return "int4"
	case FP8:
		return "fp8"
	case GRID:
		return "grid"
	}
	return "invalid"
}

// Errors of every implementation.
var (
	ErrShape    = errors.New("backend: shapes do not fit")
	ErrMemory   = errors.New("backend: out of memory")
	ErrNoDevice = errors.New("backend: device not available")
	ErrDigest   = errors.New("backend: page checksum mismatch")

	// ErrDevice means that every later step would fail, too, until the process starts again.
	ErrDevice = errors.New("backend: the device has failed")
)

// Rows is a set of rows of a buffer that are live in a step.
type Rows uint8

// Row sets.
const (
	TokenRows  Rows = iota + 1 // one row per token of the step: Step.Tokens
	OutputRows                 // one row per sampled position: Step.Outputs
)

// Buf is an activation buffer, fp32 [rows, cols] row-major, owned by the
// backend that allocated it. Rows beyond the step's live rows hold garbage.
type Buf int32

// Weight is a parameter on the device, in a layout that the backend chooses.
type Weight int32

// NoWeight is an absent optional weight, such as a bias.
const NoWeight Weight = -1

// Tensor is a weight as the checkpoint holds it. Data is row-major and little endian.
// It is borrowed only during Load, unless an option of the implementation declares that
// it stays mapped.
type Tensor struct {
	Name  string
	DType DType
	Shape []int // [out, in] for matrices, [n] for vectors
	Data  []byte

	Scales *Scales // of FP8, else nil
	Grid   *Grid   // of GRID, whose Data is empty; else nil

	As DType // INT8 or INT4: the type to convert an F32 or BF16 matrix to; else 0

	// First and Of declare that these are rows [First, First+Shape[0]) of Of rows; Of 0
	// means all. Embed returns zeros for rows that are not in the tensor.
	First, Of int
}

// Limits bound every step, so that buffers are allocated once.
type Limits struct {
	Tokens  int // most token rows in a step
	Outputs int // most output rows in a step
	Seqs    int // most sequences in a step
	Blocks  int // most blocks in one sequence's table
}

// Span is one sequence's part of a step.
type Span struct {
	Row    int32 // its first token row
	Tokens int32 // number of token rows, at consecutive positions
	Start  int32 // position of its first token row

	// Adapter is the place of the adapter of its rows; 0: none.
	Adapter int32

	// Tables are the block tables for positions [0, Start+Tokens), one per KV group.
	// Places before the window of every row of the span may hold a negative number,
	// which is no block.
	Tables [][]int32
}

// Output is one row to sample from.
type Output struct {
	Row      int32 // the token row whose hidden state gives the logits
	Position int32 // position of the token being drawn; keys the generator
	Params   sample.Params

	// LogProbs is 1 plus the number of best tokens to return with the sampled one, for
	// a Scorer; 0 for none.
	LogProbs int
}

// Step is the input that varies from one step to the next. Replay copies it before it
// runs the recorded plan. A plan that uses KV requires that Spans cover the token rows
// in order, and that each row's position matches its span; Replay checks both. StoreKV
// writes to the block that the span's table has for the position.
type Step struct {
	Tokens    []int32 // [T] token ids
	Positions []int32 // [T]
	Spans     []Span
	Outputs   []Output
	Sampled   []int32 // [len(Outputs)], written by Sample

	// Fetch are blocks, per KV group, whose pages will be read in KVRegion. A backend
	// with memory of its own copies each layer's pages there before it calls onMark.
	Fetch [][]int32
	// Digest are such blocks whose pages will be read in the device's own memory: see
	// Direct.
	Digest [][]int32
}

// Rope is a rotation table: inverse frequencies, one per pair of columns, and the
// factor on cosine and sine (1 unless the scaling sets another). Pairs are half-split.
// If there are fewer pairs than a head has, the head's last columns rotate.
type Rope struct {
	InvFreq []float32
	Scale   float32

	// Growth, where not 0, multiplies cosine and sine at position p in addition by
	// 1 + Growth·ln(1 + floor(p/Span)).
	Growth float32
	Span   int
}

// At returns the factor on cosine and sine at a position.
func (r *Rope) At(position int32) float32 {
	if r.Growth == 0 {
		return r.Scale
	}
	return r.Scale * (1 + r.Growth*float32(math.Log(float64(1+int(position)/r.Span))))
}

// AttentionSpec is one layer's attention.
type AttentionSpec struct {
	Layer   int // KV layer to read
	Heads   int
	KVHeads int
	HeadDim int     // of queries and keys; values of a latent have Latent columns
	Scale   float32 // of the scores, usually HeadDim^-0.5

	// Softcap, if not 0, bounds the scaled scores: s becomes Softcap·tanh(s/Softcap).
	Softcap float32

	// Window is how many positions a token attends to, its own included; 0 is all. A
	// layer with a window reads no block before it, and no place of the table for such
	// a block. It must not be longer than the window of the layer's KV group.
	Window int

	// Sinks is a vector [heads] of learned scores. They take part in the softmax like
	// those of keys and add nothing to the output; nil: none.
	Sinks *Weight
}

// Act is the function of a gated MLP's gate, g, and up, u.
type Act uint8

// Activations. The logistic function is σ.
const (
	SiLU     Act = iota // g·σ(g)·u
	GELUTanh            // the tanh approximation of GELU
	// ClampedSwish is GPT-OSS's: g at most 7, u within ±7, g·σ(1.702 g)·(u+1).
	ClampedSwish
)

// MoESpec is one layer's experts: gated MLPs of which each row uses the TopK with the
// highest router scores, the first of equals. Their outputs, weighted by the softmax
// over all scores, are summed from the best to the last. Each row has a chain of sums
// of its own, whichever rows share the step.
type MoESpec struct {
	TopK      int
	Normalize bool // the weights of the selected experts are divided by their sum

	Act Act

	Gate, Up []Weight // [experts] of [inner, hidden]
	Down     []Weight // [experts] of [hidden, inner]

	// Biases of each expert's products; nil: none.
	GateBias, UpBias, DownBias []Weight

	// Sigmoid, if set, replaces the softmax for the selection.
	Sigmoid *SigmoidRouter

	// Scale is a vector [experts] of factors on the weights of the selected experts,
	// applied last; nil: none.
	Scale *Weight

	// Scratch of the model, of the same row set, with TopK rows in one. Hidden is
	// [TopK*hidden], Inner and InnerUp are [TopK*inner].
	Hidden, Inner, InnerUp Buf
}

// SigmoidRouter selects experts by σ(score) + bias. Groups is the number of groups of
// neighbouring experts. It keeps the Keep groups with the largest sum of their two best
// experts, and selects the TopK best of these. Their weights are σ(score), divided by
// their sum if Normalize is set, times Factor.
//
// With Softmax the scores are the softmax over all experts, without a bias, and a group's score is
// that of its best expert.
type SigmoidRouter struct {
	Softmax      bool
	Bias         Weight // a vector [experts]; NoWeight with Softmax
	Groups, Keep int
	Factor       float32
}

// HeadSpec is a matrix per head.
type HeadSpec struct {
	Weights []Weight // [heads] of [out, in]

	In, Out Buf // scratch of the model, of the same row set: [heads*in], [heads*out]
}

// Backend runs forward passes. It is not safe for concurrent use. Operations panic if
// shapes disagree with what was allocated: that is a bug of the model file, which its
// first test finds.
type Backend interface {
	// Variant names device, instruction set and kernel version, as in
	// "cpu-avx512-amd64-1": the part of the numerics class that the backend owns.
	Variant() string

	Alloc(rows Rows, cols int) (Buf, error)
	Load(t Tensor) (Weight, error)
	AllocKV(spec KVSpec) error
	// ScaleKV sets the scales of a KV layer's keys and values, one for each head or one for all.
	// It is called after AllocKV with a spec of FP8 and before any step; without it they are 1.
	ScaleKV(layer int, k, v []float32) error
	// KVRegion returns the memory of one region's pages, [Blocks][PageBytes] bytes,
	// which kvtransfer registers. The layout of pages is private to the backend.
	KVRegion(region int) []byte
	// Download copies the live rows of a buffer of the last step to dst.
	Download(dst []float32, src Buf) []float32
	Close() error

	Embed(dst Buf, table Weight)
	Linear(dst, x Buf, w, bias Weight)                              // dst = x·Wᵀ + bias
	HeadLinear(dst, x Buf, s HeadSpec)                              // each head's first columns times its matrix, the others copied
	RMSNorm(dst, x Buf, w Weight, eps float32)                      // w may be NoWeight, as in HeadNorm
	AddRMSNorm(dst, x, add Buf, w Weight, eps float32)              // x += add; dst = norm(x)
	HeadNorm(dst, x Buf, heads, headDim int, w Weight, eps float32) // RMSNorm of each head; w is [headDim]
	Rope(x Buf, heads, headDim int, r *Rope)
	StoreKV(layer int, k, v Buf)
	Attention(dst, q Buf, a AttentionSpec)
	GatedAct(dst, gate, up Buf, act Act)
	Gate(dst, gate, x Buf)                            // dst = σ(gate)·x; a column of gate is the factor of cols(x)/cols(gate) columns
	DeltaRule(dst, qkv, beta, alpha Buf, s DeltaSpec) // see DeltaSpec
	Add(x, add Buf, scale Weight)                     // x = (x + add)·scale, a vector of one; NoWeight: 1
	Scale(x Buf, by float32)                          // x *= by
	Softcap(x Buf, limit float32)                     // x = limit·tanh(x/limit)
	Columns(dst, src Buf, from int)                   // dst = src's columns from from on, as many as dst has
	MoE(dst, x, router Buf, m MoESpec)                // dst = the selected experts of x; router is the scores [experts]
	Rows(dst, src Buf)                                // dst[i] = src[Outputs[i].Row]
	AllReduce(x Buf)                                  // x = the sum of all workers' x; see WorkerGroup
	AllGather(dst, src Buf)                           // dst = all workers' src, side by side
	Sample(logits Buf)                                // Step.Sampled; on rank 0 only
	Mark(layer int)                                   // all KV of this layer has been stored, by every worker

	// Replay runs a step. The first time it gets key it calls record, which issues
	// the operations, and keeps them. After that it repeats them without calling
	// record. It returns ErrShape before anything runs if the step does not fit.
	// onMark, if set, is called for each Mark in order, on the caller's goroutine,
	// while the step runs; the KV stored before that mark may be read from then on. If
	// the error is nil, Sampled is written.
	Replay(key Key, step *Step, record func(), onMark func(layer int)) error
}

// Capturer is a backend that can record plans before they are needed.
type Capturer interface {
	// Capture records plans, as Replay would at their first step. It returns how many
	// of them are graphs that the device runs by itself.
	Capture(keys []Key, record func()) (graphs int, err error)
}

// Ahead is a backend that accepts a step while another one runs.
type Ahead interface {
	// Start is Replay that does not wait. A token of -1-i in the step is what output i
	// of the step started last samples; that step need not have ended. At most two
	// steps are started and not finished, and meanwhile Replay must not be called.
	// Start keeps nothing of step. Only outputs of a Ruler may have Controls or a Mask.
	// In a row whose token is -1-i the Controls do not know that token yet; Start samples
	// as they will be after it. A Mask is the one after that token.
	Start(key Key, step *Step, record func()) error
	// Finish waits for the oldest started step and writes the tokens that its outputs
	// sampled.
	Finish(sampled []int32) error
}

// Ruler is a backend that applies a request's rules and masks on the device.
type Ruler interface {
	// Rules reports whether the device applies these rules, also after more further
	// tokens, and the masks of the same outputs. It returns true for nil. Once it returns
	// false for some Controls, it always does. Then the host samples, and the device
	// returns no log-probabilities.
	Rules(c *sample.Controls, more int) bool
}

// Scorer is a backend that computes log-probabilities of what it samples.
type Scorer interface {
	// MaxLogProbs returns the largest Output.LogProbs.
	MaxLogProbs() int
	// LogProbs appends to top the best tokens of an output of the last step, and returns
	// the results of sample.LogProbs for its token. ok is false if the caller has to
	// compute them from the logits.
	LogProbs(output int, top []sample.Top) (own float32, rank int, all []sample.Top, ok bool)
}

// RowReader is a backend whose buffers the engine can read in place, on the backend's
// threads.
type RowReader interface {
	// View returns src's live rows of the last step, [rows, columns], without a copy.
	// They are valid until the next step and must not be changed.
	View(src Buf) []float32
	// EachRow calls look(row) once for each row below n, on several threads, and
	// returns after the last call. It must not run during a step.
	EachRow(n int, look func(row int))
	// Kernels returns the loops over a row of logits that are fastest here.
	Kernels() sample.Kernels
}

// Mirror is a backend whose KVRegion may be a copy of memory that the network cannot
// reach. Blocks are per KV group.
type Mirror interface {
	// Mirrored reports whether KVRegion is a copy.
	Mirrored() bool
	// Fetch copies pages of all layers to KVRegion, and waits.
	Fetch(blocks [][]int32) error
	// Land copies pages from KVRegion, before any step that is started later and uses them.
	// Until the arrival is complete, such a step waits for the copies.
	Land(blocks [][]int32) (Arrival, error)
}

// Arrival reports whether pages that have arrived can be used, without waiting. Its error is
// that of the pages, which then cannot be used.
type Arrival func() (complete bool, err error)

// Direct is a Mirror whose own memory the network can reach at KVAddress. Such
// transfers do not use KVRegion. The host does not see their pages, so that the device
// computes their CRC32C.
type Direct interface {
	// KVAddress returns the address of a region's pages, [Blocks][PageBytes] bytes, and
	// the number of the GPU. A negative number means that host memory emulates a GPU's.
	KVAddress(region int) (at uintptr, gpu int)
	// KVError returns why the network cannot access the regions at KVAddress; nil if it can.
	KVError() error
	// Digest computes the checksums of pages of all layers, and waits. Blocks are per
	// KV group. Step.Digest does the same within a step.
	Digest(blocks [][]int32) error
	// KVDigest returns the last checksum of a page.
	KVDigest(region int, block int32) uint32
	// Verify compares pages that others have written with their checksums. The arrival's error
	// is ErrDigest if one differs. pages must not change before it is complete.
	Verify(pages []PageDigest) (Arrival, error)
}

// PageDigest is the CRC32C that a page of a region should have.
type PageDigest struct {
	Region int
	Page   int32
	CRC    uint32
}

// Key identifies a recorded plan by the largest numbers of rows that it must serve.
type Key struct {
	Tokens  int
	Outputs int
}
