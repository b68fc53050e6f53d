package e2e

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// pathKinds are grammars of each kind whose outputs in TestGrammarsOnEveryPath have some tens of
// tokens.
var pathKinds = map[string]*nodepb.Grammar{
	"regex":  {Kind: nodepb.GrammarKind_GRAMMAR_KIND_REGEX, Text: []byte(`([a-f]{1,3}[0-9]{1,2}, ){9,14}the end`)},
	"choice": {Kind: nodepb.GrammarKind_GRAMMAR_KIND_CHOICE, Choices: []string{"yes, certainly, as was said before", "yes, certainly, and more than that", "no, and never, as was said before"}},
	"ebnf":   {Kind: nodepb.GrammarKind_GRAMMAR_KIND_EBNF, Text: []byte("root ::= item{4,7} \"end of it\"\nitem ::= \"(\" list \")\" | \"-\"\nlist ::= [a-c] [0-9]? | \"+\" item")},
	"schema": {Kind: nodepb.GrammarKind_GRAMMAR_KIND_JSON_SCHEMA, Text: []byte(`{"type":"object","properties":{"name":{"enum":["the first","the second",null]},"n":{"type":"array","items":{"type":"integer","minimum":-50,"maximum":1200},"minItems":5,"maxItems":9},"s":{"type":"string","minLength":3,"maxLength":9}},"required":["name","n","s"],"additionalProperties":false}`)},
	"tool":   toolGrammar("hermes", false),
}

// constrainedBy returns a request under a grammar. end is the token that ends outputs.
func constrainedBy(of *nodepb.Grammar, id string, seed uint64, prompt []int32, end int32) *nodepb.Generate {
	g := proto.CloneOf(of)
	g.Version, g.MaxTokens = engine.GrammarVersion, 90
	return &nodepb.Generate{
		RequestId: id, Attempt: 1, Prompt: prompt, IgnoreEos: true, PrefixRoot: uint64(kvcache.Root("tiny", "", "")), Grammar: g,
		Sampling: &nodepb.Sampling{Seed: seed, Temperature: 0.9, LogitBias: []*nodepb.LogitBias{{Token: end, Value: 8}}},
	}
}

// Outputs under each kind of grammar have the same tokens and logits alone, chunked, cached, as
// several choices, batched, preempted, guessed ahead and prefilled on another node, and resumed on
// another node after each of their tokens, where all, some or none of the KV is cached.
func TestGrammarsOnEveryPath(t *testing.T) {
	of := campaigned{checkpoint: "gqa-tied", kernels: native()}
	ref := newAlone(t, of)
	defer ref.f.close()
	vocab := ref.f.loaded[0].Model.VocabSize()
	o := engine.LoadOptions{
		Model: of.dir(), Kernels: of.kernels, Threads: 1, MaxSeqs: 4, MaxBatchedTokens: 16, MaxModelLen: 192,
		Speculation: engine.Speculation{Tokens: 3, Lookup: engine.Lookup{Min: 1, Max: 2}},
	}
	o.KVMemory = int64(ref.f.loaded[0].KV.BlockBytes()) * 16 // of a prompt with its output 11
	pre := o
	pre.Speculation = engine.Speculation{}
	f := newFleet(t, o, &pre)
	defer f.close()
	other := o
	other.KVMemory *= 8
	second := newFleet(t, other, nil)
	defer second.close()
	rng := rand.New(rand.NewPCG(19, 1))
	for i, kind := range []string{"regex", "choice", "ebnf", "schema", "tool"} {
		t.Run(kind, func(t *testing.T) {
			p := &grammarPaths{T: t, f: f, second: second, ref: ref, known: map[string]trace{}}
			p.run(constrainedBy(pathKinds[kind], kind, 1000+100*uint64(i), randomTokens(rng, 75, vocab), int32(vocab-1)), vocab)
		})
	}
}

// grammarPaths compares the outputs of one kind of grammar.
type grammarPaths struct {
	*testing.T
	f, second *fleet
	ref       *alone
	known     map[string]trace // of requests alone
}

