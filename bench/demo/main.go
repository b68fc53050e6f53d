// Command demo shows the effect of disaggregation when engines are the bottleneck: one
// prefill and one decode node next to two colocated nodes, on the same two cores.
//
// The model has about 125M random parameters in int8. Each node has one thread, pinned
// to a core of its own, so that the nodes share as little as two machines do. Each run
// also measures how much of the cores the gateway and the client use. Four fifths of
// the load are chats and one fifth long prompts. Its rates are shares of the capacity
// of two colocated nodes at their best chunk size, which is measured first. Each
// repetition restarts all nodes, and goes around both fleets.
//
// Invariant: both fleets get the same requests at the same times, and every figure of
// the page is from this run.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/tandem-serving/tandem/bench"
	"github.com/tandem-serving/tandem/bench/checkpoint"
	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/internal/launch"
)

// shape has 123.5 million parameters.
var shape = checkpoint.Shape{Vocab: 50257, Hidden: 768, FFN: 2048, Layers: 12, Heads: 12, KVHeads: 12, HeadDim: 64, Positions: 4096, RopeTheta: 10000}

// mix is the load: share, prompt tokens, answer tokens.
var mix = []string{"0.8:64:96", "0.2:1024:16"}

// Labels of the fleets.
const (
	disaggregated = "1 prefill + 1 decode"
	colocated     = "2 colocated"
)

// tolerable is the largest factor by which a chunk size's median time to first token may
// exceed the lowest one, for its inter-token latency to be considered.
const tolerable = 1.25

// options are the command's flags.
type options struct {
	tandem, dir, out string
	port             int
	seconds, repeat  int
	shares, chunks   string
	ttft, tpot       time.Duration
	kv               string
	chunk            int     // 0: measured
	capacity         float64 // requests per second; 0: measured
	commit           string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	if len(os.Args) > 1 && os.Args[1] == "nodes" {
		err = nodes(ctx, os.Args[2:])
	} else {
		err = demo(ctx, os.Args[1:], os.Stdout, os.Stderr)
	}
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench/demo:", err)
		os.Exit(1)
	}
}

// nodes runs a fleet, with every node on a core of its own.
func nodes(ctx context.Context, args []string) error {
	var l launch.Local
	f := flag.NewFlagSet("nodes", flag.ContinueOnError)
	tandem := f.String("tandem", "bin/tandem", "program")
	model := f.String("model", "", "folder")
	state := f.String("state-dir", "", "folder of certificates")
	kv := f.String("kv", "", "--kv-cache-memory-bytes")
	chunk := f.String("max-num-batched-tokens", "512", "of every node")
	f.IntVar(&l.Prefill, "prefill", 0, "prefill nodes")
	f.IntVar(&l.Decode, "decode", 2, "decode nodes")
	f.IntVar(&l.Port, "port", 9800, "of the gateway")
	if err := f.Parse(args); err != nil {
		return err
	}
	certs, err := launch.LocalCerts(*state)
	if err != nil {
		return err
	}
	node := []string{"--model", *model, "--quantization", "int8", "--max-num-batched-tokens", *chunk, "--kv-cache-memory-bytes", *kv}
	l.Certs, l.Threads = certs, 1
	l.Flags = map[string][]string{"gateway": {"--port", strconv.Itoa(l.Port)}, "prefill": node, "decode": node}
	processes, err := l.Processes()
	if err != nil {
		return err
	}
	for i := range processes {
		cpus := "0-" + strconv.Itoa(l.Prefill+l.Decode-1)
		if i > 0 { // the gateway is the first
			cpus = strconv.Itoa(i - 1)
		}
		processes[i].Args = append([]string{"-c", cpus, *tandem}, processes[i].Args...)
	}
	return launch.Run(ctx, launch.Options{Binary: "taskset", Processes: processes, Out: os.Stderr, Logger: slog.Default(), Grace: time.Minute}, nil)
}

