// Command grammar measures engine/grammar next to llguidance, which runs in a Python process of
// its own, or compares their masks.
//
// Both read the same JSON schemas (maskbench) over the same vocabulary (o200k_base). For each
// schema that both compile, each side in turn compiles it and computes the masks along each valid
// instance, tokenized greedily. Times are taken inside each process. Our first mask of a state and
// one that is found cached both count, as they do for a server. With -compare the program walks
// at random instead and counts the states in which the masks differ, and the differences by kind.
//
// Invariant: nothing is compared that did not run in the same call, and a figure that was not
// measured is not written.
//
// With -walks it draws random outputs and has jsonschema validate those that finish.
package main

import (
	"encoding/base64"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/tandem-serving/tandem/engine/grammar"
)

type options struct {
	schemas, ranks, python, script, validator, out, commit string
	compare, walks                                         int
	seed                                                   uint64
}

func main() {
	var o options
	flag.StringVar(&o.schemas, "schemas", "", "folder with the files of maskbench")
	flag.StringVar(&o.ranks, "ranks", "ranks.json", "vocabulary, as ranks.mjs writes it")
	flag.StringVar(&o.python, "python", "python3", "Python with llguidance; empty: ours alone")
	flag.StringVar(&o.script, "peer", "bench/grammar/peer.py", "program that runs llguidance")
	flag.StringVar(&o.out, "out", "", "file for the results; empty: only print")
	flag.StringVar(&o.commit, "commit", "", "commit to name in the results")
	flag.IntVar(&o.compare, "compare", 0, "states in which to compare masks; 0: measure times")
	flag.StringVar(&o.validator, "validator", "bench/grammar/validate.py", "program that runs jsonschema")
	flag.IntVar(&o.walks, "walks", 0, "random outputs to draw and validate with jsonschema; 0: measure times")
	flag.Uint64Var(&o.seed, "seed", 1, "seed of random walks")
	flag.Parse()
	if err := run(&o); err != nil {
		fmt.Fprintln(os.Stderr, "grammar:", err)
		os.Exit(1)
	}
}

func run(o *options) error {
	cases, err := readCases(o.schemas)
	if err != nil {
		return err
	}
	tokens, err := readRanks(o.ranks)
	if err != nil {
		return err
	}
	b := &bench{o: o, cases: cases, tokens: tokens}
	if o.walks > 0 {
		b.setup()
		return b.walk()
	}
	if o.python != "" {
		if b.peer, err = startPeer(o.python, o.script); err != nil {
			return err
		}
		defer b.peer.close()
		a, err := b.peer.ask(peerRequest{Vocabulary: o.ranks})
		if err != nil {
			return err
		}
		b.theirs.setup, b.theirs.setupBytes = time.Duration(a.NS), a.Bytes
	}
	b.setup()
	if o.compare > 0 {
		return b.compare()
	}
	if err := b.measure(); err != nil {
		return err
	}
	text := b.table()
	fmt.Print(text)
	if o.out != "" {
		return os.WriteFile(o.out, []byte(text), 0o644)
	}
	return nil
}

// benchCase is a file of maskbench.
type benchCase struct {
	name   string
	Schema json.RawMessage `json:"schema"`
	Tests  []struct {
		Valid bool            `json:"valid"`
		Data  json.RawMessage `json:"data"`
	} `json:"tests"`
}

func readCases(dir string) ([]benchCase, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil || len(files) == 0 {
		return nil, fmt.Errorf("no schemas in %q: unpack maskbench there", dir)
	}
	var out []benchCase
	for _, path := range files {
		b, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		c := benchCase{name: filepath.Base(path)}
		if err := json.Unmarshal(b, &c); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		out = append(out, c)
	}
	return out, nil
}

func readRanks(path string) ([][]byte, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var texts []string
	if err := json.Unmarshal(b, &texts); err != nil {
		return nil, err
	}
	tokens := make([][]byte, len(texts)+1) // the last ends an output
	for i, t := range texts {
		if tokens[i], err = base64.StdEncoding.DecodeString(t); err != nil {
			return nil, err
		}
	}
	return tokens, nil
}

// side is what was measured of one of the two.
type side struct {
	setup      time.Duration
	setupBytes int64
	compiles   []time.Duration
	masks      []time.Duration
	slowest    [2]slowest // compile and mask
	refused    int        // schemas
	failed     int        // valid instances that ended early
}

// slowest is the longest time of a kind, and its schema.
type slowest struct {
	took time.Duration
	name string
}

