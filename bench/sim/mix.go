package sim

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// Kind is one kind of request in a mixed load.
type Kind struct {
	Share          float64 // of the requests, relative to the other kinds'
	Prompt, Output int     // tokens
}

// ErrMix means that a description of a mixed load does not parse.
var ErrMix = errors.New("sim: bad mix")

// ParseMix parses kinds such as "0.8:64:96,0.2:1024:16": share, prompt tokens and answer
// tokens of each.
func ParseMix(text string) (kinds []Kind, err error) {
	for part := range strings.SplitSeq(text, ",") {
		var k Kind
		var rest string
		n, _ := fmt.Sscanf(part+" .", "%g:%d:%d %s", &k.Share, &k.Prompt, &k.Output, &rest)
		if n != 4 || rest != "." || !(k.Share > 0) || k.Prompt < 1 || k.Output < 1 {
			return nil, fmt.Errorf("%w: %q, want SHARE:PROMPT:ANSWER such as 0.8:64:96", ErrMix, part)
		}
		kinds = append(kinds, k)
	}
	return kinds, nil
}

// Mix returns a trace of n requests of those kinds, drawn with the seed, at rate per
// second as a Poisson process. No two prompts have a block in common.
func Mix(kinds []Kind, n int, rate float64, seed uint64) []Request {
	draw := rand.New(rand.NewPCG(seed, 64))
	sum := 0.0
	for _, k := range kinds {
		sum += k.Share
	}
	trace := make([]Request, n)
	at := 0.0
	for i := range trace {
		at += draw.ExpFloat64() / rate
		left, kind := draw.Float64()*sum, 0
		for ; kind < len(kinds)-1 && left >= kinds[kind].Share; kind++ {
			left -= kinds[kind].Share
		}
		q := Request{At: time.Duration(at * float64(time.Second)), Tokens: kinds[kind].Prompt, Output: kinds[kind].Output}
		for b := range q.Tokens/BlockTokens + 1 {
			q.Blocks = append(q.Blocks, kvcache.Hash(mix(uint64(i)<<20|uint64(b)+1)))
		}
		trace[i] = q
	}
	return trace
}
