// Package dataset makes the requests of a load test: their prompts, their output
// lengths, and for traces their arrival times.
//
// Prompts of a known length are lists of token ids drawn from a vocabulary. If the API
// takes only text, they are decoded, encoded again and trimmed until the text has that
// many tokens. Invariant: equal options, seed and files give equal requests, on every
// machine. The package sends nothing and reads no clock.
package dataset

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"time"
)

// ErrOption is wrapped by every error about an option or a file.
var ErrOption = errors.New("dataset: bad option")

// Bounds of files and flags.
const (
	maxPrompt   = 4 << 20 // tokens of a prompt
	maxRequests = 1 << 20 // requests of one run
	maxFile     = 4 << 30 // bytes of a dataset's file
	maxLine     = 64 << 20
)

// Request is one request to send.
type Request struct {
	Pieces       [][]int32     // the prompt's token ids in order; pieces may be shared between requests and are never written
	Text         string        // the prompt as text; empty if it is sent as token ids
	PromptTokens int           // 0: unknown, the server's count is used
	OutputTokens int           // requested output
	At           time.Duration // arrival since the start; traces only
}

// Vocabulary is the material of prompts.
type Vocabulary struct {
	IDs    []int32                   // ids that may occur in a prompt, none special
	Encode func(string) []int32      // nil: no tokenizer
	Decode func(ids []int32) string  // nil: no tokenizer
	Word   func(r *rand.Rand) string // about one token, used if there is no tokenizer
}

// Options are those of all datasets; each dataset reads its own.
type Options struct {
	Name, Path string
	N          int
	Seed       uint64
	AsText     bool // prompts as text, not token ids
	NoShuffle  bool
	NoRepeat   bool // fewer samples than N are not repeated
	Vocabulary Vocabulary

	Random RandomOptions
	Prefix PrefixOptions
	Trace  TraceOptions

	ShareGPTOutput int // 0: as in the file
	CustomOutput   int // -1: as in the file
}

// Make makes the requests.
func Make(o Options) ([]Request, error) {
	if o.N < 1 || o.N > maxRequests {
		return nil, fmt.Errorf("%w: --num-prompts %d: want 1 to %d", ErrOption, o.N, maxRequests)
	}
	m := &maker{Options: o, rng: rand.New(rand.NewPCG(o.Seed, 0x74616e64656d))}
	switch o.Name {
	case "random":
		return m.random()
	case "prefix_repetition":
		return m.prefixRepetition()
	case "sharegpt":
		return m.shareGPT()
	case "custom":
		return m.custom()
	case "timed_trace":
		return m.trace()
	}
	return nil, fmt.Errorf("%w: --dataset-name %q: want random, sharegpt, custom, prefix_repetition or timed_trace", ErrOption, o.Name)
}

// maker is one call of Make.
type maker struct {
	Options
	rng *rand.Rand
}

// tokens draws n ids.
func (m *maker) tokens(n int) ([]int32, error) {
	if n < 0 || n > maxPrompt {
		return nil, fmt.Errorf("%w: a prompt of %d tokens: want at most %d", ErrOption, n, maxPrompt)
	}
	ids := make([]int32, n)
	if len(m.Vocabulary.IDs) == 0 {
		if m.AsText {
			return ids, nil // words replace them
		}
		return nil, fmt.Errorf("%w: no vocabulary for prompts of token ids: give --tokenizer", ErrOption)
	}
	for i := range ids {
		ids[i] = m.Vocabulary.IDs[m.rng.IntN(len(m.Vocabulary.IDs))]
	}
	return ids, nil
}

// prompt makes a request of these pieces, as text if requested.
func (m *maker) prompt(output int, pieces ...[]int32) Request {
	r := Request{Pieces: pieces, OutputTokens: output}
	for _, p := range pieces {
		r.PromptTokens += len(p)
	}
	if !m.AsText {
		return r
	}
	r.Pieces = nil
	if m.Vocabulary.Decode == nil {
		r.Text, r.PromptTokens = m.words(pieces), 0
		return r
	}
	var ids []int32
	for _, p := range pieces {
		ids = append(ids, p...)
	}
	r.Text, r.PromptTokens = m.exactText(ids)
	return r
}

// tries bounds the trimming. Text of some vocabularies never has the same number of
// tokens again; then PromptTokens is the true number.
const tries = 10

// exactText returns text of as many tokens as there are ids, or as near as possible.
func (m *maker) exactText(ids []int32) (text string, n int) {
	want := len(ids)
	for range tries {
		text = m.Vocabulary.Decode(ids)
		back := m.Vocabulary.Encode(text)
		n = len(back)
		if n == want {
			break
		}
		ids = back
		if n > want {
			ids = back[:want]
		}
		for len(ids) < want {
			ids = append(ids, m.Vocabulary.IDs[m.rng.IntN(len(m.Vocabulary.IDs))])
		}
	}
	return text, n
}

// words returns text of about as many tokens as the pieces have ids. A piece's words
// depend only on its ids, so that equal pieces give equal text.
func (m *maker) words(pieces [][]int32) string {
	var text []byte
	for _, p := range pieces {
		for _, id := range p {
			rng := m.rng
			if id != 0 {
				rng = rand.New(rand.NewPCG(m.Seed, uint64(id)))
			}
			text = append(append(text, m.Vocabulary.Word(rng)...), ' ')
		}
	}
	return string(text)
}

// length draws uniformly from n*(1-ratio) to n*(1+ratio).
func (m *maker) length(n int, ratio float64) int {
	low, high := int(math.Floor(float64(n)*(1-ratio))), int(math.Ceil(float64(n)*(1+ratio)))
	return low + m.rng.IntN(high-low+1)
}

// fill repeats randomly chosen samples up to N, or cuts them to N.
func (m *maker) fill(rs []Request) ([]Request, error) {
	if len(rs) == 0 {
		return nil, fmt.Errorf("%w: %s has no usable request", ErrOption, m.Path)
	}
	if len(rs) > m.N {
		rs = rs[:m.N]
	}
	for have := len(rs); len(rs) < m.N && !m.NoRepeat; {
		rs = append(rs, rs[m.rng.IntN(have)])
	}
	return rs, nil
}

// shuffle puts samples in random order.
func (m *maker) shuffle(n int, swap func(i, j int)) {
	if !m.NoShuffle {
		m.rng.Shuffle(n, swap)
	}
}