func (s *slowest) note(took time.Duration, name string) {
	if took > s.took {
		*s = slowest{took, name}
	}
}

type bench struct {
	o            *options
	cases        []benchCase
	tokens       [][]byte
	greedy       map[string]int32
	longest      int
	peer         *peer
	vocab        *grammar.Vocabulary
	ours, theirs side
	both         int // schemas that both compile
}

// setup builds our vocabulary and measures it.
func (b *bench) setup() {
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	start := time.Now()
	b.vocab = grammar.NewVocabulary(b.tokens, nil, []int32{int32(len(b.tokens) - 1)})
	b.ours.setup = time.Since(start)
	runtime.GC()
	runtime.ReadMemStats(&after)
	b.ours.setupBytes = int64(after.HeapAlloc) - int64(before.HeapAlloc)
	b.greedy = make(map[string]int32, len(b.tokens))
	for id, t := range b.tokens {
		if len(t) > 0 {
			b.greedy[string(t)] = int32(id)
			b.longest = max(b.longest, len(t))
		}
	}
}

// tokenize returns the longest tokens one after the other.
func (b *bench) tokenize(text []byte) []int32 {
	var out []int32
	for len(text) > 0 {
		for n := min(b.longest, len(text)); n > 0; n-- {
			if id, ok := b.greedy[string(text[:n])]; ok {
				out = append(out, id)
				text = text[n:]
				break
			}
		}
	}
	return out
}

// measure runs each schema on both sides, one after the other.
func (b *bench) measure() error {
	for i := range b.cases {
		c := &b.cases[i]
		limits := grammar.DefaultLimits()
		start := time.Now()
		g, err := grammar.Compile(grammar.Source{Kind: grammar.JSONSchema, Text: c.Schema}, limits)
		took := time.Since(start)
		if err != nil {
			b.ours.refused++
		}
		if b.peer != nil {
			theirs, perr := b.peer.compile(string(c.Schema))
			if perr != nil {
				b.theirs.refused++
			}
			if err != nil || perr != nil {
				continue
			}
			b.theirs.compiles = append(b.theirs.compiles, theirs)
			b.theirs.slowest[0].note(theirs, c.name)
		} else if err != nil {
			continue
		}
		b.ours.compiles = append(b.ours.compiles, took)
		b.ours.slowest[0].note(took, c.name)
		b.both++
		a, err := grammar.NewAutomaton(g, b.vocab, limits)
		if err != nil {
			return err
		}
		if err := b.instances(c, a); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

// mostInstances is the number of instances of one schema that are run.
const mostInstances = 5

func (b *bench) instances(c *benchCase, a *grammar.Automaton) error {
	n := 0
	for _, t := range c.Tests {
		if !t.Valid || n == mostInstances {
			continue
		}
		n++
		text, err := spaced(t.Data)
		if err != nil {
			return err
		}
		ids := append(b.tokenize(text), int32(len(b.tokens)-1))
		b.ourMasks(c.name, a, ids)
		if b.peer != nil {
			if err := b.theirMasks(c, ids); err != nil {
				return err
			}
		}
	}
	return nil
}

func (b *bench) ourMasks(schema string, a *grammar.Automaton, ids []int32) {
	mask := make([]uint64, b.vocab.Words())
	m, err := a.NewMatcher()
	for _, id := range ids {
		if err != nil {
			b.ours.failed++
			return
		}
		start := time.Now()
		err = m.Mask(mask)
		took := time.Since(start)
		b.ours.masks = append(b.ours.masks, took)
		b.ours.slowest[1].note(took, schema)
		if err == nil {
			err = m.Accept(id)
		}
	}
	if err != nil {
		b.ours.failed++
	}
}

func (b *bench) theirMasks(c *benchCase, ids []int32) error {
	if _, err := b.peer.compile(string(c.Schema)); err != nil {
		return err
	}
	for _, id := range ids {
		took, err := b.peer.mask(nil)
		if err == nil {
			b.theirs.masks = append(b.theirs.masks, took)
			b.theirs.slowest[1].note(took, c.name)
			err = b.peer.accept(id)
		}
		if err != nil {
			b.theirs.failed++
			return nil
		}
	}
	return nil
}

// percentile returns the p-th of 1,000 parts of sorted durations.
func percentile(d []time.Duration, p int) time.Duration {
	if len(d) == 0 {
		return 0
	}
	s := slices.Clone(d)
	slices.Sort(s)
	return s[min(len(s)-1, len(s)*p/1000)]
}
