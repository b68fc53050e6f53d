// Package backend is the seam between model files and the device that runs
// them: about a dozen coarse operations over buffers that are allocated once,
// and Replay, which records a forward pass the first time and repeats it after.
//
// Invariant: what an operation computes for one row depends on that row, the
// weights and the KV of its own sequence alone. It depends neither on which
// other rows share the step nor on how a prompt was cut into chunks, so the
// same token at the same position gives the same bits on every path.
//
// The package decides nothing and computes nothing: it holds the interface and
// the plain types that cross it. backend/cpu is the CPU implementation.
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
	// MXFP4 is of weights alone: groups of 32 inputs share a power of two. The
	// data of a matrix is [out, in/32, 16] bytes, the first of each two inputs in
	// the low half, then [out, in/32] exponents, 127 more than they say.
	MXFP4
	// INT8 and INT4 are of weights alone, which a backend makes at Load (Tensor.As):
	// whole numbers with a scale for each group of 32 inputs.
	INT8
	INT4
	// FP8 is of matrices alone: E4M3, a byte each, and Tensor.Scales, which they are
	// multiplied by.
	FP8
)

// Quantized says whether the type is one that is made at Load.
func (d DType) Quantized() bool { return d == INT8 || d == INT4 }

// MatrixBytes is the size of a matrix [out, in], of FP8 without its scales.
func (d DType) MatrixBytes(out, in int) int {
	groups := 2 * ((in + 63) / 64) // an even number, the last ones filled up
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

// Size is the number of bytes of one element of F32, BF16 or FP8.
func (d DType) Size() int {
	switch d {
	case BF16:
		return 2
	case FP8:
		return 1
	}
	return 4
}

// String is the name used by flags and logs.
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
	}
	return "invalid"
}

// Errors of every implementation.
var (
	ErrShape    = errors.New("backend: shapes do not fit")
	ErrMemory   = errors.New("backend: out of memory")
	ErrNoDevice = errors.New("backend: device not available")
	ErrDigest   = errors.New("backend: a page is not what was sent")
)

// Rows says how many rows of a buffer are live in a step.
type Rows uint8

// Row sets.
const (
	TokenRows  Rows = iota + 1 // one row per token of the step: Step.Tokens
	OutputRows                 // one row per sampled position: Step.Outputs
)

// Buf is an activation buffer, fp32 [rows, cols] row-major, owned by the
// backend that allocated it. Rows beyond the step's live rows hold garbage.
type Buf int32

// Weight is a parameter on the device, in whatever layout the backend likes.
type Weight int32

// NoWeight stands for an absent optional weight, such as a bias.
const NoWeight Weight = -1

// Tensor is a weight as the checkpoint holds it. Data is row-major and little
// endian; it is only borrowed during Load unless the backend is told that it
// stays mapped (Options of the implementation).
type Tensor struct {
	Name  string
	DType DType
	Shape []int // [out, in] for matrices, [n] for vectors
	Data  []byte

	Scales *Scales // of FP8, else nil

	As DType // INT8 or INT4: what a matrix of F32 or BF16 is to be turned into; else 0

	// First and Of say that these are rows [First, First+Shape[0]) of Of; Of 0 is
	// all of them. Embed has zeros for rows that are not there.
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
	Tokens int32 // how many token rows, consecutive positions
	Start  int32 // position of its first token row

	// Adapter is the place of the adapter that its rows go through; 0: none.
	Adapter int32

	// Tables are the block tables for positions [0, Start+Tokens), one per KV
	// group. At places that lie before the window of every row of the span a
	// number may be negative: there is no block any more.
	Tables [][]int32
}

// Output is one row to sample from.
type Output struct {
	Row      int32 // the token row whose hidden state gives the logits
	Position int32 // position of the token being drawn; keys the generator
	Params   sample.Params

	// Probs is 1 and how many best tokens are wanted with the one that is drawn, of a
	// Scorer; else 0.
	Probs int
}

// Step is all that varies from one step to the next. The backend copies it
// before Replay returns control to the recorded plan. A plan that uses KV wants
// Spans to cover the token rows in order, and each row's position to be that
// which its span says; Replay checks it. StoreKV writes where the span's table
// has the position.
type Step struct {
	Tokens    []int32 // [T] token ids
	Positions []int32 // [T]
	Spans     []Span
	Outputs   []Output
	Sampled   []int32 // [len(Outputs)], written by Sample

	// Fetch are blocks, per KV group, whose pages somebody will look at in
	// KVRegion: of a backend that computes elsewhere each layer's are copied there
	// before onMark hears of it.
	Fetch [][]int32
	// Digest are such blocks whose pages somebody will read in the device's own
	// memory: see Direct.
	Digest [][]int32
}

