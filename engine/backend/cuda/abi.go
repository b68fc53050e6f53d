package cuda

// The structures of cuda/api.h. library.go compares their sizes.

// version is TD_VERSION.
const version = 16

// TD_IN_CHUNK and the constants next to it.
const (
	inChunk    = 1 << 30
	chunkRows  = 64
	chunkLeast = 8
	fewRows    = 16
	moeRows    = 8
)

// TD_DELTA_WIDTH and TD_DELTA_WIDEST.
const (
	deltaWidth  = 128
	deltaWidest = 512
)

// TD_DRAWS_SLICES and TD_DRAWS_ALONE.
const (
	drawsSlices = 1
	drawsAlone  = 2
)

// address is memory of the device; 0 is none.
type address uint64

type opKind int32

const (
	opEmbed opKind = iota + 1
	opLinear
	opNorm
	opAngles
	opRope
	opStoreKV
	opAttention
	opGatedAct
	opRows
	opRoute
	opGroup
	opScatter
	opCombine
	opAdd
	opSoftcap
	opColumns
	opSample
	opRouteGroups
	opSplit
	opJoin
	opAllReduce
	opPack
	opAllGather
	opUnpack
	opPlace
	opAdapt
	opGate
	opDelta
)

// Element types of matrices and KV.
const (
	typeF32 int32 = iota
	typeBF16
	typeMXFP4
	typeFP8
	typeINT8
	typeINT4
)

type info struct {
	total, free int64
	capability  int32
	processors  int32
	twin        int32
	overlap     int32
	ptx         int32
	name        [128]byte
}

type limits struct{ tokens, outputs, seqs, blocks, oneOrder, draws int32 }

type draw struct {
	seed                    uint64
	choice                  uint32
	position                int32
	temperature, topP, minP float32
	topK, probs, rules      int32
	mask, _                 int32
}

// rules is td_rules, followed by ban and mark.
type rules struct {
	allowed, bans, marks, last      int32
	repetition, presence, frequency float32
	follows                         int32
}

type ban struct{ token, after int32 }

type mark struct {
	token, count int32
	bias         float32
	seen         int32
}

// ruleWords is TD_RULE_WORDS.
const ruleWords = 1 << 13

// topProbs is TD_TOP.
const topProbs = 20

// probs is td_probs.
type probs struct {
	own    float32
	rank   int32
	tokens [topProbs]int32
	top    [topProbs]float32
}

// piece is td_piece.
type piece struct {
	device address
	host   uint64
	bytes  int64
}

// scales is td_scales.
type scales struct{ rows, cols int32 }

// state is td_state.
type state struct {
	kv       address
	group, _ int32
}

type expert struct {
	w, bias address
	scales  scales
}

type op struct {
	kind                               opKind
	outputs                            int32
	n, k                               int32
	heads, kvHeads, dim                int32
	window, group, blockTokens         int32
	dtype                              int32
	act, from                          int32
	slots                              int32
	topK, experts, normalize, direct   int32
	halves                             int32
	scale, cap                         float32
	dst, a, b, w, bias, extra          address
	kv                                 address
	pageBytes, vAt                     int64
	chosen, weights, slot, list, table address
	more                               [2]joined
	scales                             scales
}

// joined is td_joined.
type joined struct {
	w, bias, dst address
	n, _         int32
}

// stepMemory is td_step: the arrays of a step, in memory that the library owns.
type stepMemory struct {
	counts    []int32  // [5]
	ids       []int32  // [tokens] -1-i: output i of the step before
	positions []int32  // [tokens]
	rowSpan   []int32  // [tokens]
	adapters  []int32  // [tokens] 0: none
	outRows   []int32  // [outputs]
	slots     []int32  // [groups, tokens]
	draws     []draw   // [outputs]
	rules     []uint64 // [outputs, ruleWords]
	tables    []int32  // [groups, seqs, blocks]
	sampled   []int32  // [outputs]
	done      *uint32
	copied    *uint32
	probs     []probs // [outputs]
}
