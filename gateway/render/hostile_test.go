package render

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/grammar"
	"github.com/tandem-serving/tandem/engine/grammar/grammartest"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/render/parse"
)

// hostileFormats have each kind of arguments.
var hostileFormats = []string{"hermes", "qwen3_coder", "pythonic", "mistral", "openai", "glm45", "deepseek_v3", "deepseek_v4", "kimi_k2", "gemma4", "llama3_json"}

// threadTime returns the CPU time of the calling thread.
func threadTime(t *testing.T) time.Duration {
	t.Helper()
	const rusageThread = 1
	var u syscall.Rusage
	if err := syscall.Getrusage(rusageThread, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// hostileRun is a format with a vocabulary.
type hostileRun struct {
	m     *Model
	vocab *grammar.Vocabulary
}

func newHostileRun(t *testing.T, format string, byID bool) *hostileRun {
	t.Helper()
	v := newWalkedVocabulary(byID)
	f, err := parse.NewFormat(format, "", v.added)
	if err != nil {
		t.Fatal(err)
	}
	return &hostileRun{&Model{Text: &TextModel{format: f}}, grammar.NewVocabulary(v.tokens, v.special, []int32{v.eos})}
}

// run compiles the calls of a request, and computes masks along a random answer. It returns the
// request's error. No part takes more than a second of CPU time or a gibibyte.
func (h *hostileRun) run(t *testing.T, name, fields string, r *rand.Rand) *openai.Error {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	start := threadTime(t)
	within := func(part string) {
		t.Helper()
		if took := threadTime(t) - start; took > mostTime {
			t.Errorf("%s: %s takes %v", name, part, took)
		}
		start = threadTime(t)
	}
	req, fault := openai.Parse(openai.Chat, []byte(`{"messages":[{"role":"user","content":"x"}],`+fields+`}`))
	if fault != nil {
		return fault
	}
	fault = h.m.ConstrainCalls(req, parse.AtBeginning)
	within("the grammar's text")
	if fault != nil {
		return fault
	}
	limits := grammar.DefaultLimits()
	g, err := grammar.Compile(req.Grammar.Source, limits)
	within("its compilation")
	runtime.ReadMemStats(&after)
	if used := after.TotalAlloc - before.TotalAlloc; used > 1<<30 {
		t.Errorf("%s: %d MiB are allocated", name, used>>20)
	}
	if err != nil {
		return openai.GrammarError(req.Grammar, err)
	}
	limits.CacheBytes = 8 << 20
	a, err := grammar.NewAutomaton(g, h.vocab, limits)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	m, err := a.NewMatcher()
	mask := make([]uint64, h.vocab.Words())
	for step := 0; err == nil && step < 40; step++ {
		start = threadTime(t)
		err = m.Mask(mask)
		within("a mask")
		if err != nil {
			break
		}
		var allowed []int32
		for id := range int32(64 * len(mask)) {
			in := mask[id>>6]>>(id&63)&1 != 0
			if in {
				allowed = append(allowed, id)
			}
			if step%13 == 12 {
				twin := m
				if accepted := twin.Accept(id) == nil; accepted != in {
					t.Errorf("%s: token %d is accepted: %v, and in the mask: %v", name, id, accepted, in)
				}
			}
		}
		start = threadTime(t)
		if err = m.Accept(allowed[r.IntN(len(allowed))]); err != nil && !errors.Is(err, grammar.ErrBudget) {
			t.Errorf("%s: an allowed token: %v", name, err)
		}
		within("a token")
		if m.Finished() {
			break
		}
	}
	if err != nil && !errors.Is(err, grammar.ErrBudget) {
		t.Errorf("%s: %v", name, err)
	}
	if a.Bytes() > limits.CacheBytes+32<<20 {
		t.Errorf("%s: caches of %d MiB", name, a.Bytes()>>20)
	}
	return nil
}

// hostileChoices are the ways in which a schema of a tool becomes a grammar; the last compiles none.
var hostileChoices = []string{
	`"tool_choice":"required"`, `"tool_choice":{"type":"function","function":{"name":"f"}}`, `"tool_choice":"auto"`, `"parallel_tool_calls":false`,
}

func hostileTool(name, parameters string, strict bool) string {
	return fmt.Sprintf(`{"type":"function","function":{"name":%q,"strict":%v,"parameters":%s}}`, name, strict, parameters)
}

// Hostile schemas as parameters of tools are refused with an error that names the tool, or are
// followed, in every format and with each tool_choice.
func TestHostileTools(t *testing.T) {
	type source struct{ name, text string }
	var all []source
	schemas := grammartest.Schemas()
	for _, name := range slices.Sorted(maps.Keys(schemas)) {
		text := schemas[name]
		all = append(all, source{name, text}, source{name + " of a property", `{"type":"object","properties":{"p":` + text + `},"required":["p"],"additionalProperties":false}`})
	}
	fixed := len(all)
	for i := range 200 {
		text := grammartest.RandomSchema(rand.New(rand.NewPCG(uint64(i), 3)), i)
		if i%3 == 0 {
			pattern, err := json.Marshal(grammartest.RandomPattern(rand.New(rand.NewPCG(uint64(i), 3))))
			if err != nil {
				t.Fatal(err)
			}
			text = `{"type":"string","pattern":` + string(pattern) + `}`
		}
		all = append(all, source{fmt.Sprint("random ", i), `{"type":"object","properties":{"p":` + text + `},"required":["p"]}`})
	}
	runs := map[string]*hostileRun{}
	followed, refused := 0, 0
	soak := os.Getenv("TANDEM_SOAK") != ""
	for i, s := range all {
		for k, format := range hostileFormats { // a few for each schema, all for the fixed ones of a soak
			large := len(s.text) > 20_000
			most := len(hostileFormats)
			switch {
			case large && testing.Short():
				continue
			case !soak && large:
				most = 1
			case large || !soak:
				most = 2
			case i >= fixed:
				most = 4
			}
			if (i+k)%len(hostileFormats) >= most {
				continue
			}
			byID := (i+k)%2 == 0
			key := fmt.Sprint(format, byID)
			if runs[key] == nil {
				runs[key] = newHostileRun(t, format, byID)
			}
			choice, strict := hostileChoices[(i+k)%4], (i+k)%4 != 3
			fault := runs[key].run(t, fmt.Sprintf("%s by %s, %s", s.name, format, choice), fmt.Sprintf(`"tools":[%s],%s`, hostileTool("f", s.text, strict), choice), rand.New(rand.NewPCG(uint64(i), uint64(k))))
			if fault == nil {
				followed++
				continue
			}
			refused++
			named := strings.Contains(fault.Message, "tools[0].function")
			if fault.Status != 400 || !named && !strings.HasPrefix(fault.Message, "the body is not valid JSON: ") {
				t.Errorf("%s by %s: %d %s", s.name, format, fault.Status, fault.Message)
			}
		}
	}
	t.Logf("%d followed, %d refused", followed, refused)
	if followed < refused/4 || refused == 0 {
		t.Errorf("%d followed, %d refused", followed, refused)
	}
}

// Many tools, long names and descriptions, and tools of one name are followed.
func TestHostileLists(t *testing.T) {
	tools := func(n int, tool func(i int) string) string {
		var list []string
		for i := range n {
			list = append(list, tool(i))
		}
		return `"tools":[` + strings.Join(list, ",") + `]`
	}
	const schema = `{"type":"object","properties":{"a":{"type":"string","maxLength":9,"pattern":"^[a-z]+$"},"b":{"type":"array","items":{"type":"integer","minimum":%d}},"c":{"anyOf":[{"type":"null"},{"type":"string","format":"date-time"}]}},"required":["a"]}`
	long := func(i int) string { return fmt.Sprintf("%s%03d", strings.Repeat("n", openai.MaxToolName-3), i) }
	for name, fields := range map[string]string{
		"128 tools":   tools(128, func(i int) string { return hostileTool(fmt.Sprint("f", i), fmt.Sprintf(schema, i), true) }),
		"1,024 tools": tools(openai.MaxTools, func(i int) string { return hostileTool(fmt.Sprint("f", i), fmt.Sprintf(schema, i%7), i%4 == 0) }),
		"long names":  tools(128, func(i int) string { return hostileTool(long(i), fmt.Sprintf(schema, i), true) }),
		"one name":    tools(128, func(i int) string { return hostileTool("f", fmt.Sprintf(schema, i), true) }),
		"two of a name": tools(2, func(i int) string {
			return hostileTool("f", []string{`{"type":"object","properties":{"x":{"type":"string"}},"required":["x"]}`, `{"type":"object","properties":{"x":{"type":"integer"},"y":{}},"required":["x","y"]}`}[i], true)
		}),
		"descriptions": tools(8, func(i int) string {
			d := strings.Repeat("d", 100_000)
			return fmt.Sprintf(`{"type":"function","function":{"name":"f%d","description":%q,"strict":true,"parameters":{"type":"object","description":%q,"properties":{"a":{"type":"null","description":%q}}}}}`, i, d, d[:50_000], d[:20_000])
		}),
		"random": tools(100, func(i int) string {
			text := fmt.Sprintf(`{"type":"object","properties":{"p":%s}}`, grammartest.RandomSchema(rand.New(rand.NewPCG(uint64(i), 4)), 2))
			if _, err := grammar.Compile(grammar.Source{Kind: grammar.JSONSchema, Text: []byte(text)}, grammar.DefaultLimits()); err != nil {
				text = `{}`
			}
			return hostileTool(fmt.Sprint("f", i), text, true)
		}),
	} {
		for k, format := range hostileFormats {
			if k%3 > 0 || testing.Short() && k > 0 {
				continue
			}
			for i, choice := range hostileChoices[:3] {
				if strings.Contains(choice, `"f"`) && !strings.Contains(name, "name") || strings.Contains(choice, `"f"`) && name == "long names" || (i+k)%3 > 0 && strings.HasPrefix(name, "1") {
					continue
				}
				if fault := newHostileRun(t, format, k%2 == 0).run(t, name+" by "+format, fields+","+choice, rand.New(rand.NewPCG(uint64(k), uint64(i)))); fault != nil {
					t.Errorf("%s by %s, %s: %s", name, format, choice, fault.Message)
				}
			}
		}
	}
}
