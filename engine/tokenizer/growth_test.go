package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
)

// A normalizer that makes short texts huge is refused when it is loaded, and those
// of published models are not.
func TestNormalizerGrowthIsBounded(t *testing.T) {
	replace := func(from, to string) string {
		return fmt.Sprintf(`{"type":"Replace","pattern":{"String":%q},"content":%q}`, from, to)
	}
	sequence := func(parts ...string) string {
		return `{"type":"Sequence","normalizers":[` + strings.Join(parts, ",") + `]}`
	}
	many := func(n int, part string) (parts []string) {
		for range n {
			parts = append(parts, part)
		}
		return parts
	}
	for _, c := range []struct{ normalizer, want string }{
		{replace("a", strings.Repeat("a", 1_000_000)), "Replace number 1"},
		{sequence(many(60, replace("a", "aa"))...), "Replace number 9"},
		{sequence(sequence(many(30, replace("a", "bb"))...), sequence(many(30, replace("b", "aa"))...)), "Replace number 9"},
		{`{"type":"Prepend","prepend":"` + strings.Repeat("x", 256) + `"}`, "Prepend number 1"},
		{sequence(many(65, replace("a", "b"))...), "more than 64 parts"},
		{sequence(many(8, replace("a", "aa"))...), ""},
		{sequence(`{"type":"Prepend","prepend":"▁"}`, replace(" ", "▁")), ""},
		{sequence(many(5, `{"type":"NFC"}`)...), ""},
		{replace("a", ""), ""},
	} {
		tok := &Tokenizer{chars: chars(), growth: 1}
		err := tok.loadNormalizer(json.RawMessage(c.normalizer))
		switch {
		case c.want == "" && err != nil, c.want != "" && (!errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%.80s: %v, want %q", c.normalizer, err, c.want)
		case err == nil:
			for _, text := range []string{"a", "a a", "abab", "é"} {
				if got := tok.normalize(text); len(got) > tok.growth*len(text) {
					t.Errorf("%.80s: %d bytes of %d, growth %d", c.normalizer, len(got), len(text), tok.growth)
				}
			}
		}
	}
}
