package openai

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// An answer of vectors takes at most the bytes that VectorBytes returns, and its buffer grows once.
func TestVectorBytes(t *testing.T) {
	const texts, size = 3, 4096
	longest := float32(0) // the float32 with the longest text of many
	for r, most, i := rand.New(rand.NewPCG(3, 4)), 0, 0; i < 20_000; i++ {
		f := math.Float32frombits(1<<31 | r.Uint32N(60)<<23 | r.Uint32N(1<<23))
		if n := len(appendFloat(nil, &f)); n > most {
			longest, most = f, n
		}
	}
	vectors := slices.Repeat([][]float32{slices.Repeat([]float32{longest}, size)}, texts)
	check := func(how string, o *VectorOptions, got []byte) {
		t.Helper()
		most := 512 + texts*(&Request{VectorOptions: o}).VectorBytes(size)
		if len(got) > most || cap(got) > most+most/4 {
			t.Errorf("%s: %d bytes in a buffer of %d, want at most %d", how, len(got), cap(got), most)
		}
	}
	for _, inBase64 := range []bool{false, true} {
		check("embeddings", &VectorOptions{Base64: inBase64}, AppendEmbeddings(nil, Embeddings, "id", 1, "m", vectors, inBase64, Usage{}))
	}
	for n := range len(embeddingTypes) {
		types := embeddingTypes[:n+1]
		check(strings.Join(types, " "), &VectorOptions{Types: types}, AppendTypedEmbeddings(nil, "id", nil, vectors, types, Usage{}))
	}
}