func demo(ctx context.Context, args []string, out, errOut io.Writer) error {
	var o options
	f := flag.NewFlagSet("demo", flag.ContinueOnError)
	f.StringVar(&o.tandem, "tandem", "bin/tandem", "program")
	f.StringVar(&o.dir, "dir", ".cache/bench-demo", "folder for the model, 250 MB, and trials")
	f.StringVar(&o.out, "out", "bench/results/demo-report", "folder of the pages")
	f.IntVar(&o.port, "port", 9800, "of the gateway; nodes have those after it")
	f.IntVar(&o.seconds, "seconds", 60, "of arrivals in each run")
	f.IntVar(&o.repeat, "repeat", 5, "repetitions, each around both fleets")
	f.StringVar(&o.shares, "shares", "0.3,0.45,0.6,0.75,0.9", "loads, of the capacity of two colocated nodes")
	f.StringVar(&o.chunks, "chunks", "128,256,512,1024", "chunk sizes to try with colocated nodes")
	f.IntVar(&o.chunk, "chunk", 0, "the chunk size of both fleets; 0: the colocated nodes' best, measured")
	f.Float64Var(&o.capacity, "capacity", 0, "capacity of two colocated nodes in requests per second; 0: measured")
	f.DurationVar(&o.ttft, "ttft", time.Second, "goodput: longest time to the first token")
	f.DurationVar(&o.tpot, "tpot", 20*time.Millisecond, "goodput: longest mean time per further token")
	f.StringVar(&o.kv, "kv", "512MiB", "KV memory of a node")
	f.StringVar(&o.commit, "commit", "unknown", "for the page")
	if err := f.Parse(args); err != nil {
		return err
	}
	model := filepath.Join(o.dir, "model")
	if err := errors.Join(shape.HuggingFace(model), shape.Tokenizer(model)); err != nil {
		return err
	}
	if err := o.trial(ctx, out, errOut); err != nil {
		return err
	}
	var shares, rates []float64
	var names []string
	for text := range strings.SplitSeq(o.shares, ",") {
		share, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
		if err != nil || !(share > 0) {
			return fmt.Errorf("-shares %q: want numbers above 0", o.shares)
		}
		shares, rates = append(shares, share), append(rates, math.Round(100*share*o.capacity)/100)
		names = append(names, fmt.Sprintf("%.0f %%", 100*share))
	}
	flags := fmt.Sprintf("--max-num-batched-tokens %d", o.chunk)
	points, err := o.sweep(ctx, out, errOut, o.out, bench.SweepOptions{
		Rates: rates, RunSeconds: o.seconds, Repeat: o.repeat, Alternate: true,
		Commands: []string{o.fleet(1, 1) + " " + flags, o.fleet(0, 2) + " " + flags}, Labels: []string{disaggregated, colocated},
		Title: "One prefill and one decode node, or two colocated nodes",
		Notes: []string{
			fmt.Sprintf("Each node has one thread on a core of its own; int8 weights of %.1f million random parameters; gateway and client share the two cores with them.", float64(parameters())/1e6),
			fmt.Sprintf("Load: %s (share:prompt tokens:answer tokens), at shares of %.2f requests/s, the capacity of two colocated nodes; steps of up to %d tokens in all nodes.", strings.Join(mix, ", "), o.capacity, o.chunk),
			"Commit " + o.commit,
		},
	})
	if err != nil {
		return err
	}
	logs, err := filepath.Glob(filepath.Join(o.out, "server-*.log"))
	if err != nil {
		return err
	}
	for _, name := range append(logs, filepath.Join(o.out, "sweep.json")) {
		if err := os.Remove(name); err != nil {
			return err
		}
	}
	gpus, err := estimate([]int{4, 8, 16}, shares)
	if err != nil {
		return err
	}
	page := o.page(points, rates, names) + "\n" + gpus
	fmt.Fprint(out, "\n"+page)
	return os.WriteFile(filepath.Join(o.out, "README.md"), []byte(page), 0o644)
}

func parameters() (n int) {
	for _, m := range shape.Matrices() {
		n += m.Elements()
	}
	return n
}

// fleet returns the command line of a fleet.
func (o *options) fleet(prefill, decode int) string {
	self, err := os.Executable()
	if err != nil {
		self = os.Args[0]
	}
	return fmt.Sprintf("'%s' nodes --tandem '%s' --model '%s' --state-dir '%s' --kv %s --port %d --prefill %d --decode %d",
		self, o.tandem, filepath.Join(o.dir, "model"), o.dir, o.kv, o.port, prefill, decode)
}

// sweep runs a sweep with the load's flags.
func (o *options) sweep(ctx context.Context, out, errOut io.Writer, dir string, so bench.SweepOptions, more ...string) ([]report.Point, error) {
	args := append([]string{"--port", strconv.Itoa(o.port), "--tokenizer", filepath.Join(o.dir, "model"), "--ignore-eos", "--temperature", "0", "--num-warmups", "1",
		"--goodput", fmt.Sprintf("ttft:%d", o.ttft.Milliseconds()), "--goodput", fmt.Sprintf("tpot:%d", o.tpot.Milliseconds()), "--disable-tqdm"}, more...)
	for _, l := range mix {
		args = append(args, "--random-mix", l)
	}
	var b bench.Options
	s := pflag.NewFlagSet("bench", pflag.ContinueOnError)
	b.Register(s)
	if err := s.Parse(bench.JoinLists(args)); err != nil {
		return nil, err
	}
	so.Dir, so.Pause = dir, time.Second
	return bench.Points(ctx, &b, so, out, errOut)
}