// Rope is a rotation table: inverse frequencies, one per pair of columns, and the
// factor on cosine and sine (1 unless the scaling says otherwise). Half-split
// pairs; where there are fewer than a head has, its last columns turn.
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
	Scale   float32 // on the scores, usually HeadDim^-0.5

	// Softcap, where not 0, bounds the scaled scores: s becomes Softcap·tanh(s/Softcap).
	Softcap float32

	// Window is how many positions a token sees, its own included; 0 is all. A
	// layer with a window reads no block that lies before it, and no place of the
	// table either. It must not be longer than that of the layer's KV group.
	Window int

	// Sinks is a vector [heads] of learned scores that stand beside those of the
	// keys in the softmax and add nothing to the output; nil: none.
	Sinks *Weight
}

// Act is what a gated MLP does to its gate, g, before it multiplies up, u.
type Act uint8

// Activations. The logistic function is σ.
const (
	SiLU     Act = iota // g·σ(g)·u
	GELUTanh            // the tanh approximation of GELU
	// ClampedSwish is GPT-OSS's: g at most 7, u within ±7, g·σ(1.702 g)·(u+1).
	ClampedSwish
)

// MoESpec is one layer's experts: gated MLPs of which each row uses the TopK
// that its router scores highest, the first of equals. Their outputs, weighted
// by the softmax over all scores, are summed from the best to the last, one
// chain per row, whichever rows share the step.
type MoESpec struct {
	TopK      int
	Normalize bool // the weights of the chosen are divided by their sum

	Act Act

	Gate, Up []Weight // [experts] of [inner, hidden]
	Down     []Weight // [experts] of [hidden, inner]

	// Biases of each expert's products; nil: none.
	GateBias, UpBias, DownBias []Weight

	// Sigmoid, where set, chooses by other scores than the softmax.
	Sigmoid *SigmoidRouter

	// Scale is a vector [experts] that multiplies the chosen ones' weights in the
	// end; nil: none.
	Scale *Weight

	// Scratch of the model's, of the same row set: TopK rows in one. Hidden is
	// [TopK*hidden], Inner and InnerUp are [TopK*inner].
	Hidden, Inner, InnerUp Buf
}

// SigmoidRouter chooses experts by σ(score) + bias: of as many groups of
// neighbouring experts as Groups says those Keep whose two best are the most
// together, of these the TopK best. Their weights are σ(score), divided by their
// sum where Normalize says so, times Factor.
//
// With Softmax the scores are the softmax over all, without a bias, and a group is as good
// as its best expert.
type SigmoidRouter struct {
	Softmax      bool
	Bias         Weight // a vector [experts]; NoWeight with Softmax
	Groups, Keep int
	Factor       float32
}

// HeadSpec is a matrix per head.
type HeadSpec struct {
	Weights []Weight // [heads] of [out, in]

	In, Out Buf // scratch of the model's, of the same row set: [heads*in], [heads*out]
}

// Backend runs forward passes. One goroutine uses it; it is not safe for more.
// Operations panic when shapes disagree with what was allocated: that is a
// fault of the model file, found by its first test.
type Backend interface {
	// Variant names device, instruction set and kernel version, as in
	// "cpu-avx512-amd64-1": the part of the numerics class that the backend owns.
	Variant() string

	Alloc(rows Rows, cols int) (Buf, error)
	Load(t Tensor) (Weight, error)
	AllocKV(spec KVSpec) error
	// KVRegion is the memory of one region's pages, [Blocks][PageBytes] bytes,
	// for kvtransfer to register. Pages are opaque to everybody else.
	KVRegion(region int) []byte
	// Download copies the live rows of a buffer of the last step to dst.
	Download(dst []float32, src Buf) []float32
	Close() error

	Embed(dst Buf, table Weight)
	Linear(dst, x Buf, w, bias Weight)                              // dst = x·Wᵀ + bias
	HeadLinear(dst, x Buf, s HeadSpec)                              // each head's first columns by its matrix, the others as they are
	RMSNorm(dst, x Buf, w Weight, eps float32)                      // w may be NoWeight, as in HeadNorm
	AddRMSNorm(dst, x, add Buf, w Weight, eps float32)              // x += add; dst = norm(x)
	HeadNorm(dst, x Buf, heads, headDim int, w Weight, eps float32) // RMSNorm of each head; w is [headDim]
	Rope(x Buf, heads, headDim int, r *Rope)
	StoreKV(layer int, k, v Buf)
	Attention(dst, q Buf, a AttentionSpec)
	GatedAct(dst, gate, up Buf, act Act)
	Add(x, add Buf, scale Weight)      // x = (x + add)·scale, a vector of one; NoWeight: 1
	Scale(x Buf, by float32)           // x *= by
	Softcap(x Buf, limit float32)      // x = limit·tanh(x/limit)
	Columns(dst, src Buf, from int)    // dst = src's columns from from on, as many as dst has
	MoE(dst, x, router Buf, m MoESpec) // dst = the chosen experts of x; router is the scores [experts]
	Rows(dst, src Buf)                 // dst[i] = src[Outputs[i].Row]
	AllReduce(x Buf)                   // x = the sum of all ranks' x; see Ranks
	AllGather(dst, src Buf)            // dst = all ranks' src, side by side
	Sample(logits Buf)                 // Step.Sampled; of rank 0 alone
	Mark(layer int)                    // all KV of this layer has been stored, by every rank

	// Replay runs a step. The first time it sees key it calls record, which
	// issues the operations, and keeps them; after that it repeats them
	// without calling record. A step that does not fit is refused with ErrShape
	// before anything runs. onMark, when set, is called for each Mark in
	// order, on the caller's goroutine, while the step runs; the KV stored
	// before that mark may be read from then on. A nil error means that
	// Sampled is written.
	Replay(key Key, step *Step, record func(), onMark func(layer int)) error
}

