package e2e

import (
	"bufio"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/tokenizer"
	"github.com/tandem-serving/tandem/gateway/render"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// question is a line of engine/builtin/eval.jsonl.
type question struct {
	Kind      string
	System    string
	History   []string // user, assistant, user, …
	Prompt    string
	Answer    string   // exact; empty for stories
	Contains  []string // stories
	MinTokens int      `json:"min_tokens"`
}

func questions(t *testing.T, file string) []question {
	t.Helper()
	f, err := os.Open("../../engine/builtin/" + file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var qs []question
	for s := bufio.NewScanner(f); s.Scan(); {
		var q question
		if err := json.Unmarshal(s.Bytes(), &q); err != nil {
			t.Fatalf("line %d: %v", len(qs)+1, err)
		}
		qs = append(qs, q)
	}
	return qs
}

// messages is the conversation as the chat template takes it.
func (q *question) messages() render.List {
	var l render.List
	add := func(role, content string) { l = append(l, render.NewDict("role", role, "content", content)) }
	if q.System != "" {
		add("system", q.System)
	}
	for i, h := range q.History {
		add([]string{"user", "assistant"}[i%2], h)
	}
	add("user", q.Prompt)
	return l
}

// repeats is how often the most frequent run of n words occurs.
func repeats(text string, n int) (most int) {
	words, seen := strings.Fields(text), map[string]int{}
	for i := 0; i+n <= len(words); i++ {
		k := strings.Join(words[i:i+n], " ")
		seen[k]++
		most = max(most, seen[k])
	}
	return most
}

// asker asks the built-in model, all greedy, through template, tokenizer, remote
// prefill, KV transfer and decode.
type asker struct {
	f    *fleet
	tok  *tokenizer.Tokenizer
	chat *render.Template
	next uint64
}

func newAsker(t *testing.T) *asker {
	t.Helper()
	o := engine.LoadOptions{Model: engine.Builtin, Kernels: native(), KVMemory: 32 << 20, MaxSeqs: 16}
	pre := o
	a := &asker{f: newFleet(t, o, &pre)}
	var err error
	if a.tok, err = tokenizer.Load(a.f.loaded[0].Bundle.TokenizerJSON); err != nil {
		t.Fatal(err)
	}
	if a.chat, err = render.Parse(a.f.loaded[0].Bundle.ChatTemplate); err != nil {
		t.Fatal(err)
	}
	return a
}

func (a *asker) ask(t *testing.T, q *question) (answer string, nTokens int) {
	t.Helper()
	bundle := a.f.loaded[0].Bundle
	text, err := a.chat.Render(render.Input{
		Messages: q.messages(), AddGenerationPrompt: true, BosToken: bundle.BosToken, EosToken: bundle.EosToken, Now: time.Now(),
	})
	if err != nil {
		t.Fatalf("%q: %v", q.Prompt, err)
	}
	a.next++
	got := a.f.run(t, &nodepb.Generate{
		RequestId: q.Prompt, Attempt: 1, Prompt: a.tok.Encode(text, true), MaxTokens: 400, EosTokenIds: bundle.EOSTokenIDs,
		PrefixRoot: uint64(kvcache.Root("builtin", "", "")), Sampling: &nodepb.Sampling{Seed: a.next}, Prefill: []string{"prefill"},
	}).tokens
	return a.tok.Decode(got, true), len(got)
}

// What the model reliably says is said to the letter; stories keep their hero
// and do not go in circles.
func TestBuiltinModelAnswers(t *testing.T) {
	a := newAsker(t)
	defer a.f.close()
	count := map[string]int{}
	for i, q := range questions(t, "eval.jsonl") {
		answer, n := a.ask(t, &q)
		count[q.Kind]++
		if q.Answer != "" {
			if answer != q.Answer {
				t.Errorf("line %d (%s) %q:\n got  %s\n want %s", i+1, q.Kind, q.Prompt, answer, q.Answer)
			}
			continue
		}
		for _, word := range q.Contains {
			if !strings.Contains(answer, word) {
				t.Errorf("line %d: the story %q does not say %q:\n%s", i+1, q.Prompt, word, answer)
			}
		}
		if n < q.MinTokens || repeats(answer, 6) > 2 {
			t.Errorf("line %d: the story has %d tokens (want %d) and says one run of six words %d times:\n%s",
				i+1, n, q.MinTokens, repeats(answer, 6), answer)
		}
	}
	if c := a.f.decode.Counters(); c.RemotePrefills < 20 {
		t.Errorf("only %d prompts were prefilled elsewhere", c.RemotePrefills)
	}
	t.Logf("asked %v", count)
}

// Phrasings and questions that training never saw: most are answered to the
// letter, and most unknown ones refused. The bounds are below what the model
// card reports, so that kernels may round differently.
func TestBuiltinModelHeldOut(t *testing.T) {
	a := newAsker(t)
	defer a.f.close()
	asked, right, unknown, refused := 0, 0, 0, 0
	for _, q := range questions(t, "train/heldout.jsonl") {
		answer, _ := a.ask(t, &q)
		if q.Kind == "refusal" {
			unknown++
			if strings.HasPrefix(answer, "I do not know") {
				refused++
			}
			continue
		}
		asked++
		if answer == q.Answer {
			right++
		}
	}
	t.Logf("held-out phrasings right %d of %d, unknown questions refused %d of %d", right, asked, refused, unknown)
	if asked < 200 || float64(right) < 0.75*float64(asked) {
		t.Errorf("%d of %d held-out phrasings are answered, want three quarters of at least 200", right, asked)
	}
	if unknown < 40 || float64(refused) < 0.8*float64(unknown) {
		t.Errorf("%d of %d unknown questions are refused, want four fifths of at least 40", refused, unknown)
	}
}
