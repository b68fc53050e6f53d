package dataset

import "fmt"

// RandomOptions are those of the dataset random.
type RandomOptions struct {
	Input, Output, Prefix   int     // tokens
	InputRatio, OutputRatio float64 // in [0, 1): lengths vary by this share
	Mix                     []Kind  // kinds of requests, instead of Input and Output; empty: no mix
}

// Kind is one kind of request in a mix.
type Kind struct {
	Share         float64 // of all requests, relative to the other kinds'
	Input, Output int     // tokens
}

// kind draws the kind of the next request, whose lengths then vary.
func (m *maker) kind() Kind {
	o := m.Random
	if len(o.Mix) == 0 {
		return Kind{1, o.Input, o.Output}
	}
	sum := 0.0
	for _, k := range o.Mix {
		sum += k.Share
	}
	at := m.rng.Float64() * sum
	for _, k := range o.Mix {
		if at -= k.Share; at < 0 {
			return k
		}
	}
	return o.Mix[len(o.Mix)-1]
}

func (m *maker) random() ([]Request, error) {
	o := m.Random
	if o.Input < 1 || o.Output < 1 || o.Prefix < 0 || o.Output > maxPrompt {
		return nil, fmt.Errorf("%w: --random-input-len %d, --random-output-len %d, --random-prefix-len %d: want lengths of at least 1 and no negative prefix", ErrOption, o.Input, o.Output, o.Prefix)
	}
	for _, k := range o.Mix {
		if !(k.Share > 0 && k.Share <= 1e9) || k.Input < 1 || k.Output < 1 || k.Output > maxPrompt {
			return nil, fmt.Errorf("%w: --random-mix %g:%d:%d: want a share of more than 0 and lengths of at least 1", ErrOption, k.Share, k.Input, k.Output)
		}
	}
	for _, r := range []float64{o.InputRatio, o.OutputRatio} {
		if !(r >= 0 && r < 1) {
			return nil, fmt.Errorf("%w: --random-range-ratio %g: want 0 or more and less than 1", ErrOption, r)
		}
	}
	prefix, err := m.tokens(o.Prefix)
	if err != nil {
		return nil, err
	}
	rs := make([]Request, m.N)
	for i := range rs {
		k := m.kind()
		body, err := m.tokens(max(1, m.length(k.Input, o.InputRatio)))
		if err != nil {
			return nil, err
		}
		rs[i] = m.prompt(max(1, m.length(k.Output, o.OutputRatio)), prefix, body)
	}
	return rs, nil
}

// PrefixOptions are those of the dataset prefix_repetition.
type PrefixOptions struct{ Prefix, Suffix, Prefixes, Output int }

// prefixRepetition makes the same number of prompts for each prefix, and so fewer than
// N if N is not a multiple of the prefixes.
func (m *maker) prefixRepetition() ([]Request, error) {
	o := m.Prefix
	if o.Prefix < 0 || o.Suffix < 0 || o.Prefix+o.Suffix < 1 || o.Output < 1 || o.Prefixes < 1 || m.N < o.Prefixes {
		return nil, fmt.Errorf("%w: %d prompts of --prefix-repetition-num-prefixes %d, prefix %d and suffix %d tokens, output %d: want tokens, and at least one prompt per prefix",
			ErrOption, m.N, o.Prefixes, o.Prefix, o.Suffix, o.Output)
	}
	var rs []Request
	for range o.Prefixes {
		prefix, err := m.tokens(o.Prefix)
		if err != nil {
			return nil, err
		}
		for range m.N / o.Prefixes {
			suffix, err := m.tokens(o.Suffix)
			if err != nil {
				return nil, err
			}
			rs = append(rs, m.prompt(o.Output, prefix, suffix))
		}
	}
	m.shuffle(len(rs), func(i, j int) { rs[i], rs[j] = rs[j], rs[i] })
	return rs, nil
}