// alone returns what a request has alone, from its beginning.
func (p *grammarPaths) alone(g *nodepb.Generate) trace {
	key := fmt.Sprint(g.Sampling.Seed, g.Sampling.Choice, g.Prompt[0])
	want, ok := p.known[key]
	if !ok {
		whole := proto.CloneOf(g)
		whole.Output = nil
		want = p.ref.run(p.T, whole)
		p.known[key] = want
	}
	return want
}

// same runs requests at once and compares each with the reference.
func (p *grammarPaths) same(path string, f *fleet, all ...*nodepb.Generate) {
	p.Helper()
	streams := make([]*stream, len(all))
	for i, g := range all {
		var err error
		if streams[i], _, err = f.client.generate(g); err != nil {
			p.Fatal(err)
		}
	}
	for i, g := range all {
		got, want := f.wait(p, streams[i], g), p.alone(g)
		got.tokens, got.prompt = append(slices.Clone(g.Output), got.tokens...), want.prompt
		if err := compare(got, want, g); err != nil {
			p.Errorf("%s: %v", path, err)
		}
	}
}

// more reports a path that did not occur, by a count before it and after.
func (p *grammarPaths) more(path string, before, after uint64) {
	p.Helper()
	if after <= before {
		p.Errorf("%s: the path was not taken", path)
	}
}

func (p *grammarPaths) run(g *nodepb.Generate, vocab int) {
	f := p.f
	want := p.alone(g)
	if finished, err := follows(g.Grammar, want.tokens, vocab); err != nil || !finished || len(want.tokens) < 6 || want.err != "" {
		p.Fatalf("alone: %d tokens, finished %v, %s, %v", len(want.tokens), finished, want.err, err)
	}
	variant := func(seed, choice int) *nodepb.Generate {
		v := proto.CloneOf(g)
		v.RequestId = fmt.Sprintf("%s-%d-%d", g.RequestId, seed, choice)
		v.Sampling.Seed, v.Sampling.Choice = g.Sampling.Seed+uint64(seed), uint32(choice)
		return v
	}
	remote := variant(1, 0)
	remote.Prefill = []string{"prefill"}
	n := f.decode.Counters().RemotePrefills
	p.same("disaggregated", f, remote)
	p.more("disaggregated", n, f.decode.Counters().RemotePrefills)

	p.same("in chunks", f, g) // the prompt exceeds MaxBatchedTokens
	st := f.decEng.Stats()
	p.same("cached", f, g)
	p.more("cached", st.Scheduler.PrefixHits, f.decEng.Stats().Scheduler.PrefixHits)

	st = f.decEng.Stats()
	p.same("n = 3", p.second, variant(2, 0), variant(2, 1), variant(2, 2))
	p.more("n = 3", 0, p.second.decEng.Stats().BatchedSteps)

	st = f.decEng.Stats()
	for seed := 3; seed < 43 && f.decEng.Stats().Scheduler.Preemptions == st.Scheduler.Preemptions; seed += 4 {
		var all []*nodepb.Generate
		for i := range 4 {
			v := variant(seed+i, 0)
			v.Prompt = slices.Concat(v.Prompt[i:], v.Prompt[:i]) // no blocks are shared
			all = append(all, v)
		}
		p.same("preempted", f, all...)
	}
	now := f.decEng.Stats()
	p.more("preempted", st.Scheduler.Preemptions, now.Scheduler.Preemptions)
	p.more("batched", st.BatchedSteps, now.BatchedSteps)
	p.more("guessed", 0, now.Scheduler.Accepted[0])

	for cut := 1; cut < len(want.tokens); cut++ {
		again := proto.CloneOf(g)
		again.RequestId, again.Attempt, again.Output = fmt.Sprintf("%s-cut-%d", g.RequestId, cut), 2, want.tokens[:cut]
		switch cut % 3 {
		case 1:
			again.PrefixRoot += uint64(cut) // nothing is cached
		case 2:
			again.PrefixRoot++ // prompt and beginning may be
		}
		p.same(fmt.Sprintf("resumed after %d tokens", cut), p.second, again)
	}
}
