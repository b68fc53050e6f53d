// Command write makes a model of any shape with random weights: a Hugging Face folder in
// bf16 with a tokenizer of bytes, or of the tokens of -ranks, as bench/grammar/ranks.mjs writes
// them. It is for measurements of steps, not of answers.
//
//	go run ./bench/checkpoint/write -vocab 151936 -hidden 64 -ffn 128 -layers 1 -heads 4 -kv-heads 2 -head-dim 16 FOLDER
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/tandem-serving/tandem/bench/checkpoint"
)

// errUsage means that no model can have such flags.
var errUsage = errors.New("bad flags")

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "write:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	s := checkpoint.Shape{RopeTheta: 10000}
	f := flag.NewFlagSet("write", flag.ContinueOnError)
	for _, n := range []struct {
		to         *int
		name, what string
		value      int
	}{
		{&s.Vocab, "vocab", "tokens of the vocabulary, at least the 256 bytes", 50257},
		{&s.Hidden, "hidden", "width", 768},
		{&s.FFN, "ffn", "inner width of the feed-forward layer", 2048},
		{&s.Layers, "layers", "layers", 12},
		{&s.Heads, "heads", "query heads", 12},
		{&s.KVHeads, "kv-heads", "key and value heads", 12},
		{&s.HeadDim, "head-dim", "width of a head", 64},
		{&s.Positions, "positions", "longest context", 4096},
	} {
		f.IntVar(n.to, n.name, n.value, n.what)
	}
	ranks := f.String("ranks", "", "file with the vocabulary: a JSON array of base64; empty: the 256 bytes")
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() != 1 || s.Vocab < 256 || min(s.Hidden, s.FFN, s.Layers, s.Heads, s.KVHeads, s.HeadDim, s.Positions) < 1 || s.Heads%s.KVHeads != 0 {
		return fmt.Errorf("%w: want one folder, a vocabulary of at least 256, every other number at least 1 and -heads a multiple of -kv-heads; got %+v and folders %q", errUsage, s, f.Args())
	}
	if *ranks != "" {
		b, err := os.ReadFile(*ranks)
		if err := errors.Join(err, json.Unmarshal(b, &s.Tokens)); err != nil {
			return fmt.Errorf("-ranks %s: %w", *ranks, err)
		}
		s.Tokens = s.Tokens[:min(len(s.Tokens), s.Vocab-1)] // the last one may end an answer
	}
	if err := errors.Join(s.HuggingFace(f.Arg(0)), s.Tokenizer(f.Arg(0))); err != nil {
		return err
	}
	n := 0
	for _, m := range s.Matrices() {
		n += m.Elements()
	}
	_, err := fmt.Fprintf(out, "%s: %.1f million parameters\n", f.Arg(0), float64(n)/1e6)
	return err
}
