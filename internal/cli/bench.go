package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench"
	"github.com/tandem-serving/tandem/bench/dataset"
	"github.com/tandem-serving/tandem/bench/load"
	"github.com/tandem-serving/tandem/bench/offline"
	"github.com/tandem-serving/tandem/bench/transfer"
	"github.com/tandem-serving/tandem/bench/truth"
	"github.com/tandem-serving/tandem/internal/config"
	"github.com/tandem-serving/tandem/internal/process"
)

// benchmarks are the commands of `tandem bench`.
var benchmarks = Table{
	{"bench serve", "[flags]", "Loads a server that speaks the OpenAI API and reports latencies and throughput, as vLLM's benchmark does.",
		"tandem bench serve --port 8000 --dataset-name random --random-input-len 256 --random-output-len 64 --num-prompts 200 --request-rate 4", benchServe},
	{"bench compare", "A.json B.json [flags]", "Compares two results of bench serve, with confidence intervals; save them with --save-detailed, or several runs with --append-result.",
		"tandem bench compare before.json after.json", untilSignal(benchCompare)},
	{"bench sweep", "[flags]", "Runs bench serve over rates, concurrencies and servers' flags and writes one HTML page with plots, a CSV and a JSON.",
		"tandem bench sweep --port 8000 --num-prompts 200 --request-rates 1,2,4,8 --max-concurrencies 8,32", benchSweep},
	{"bench throughput", "[flags]", "Runs many prompts on an engine in this process, without a server, and reports its throughput.",
		"tandem bench throughput --input-len 256 --output-len 64 --num-prompts 100", benchThroughput},
	{"bench latency", "[flags]", "Measures the time of one batch on an engine in this process, repeatedly.",
		"tandem bench latency --input-len 32 --output-len 128 --batch-size 8", benchLatency},
	{"bench transfer", "--listen HOST:PORT | --peer HOST:PORT [flags]", "Measures KV transfer between two machines: scattered pages, leases and checksums as between nodes, every byte compared.",
		"tandem bench transfer --listen 127.0.0.1:7400    # and, on the other machine: tandem bench transfer --peer 127.0.0.1:7400", benchTransfer},
	{"bench mock", "[flags]", "Serves an OpenAI API that sends tokens at a given pace and records it, to check load testers.",
		"tandem bench mock --port 9000 --gap 100ms", benchMock},
	{"bench truth", "[flags]", "Compares the results of bench serve, and of guidellm if it is installed, with the record of a mock.",
		"tandem bench truth --streams 10,100,1000", benchTruth},
}

// benchmark runs the benchmark of the first argument; without one, its flags are those of serve.
func benchmark(v *Invocation) error {
	if len(v.Arguments) == 0 || strings.HasPrefix(v.Arguments[0], "-") {
		if len(v.Arguments) > 0 {
			v.Set = config.New("bench NAME [flags]", listBenchmarks(), "tandem bench serve --port 8000 --num-prompts 200 --request-rate 4\ntandem bench sweep --help", v.Out)
		}
		var o bench.Options
		o.Register(v.FlagSet)
		if _, err := v.Parse(0); err != nil {
			return err
		}
	}
	var names []string
	for _, c := range benchmarks {
		name := strings.TrimPrefix(c.Name, "bench ")
		names = append(names, name)
		if len(v.Arguments) > 0 && name == v.Arguments[0] {
			v.Set, v.Arguments = c.Flags(v.Out), bench.JoinLists(v.Arguments[1:])
			err := c.Run(v)
			for _, sentinel := range []error{offline.ErrOption, transfer.ErrOption, bench.ErrOption, dataset.ErrOption, load.ErrOption} {
				if errors.Is(err, sentinel) {
					return fmt.Errorf("%w: %s", config.ErrValue, strings.TrimPrefix(err.Error(), sentinel.Error()+": "))
				}
			}
			return err
		}
	}
	unknown := ""
	if len(v.Arguments) > 0 && !strings.HasPrefix(v.Arguments[0], "-") {
		unknown = fmt.Sprintf("no benchmark is called %q: ", v.Arguments[0])
	}
	return fmt.Errorf("%w: %sname the benchmark, such as in `tandem bench serve --port 8000`: %s", config.ErrValue, unknown, strings.Join(names, ", "))
}

// listBenchmarks returns the help of `tandem bench`.
func listBenchmarks() string {
	return "Measures a server, an engine or a network. `tandem bench NAME --help` has the flags of each; below are those of serve.\n\nBenchmarks:" + benchmarks.listed()
}

func benchServe(v *Invocation) error {
	var o bench.Options
	o.Register(v.FlagSet)
	if _, err := v.Parse(0); err != nil {
		return err
	}
	ctx, _, stop := process.Signals()
	defer stop()
	_, err := bench.Serve(ctx, &o, v.Out, v.ErrOut)
	return interrupted(ctx, err)
}

