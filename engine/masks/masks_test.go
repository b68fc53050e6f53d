package masks

import (
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/engine/grammar"
)

// words are a vocabulary of all bytes and some longer tokens; the last id ends an output.
func words() (tokens [][]byte, end int32) {
	for c := range 256 {
		tokens = append(tokens, []byte{byte(c)})
	}
	for _, s := range []string{`{"`, `": `, `", "`, `"}`, "name", "age", "aaa", "true", "false", "null", " ", "12", "ab", `"a"`, "[[", "]]", `\"`, "é"} {
		tokens = append(tokens, []byte(s))
	}
	return append(tokens, nil), int32(len(tokens))
}

func vocabulary(lead int) func() (Vocabulary, error) {
	tokens, end := words()
	v := grammar.NewVocabulary(tokens, map[string]int32{"<end>": end}, []int32{end})
	return func() (Vocabulary, error) { return Vocabulary{v, lead}, nil }
}

func newMasks(t *testing.T, change func(*Options)) *Masks {
	o := Options{Vocabulary: vocabulary(0), Limits: grammar.DefaultLimits(), Ready: func() {}}
	if change != nil {
		change(&o)
	}
	m := New(o)
	t.Cleanup(m.Close)
	return m
}

func wait(t *testing.T, m *Masks, g *Guide) {
	t.Helper()
	for start := time.Now(); !g.Ready(); {
		if time.Since(start) > 30*time.Second {
			t.Fatal("the guide is never ready")
		}
		select {
		case <-m.Ready():
		case <-time.After(time.Millisecond):
		}
	}
}

var sources = []grammar.Source{
	{Kind: grammar.JSONObject},
	{Kind: grammar.JSONSchema, Text: []byte(`{"type":"object","properties":{"name":{"const":"aaaa"},"age":{"type":"integer"}},"required":["name","age"],"additionalProperties":false}`)},
	{Kind: grammar.Regex, Text: []byte(`(ab|aaa)*12?(é|true){3}`)},
	{Kind: grammar.Choice, Choices: []string{"true", "false", "nullnull"}},
	{Kind: grammar.Choice, Choices: []string{"zzzzzzzzzzz", "zzzzzzzzzy"}},
	{Kind: grammar.EBNF, Text: []byte("root ::= \"[\" root \"]\" | \"12\"")},
}

func allowed(mask []uint64, r *rand.Rand) int32 {
	n := 0
	for _, w := range mask {
		n += bits.OnesCount64(w)
	}
	k := r.IntN(n)
	for i, w := range mask {
		for ; w != 0; w &= w - 1 {
			if k == 0 {
				return int32(64*i + bits.TrailingZeros64(w))
			}
			k--
		}
	}
	panic("no token")
}

// A Guide has the masks of a Matcher of its own, whatever other outputs share its grammar, whatever
// is cached and however many drafts precede a token. The outputs of one grammar run at once.
func TestGuides(t *testing.T) {
	_, end := words()
	for _, cache := range []int{0, 1 << 16} {
		m := newMasks(t, func(o *Options) { o.CacheBytes = cache })
		var all sync.WaitGroup
		var drafted, certain, fast sync.Map
		for seed := range 24 {
			all.Go(func() {
				r := rand.New(rand.NewPCG(uint64(seed), 1))
				src := sources[seed%len(sources)]
				c, err := grammar.Compile(src, grammar.DefaultLimits())
				if err != nil {
					t.Error(err)
					return
				}
				v, _ := m.vocab()
				a, err := grammar.NewAutomaton(c, v.Vocabulary, grammar.DefaultLimits())
				if err != nil {
					t.Error(err)
					return
				}
				want, err := a.NewMatcher()
				if err != nil {
					t.Error(err)
					return
				}
				g := m.Start(src, nil)
				defer g.Close(m)
				mask := make([]uint64, v.Words())
				for n := 0; n < 60; {
					for !g.Ready() {
						time.Sleep(10 * time.Microsecond)
					}
					if g.Err() != nil {
						t.Errorf("seed %d: %v", seed, g.Err())
						return
					}
					drafts := g.Drafts(nil, 5, 3, func(tokens []int32, n int) []int32 {
						for range n {
							tokens = append(tokens, int32('a'))
						}
						return tokens
					})
					drafted.Store(len(drafts), true)
					certain.Store(g.certain > 0, true)
					sampled, last, done := 0, int32(0), false
					for {
						if err := want.Mask(mask); err != nil || !slices.Equal(mask, g.Mask(sampled)) {
							t.Errorf("seed %d after %d tokens and %d drafts: %v, masks differ", seed, n, sampled, err)
							return
						}
						token := allowed(mask, r)
						if r.IntN(3) > 0 && sampled < len(drafts) && g.Allows(m, sampled, drafts[sampled], false) == nil {
							token = drafts[sampled]
						}
						if err := want.Accept(token); err != nil {
							t.Error(err)
							return
						}
						sampled, last, done = sampled+1, token, g.Ends(m, token)
						if done != (token == end) || done || sampled > len(drafts) || token != drafts[sampled-1] {
							break
						}
					}
					if done {
						return
					}
					n += sampled
					g.Advance(m, sampled, last)
					fast.Store(g.Ready(), true)
				}
			})
		}
		all.Wait()
		for _, n := range []int{0, 1, 3, 5} {
			if _, ok := drafted.Load(n); !ok && cache == 0 {
				t.Errorf("never %d drafts", n)
			}
		}
		if _, ok := certain.Load(true); !ok {
			t.Error("no token was certain")
		}
		if _, ok := fast.Load(true); !ok && cache == 0 {
			t.Error("no mask was found in a cache")
		}
		for m.Stats().Waiting > 0 { // guides that were closed while they waited
			time.Sleep(time.Millisecond)
		}
		if s := m.Stats(); s.Waiting != 0 || s.Computed == 0 || s.Ended != 0 {
			t.Errorf("%+v", s)
		}
		m.Close()
		for _, e := range m.entries {
			if e.refs != 0 {
				t.Errorf("a grammar keeps %d references", e.refs)
			}
		}
	}
}