// trial measures the colocated nodes' capacity and their best chunk size, unless flags
// set them.
func (o *options) trial(ctx context.Context, out, errOut io.Writer) error {
	chunks := o.chunks
	if o.chunk > 0 {
		chunks = strconv.Itoa(o.chunk)
	}
	vary := []string{"max-num-batched-tokens=" + chunks}
	dir := filepath.Join(o.dir, "trial")
	if o.capacity == 0 {
		points, err := o.sweep(ctx, out, errOut, dir, bench.SweepOptions{Rates: []float64{math.Inf(1)}, Commands: []string{o.fleet(0, 2)}, Vary: vary}, "--num-prompts", "100")
		if err != nil {
			return err
		}
		for i := range points {
			o.capacity = max(o.capacity, points[i].Figure("request_throughput"))
		}
	}
	if o.chunk > 0 {
		return nil
	}
	points, err := o.sweep(ctx, out, errOut, dir, bench.SweepOptions{Rates: []float64{math.Round(60*o.capacity) / 100}, RunSeconds: o.seconds, Commands: []string{o.fleet(0, 2)}, Vary: vary})
	if err != nil {
		return err
	}
	o.chunk, err = best(points, strings.Split(chunks, ","))
	return err
}

// best returns the chunk size with the lowest inter-token latency among those with about
// the shortest time to first token.
func best(points []report.Point, chunks []string) (int, error) {
	if len(points) != len(chunks) {
		return 0, fmt.Errorf("%d runs for %d chunk sizes", len(points), len(chunks))
	}
	soonest, at := math.Inf(1), -1
	for i := range points {
		soonest = min(soonest, points[i].Figure("median_ttft_ms"))
	}
	for i := range points {
		p := &points[i]
		if p.Figure("median_ttft_ms") <= tolerable*soonest && (at < 0 || p.Figure("p99_itl_ms") < points[at].Figure("p99_itl_ms")) {
			at = i
		}
	}
	return strconv.Atoi(strings.TrimSpace(chunks[at]))
}

// page returns the summary: for each load, medians over the repetitions of both fleets.
func (o *options) page(points []report.Point, rates []float64, names []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# What disaggregation changes\n\nOne prefill and one decode node, and two colocated nodes (`make demo-report`; [plots](report.html), [runs](sweep.csv)).\n\n")
	fmt.Fprintf(&b, "- Machine: %s\n- Commit: %s\n", report.Machine(), o.commit)
	fmt.Fprintf(&b, "- Model: %.1f million random parameters in int8, vocabulary of %d; each node one thread on a core of its own.\n", float64(parameters())/1e6, shape.Vocab)
	fmt.Fprintf(&b, "- Load: %s (share:prompt tokens:answer tokens) for %d s a run, %d repetitions that alternate between the fleets.\n", strings.Join(mix, ", "), o.seconds, o.repeat)
	fmt.Fprintf(&b, "- 100 %% is %.2f requests/s, the capacity of the two colocated nodes, at their best chunk size of %d tokens; both fleets have it.\n", o.capacity, o.chunk)
	fmt.Fprintf(&b, "- Goodput: first token within %v, mean time per further token within %v.\n\n", o.ttft, o.tpot)
	fmt.Fprintf(&b, "Medians over the repetitions, in milliseconds: disaggregated, colocated, and the first as a multiple of the second.\n\n")
	fmt.Fprintf(&b, "| load | ITL p99 | TTFT p50 | TTFT p99 | goodput, requests/s | gateway and client, cores | nodes, cores |\n|---|---|---|---|---|---|---|\n")
	for i, rate := range rates {
		cell := func(of func(p *report.Point) float64) (a, c float64) {
			return median(points, disaggregated, rate, of), median(points, colocated, rate, of)
		}
		row := "| " + names[i]
		for _, name := range []string{"p99_itl_ms", "median_ttft_ms", "p99_ttft_ms", "request_goodput"} {
			a, c := cell(func(p *report.Point) float64 { return p.Figure(name) })
			row += fmt.Sprintf(" | %.3g, %.3g: %.2f ×", a, c, a/c)
		}
		a, c := cell(func(p *report.Point) float64 { return p.Client + cores(p.Nodes[:min(1, len(p.Nodes))]) })
		row += fmt.Sprintf(" | %.2f, %.2f", a, c)
		a, c = cell(func(p *report.Point) float64 { return cores(p.Nodes[min(1, len(p.Nodes)):]) })
		fmt.Fprintf(&b, "%s | %.2f, %.2f |\n", row, a, c)
	}
	return b.String()
}

// cores returns the cores that all processes used together. The gateway is a server's first.
func cores(nodes []report.Node) (sum float64) {
	for i := range nodes {
		sum += nodes[i].Cores()
	}
	return sum
}

// median returns the median of a figure over a fleet's runs of a load.
func median(points []report.Point, server string, rate float64, of func(*report.Point) float64) float64 {
	var v []float64
	for i := range points {
		if p := &points[i]; p.Server == server && p.Rate == rate {
			v = append(v, of(p))
		}
	}
	slices.Sort(v)
	return report.Quantile(v, 50)
}
