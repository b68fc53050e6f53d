// Package offline measures the engine in this process, without a server. bench throughput
// submits many requests at once and times them all. bench latency times one batch
// repeatedly. Flags, printed lines and JSON are vLLM's.
//
// Prompts are token ids and every output has exactly the requested length, so that two
// engines do the same work. Invariant: the timed interval begins with the first request's
// submission and ends with the last token, detokenized unless that is turned off. Loading
// the model and making prompts are outside.
//
// The package knows no network and no roles.
package offline

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/bench/dataset"
	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/tokenizer"
)

// ErrOption is wrapped by every error about an option.
var ErrOption = errors.New("offline: bad option")

// Options are the options of both benchmarks.
type Options struct {
	Load       engine.LoadOptions
	N          int // outputs per prompt
	Detokenize bool
	Seed       uint64
	OutputJSON string // file; empty: none
	Out        io.Writer
}

// maxOutputs bounds the outputs of one call of generate.
const maxOutputs = 1 << 20

// bench is a running engine.
type bench struct {
	Options
	loaded *engine.Loaded
	eng    *engine.Engine
	tok    *tokenizer.Tokenizer
	stop   func()
	root   kvcache.Hash // of the next prompts that must not be found in the prefix cache
}

// start loads the model for so many outputs at once.
func start(ctx context.Context, o Options, outputs int) (*bench, error) {
	if o.N < 1 || outputs < 1 || outputs > maxOutputs {
		return nil, fmt.Errorf("%w: --n %d and %d outputs in all: want 1 to %d", ErrOption, o.N, outputs, maxOutputs)
	}
	o.Load.MaxQueued = max(o.Load.MaxQueued, outputs)
	l, err := engine.Load(o.Load)
	if err != nil {
		return nil, err
	}
	b := &bench{Options: o, loaded: l}
	if b.tok, err = tokenizer.Load(l.Bundle.TokenizerJSON); err != nil {
		return nil, errors.Join(fmt.Errorf("%w: the model's tokenizer: %w", engine.ErrModel, err), l.Close())
	}
	eo := l.Options()
	eo.Logger = o.Load.Logger
	if b.eng, err = engine.New(eo); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	ctx, cancel := context.WithCancel(ctx)
	go b.eng.Run(ctx)
	b.stop = func() {
		cancel()
		<-b.eng.Done()
	}
	return b, nil
}

// close ends the engine and frees the model.
func (b *bench) close() error {
	b.stop()
	return b.loaded.Close()
}

// vocabulary returns the material of prompts.
func (b *bench) vocabulary() dataset.Vocabulary {
	v := dataset.Vocabulary{
		Encode: func(text string) []int32 { return b.tok.Encode(text, false) },
		Decode: func(ids []int32) string { return b.tok.Decode(ids, false) },
	}
	for id := range int32(b.tok.VocabSize()) {
		if !b.tok.IsSpecial(id) && len(b.tok.TokenBytes(id)) > 0 {
			v.IDs = append(v.IDs, id)
		}
	}
	return v
}

// prompt is a prompt and its output length.
type prompt struct {
	tokens []int32
	output int
}

// generate submits all prompts, N times each, waits for the last token and returns the
// time and the number of tokens. If cached is set, prompts may hit the prefix cache.
func (b *bench) generate(ctx context.Context, prompts []prompt, cached bool) (took time.Duration, tokens int, err error) {
	var wg sync.WaitGroup
	outputs := make([][]int32, len(prompts)*b.N)
	failed := make(chan error, len(outputs))
	began := time.Now()
	for i, p := range prompts {
		root := kvcache.Hash(0)
		if !cached {
			b.root++
			root = b.root
		}
		for k := range b.N {
			out := &outputs[i*b.N+k]
			*out = make([]int32, 0, p.output)
			wg.Add(1)
			r := &engine.Request{
				Root: root, Prompt: p.tokens, MaxTokens: p.output,
				Sampling: engine.Sampling{Seed: b.Seed + uint64(i), Choice: uint32(k), Temperature: 1},
				Emit: func(t engine.Token) {
					if t.Err != nil {
						failed <- t.Err
					} else {
						*out = append(*out, t.ID)
					}
					if t.Finish != 0 {
						wg.Done()
					}
				},
			}
			if _, _, err := b.eng.Add(r); err != nil {
				return 0, 0, fmt.Errorf("prompt %d of %d tokens for %d more: %w", i, len(p.tokens), p.output, err)
			}
		}
	}
	ended := make(chan struct{})
	go func() { wg.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-ctx.Done():
		return 0, 0, ctx.Err()
	}
	for _, out := range outputs {
		tokens += len(out)
		if b.Detokenize {
			b.tok.Decode(out, true)
		}
	}
	took = time.Since(began)
	select {
	case err = <-failed:
	default:
	}
	return took, tokens, err
}

