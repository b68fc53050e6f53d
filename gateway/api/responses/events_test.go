package responses

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/api/openai"
)

var update = flag.Bool("update", false, "write testdata/events.txt")

func text(s string) openai.Delta {
	return openai.Delta{Text: []byte(s), Finish: openai.NotFinished}
}

func thought(s string) openai.Delta {
	return openai.Delta{Reasoning: []byte(s), Finish: openai.NotFinished}
}

func callOf(i int, id, name, arguments string) openai.Delta {
	return openai.Delta{Calls: []openai.ToolCall{{Index: i, ID: id, Name: name, Arguments: []byte(arguments)}}, Finish: openai.NotFinished}
}

func end(reason string) openai.Delta {
	return openai.Delta{Finish: openai.Finish{Reason: reason, Token: -1}}
}

// scored adds log-probabilities to a Delta, one token for each text.
func scored(d openai.Delta, texts ...string) openai.Delta {
	for _, s := range texts {
		d.Logprobs = append(d.Logprobs, openai.TokenLogprob{Text: s, Bytes: []byte(s), Logprob: -0.5, Top: []openai.TokenLogprob{{Text: "z", Bytes: []byte("z"), Logprob: -2}}})
	}
	return d
}

// answers has requests and the Deltas of their answers.
var answers = []struct {
	name, body string
	deltas     []openai.Delta
	fault      *openai.Error // ends the stream
}{
	{"text", `{"model":"m","input":"u"}`, []openai.Delta{text("Hel"), text("lo\n\"é\""), end("stop")}, nil},
	{"text that is cut", `{"input":"u","max_output_tokens":2,"temperature":0.5,"metadata":{"a" :
 "b"}}`, []openai.Delta{text("Hel"), text("lo"), end("length")}, nil},
	{"nothing", `{"input":"u"}`, []openai.Delta{end("stop")}, nil},
	{"reasoning and calls", `{"instructions":"i","input":"u","reasoning":{"effort":"low","summary":"auto"},"tools":[{"type":"function","name":"f","parameters":{"type" :
"object"}}]}`, []openai.Delta{
		thought("Hm"), thought(", "), text("I look."), callOf(0, "call_a", "f", ""), callOf(0, "", "", `{"a"`), callOf(0, "", "", `:1}`), callOf(1, "call_b", "g", "{}"), end("tool_calls"),
	}, nil},
	{"a call that is cut", `{"input":"u"}`, []openai.Delta{callOf(0, "call_a", "f", `{"a`), end("length")}, nil},
	{"reasoning that is cut", `{"input":"u"}`, []openai.Delta{thought("Hm"), end("length")}, nil},
	{"parts of one Delta", `{"input":"u"}`, []openai.Delta{
		{Reasoning: []byte("r"), Text: []byte("t"), Calls: []openai.ToolCall{{ID: "c", Name: "f", Arguments: []byte("{")}}, Finish: openai.NotFinished},
		{Text: []byte("after"), Calls: []openai.ToolCall{{Arguments: []byte("}")}, {Index: 1, ID: "d", Name: "g", Arguments: []byte("{}")}}, Finish: openai.Finish{Reason: "tool_calls", Token: -1}},
	}, nil},
	{"log-probabilities", `{"input":"u","include":["message.output_text.logprobs"],"top_logprobs":1}`, []openai.Delta{
		scored(thought("Hm"), "Hm"), scored(openai.Delta{Finish: openai.NotFinished}, "</think>"), scored(text("A"), "A"), scored(openai.Delta{Finish: openai.NotFinished}, "\xc3"), scored(text("é"), "\xa9"), scored(end("stop"), "<end>"),
	}, nil},
	{"padding", `{"input":"u","stream":true,"stream_options":{"include_obfuscation":true}}`, []openai.Delta{text("a"), text("exactly 16 bytes"), text("more than sixteen"), end("stop")}, nil},
	{"failure", `{"input":"u"}`, []openai.Delta{thought("Hm"), text("Hel")}, openai.Unavailable(1, "no node is left")},
	{"failure between items", `{"input":"u"}`, []openai.Delta{text("")}, &openai.Error{Status: 429, Message: "too many"}},
	{"failure before a Delta", `{"input":"u"}`, nil, &openai.Error{Status: 499, Message: "aborted"}},
}

