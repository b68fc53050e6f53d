package grammar

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/grammar/grammartest"
)

// hostile are sources that broke other programs, or were made to: repeats of repeats, large counts,
// long lists, look-around, references in circles, surrogates, empty languages.
func hostile() map[string]Source {
	schema := func(s string) Source { return Source{Kind: JSONSchema, Text: []byte(s)} }
	regex := func(s string) Source { return Source{Kind: Regex, Text: []byte(s)} }
	out := map[string]Source{
		"repeats of repeats":        regex(`(a{1,1000}){1,1000}`),
		"repeats of repeats, 3":     regex(`((a{1,1000}){1,1000}){1,1000}`),
		"repeats of empty repeats":  regex(`((a?){0,1000}){0,1000}`),
		"many dot stars":            regex(`(.*a){20}`),
		"two to the 18 states":      regex(`.*a.{18}`),
		"two to the 300 states":     regex(`.*a.{300}`),
		"dot star and large repeat": regex(`.*a.{100000}b`),
		"nested stars":              regex(`(((((a*)*)*)*)*)*b`),
		"overlapping alternatives":  regex(`(a|aa|aaa|aaaa|aaaaa)*b`),
		"nested empty repeats":      regex(strings.Repeat("(a?", 60) + strings.Repeat(")*", 60)),
		"nested empty counts":       regex(strings.Repeat("(a?b?", 60) + strings.Repeat("){2,5}", 60)),
		"look-ahead":                regex(`(?=a)b`),
		"look-behind":               regex(`(?<!a)b`),
		"back-reference":            regex(`(a)\1`),
		"word boundary":             regex(`\bfoo\b`),
		"huge repeat":               regex(`a{1,999999999}`),
		"repeat past the limit":     regex(`a{1,99999999999}`),
		"bad range":                 regex(`[z-a]`),
		"open group":                regex(`((((((((((`),
		"deep groups":               regex(strings.Repeat("(", 2000) + "a" + strings.Repeat(")", 2000)),
		"long":                      regex(strings.Repeat("a", 5000)),
		"classes":                   regex(`[\s\S]*[\w\W]*[\d\D]*x`),
		"unicode classes":           regex(`\p{L}*\p{Lu}*\P{Nd}*!`),
		"nothing":                   regex(`[^\s\S]`),
		"no UTF-8":                  regex("a\xff"),
		"surrogate":                 regex(`\ud800`),
		"left recursion":            {Kind: EBNF, Text: []byte(`root ::= root "a" | "b"`)},
		"hidden left recursion":     {Kind: EBNF, Text: []byte("root ::= x? root \"a\" | \"b\"\nx ::= \"y\"")},
		"endless rule":              {Kind: EBNF, Text: []byte(`root ::= "a" root`)},
		"ambiguous rule":            {Kind: EBNF, Text: []byte("root ::= \"a\" root \"b\" | \"a\" root \"c\" | \"a\" root | \"d\"")},
		"repeat of an empty rule":   {Kind: EBNF, Text: []byte("root ::= x{0,1000000}\nx ::= \"a\"?")},
		"no root":                   {Kind: EBNF, Text: []byte(`x ::= "a"`)},
		"no rule":                   {Kind: Lark, Text: []byte(`start: nothing`)},
		"template":                  {Kind: Lark, Text: []byte("start: _sep{x, y}")},
		"import":                    {Kind: Lark, Text: []byte("%import .other (X)\nstart: X")},
		"no trigger":                {Kind: StructuralTag, Text: []byte(`{"structures":[{"begin":"<a>","schema":{},"end":"</a>"}],"triggers":["<b>"]}`)},
		"no format":                 {Kind: StructuralTag, Text: []byte(`{"format":{"type":"unknown"}}`)},
		"many choices":              {Kind: Choice, Choices: make([]string, 20_000)},
	}
	for name, text := range grammartest.Schemas() {
		out[name] = schema(text)
	}
	hostileRules(out)
	return out
}

