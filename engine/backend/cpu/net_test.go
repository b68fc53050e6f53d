package cpu

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// net is a small random Llama over the backend, and what the tests know of it.
type net struct {
	*CPU
	shape
	logits backend.Buf
	record func()
	hidden backend.Buf
}

// shape is drawn at random, odd sizes included.
type shape struct {
	vocab, hidden, inner, layers  int
	heads, kvHeads, dim           int
	blocks, blockTokens           int
	dtype, kvType                 backend.DType
	maxTokens, maxSeqs, maxBlocks int
	context                       int // longest sequence of the tests
}

func randomShape(rng *rand.Rand) shape {
	pick := func(v ...int) int { return v[rng.IntN(len(v))] }
	s := shape{
		vocab: 17 + rng.IntN(90), hidden: 8 + rng.IntN(120), inner: 1 + rng.IntN(150), layers: 1 + rng.IntN(2),
		kvHeads: 1 + rng.IntN(3), dim: pick(16, 18, 32, 40, 64, 80), blockTokens: pick(1, 4, 16, 16, 16, 24, 32),
		maxTokens: 40, maxSeqs: 6,
	}
	s.heads = s.kvHeads * pick(1, 1, 2, 3, 4, 7)
	s.setContext(90)
	if rng.IntN(3) == 0 {
		s.setContext(600) // more than one attention segment
	}
	s.dtype = []backend.DType{backend.F32, backend.BF16, backend.INT8, backend.INT4, backend.FP8}[rng.IntN(5)]
	s.kvType = []backend.DType{backend.F32, backend.BF16, backend.FP8}[rng.IntN(3)]
	return s
}

// setContext sizes the KV for sequences of so many tokens.
func (s *shape) setContext(tokens int) {
	s.context = tokens
	s.maxBlocks = (tokens + s.blockTokens) / s.blockTokens
	s.blocks = s.maxBlocks*s.maxSeqs + 3
}

// tensor makes a random tensor of the given deviation; of the quantized types
// only matrices.
func tensor(rng *rand.Rand, dt backend.DType, dev float64, dims ...int) backend.Tensor {
	if dt.Quantized() {
		as := dt
		if len(dims) == 1 {
			as = 0
		}
		t := tensor(rng, backend.BF16, dev, dims...)
		t.As = as
		return t
	}
	if dt == backend.FP8 {
		if len(dims) == 2 {
			return fp8Tensor(rng, dev, dims[0], dims[1])
		}
		dt = backend.BF16
	}
	n := 1
	for _, d := range dims {
		n *= d
	}
	data := make([]byte, 0, n*dt.Size())
	for range n {
		f := float32(rng.NormFloat64() * dev)
		if dt == backend.BF16 {
			data = binary.LittleEndian.AppendUint16(data, toBF16(f))
		} else {
			data = binary.LittleEndian.AppendUint32(data, math.Float32bits(f))
		}
	}
	return backend.Tensor{Name: fmt.Sprint("random", dims), DType: dt, Shape: dims, Data: data}
}

// newNet builds the same weights for the same seed, whatever the options.
func newNet(t testing.TB, s shape, o Options, seed uint64) *net {
	t.Helper()
	o.Limits = backend.Limits{Tokens: s.maxTokens, Outputs: s.maxTokens, Seqs: s.maxSeqs, Blocks: s.maxBlocks}
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	rng := rand.New(rand.NewPCG(seed, 1))
	check := func(err error) {
		if err != nil {
			t.Helper()
			t.Fatal(err)
		}
	}
	check(c.AllocKV(backend.UniformKV(s.layers, s.blocks, s.blockTokens, s.kvHeads, s.dim, s.kvType)))
	buf := func(rows backend.Rows, cols int) backend.Buf {
		b, err := c.Alloc(rows, cols)
		check(err)
		return b
	}
	load := func(dev float64, dims ...int) backend.Weight {
		w, err := c.Load(tensor(rng, s.dtype, dev, dims...))
		check(err)
		return w
	}
	lin := func(out, in int) backend.Weight { return load(1/math.Sqrt(float64(in)), out, in) }

	x, h, y := buf(backend.TokenRows, s.hidden), buf(backend.TokenRows, s.hidden), buf(backend.TokenRows, s.hidden)
	q, a := buf(backend.TokenRows, s.heads*s.dim), buf(backend.TokenRows, s.heads*s.dim)
	k, v := buf(backend.TokenRows, s.kvHeads*s.dim), buf(backend.TokenRows, s.kvHeads*s.dim)
	gate, up := buf(backend.TokenRows, s.inner), buf(backend.TokenRows, s.inner)
	last, logits := buf(backend.OutputRows, s.hidden), buf(backend.OutputRows, s.vocab)
	embed, final := load(1, s.vocab, s.hidden), load(1, s.hidden)
	type layer struct{ n1, n2, q, k, v, o, gate, up, down, bias backend.Weight }
	layers := make([]layer, s.layers)
	for i := range layers {
		layers[i] = layer{load(1, s.hidden), load(1, s.hidden), lin(s.heads*s.dim, s.hidden), lin(s.kvHeads*s.dim, s.hidden),
			lin(s.kvHeads*s.dim, s.hidden), lin(s.hidden, s.heads*s.dim), lin(s.inner, s.hidden), lin(s.inner, s.hidden),
			lin(s.hidden, s.inner), load(1, s.hidden)}
	}
	rope := &backend.Rope{InvFreq: make([]float32, s.dim/2), Scale: 1}
	for i := range rope.InvFreq {
		rope.InvFreq[i] = float32(math.Pow(10000, -2*float64(i)/float64(s.dim)))
	}
	n := &net{CPU: c, shape: s, logits: logits, hidden: last}
	n.record = func() {
		c.Embed(x, embed)
		c.RMSNorm(h, x, layers[0].n1, 1e-5)
		for i, l := range layers {
			c.Linear(q, h, l.q, backend.NoWeight)
			c.Linear(k, h, l.k, backend.NoWeight)
			c.Linear(v, h, l.v, backend.NoWeight)
			c.Rope(q, s.heads, s.dim, rope)
			c.Rope(k, s.kvHeads, s.dim, rope)
			c.StoreKV(i, k, v)
			c.Mark(i)
			c.Attention(a, q, backend.AttentionSpec{Layer: i, Heads: s.heads, KVHeads: s.kvHeads, HeadDim: s.dim,
				Scale: float32(1 / math.Sqrt(float64(s.dim)))})
			c.Linear(y, a, l.o, l.bias)
			c.AddRMSNorm(h, x, y, l.n2, 1e-5)
			c.Linear(gate, h, l.gate, backend.NoWeight)
			c.Linear(up, h, l.up, backend.NoWeight)
			c.GatedAct(gate, gate, up, backend.SiLU)
			c.Linear(y, gate, l.down, backend.NoWeight)
			next := final
			if i+1 < len(layers) {
				next = layers[i+1].n1
			}
			c.AddRMSNorm(h, x, y, next, 1e-5)
		}
		c.Rows(last, h)
		c.Linear(logits, last, embed, backend.NoWeight)
		c.Sample(logits)
	}
	return n
}