// play returns the events of an answer.
func play(t testing.TB, body string, deltas []openai.Delta, fault *openai.Error) []byte {
	r, _ := chat(t, Options{}, body)
	if id := r.Begin("1f", 1700000000, "m"); id != "resp_1f" {
		t.Fatal(id)
	}
	var out []byte
	for i := range deltas {
		d := deltas[i]
		d.Begin = i == 0
		out = r.AppendDelta(out, &d)
	}
	if fault != nil {
		return r.AppendFault(out, fault)
	}
	return r.AppendEnd(out, &openai.Usage{Prompt: 9, Cached: 4, Completion: 7, Reasoning: 2, Reasons: true})
}

// whole returns the answer as one object.
func whole(t testing.TB, body string, deltas []openai.Delta) []byte {
	r, _ := chat(t, Options{}, body)
	r.Begin("1f", 1700000000, "m")
	return r.AppendWhole(nil, []openai.Delta{joined(deltas)}, openai.Usage{Prompt: 9, Cached: 4, Completion: 7, Reasoning: 2, Reasons: true})
}

// joined returns the Delta of a whole answer.
func joined(deltas []openai.Delta) openai.Delta {
	all := openai.Delta{Begin: true}
	for _, d := range deltas {
		all.Reasoning = append(all.Reasoning, d.Reasoning...)
		all.Text = append(all.Text, d.Text...)
		all.Logprobs = append(all.Logprobs, d.Logprobs...)
		all.Finish = d.Finish
		for _, c := range d.Calls {
			if c.Name == "" {
				last := &all.Calls[c.Index]
				last.Arguments = append(slices.Clip(last.Arguments), c.Arguments...)
			} else {
				all.Calls = append(all.Calls, c)
			}
		}
	}
	return all
}

