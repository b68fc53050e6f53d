package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/pflag"

	"github.com/tandem-serving/tandem/bench"
	"github.com/tandem-serving/tandem/bench/load"
	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/internal/launch"
)

// node is what the nodes of a fleet are.
type node struct {
	profile string   // file; nodes sleep. Empty: they compute, each on a core of its own
	tokens  string   // folder of the tokenizer, or builtin
	flags   []string // of a node
}

// nodes runs a fleet on this machine until it is stopped.
func nodes(ctx context.Context, args []string) error {
	var l launch.Local
	f := flag.NewFlagSet("nodes", flag.ContinueOnError)
	profile := f.String("profile", "", "profile of nodes that sleep; empty: they compute, each on a core of its own")
	tandem := f.String("tandem", "bin/tandem", "program of nodes that compute")
	record := f.Bool("record", false, "record the steps of nodes that compute in the folder of certificates")
	state := f.String("state-dir", "", "folder of certificates")
	f.IntVar(&l.Prefill, "prefill", 0, "prefill nodes")
	f.IntVar(&l.Decode, "decode", 1, "decode nodes")
	f.IntVar(&l.Port, "port", 9700, "of the gateway")
	if err := f.Parse(args); err != nil {
		return err
	}
	var err error
	if l.Certs, err = launch.LocalCerts(*state); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	l.Threads = 1
	l.Flags = map[string][]string{"gateway": {"--port", strconv.Itoa(l.Port)}, "prefill": f.Args(), "decode": f.Args()}
	processes, err := l.Processes()
	if err != nil {
		return err
	}
	binary := self
	for i := range processes {
		p := &processes[i]
		if *profile != "" {
			p.Env = append(p.Env, sleeping+"="+*profile)
			continue
		}
		cpus := "0-" + strconv.Itoa(l.Prefill+l.Decode-1)
		if i > 0 { // the gateway is the first
			cpus = strconv.Itoa(i - 1)
		}
		program := *tandem
		if *record {
			program = self
			p.Env = append(p.Env, recording+"="+(&options{dir: *state}).stepsFile(p.Name))
		}
		binary, p.Args = "taskset", append([]string{"-c", cpus, program}, p.Args...)
	}
	return launch.Run(ctx, launch.Options{Binary: binary, Processes: processes, Out: os.Stderr, Logger: slog.Default(), Grace: time.Minute}, nil)
}

// wait returns when all nodes of a fleet are ready, and a second later, so that the gateway has
// their reports.
func wait(ctx context.Context, args []string) error {
	f := flag.NewFlagSet("wait", flag.ContinueOnError)
	port := f.Int("port", 9700, "of the gateway")
	n := f.Int("nodes", 1, "nodes")
	if err := f.Parse(args); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	ready := func(port int) bool {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d/readyz", port), nil)
		if err != nil {
			return false
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return false
		}
		return resp.Body.Close() == nil && resp.StatusCode == http.StatusOK
	}
	for i := 0; i <= *n; {
		if ready(*port + i) {
			i++
			continue
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("the node with port %d is not ready: %w", *port+i, ctx.Err())
		}
	}
	time.Sleep(time.Second)
	return nil
}

// writeTrace writes a trace in the format of Mooncake's, which bench serve plays.
func writeTrace(name string, trace []sim.Request) error {
	ids, numbers := map[uint64]int{}, [][]int{}
	for i := range trace {
		var list []int
		for _, b := range trace[i].Blocks {
			if _, known := ids[uint64(b)]; !known {
				ids[uint64(b)] = len(ids)
			}
			list = append(list, ids[uint64(b)])
		}
		numbers = append(numbers, list)
	}
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	e := json.NewEncoder(f)
	for i := range trace {
		err = errors.Join(err, e.Encode(map[string]any{
			"timestamp": trace[i].At.Seconds(), "input_length": trace[i].Tokens, "output_length": max(1, trace[i].Output), "hash_ids": numbers[i],
		}))
	}
	return errors.Join(err, f.Close())
}

// run is what bench serve measured of a fleet.
type run struct {
	record  *load.Record
	limited string  // why the client was the limit
	client  float64 // cores
	gateway float64
	nodes   float64 // of all nodes together
}

// complete returns an error if requests have failed. It returns nil for a nil run.
func (r *run) complete() error {
	failed := 0
	for i := 0; r != nil && i < len(r.record.Outcomes); i++ {
		if r.record.Outcomes[i].Err != nil {
			failed++
		}
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d requests failed: the folder runs of -dir has the fleet's output", failed, len(r.record.Outcomes))
	}
	return nil
}

// measure starts a fleet, plays a trace against it, and stops it.
func (o *options) measure(ctx context.Context, n *node, prefill, decode int, trace []sim.Request, out, errOut io.Writer) (*run, error) {
	file := filepath.Join(o.dir, "trace.jsonl")
	if err := writeTrace(file, trace); err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	command := fmt.Sprintf("'%s' nodes -record=%t -profile '%s' -tandem '%s' -state-dir '%s' -port %d -prefill %d -decode %d --", self, o.record, n.profile, o.tandem, o.dir, o.port, prefill, decode)
	for _, f := range n.flags {
		command += " '" + f + "'"
	}
	var b bench.Options
	s := pflag.NewFlagSet("bench", pflag.ContinueOnError)
	b.Register(s)
	if err := s.Parse([]string{
		"--port", strconv.Itoa(o.port), "--tokenizer", n.tokens, "--ignore-eos", "--temperature", "0", "--disable-tqdm",
		"--dataset-name", "timed_trace", "--dataset-path", file, "--timed-trace-chunk-hash-size", strconv.Itoa(trace[0].IDTokens()), "--num-prompts", strconv.Itoa(len(trace)),
	}); err != nil {
		return nil, err
	}
	points, err := bench.Points(ctx, &b, bench.SweepOptions{
		Commands: []string{command}, Dir: filepath.Join(o.dir, "runs"), Rates: []float64{math.Inf(1)}, Before: fmt.Sprintf("'%s' wait -port %d -nodes %d", self, o.port, prefill+decode),
	}, out, errOut)
	if err != nil {
		return nil, err
	}
	p := &points[0]
	r := &run{record: &load.Record{Duration: p.Summary.Duration}, limited: p.Limited, client: p.Client}
	for i := range p.Summary.Requests {
		q := &p.Summary.Requests[i]
		outcome := *q.Outcome
		outcome.Prompt, outcome.Output = q.Input, q.Output
		r.record.Outcomes = append(r.record.Outcomes, outcome)
	}
	r.gateway, r.nodes = cores(p.Nodes[:min(1, len(p.Nodes))]), cores(p.Nodes[min(1, len(p.Nodes)):])
	return r, nil
}

// cores returns the cores that nodes used together.
func cores(nodes []report.Node) (sum float64) {
	for i := range nodes {
		sum += nodes[i].Cores()
	}
	return sum
}