// save writes a result as indented JSON.
func save(path string, o report.Object) error {
	if path == "" {
		return nil
	}
	data, err := json.Marshal(o)
	if err != nil {
		return err
	}
	var indented bytes.Buffer
	if err := json.Indent(&indented, data, "", "    "); err != nil {
		return err
	}
	if err := os.WriteFile(path, indented.Bytes(), 0o644); err != nil {
		return fmt.Errorf("--output-json: %w", err)
	}
	return nil
}

// Throughput times all requests that requests makes from a vocabulary.
func Throughput(ctx context.Context, o Options, n int, requests func(dataset.Vocabulary) ([]dataset.Request, error)) error {
	b, err := start(ctx, o, n*o.N)
	if err != nil {
		return err
	}
	return errors.Join(b.throughput(ctx, requests), b.close())
}

func (b *bench) throughput(ctx context.Context, requests func(dataset.Vocabulary) ([]dataset.Request, error)) error {
	v := b.vocabulary()
	rs, err := requests(v)
	if err != nil {
		return err
	}
	prompts := make([]prompt, len(rs))
	in := 0
	for i, r := range rs {
		p := prompt{tokens: slices.Concat(r.Pieces...), output: r.OutputTokens}
		if r.Text != "" {
			p.tokens = v.Encode(r.Text)
		}
		prompts[i] = p
		in += len(p.tokens)
	}
	took, out, err := b.generate(ctx, prompts, true)
	if err != nil {
		return err
	}
	s, total := took.Seconds(), float64(in+out)
	fmt.Fprintf(b.Out, "Throughput: %.2f requests/s, %.2f total tokens/s, %.2f output tokens/s\nTotal num prompt tokens:  %d\nTotal num output tokens:  %d\n",
		float64(len(rs))/s, total/s, float64(out)/s, in, out)
	return save(b.OutputJSON, report.Object{
		{Key: "elapsed_time", Value: s}, {Key: "num_requests", Value: len(rs)}, {Key: "total_num_tokens", Value: in + out},
		{Key: "requests_per_second", Value: float64(len(rs)) / s}, {Key: "tokens_per_second", Value: total / s},
	})
}

// LatencyOptions are the options of bench latency only.
type LatencyOptions struct {
	Input, Output, Batch, Warmups, Iterations int
}

// percentages are the percentiles that bench latency reports.
var percentages = []float64{10, 25, 50, 75, 90, 99}

// Latency times one batch of random prompts repeatedly. No iteration finds the prompts of
// another in the prefix cache.
func Latency(ctx context.Context, o Options, l LatencyOptions) error {
	if l.Input < 1 || l.Output < 1 || l.Batch < 1 || l.Warmups < 0 || l.Iterations < 1 || l.Batch > maxOutputs {
		return fmt.Errorf("%w: --input-len %d, --output-len %d, --batch-size %d, --num-iters-warmup %d, --num-iters %d: want at least 1 for each, and at least 0 warm-ups", ErrOption,
			l.Input, l.Output, l.Batch, l.Warmups, l.Iterations)
	}
	b, err := start(ctx, o, l.Batch*o.N)
	if err != nil {
		return err
	}
	return errors.Join(b.latency(ctx, l), b.close())
}

func (b *bench) latency(ctx context.Context, l LatencyOptions) error {
	ids := b.vocabulary().IDs
	rng := rand.New(rand.NewPCG(b.Seed, 0x6c6174656e6379))
	prompts := make([]prompt, l.Batch)
	for i := range prompts {
		prompts[i] = prompt{make([]int32, l.Input), l.Output}
		for k := range prompts[i].tokens {
			prompts[i].tokens[k] = ids[rng.IntN(len(ids))]
		}
	}
	fmt.Fprintln(b.Out, "Warming up...")
	seconds := make([]float64, 0, l.Iterations)
	for i := range l.Warmups + l.Iterations {
		took, _, err := b.generate(ctx, prompts, false)
		if err != nil {
			return err
		}
		if i >= l.Warmups {
			seconds = append(seconds, took.Seconds())
		}
	}
	return b.report(seconds)
}

// report prints and saves the iterations' times.
func (b *bench) report(seconds []float64) error {
	sorted := slices.Sorted(slices.Values(seconds))
	mean, std := 0.0, 0.0
	for _, s := range seconds {
		mean += s / float64(len(seconds))
	}
	for _, s := range seconds {
		std += (s - mean) * (s - mean) / float64(len(seconds))
	}
	std = math.Sqrt(std)
	fmt.Fprintf(b.Out, "Avg latency: %v seconds\nStd latency: %v seconds\n", mean, std)
	var ps report.Object
	for _, p := range percentages {
		v := report.Quantile(sorted, p)
		fmt.Fprintf(b.Out, "%.0f%% percentile latency: %v seconds\n", p, v)
		ps = append(ps, report.Field{Key: strconv.Itoa(int(p)), Value: v})
	}
	return save(b.OutputJSON, report.Object{
		{Key: "avg_latency", Value: mean}, {Key: "std_latency", Value: std}, {Key: "latencies", Value: seconds}, {Key: "percentiles", Value: ps},
	})
}
