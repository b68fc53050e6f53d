package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"os"
	"os/exec"

	"github.com/tandem-serving/tandem/engine/grammar"
)

// walk draws random outputs for each schema and has jsonschema validate those that finish.
func (b *bench) walk() error {
	validator, err := newLines(exec.Command(b.o.python, b.o.validator))
	if err != nil {
		return err
	}
	defer validator.close()
	r := rand.New(rand.NewPCG(b.o.seed, 1))
	drawn, finished, skipped, invalid := 0, 0, 0, 0
	for drawn < b.o.walks {
		for i := range b.cases {
			c := &b.cases[i]
			outputs, n, err := b.outputs(c, r, 2)
			if err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			drawn, finished = drawn+n, finished+len(outputs)
			if len(outputs) == 0 {
				continue
			}
			var answer struct {
				Invalid []string `json:"invalid"`
				Skipped int      `json:"skipped"`
			}
			request := struct {
				Schema  json.RawMessage `json:"schema"`
				Outputs []string        `json:"outputs"`
			}{c.Schema, outputs}
			if err := validator.exchange(request, &answer); err != nil {
				return err
			}
			skipped += answer.Skipped
			for _, text := range answer.Invalid {
				invalid++
				fmt.Printf("%s: %s\n", c.name, text)
			}
		}
	}
	fmt.Printf("%d outputs drawn, %d finished, %d of them not validated, %d invalid\n", drawn, finished, skipped, invalid)
	if invalid > 0 {
		return errors.New("jsonschema refuses outputs")
	}
	return nil
}

// outputs draws n outputs for a schema and returns those that finish.
func (b *bench) outputs(c *benchCase, r *rand.Rand, n int) (finished []string, drawn int, err error) {
	limits := grammar.DefaultLimits()
	g, err := grammar.Compile(grammar.Source{Kind: grammar.JSONSchema, Text: c.Schema}, limits)
	if err != nil {
		return nil, 0, nil
	}
	a, err := grammar.NewAutomaton(g, b.vocab, limits)
	if err != nil {
		return nil, 0, err
	}
	mask := make([]uint64, b.vocab.Words())
	for range n {
		m, err := a.NewMatcher()
		if err != nil {
			return nil, drawn, err
		}
		drawn++
		var out []byte
		free := 10 + r.IntN(40)
		for step := 0; step < 400; step++ {
			if err := m.Mask(mask); err != nil {
				return nil, drawn, fmt.Errorf("after %q: %w", out, err)
			}
			id := b.draw(mask, r, step > free)
			if err := m.Accept(id); err != nil {
				return nil, drawn, err
			}
			if int(id) == len(b.tokens)-1 {
				finished = append(finished, string(out))
				break
			}
			out = append(out, b.tokens[id]...)
		}
	}
	return finished, drawn, nil
}

// draw returns an allowed token: of all, or, to end an output, the end or one that closes.
func (b *bench) draw(mask []uint64, r *rand.Rand, end bool) int32 {
	if end || r.IntN(3) == 0 {
		for _, s := range []string{"", `"`, "}", "]", ":", ",", "0"} {
			id, ok := b.greedy[s]
			if s == "" {
				id, ok = int32(len(b.tokens)-1), end
			}
			if ok && mask[id>>6]>>(id&63)&1 != 0 {
				return id
			}
		}
	}
	count := 0
	for _, w := range mask {
		count += bits.OnesCount64(w)
	}
	k := r.IntN(count)
	for i, w := range mask {
		if n := bits.OnesCount64(w); k >= n {
			k -= n
			continue
		}
		for ; k > 0; k-- {
			w &= w - 1
		}
		return int32(i*64 + bits.TrailingZeros64(w))
	}
	fmt.Fprintln(os.Stderr, "grammar: an empty mask")
	return -1
}
