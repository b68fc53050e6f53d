package backend

// DeltaSpec is one layer's gated delta rule, an attention whose memory is one matrix
// S [KeyDim, ValueDim] for each value head. For each token, in order:
//
//	q, k, v = SiLU of a causal convolution of the DeltaConv last rows of qkv, by column
//	q, k    = scaled to unit length; q also by KeyDim^-0.5
//	S       = S·exp(-exp(Decay)·softplus(alpha + Bias))
//	S       = S + kᵀ·(v - k·S)·σ(beta)
//	dst     = q·S
//
// The columns of qkv are all queries, all keys, then all values. Value head h uses the query and
// key of head h·KeyHeads/ValueHeads.
//
// A state is S and the last DeltaConv-1 rows of qkv. KV layers Layer to Layer+Parts-1 hold it, each
// that of KeyHeads/Parts key heads. Their groups have BlockTokens and a window of 2. The block of
// a place holds the state after the tokens computed so far, of those before the end of the place.
// The first token of a place starts from a copy of the block before, or in it, where the table has
// it at both places. A block that the table has only once does not change after the last token of
// its place, so that another sequence may start from it.
type DeltaSpec struct {
	Layer, Parts         int
	KeyHeads, ValueHeads int
	KeyDim, ValueDim     int // of a head

	Conv        Weight // a vector [channels*DeltaConv], the weight of the newest row last
	Decay, Bias Weight // vectors [ValueHeads]
}

const (
	DeltaConv = 4    // rows of the convolution
	DeltaEps  = 1e-6 // is added to the squared length of queries and keys

	DeltaColumns = 1 << 13 // bounds the columns of a key head in qkv
)

// Valid reports whether the numbers of a spec fit together.
func (s *DeltaSpec) Valid() bool {
	return s.Layer >= 0 && s.Parts > 0 && s.KeyHeads > 0 && s.KeyHeads%s.Parts == 0 && s.ValueHeads > 0 && s.ValueHeads%s.KeyHeads == 0 && s.KeyDim > 0 && s.ValueDim > 0
}

// Channels returns the columns of qkv.
func (s *DeltaSpec) Channels() int { return 2*s.KeyHeads*s.KeyDim + s.ValueHeads*s.ValueDim }

// State returns the number of floats of a part's state. For each of its key heads it has the last
// rows of qkv, that of position p at index p modulo DeltaConv-1, then the matrices of its value
// heads.
func (s *DeltaSpec) State() int {
	group := s.ValueHeads / s.KeyHeads
	return s.KeyHeads / s.Parts * ((DeltaConv-1)*(2*s.KeyDim+group*s.ValueDim) + group*s.KeyDim*s.ValueDim)
}

// Parted returns the first column of a key head's query, key and values in qkv, and the column
// after each.
func (s *DeltaSpec) Parted(head int) [3][2]int {
	keys, wide := s.KeyHeads*s.KeyDim, s.ValueHeads/s.KeyHeads*s.ValueDim
	at := func(first, n int) [2]int { return [2]int{first + head*n, first + (head+1)*n} }
	return [3][2]int{at(0, s.KeyDim), at(keys, s.KeyDim), at(2*keys, wide)}
}