func TestGolden(t *testing.T) {
	var got bytes.Buffer
	for _, a := range answers {
		fmt.Fprintf(&got, "= %s\n%s\n\n%s", a.name, a.body, play(t, a.body, a.deltas, a.fault))
		if a.fault == nil {
			fmt.Fprintf(&got, "%s\n\n", whole(t, a.body, a.deltas))
		}
	}
	const path = "testdata/events.txt"
	if *update {
		if err := os.WriteFile(path, got.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got.Bytes(), want) {
		t.Errorf("%s differs; -update writes it, after you have read the diff:\n%s", path, got.Bytes())
	}
}

// event has the members of all events.
type event struct {
	Type     string
	Sequence int     `json:"sequence_number"`
	Index    *int    `json:"output_index"`
	Content  *int    `json:"content_index"`
	Item     anyItem `json:"item"`
	ItemID   string  `json:"item_id"`
	Delta    string
	Text     *string
	Args     *string `json:"arguments"`
	Name     string
	Padding  *string `json:"obfuscation"`
	Part     *struct{ Type, Text string }
	Logprobs []any
	Response *struct {
		ID, Status string
		Output     []anyItem
		Usage      any
		Error      *struct{ Code, Message string }
	}
}

type anyItem struct {
	Type, ID, Status string
	CallID           string `json:"call_id"`
	Name, Arguments  string
	Sealed           *string `json:"encrypted_content"`
	Content          []struct{ Type, Text string }
}

func (i *anyItem) text() string {
	if i.Type == "function_call" {
		return i.Arguments
	}
	if len(i.Content) == 0 {
		return ""
	}
	return i.Content[0].Text
}

// eventsOf parses events, whose names are their types.
func eventsOf(t testing.TB, stream []byte) (all []event) {
	t.Helper()
	for _, e := range strings.Split(strings.TrimSuffix(string(stream), "\n\n"), "\n\n") {
		name, data, ok := strings.Cut(e, "\ndata: ")
		var v event
		if err := json.Unmarshal([]byte(data), &v); !ok || err != nil || name != "event: "+v.Type || strings.Contains(data, "\n") {
			t.Fatalf("%q: %v", e, err)
		}
		all = append(all, v)
	}
	return all
}

// checkEvents holds a stream against every rule of the order of events, and returns the items of the
// response at its end.
func checkEvents(t testing.TB, stream []byte) []anyItem {
	t.Helper()
	all := eventsOf(t, stream)
	fail := func(i int, format string, args ...any) {
		t.Helper()
		t.Fatalf("event %d, %s: %s\n%s", i, all[i].Type, fmt.Sprintf(format, args...), stream)
	}
	var open *anyItem // added and not done
	var part, textDone bool
	var written string
	var done []anyItem
	ids := map[string]bool{}
	for i := range all {
		e := &all[i]
		last := i == len(all)-1
		if e.Sequence != i {
			fail(i, "sequence number %d", e.Sequence)
		}
		if e.ItemID != "" && (open == nil || e.ItemID != open.ID || *e.Index != len(done)) {
			fail(i, "of item %s at %d", e.ItemID, *e.Index)
		}
		if e.Content != nil && (*e.Content != 0 || open.Type == "function_call") {
			fail(i, "content index %d", *e.Content)
		}
		switch kind, what, _ := strings.Cut(strings.TrimPrefix(e.Type, "response."), "."); {
		case i < 2:
			if want := []string{"response.created", "response.in_progress"}[i]; e.Type != want || e.Response.Status != "in_progress" || len(e.Response.Output) > 0 || e.Response.Usage != nil {
				fail(i, "want %s", want)
			}
		case last:
			if kind != e.Response.Status || open != nil || len(e.Response.Output) != len(done) || (kind == "failed") != (e.Response.Error != nil) || (kind == "failed") != (e.Response.Usage == nil) {
				fail(i, "status %s, %d items of %d, %v open", e.Response.Status, len(e.Response.Output), len(done), open)
			}
			for k := range done {
				if fmt.Sprint(e.Response.Output[k].Content, e.Response.Output[k].ID, e.Response.Output[k].Status) != fmt.Sprint(done[k].Content, done[k].ID, done[k].Status) {
					fail(i, "item %d is %v, was %v", k, e.Response.Output[k], done[k])
				}
			}
		case kind == "output_item" && what == "added":
			if open != nil || *e.Index != len(done) || e.Item.Status != "in_progress" || e.Item.text() != "" || len(e.Item.Content) > 0 || ids[e.Item.ID] {
				fail(i, "item %+v at %d, %v is open", e.Item, *e.Index, open)
			}
			ids[e.Item.ID] = true
			open, part, textDone, written = &e.Item, false, false, ""
		case kind == "content_part" && what == "added":
			if open.Type == "function_call" || part || e.Part.Text != "" {
				fail(i, "part %+v", e.Part)
			}
			part = true
		case what == "delta":
			if textDone || part == (open.Type == "function_call") || kind != map[string]string{"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}[open.Type] {
				fail(i, "of %s", open.Type)
			}
			written += e.Delta
		case kind == "content_part" && what == "done":
			if !textDone || !part || e.Part.Text != written {
				fail(i, "part %+v", e.Part)
			}
			part = false
		case what == "done" && kind != "output_item":
			got := e.Text
			if open.Type == "function_call" {
				if got = e.Args; e.Name != open.Name {
					fail(i, "name %s", e.Name)
				}
			}
			if textDone || got == nil || *got != written {
				fail(i, "text %v after %q", got, written)
			}
			textDone = true
		case kind == "output_item" && what == "done":
			if open == nil || !textDone || part || e.Item.ID != open.ID || e.Item.CallID != open.CallID || *e.Index != len(done) || e.Item.text() != written || e.Item.Status == "in_progress" {
				fail(i, "item %+v after %q", e.Item, written)
			}
			done, open = append(done, e.Item), nil
		default:
			fail(i, "unknown")
		}
	}
	for i := range done {
		if done[i].Status == "incomplete" && i < len(done)-1 {
			t.Fatalf("item %d of %d is incomplete", i, len(done))
		}
	}
	return done
}

// Any Deltas give events in order, and the items have all of their text. How the answer is split
// into Deltas changes its events, but not its items.
func TestOrder(t *testing.T) {
	for _, a := range answers {
		items := checkEvents(t, play(t, a.body, a.deltas, a.fault))
		if a.name == "reasoning and calls" && (len(items) != 4 || items[1].text() != "I look." || items[2].text() != `{"a":1}` || items[3].CallID != "call_b") {
			t.Errorf("%+v", items)
		}
	}
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var deltas, single []openai.Delta
		calls := 0
		for range rng.IntN(8) {
			var whole, more openai.Delta
			switch rng.IntN(3) {
			case 0:
				whole, more = text("text"), text("-end")
			case 1:
				whole, more = thought("thought"), thought("-end")
			default:
				whole, more = callOf(calls, fmt.Sprint("c", calls), "f", `{"a"`), callOf(calls, "", "", `:1}`)
				calls++
			}
			both := joinedAs(whole, more)
			single = append(single, both)
			if rng.IntN(2) == 0 {
				deltas = append(deltas, whole, more)
			} else {
				deltas = append(deltas, both)
			}
		}
		reason := []string{"stop", "length"}[rng.IntN(2)]
		a := checkEvents(t, play(t, `{"input":"u"}`, append(deltas, end(reason)), nil))
		b := checkEvents(t, play(t, `{"input":"u"}`, append(single, end(reason)), nil))
		if fmt.Sprint(a) != fmt.Sprint(b) {
			t.Fatalf("seed %d: %v is not %v", seed, a, b)
		}
		checkEvents(t, play(t, `{"input":"u"}`, append(deltas, text("")), openai.Unavailable(1, "gone")))
	}
}

