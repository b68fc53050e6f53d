package sim

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"regexp"
	"strconv"
	"strings"

	"github.com/tandem-serving/tandem/bench/load"
	"github.com/tandem-serving/tandem/engine/kvcache"
)

// ErrLoad means that the description of a load does not parse.
var ErrLoad = errors.New("sim: bad load")

// loadBlock is the number of tokens of a block of a drawn prompt.
const loadBlock = 16

// Load describes drawn requests.
type Load struct {
	Rate       float64 // requests per second
	Burstiness float64 // of the arrivals, as --burstiness of bench serve
	N          int     // requests
	In, Out    Lengths
	Prefix     float64 // share of a prompt that others have in common
	Prefixes   int     // different ones
}

// Lengths is a distribution of numbers of tokens.
type Lengths struct {
	kind string // "": always a; uniform: from a to b; lognormal: exp of a normal distribution; exp: of mean a
	a, b float64
}

// draw returns a length within the bounds of a trace.
func (l Lengths) draw(r *rand.Rand) int {
	v := l.a
	switch l.kind {
	case "uniform":
		v = l.a + float64(r.Int64N(int64(l.b-l.a)+1))
	case "lognormal":
		v = math.Exp(l.a + l.b*r.NormFloat64())
	case "exp":
		v = l.a * r.ExpFloat64()
	}
	return int(min(max(1, math.Round(v)), maxTokens))
}

var (
	loadPart = regexp.MustCompile(`[^,(]+(\([^)]*\))?[^,]*`)
	function = regexp.MustCompile(`^(lognormal|exp)\(([^)]*)\)$`)
)

// loadHelp ends the errors of ParseLoad.
const loadHelp = "write such as rps=10,n=2000,in=lognormal(8,0.9),out=343,prefix=0.3"

// ParseLoad parses "rps=10,in=lognormal(8,0.9),out=343,prefix=0.3": requests per second, tokens of
// prompts and of answers, and the share of a prompt that others have in common. Lengths are a
// number, a range 100-2000, lognormal(MU,SIGMA) or exp(MEAN). Other keys are n (requests, 1,000),
// prefixes (different ones, 1) and burstiness (1).
func ParseLoad(text string) (l Load, err error) {
	l = Load{Burstiness: 1, N: 1000, Prefixes: 1}
	seen := map[string]bool{}
	for _, part := range loadPart.FindAllString(text, -1) {
		key, value, ok := strings.Cut(strings.TrimSpace(part), "=")
		if !ok || seen[key] {
			return l, fmt.Errorf("%w: %q: give each key once, as KEY=VALUE; %s", ErrLoad, part, loadHelp)
		}
		seen[key] = true
		number := func(least, most float64) (v float64) {
			v, e := strconv.ParseFloat(value, 64)
			if e != nil || !(v >= least && v <= most) {
				err = fmt.Errorf("%w: %s=%s: want a number from %g to %g; %s", ErrLoad, key, value, least, most, loadHelp)
			}
			return v
		}
		switch key {
		case "rps":
			l.Rate = number(1e-6, 1e9)
		case "burstiness":
			l.Burstiness = number(1e-3, 1e6)
		case "n":
			l.N = int(number(1, maxRequests))
		case "prefix":
			l.Prefix = number(0, 1)
		case "prefixes":
			l.Prefixes = int(number(1, maxRequests))
		case "in":
			l.In, err = parseLengths(value)
		case "out":
			l.Out, err = parseLengths(value)
		default:
			err = fmt.Errorf("%w: there is no key %s; %s", ErrLoad, key, loadHelp)
		}
		if err != nil {
			return l, err
		}
	}
	for _, key := range []string{"rps", "in", "out"} {
		if !seen[key] {
			return l, fmt.Errorf("%w: %q has no %s; %s", ErrLoad, text, key, loadHelp)
		}
	}
	if float64(l.N)/l.Rate > MaxSpan {
		return l, fmt.Errorf("%w: %d requests at %g a second take more than %d s: draw fewer, with n=", ErrLoad, l.N, l.Rate, MaxSpan)
	}
	return l, nil
}

func parseLengths(text string) (l Lengths, err error) {
	bad := fmt.Errorf("%w: length %q: want tokens such as 343, 100-2000, lognormal(8,0.9) or exp(500), at most %d; %s", ErrLoad, text, maxTokens, loadHelp)
	numbers := func(texts ...string) bool {
		to := []*float64{&l.a, &l.b}
		for i, t := range texts {
			v, err := strconv.ParseFloat(strings.TrimSpace(t), 64)
			if err != nil || !(v >= 0 && v <= maxTokens) {
				return false
			}
			*to[i] = v
		}
		return true
	}
	if m := function.FindStringSubmatch(text); m != nil {
		args := strings.Split(m[2], ",")
		want := map[string]int{"lognormal": 2, "exp": 1}[m[1]]
		l.kind = m[1]
		if len(args) != want || !numbers(args...) || l.kind == "exp" && l.a < 1 || l.kind == "lognormal" && (l.a > 15 || l.b > 5) {
			return l, bad
		}
		return l, nil
	}
	low, high, isRange := strings.Cut(text, "-")
	if isRange {
		l.kind = "uniform"
		if !numbers(low, high) || l.a < 1 || l.b < l.a || l.a != math.Trunc(l.a) || l.b != math.Trunc(l.b) {
			return l, bad
		}
		return l, nil
	}
	if !numbers(text) || l.a < 1 || l.a != math.Trunc(l.a) {
		return l, bad
	}
	return l, nil
}

// Trace draws the requests with the seed.
func (l Load) Trace(seed uint64) ([]Request, error) {
	at, _, err := load.Arrivals{Rate: l.Rate, Burstiness: l.Burstiness, Seed: seed}.Times(l.N)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrLoad, err)
	}
	draw := rand.New(rand.NewPCG(seed, 0x6c6f6164))
	trace, prefixes, blocks := make([]Request, l.N), make([]int, l.N), 0
	for i := range trace {
		trace[i] = Request{At: at[i] - at[0], Tokens: l.In.draw(draw), Output: l.Out.draw(draw), Block: loadBlock}
		prefixes[i] = draw.IntN(l.Prefixes)
		if blocks += trace[i].Tokens/loadBlock + 1; blocks > maxBlocks {
			return nil, fmt.Errorf("%w: %d of %d prompts have more than %d tokens together: draw fewer, with n=", ErrLoad, i+1, l.N, maxBlocks*loadBlock)
		}
	}
	for i := range trace {
		q, prefix := &trace[i], prefixes[i]
		q.Blocks = own(uint64(i), q.Tokens, loadBlock)
		for b := range int(l.Prefix * float64(q.Tokens) / loadBlock) {
			q.Blocks[b] = kvcache.Hash(mix(1<<63 | uint64(prefix)<<24 | uint64(b)))
		}
	}
	return trace, nil
}