// hostileRules adds long chains of rules.
func hostileRules(out map[string]Source) {
	var chain, back strings.Builder
	for i := range 20_000 {
		fmt.Fprintf(&chain, "r%d ::= r%d | \"a\"\n", i, i+1)
		fmt.Fprintf(&back, "r%d ::= \"b\" r%d\n", i+1, i)
	}
	out["deep rules"] = Source{Kind: EBNF, Text: []byte("root ::= r20000 \"c\"\n" + strings.ReplaceAll(back.String(), "\n", " \"d\"\n") + "r0 ::= \"x\"")}
	out["chain of rules"] = Source{Kind: EBNF, Text: []byte("root ::= r0\n" + chain.String() + "r20000 ::= \"x\"")}
	out["chain of rules, backwards"] = Source{Kind: EBNF, Text: []byte("root ::= r20000\n" + back.String() + "r0 ::= \"x\"")}
}

// runHostile compiles a source and computes masks along a random output. Every error must be one
// of the package's.
func runHostile(t *testing.T, name string, src Source, v *Vocabulary, r *rand.Rand) {
	t.Helper()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	start := time.Now()
	g, err := Compile(src, DefaultLimits())
	if err != nil {
		var e *Error
		if !errors.As(err, &e) || e.Keyword == "" || e.Reason == "" {
			t.Errorf("%s: %v names no keyword", name, err)
		}
	} else {
		walkHostile(t, name, g, v, r)
	}
	took := time.Since(start)
	runtime.ReadMemStats(&after)
	if used := after.TotalAlloc - before.TotalAlloc; used > 1<<30 {
		t.Errorf("%s: %d MiB allocated", name, used>>20)
	}
	if took > 30*time.Second { // a second on a machine of its own
		t.Errorf("%s: %v", name, took)
	}
	if took > 300*time.Millisecond {
		t.Logf("%s: %v, %d MiB", name, took, (after.TotalAlloc-before.TotalAlloc)>>20)
	}
}

func walkHostile(t *testing.T, name string, g *Grammar, v *Vocabulary, r *rand.Rand) {
	t.Helper()
	limits := DefaultLimits()
	limits.CacheBytes = 8 << 20
	a, err := NewAutomaton(g, v, limits)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	m, err := a.NewMatcher()
	mask := make([]uint64, v.Words())
	for step := 0; err == nil && step < 6 && !m.done; step++ {
		err = m.Mask(mask)
		checkSteps(t, name, a)
		if err != nil {
			break
		}
		if step == 1 {
			checkMask(t, a, m, mask)
		}
		id := int32(r.IntN(v.size))
		for !has(mask, id) {
			id = (id + 1) % int32(v.size)
		}
		if err = m.Accept(id); err != nil {
			t.Errorf("%s: an allowed token: %v", name, err)
		}
		checkSteps(t, name, a)
	}
	if err != nil && !errors.Is(err, ErrBudget) {
		t.Errorf("%s: %v", name, err)
	}
	if a.Bytes() > limits.CacheBytes+32<<20 {
		t.Errorf("%s: caches of %d MiB", name, a.Bytes()>>20)
	}
}

// checkSteps holds the last call against the limit of counted steps. A step took at most 50 ns in
// masks of these sources over 150,000 tokens, so that 200 ns a step are below a second.
func checkSteps(t *testing.T, name string, a *Automaton) {
	t.Helper()
	const perStep, most = 200 * time.Nanosecond, time.Second
	if beyond := a.Steps() - a.limits.MaskSteps; beyond > a.limits.MaskSteps/100 || time.Duration(a.limits.MaskSteps)*perStep > most {
		t.Errorf("%s: %d steps, %d beyond the limit", name, a.Steps(), beyond)
	}
}

func TestHostile(t *testing.T) {
	v := testVocabulary(1)
	r := rand.New(rand.NewPCG(1, 1))
	for name, src := range hostile() {
		runHostile(t, name, src, v, r)
	}
	random := 200
	if testing.Short() {
		random = 50
	}
	for i := range random {
		seed := rand.New(rand.NewPCG(uint64(i), 3))
		src := Source{Kind: JSONSchema}
		if i%3 == 0 {
			src = Source{Kind: Regex, Text: []byte(grammartest.RandomPattern(seed))}
		} else {
			src.Text = []byte(grammartest.RandomSchema(seed, i))
		}
		runHostile(t, fmt.Sprintf("random %d %s", i, clip(string(src.Text))), src, v, r)
	}
}