// Log-probabilities of a whole answer are those of its text, although reasoning and arguments
// contain it, too.
func TestLogprobsOfText(t *testing.T) {
	for _, calls := range []bool{false, true} {
		deltas := []openai.Delta{scored(thought("ok then"), "ok", " then"), scored(openai.Delta{Finish: openai.NotFinished}, "</think>"), scored(text("ok"), "ok")}
		if calls {
			deltas = append(deltas, scored(callOf(0, "c", "f", `{"a":"ok"}`), `{"a":"`, "ok", `"}`))
		}
		for i := range deltas {
			for k := range deltas[i].Logprobs {
				deltas[i].Logprobs[k].Logprob = -float32(i)
			}
		}
		got := string(whole(t, `{"input":"u","top_logprobs":1}`, append(deltas, end("stop"))))
		_, got, _ = strings.Cut(got, `"logprobs":[`)
		if got, _, _ = strings.Cut(got, `"top_logprobs"`); !strings.Contains(got, `"token":"ok"`) || !strings.Contains(got, `"logprob":-2`) {
			t.Errorf("with calls %t: %s", calls, got)
		}
	}
}

// joinedAs returns two Deltas of one part as one.
func joinedAs(a, b openai.Delta) openai.Delta {
	if len(a.Calls) == 0 {
		return joined([]openai.Delta{a, b})
	}
	c := a.Calls[0]
	return callOf(c.Index, c.ID, c.Name, string(c.Arguments)+string(b.Calls[0].Arguments))
}

func TestEncryptedContent(t *testing.T) {
	k := testKeys(t, "k")
	r, _ := chat(t, Options{Keys: k, Owner: "a"}, `{"model":"m","input":"u","include":["reasoning.encrypted_content"]}`)
	r.Begin("1", 1, "m")
	first, second := thought("Hm"), text("t")
	first.Begin, second.Finish.Reason = true, "stop"
	items := checkEvents(t, r.AppendEnd(r.AppendDelta(r.AppendDelta(nil, &first), &second), &openai.Usage{}))
	got, err := k.open(*items[0].Sealed, "m", "a")
	if string(got) != "Hm" || err != nil {
		t.Errorf("%q %v", got, err)
	}
}

// A Delta costs no memory but that of the buffers.
func TestDeltaDoesNotAllocate(t *testing.T) {
	for _, d := range []openai.Delta{text("abc"), thought("abc"), callOf(0, "", "", "abc"), scored(text("abc"), "abc")} {
		r, _ := chat(t, Options{}, `{"input":"u","include":["message.output_text.logprobs"],"stream":true,"stream_options":{"include_obfuscation":true}}`)
		r.Begin("1", 1, "m")
		first := d
		if first.Begin = true; len(d.Calls) > 0 {
			first.Calls = []openai.ToolCall{{ID: "c", Name: "f"}}
		}
		buf := r.AppendDelta(nil, &first)
		if n := testing.AllocsPerRun(1000, func() { buf = r.AppendDelta(buf[:0], &d) }); n != 0 || len(buf) == 0 {
			t.Errorf("%g allocations for %q", n, buf)
		}
	}
}

// The official client's models accept every event and every whole answer, and its own accumulation
// of a stream gives the same items.
func TestOfficialModels(t *testing.T) {
	python := os.Getenv("TANDEM_PYTHON")
	if python == "" {
		t.Skip("needs TANDEM_PYTHON, a Python with the openai package: run make test")
	}
	var in bytes.Buffer
	n := 0
	for _, a := range answers {
		for _, e := range strings.Split(strings.TrimSuffix(string(play(t, a.body, a.deltas, a.fault)), "\n\n"), "\n\n") {
			_, data, _ := strings.Cut(e, "\ndata: ")
			fmt.Fprintln(&in, data)
			n++
		}
		if a.fault == nil {
			fmt.Fprintf(&in, "%s\n", whole(t, a.body, a.deltas))
			n++
		}
	}
	cmd := exec.CommandContext(t.Context(), python, "testdata/models.py")
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1")
	cmd.Stdin = &in
	out, err := cmd.CombinedOutput()
	if want := fmt.Sprintf("%d good\n", n); err != nil || string(out) != want {
		t.Errorf("%v\n%s", err, out)
	}
}
