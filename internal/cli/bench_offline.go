package cli

import (
	"context"
	"fmt"

	"github.com/tandem-serving/tandem/bench"
	"github.com/tandem-serving/tandem/bench/dataset"
	"github.com/tandem-serving/tandem/bench/offline"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/process"
)

// offlineFlags are the flags that bench throughput and bench latency share.
type offlineFlags struct {
	m      Model
	o      offline.Options
	noText bool
}

func (f *offlineFlags) register(v *Invocation) {
	f.m.Register(v.Set)
	v.IntVar(&f.o.N, "n", 1, "outputs per prompt")
	v.Uint64Var(&f.o.Seed, "seed", 0, "seed of prompts and sampling")
	v.StringVar(&f.o.OutputJSON, "output-json", "", "file for the figures")
	v.BoolVar(&f.noText, "disable-detokenize", false, "do not convert the output to text")
	bench.RefuseSwitch(v.FlagSet, "profile", "the engine has no profiler of its own: run the command under `perf record`")
}

// options returns the options of the measurement. The engine logs warnings only.
func (f *offlineFlags) options(v *Invocation) (o offline.Options, err error) {
	log, _, err := process.Logger("warning", "text", v.ErrOut)
	if err != nil {
		return o, err
	}
	f.o.Detokenize, f.o.Out = !f.noText, v.Out
	f.o.Load, err = f.m.Options(context.Background(), v.Environ, log)
	return f.o, err
}

func benchThroughput(v *Invocation) error {
	var f offlineFlags
	var o bench.Options
	v.First("model", "dataset-name", "input-len", "output-len", "num-prompts")
	f.register(v)
	o.RegisterOffline(v.FlagSet)
	v.String("backend", "vllm", "the engine in this process; the only one")
	v.Bool("async-engine", false, "no effect: the engine is always asynchronous")
	v.Bool("disable-frontend-multiprocessing", false, "no effect: there is one process")
	bench.Refuse(v.FlagSet, "lora-path", "the model itself is measured here; `tandem bench serve --lora-modules` asks a server with adapters")
	bench.Refuse(v.FlagSet, "hf-max-batch-size", "the engine is Tandem's, which batches by itself")
	if _, err := v.Parse(0); err != nil {
		return err
	}
	if b, _ := v.GetString("backend"); b != "vllm" && b != "tandem" {
		return fmt.Errorf("%w: --backend %s: only Tandem's engine is measured; leave it out", config.ErrValue, b)
	}
	options, err := f.options(v)
	if err != nil {
		return err
	}
	ctx, _, stop := process.Signals()
	defer stop()
	return interrupted(ctx, offline.Throughput(ctx, options, o.NumPrompts, func(d dataset.Vocabulary) ([]dataset.Request, error) { return o.Requests(d, options.Seed) }))
}

func benchLatency(v *Invocation) error {
	var f offlineFlags
	var l offline.LatencyOptions
	v.First("model", "input-len", "output-len", "batch-size", "num-iters")
	f.register(v)
	v.IntVar(&l.Input, "input-len", 32, "tokens of a prompt")
	v.IntVar(&l.Output, "output-len", 128, "tokens of an output")
	v.IntVar(&l.Batch, "batch-size", 8, "prompts at once")
	v.IntVar(&l.Warmups, "num-iters-warmup", 10, "iterations that do not count")
	v.IntVar(&l.Iterations, "num-iters", 30, "iterations that count")
	bench.RefuseSwitch(v.FlagSet, "use-beam-search", "the engine samples; it does not search")
	if _, err := v.Parse(0); err != nil {
		return err
	}
	options, err := f.options(v)
	if err != nil {
		return err
	}
	ctx, _, stop := process.Signals()
	defer stop()
	return interrupted(ctx, offline.Latency(ctx, options, l))
}