// interrupted returns the error of a command, which is its signal if one has ended ctx, a context
// of process.Signals.
func interrupted(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// ended is interrupted for a server that serves until a signal, so that it returns no error itself.
func ended(ctx context.Context, err error) error {
	if err == nil {
		return context.Cause(ctx)
	}
	return interrupted(ctx, err)
}

func benchCompare(v *Invocation) error {
	seed := v.Uint64("seed", 0, "seed of the resampling")
	args, err := v.Parse(2)
	if err != nil {
		return err
	}
	if len(args) != 2 {
		return fmt.Errorf("%w: give two files of results", config.ErrValue)
	}
	return bench.Compare(args[0], args[1], *seed, v.Out)
}

func benchSweep(v *Invocation) error {
	var o bench.Options
	var s bench.SweepOptions
	o.Register(v.FlagSet)
	v.Float64SliceVar(&s.Rates, "request-rates", nil, "requests per second of each run; default: that of --request-rate")
	v.IntSliceVar(&s.Concurrencies, "max-concurrencies", nil, "--max-concurrency of each run, for every rate")
	v.IntVar(&s.RunSeconds, "run-seconds", 0, "seconds of arrivals in each run at a finite rate; 0: --num-prompts requests")
	v.IntVar(&s.Repeat, "repeat", 1, "runs of each load: the page shows the median and the range")
	v.BoolVar(&s.Alternate, "alternate", false, "with several servers: each repetition restarts and measures all of them in turn, so that slow changes of the machine affect all alike")
	v.StringArrayVar(&s.Commands, "serve-cmd", nil, "command line of a server to start for its runs and to end after them, such as 'tandem up --port 8000'; may be repeated")
	v.StringArrayVar(&s.Labels, "serve-label", nil, "name of the server in the report; one for each --serve-cmd")
	v.StringArrayVar(&s.Vary, "vary", nil, "NAME=V1,V2: a flag of the servers, a server for each value; several flags: for each combination")
	v.StringArrayVar(&s.Metrics, "metrics-url", nil, "metrics to read during each run; default: the server's /metrics, and its nodes' where the sweep starts a cluster")
	v.StringVar(&s.Title, "title", "Sweep", "title of the page")
	v.StringArrayVar(&s.Notes, "note", nil, "a line for the page's head; may be repeated")
	v.StringVar(&s.Dir, "report-dir", "bench-report", "folder of report.html, sweep.csv and sweep.json")
	v.StringVar(&s.Before, "before-bench-cmd", "", "command line to run before each run, such as one that waits until the machine is idle; the run begins when it has ended")
	v.DurationVar(&s.Pause, "pause", time.Second, "rest between runs")
	if _, err := v.Parse(0); err != nil {
		return err
	}
	ctx, _, stop := process.Signals()
	defer stop()
	return interrupted(ctx, bench.Sweep(ctx, &o, s, v.Out, v.ErrOut))
}

func benchMock(v *Invocation) error {
	var p truth.Pace
	port := v.Int("port", 8000, "port on loopback; 0: any")
	v.DurationVar(&p.First, "first", 50*time.Millisecond, "from a request's arrival to its first token, at least")
	v.DurationVar(&p.Spread, "spread", 200*time.Millisecond, "the first token comes up to this much later")
	v.DurationVar(&p.Gap, "gap", 100*time.Millisecond, "between two tokens of a stream")
	v.DurationVar(&p.Jitter, "jitter", 40*time.Millisecond, "each later token is up to this much late")
	v.DurationVar(&p.StallAfter, "stall-after", 0, "after the first request, the stall begins")
	v.DurationVar(&p.Stall, "stall", 0, "time without output; 0: no stall")
	if _, err := v.Parse(0); err != nil {
		return err
	}
	if p.First < 0 || p.Spread < 0 || p.Gap < 0 || p.Jitter < 0 || p.Stall < 0 || p.StallAfter < 0 {
		return fmt.Errorf("%w: --first, --spread, --gap, --jitter, --stall, --stall-after: want no negative times", config.ErrValue)
	}
	l, err := process.Listen("127.0.0.1", *port, "port")
	if err != nil {
		return err
	}
	ctx, _, stop := process.Signals()
	defer stop()
	defer context.AfterFunc(ctx, func() { l.Close() })()
	fmt.Fprintf(v.Out, "http://%s\n", l.Addr())
	return ended(ctx, truth.NewMock(p, time.Now()).Serve(l))
}

func benchTruth(v *Invocation) error {
	var o truth.Options
	v.IntSliceVar(&o.Streams, "streams", []int{10, 100, 1000}, "streams of ten tokens a second at the same time, one run each")
	v.Float64Var(&o.MaxCores, "max-cores", 0.5, "CPU that the client may use in each run; 0: any")
	v.DurationVar(&o.Stall, "stall", 2*time.Second, "length of the stall in the runs with one")
	v.StringVar(&o.Guidellm, "guidellm", "", "guidellm's program: runs it on the same mock and compares")
	v.StringSliceVar(&o.Runs, "runs", truth.Runs, "which runs to make for each number of streams")
	if _, err := v.Parse(0); err != nil {
		return err
	}
	var err error
	if o.Binary, err = os.Executable(); err != nil {
		return err
	}
	o.Out, o.ErrOut = v.Out, v.ErrOut
	ctx, _, stop := process.Signals()
	defer stop()
	return interrupted(ctx, truth.Check(ctx, o))
}
