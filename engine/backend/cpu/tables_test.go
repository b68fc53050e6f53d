package cpu

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// tableTaker returns a backend that has block tables and no memory for KV.
func tableTaker(seqs, blocks, pool int, groups ...backend.KVGroup) *CPU {
	c := &CPU{opts: Options{Limits: backend.Limits{Tokens: seqs, Seqs: seqs, Blocks: blocks}}}
	c.kv.spec.Blocks = pool
	for _, g := range groups {
		c.kv.groups = append(c.kv.groups, kvGroup{KVGroup: g, slots: make([]int32, seqs), tables: make([]int32, seqs*blocks)})
	}
	c.step.rowSpan, c.step.spanRows = make([]int32, seqs), make([]int32, seqs+1)
	return c
}

// TestTablesFollowEachStep: whatever the steps before had in a span's place, a table with a
// block that does not exist where it may be read is refused, and every entry of one that is
// accepted is what C reads.
func TestTablesFollowEachStep(t *testing.T) {
	const blocks, blockTokens, pool = 3*tablePart + 7, 2, 50
	rng := rand.New(rand.NewPCG(16, 6))
	groups := []backend.KVGroup{{BlockTokens: blockTokens}, {BlockTokens: blockTokens, Window: 9}, {BlockTokens: blockTokens, Window: 2 * tablePart}}
	c := tableTaker(2, blocks, pool, groups...)
	before := make([][]int32, len(groups)) // the last tables that were accepted
	accepted, refused := 0, 0
	for range trials(3000) {
		n := 1 + rng.IntN(blocks)
		start := n*blockTokens - 1
		sp := backend.Span{Tokens: 1, Start: int32(start)}
		good, repair := true, rng.IntN(4) > 0
		for g, spec := range groups {
			first := 0
			if spec.Window > 0 {
				first = max(0, start-spec.Window+1) / blockTokens
			}
			table := slices.Clone(before[g])
			table = table[:min(len(table), n)]
			for len(table) < n {
				table = append(table, rng.Int32N(pool))
			}
			if rng.IntN(2) == 0 { // mostly as in the step before, apart from what fell out of the window
				for i := range first {
					table[i] = -1
				}
			}
			for i := first; i < n && repair; i++ {
				if table[i] < 0 { // a sequence that reads further back than the one before it
					table[i] = rng.Int32N(pool)
				}
			}
			for range rng.IntN(3) {
				table[rng.IntN(n)] = rng.Int32N(pool)
			}
			if rng.IntN(6) == 0 {
				table[rng.IntN(n)] = pool
			}
			if rng.IntN(6) == 0 {
				table[rng.IntN(n)] = -1
			}
			for i, b := range table {
				good = good && b < pool && (b >= 0 || i < first)
			}
			sp.Tables = append(sp.Tables, table)
		}
		step := &backend.Step{Tokens: []int32{0}, Positions: []int32{int32(start)}, Spans: []backend.Span{sp}}
		if err := c.copySpans(step); (err == nil) != good {
			t.Fatalf("tables of %d blocks are good: %t, error %v", n, good, err)
		}
		if !good {
			refused++
			continue
		}
		accepted++
		for g := range groups {
			table := sp.Tables[g]
			if !slices.Equal(c.kv.groups[g].tables[:n], table) {
				t.Fatalf("group %d: the tables that are read differ from those of the step", g)
			}
			if got, want := c.kv.groups[g].slots[0], table[start/blockTokens]*blockTokens+int32(start%blockTokens); got != want {
				t.Fatalf("group %d: slot %d, want %d", g, got, want)
			}
			before[g] = table
		}
	}
	if least := int(trials(300)); accepted < least || refused < least {
		t.Errorf("%d steps accepted, %d refused", accepted, refused)
	}
}

// BenchmarkTables checks and copies the block tables of a step in which 64 sequences of 131,072
// tokens compute one token each, without the model's arithmetic.
func BenchmarkTables(b *testing.B) {
	const seqs, blocks, blockTokens = 64, 8192, 16
	c := tableTaker(seqs, blocks, seqs*blocks, backend.KVGroup{BlockTokens: blockTokens})
	st := &backend.Step{}
	for i := range seqs {
		table := make([]int32, blocks)
		for j := range table {
			table[j] = int32(i*blocks + j)
		}
		const last = blocks*blockTokens - 1
		st.Tokens, st.Positions = append(st.Tokens, 0), append(st.Positions, last)
		st.Spans = append(st.Spans, backend.Span{Row: int32(i), Tokens: 1, Start: last, Tables: [][]int32{table}})
	}
	for b.Loop() {
		if err := c.copySpans(st); err != nil {
			b.Fatal(err)
		}
	}
}