// Capturer is a backend whose plans are worth recording before they are needed.
type Capturer interface {
	// Capture records plans, as Replay would at their first step. It returns how
	// many of them are graphs that the device runs by itself.
	Capture(keys []Key, record func()) (graphs int, err error)
}

// Ahead is a backend that takes a step while another one runs.
type Ahead interface {
	// Start is Replay that does not wait. A token of -1-i in the step is what output
	// i of the step that was started last draws, which need not have ended. At most
	// two steps are started and not finished, and until they are there is no
	// Replay. Of the step nothing is kept. An output may have Controls only of a Ruler;
	// they know nothing yet of a token of -1-i in its row, and it draws as they will be
	// behind that one.
	Start(key Key, step *Step, record func()) error
	// Finish waits for the oldest step that was started and writes what its outputs
	// drew.
	Finish(sampled []int32) error
}

// Ruler is a backend that draws by a request's rules where it computes.
type Ruler interface {
	// Rules says whether it does so by these, also when so many more tokens have
	// followed. Those that it refuses once it refuses ever after; of them it has the
	// host draw, and tells no log-probabilities.
	Rules(c *sample.Controls, more int) bool
}

// Scorer is a backend that tells log-probabilities of what it draws.
type Scorer interface {
	// MostProbs is the largest Output.Probs.
	MostProbs() int
	// LogProbs appends to top what sample.LogProbs tells of an output's token, of the
	// step that has ended last. False: its logits have to be looked at.
	LogProbs(output int, top []sample.Top) (own float32, rank int, all []sample.Top, ok bool)
}

// RowReader is a backend whose buffers the engine can read in place, on the backend's
// threads.
type RowReader interface {
	// View returns src's live rows of the last step, [rows, columns], without a copy.
	// They are valid until the next step and must not be changed.
	View(src Buf) []float32
	// EachRow calls look(row) once for each row below n, on several threads, and
	// returns when all calls have. It must not run during a step.
	EachRow(n int, look func(row int))
	// Kernels returns the loops over a row of logits that are fastest here.
	Kernels() sample.Kernels
}

// Mirror is a backend whose KVRegion may be a copy of memory that others cannot
// reach. Blocks are per KV group.
type Mirror interface {
	// Mirrored says whether it is one.
	Mirrored() bool
	// Fetch copies pages of all layers to KVRegion, and waits.
	Fetch(blocks [][]int32) error
	// Land copies them from KVRegion, before any step that is started later.
	Land(blocks [][]int32) error
}

// Direct is a Mirror whose own memory others can reach who are told where it is. They
// do without KVRegion; since the host then does not see the pages, the device makes
// their CRC32C.
type Direct interface {
	// KVAddress is where a region's pages lie, [Blocks][PageBytes] bytes, and in which
	// GPU; negative: the host's memory stands in for one's.
	KVAddress(region int) (at uintptr, gpu int)
	// Digest makes the checksums of pages of all layers, and waits. Blocks are per KV
	// group. Step.Digest has a step do so.
	Digest(blocks [][]int32) error
	// KVDigest is what was made of a page last.
	KVDigest(region int, block int32) uint32
	// Verify holds pages that others have written against theirs: ErrDigest.
	Verify(pages []PageDigest) error
}

// PageDigest is the CRC32C that a page of a region should have.
type PageDigest struct {
	Region int
	Page   int32
	CRC    uint32
}

// Key names a recorded plan: the largest numbers of rows it must serve.
type Key struct {
	Tokens  int
	Outputs int
}