// A Guide that continues an output has the masks of one that has sampled it.
func TestResumed(t *testing.T) {
	m := newMasks(t, nil)
	text := `{"name": "aaaa", "age": 12`
	var output []int32
	for _, c := range []byte(text) {
		output = append(output, int32(c))
	}
	whole := m.Start(sources[1], nil)
	defer whole.Close(m)
	for _, id := range output {
		wait(t, m, whole)
		whole.Advance(m, 1, id)
	}
	wait(t, m, whole)
	for cut := range len(output) + 1 {
		g := m.Start(sources[1], output[:cut])
		for _, id := range output[cut:] {
			wait(t, m, g)
			g.Advance(m, 1, id)
		}
		wait(t, m, g)
		if g.Err() != nil || !slices.Equal(g.Mask(0), whole.Mask(0)) {
			t.Errorf("after a cut at %d: %v", cut, g.Err())
		}
		g.Close(m)
	}
}

// What a request cannot continue with is an error that names it.
func TestEnds(t *testing.T) {
	m := newMasks(t, nil)
	lead := newMasks(t, func(o *Options) { o.Vocabulary = vocabulary(1) })
	none := newMasks(t, func(o *Options) {
		o.Vocabulary = func() (Vocabulary, error) { return ReadVocabulary(nil, nil) }
	})
	for _, c := range []struct {
		m      *Masks
		src    grammar.Source
		output []int32
		want   error
		text   string
	}{
		{m, grammar.Source{Kind: grammar.Regex, Text: []byte("(")}, nil, ErrEnded, "regex"},
		{m, grammar.Source{Kind: grammar.Regex, Text: []byte("ab")}, []int32{'a', 'x'}, grammar.ErrRefused, "after 1 tokens"},
		{m, grammar.Source{Kind: grammar.Regex, Text: []byte(`[\s\S]*`), MaskSteps: 40}, nil, grammar.ErrBudget, "more than 40 steps"},
		{lead, grammar.Source{Kind: grammar.Regex, Text: []byte(" ?a")}, nil, ErrEnded, "begin with a space"},
		{none, grammar.Source{Kind: grammar.JSONObject}, nil, ErrVocabulary, "no tokenizer"},
	} {
		g := c.m.Start(c.src, c.output)
		wait(t, c.m, g)
		if err := g.Err(); !errors.Is(err, c.want) || !errors.Is(err, ErrEnded) || !strings.Contains(fmt.Sprint(err), c.text) {
			t.Errorf("%s: %v, want %v with %q", c.src.Text, err, c.want, c.text)
		}
		g.Close(c.m)
	}
	g := lead.Start(grammar.Source{Kind: grammar.Regex, Text: []byte("a+")}, []int32{' ', 'a'})
	wait(t, lead, g)
	if g.Err() != nil || g.Allows(lead, 0, 'a', false) != nil || g.Allows(lead, 0, ' ', false) == nil || g.Allows(lead, 0, 'a', true) == nil {
		t.Errorf("after a space that the decoder drops: %v", g.Err())
	}
	g.Close(lead)
}

