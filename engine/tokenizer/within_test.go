package tokenizer

import (
	"runtime"
	"strings"
	"testing"
)

// What encoding allocates is counted before it is, and a caller that has no room for it
// ends the encoding.
func TestEncodeWithinCountsMemory(t *testing.T) {
	const size = 1 << 20
	byteLevel, _ := loadGolden(t, "testdata/gpt2.json.gz")
	for name, c := range map[string]struct {
		tok  *Tokenizer
		text string
	}{
		"one word":                       {byteLevel, strings.Repeat("ab", size/2)},
		"a word without merges":          {byteLevel, strings.Repeat("z", size)},
		"words":                          {byteLevel, strings.Repeat("ab ba z ", size/8)},
		"a token for each character":     {byteLevel, strings.Repeat("z ", size/2)},
		"normalized, one word":           {loadSmallFallback(t), strings.Repeat("ab", size/2)},
		"normalized to something longer": {loadSmallFallback(t), strings.Repeat("a ", size/2)},
	} {
		t.Run(name, func(t *testing.T) {
			cache := c.tok.NewMessageCache(0)
			counted := 0
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			ids, ok := cache.EncodeWithin(c.text, false, func(n int) bool {
				counted += n
				return true
			})
			runtime.ReadMemStats(&after)
			if !ok || len(ids) == 0 {
				t.Fatalf("%d ids, %v", len(ids), ok)
			}
			// Besides it the ids take a third of the text's bytes, 4 bytes each; the smaller
			// buffers that they outgrew are garbage by then.
			if took, most := int(after.TotalAlloc-before.TotalAlloc), 2*counted+4*size/3+size; took > most {
				t.Errorf("%d bytes allocated, %d counted", took, counted)
			}
			if counted == 0 {
				return
			}
			calls := 0
			if _, ok := cache.EncodeWithin(c.text, false, func(int) bool { calls++; return false }); ok || calls != 1 {
				t.Errorf("without room: %v after %d calls", ok, calls)
			}
		})
	}
}