// sequence is a prompt, its blocks and the logits seen so far.
type sequence struct {
	tokens []int32
	blocks []int32
	done   int
	logits [][]float32 // [tokens, vocab]
}

// sequences draws prompts and disjoint random blocks.
func sequences(s shape, rng *rand.Rand, lengths ...int) []*sequence {
	perm := rng.Perm(s.blocks)
	var seqs []*sequence
	for _, n := range lengths {
		q := &sequence{tokens: make([]int32, n)}
		for i := range q.tokens {
			q.tokens[i] = int32(rng.IntN(s.vocab))
		}
		for range (n + s.blockTokens - 1) / s.blockTokens {
			q.blocks, perm = append(q.blocks, int32(perm[0])), perm[1:]
		}
		seqs = append(seqs, q)
	}
	return seqs
}

// clone is the same prompts in the same blocks, nothing computed.
func clone(seqs []*sequence) []*sequence {
	var out []*sequence
	for _, q := range seqs {
		out = append(out, &sequence{tokens: q.tokens, blocks: q.blocks})
	}
	return out
}

// chunk is a part of a sequence to put in a step.
type chunk struct {
	seq *sequence
	n   int
}

// stepOf builds a step that computes the chunks with an output in every row.
func (n *net) stepOf(chunks []chunk) *backend.Step {
	st := &backend.Step{}
	for _, c := range chunks {
		q, row := c.seq, int32(len(st.Tokens))
		for i := range c.n {
			pos := q.done + i
			st.Outputs = append(st.Outputs, backend.Output{Row: int32(len(st.Tokens)), Position: int32(pos + 1)})
			st.Tokens = append(st.Tokens, q.tokens[pos])
			st.Positions = append(st.Positions, int32(pos))
		}
		st.Spans = append(st.Spans, backend.Span{Row: row, Tokens: int32(c.n), Start: int32(q.done), Tables: [][]int32{q.blocks}})
	}
	st.Sampled = make([]int32, len(st.Outputs))
	return st
}

// forward runs the chunks as one step and keeps their logits.
func (n *net) forward(t testing.TB, chunks []chunk, onMark func(int)) *backend.Step {
	t.Helper()
	st := n.stepOf(chunks)
	key := backend.Key{Tokens: n.maxTokens, Outputs: n.maxTokens}
	if err := n.Replay(key, st, n.record, onMark); err != nil {
		t.Fatal(err)
	}
	all := n.Download(nil, n.logits)
	for _, c := range chunks {
		for range c.n {
			c.seq.logits = append(c.seq.logits, all[:n.vocab:n.vocab])
			all = all[n.vocab:]
			c.seq.done++
		}
	}
	return st
}

// alone computes each sequence by itself, one token a step.
func (n *net) alone(t testing.TB, seqs []*sequence) {
	for _, q := range seqs {
		for range q.tokens {
			n.forward(t, []chunk{{q, 1}}, nil)
		}
	}
}

// mixed computes the sequences in random chunks and batches.
func (n *net) mixed(t testing.TB, seqs []*sequence, rng *rand.Rand) (steps, widest int) {
	for {
		var chunks []chunk
		room := 1 + rng.IntN(n.maxTokens)
		for _, i := range rng.Perm(len(seqs)) {
			q := seqs[i]
			left := min(len(q.tokens)-q.done, room)
			if left > 0 && rng.IntN(4) > 0 {
				k := 1 + rng.IntN(left)
				chunks = append(chunks, chunk{q, k})
				room -= k
			}
		}
		if len(chunks) > 0 {
			n.forward(t, chunks, nil)
			steps, widest = steps+1, max(widest, len(chunks))
		}
		rest := 0
		for _, q := range seqs {
			rest += len(q.tokens) - q.done
		}
		if rest == 0 {
			return steps, widest
		}
	}
}

// firstDifference names the first logit that is not the same bits.
func firstDifference(a, b []*sequence) string {
	for i := range a {
		for pos := range a[i].logits {
			for v, x := range a[i].logits[pos] {
				if y := b[i].logits[pos][v]; math.Float32bits(x) != math.Float32bits(y) {
					return fmt.Sprintf("sequence %d position %d logit %d: %g (%08x) against %g (%08x)",
						i, pos, v, x, math.Float32bits(x), y, math.Float32bits(y))
				}
			}
		}
	}
	return ""
}