// Guides whose masks are expensive leave a worker to the others.
func TestExpensiveMasksWaitApart(t *testing.T) {
	blocked, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	ready := vocabulary(0)
	m := newMasks(t, func(o *Options) {
		o.Workers = 2
		o.Vocabulary = func() (Vocabulary, error) {
			once.Do(func() { close(blocked) })
			<-release
			return ready()
		}
	})
	first := m.Start(sources[0], nil) // a worker waits for the vocabulary
	<-blocked
	second := m.Start(sources[2], nil)
	time.Sleep(5 * time.Millisecond)
	if s := m.Stats(); s.Waiting != 1 {
		t.Errorf("%d guides wait: a new one took the last worker", s.Waiting)
	}
	close(release)
	wait(t, m, first)
	wait(t, m, second)
	first.Close(m)
	second.Close(m)
}

// Guides of a grammar whose lock a worker holds for long leave all workers to other grammars. They
// continue when it is free, and have the masks that they have alone.
func TestSlowGrammarDelaysNoOther(t *testing.T) {
	const streams = 8
	for _, workers := range []int{1, 2} {
		m := newMasks(t, func(o *Options) { o.Workers = workers })
		slow := make([]*Guide, streams)
		for i := range slow {
			slow[i] = m.Start(sources[2], nil)
			wait(t, m, slow[i])
		}
		e := slow[0].entry
		for m.mu.Lock(); e.held; m.mu.Lock() { // the last worker may not have left it yet
			m.mu.Unlock()
			time.Sleep(10 * time.Microsecond)
		}
		e.held = true // as a worker with a long mask
		m.mu.Unlock()
		e.mu.Lock()
		for i, g := range slow {
			g.Advance(m, 1, 'a')
			if i == 0 {
				g.Close(m) // while it waits
			}
		}
		before := m.Stats().Computed
		other := m.Start(sources[1], nil)
		for _, c := range []byte(`{"name": "aaaa", "age": 12`) {
			wait(t, m, other)
			other.Advance(m, 1, int32(c))
		}
		wait(t, m, other)
		if s := m.Stats(); other.Err() != nil || s.Waiting != streams || s.Computed < before+4 {
			t.Errorf("%d workers: %v, %+v", workers, other.Err(), s)
		}
		other.Close(m)
		e.mu.Unlock()
		m.mu.Lock()
		m.free(e)
		m.mu.Unlock()
		alone := newMasks(t, nil).Start(sources[2], []int32{'a'})
		for _, g := range slow {
			wait(t, m, g)
		}
		for m.Stats().Waiting > 0 || !alone.Ready() {
			time.Sleep(10 * time.Microsecond)
		}
		for i, g := range slow[1:] {
			if g.Err() != nil || !slices.Equal(g.Mask(0), alone.Mask(0)) {
				t.Errorf("%d workers, guide %d: %v, or another mask", workers, i+1, g.Err())
			}
			g.Close(m)
		}
		m.Close()
		if e.refs != 0 || m.busy != 0 || m.parked != 0 || len(e.parked) != 0 {
			t.Errorf("%d workers: %d references, %d busy, %d parked", workers, e.refs, m.busy, m.parked)
		}
	}
}

// The caches of idle grammars are dropped, and grammars in use keep what they need.
func TestCacheBytes(t *testing.T) {
	m := newMasks(t, func(o *Options) { o.CacheBytes = 1 << 20 })
	for i := range 40 {
		g := m.Start(grammar.Source{Kind: grammar.Regex, Text: fmt.Appendf(nil, "(a|b|%d)*[a-z]{1,%d}", i, i+1)}, []int32{'a', 'b'})
		wait(t, m, g)
		if g.Err() != nil {
			t.Fatal(g.Err())
		}
		g.Close(m)
	}
	if s := m.Stats(); s.Bytes > 1<<20 || s.Grammars == 0 || s.Grammars > 40 {
		t.Errorf("%+v", s)
	}
}

// An entry that was dropped while its worker counted its memory no longer counts.
func TestSettleDropped(t *testing.T) {
	m := newMasks(t, func(o *Options) { o.CacheBytes = 10 })
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.open(keyOf(&sources[0]))
	if !m.settle(e, 100) {
		t.Error("the only entry, in use, keeps its cache")
	}
	m.release(&Guide{entry: e})
	if m.settle(e, 20); m.bytes != 0 || len(m.entries) != 0 {
		t.Errorf("%d bytes of %d grammars", m.bytes, len(m.entries))
	}
}
