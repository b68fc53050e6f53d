// Command speed measures the CPU time of simulations, and that of another simulator on the same
// traces, in turns:
//
//	go run ./bench/sim/speed -azure AzureLLMInferenceTrace_code.csv -peer POOLSIM
//
// The peer is the prototype, bench/poolsim of 2e3d892~1 with ../shared/reference/pool-sizing-tried.
// The traces are resampled: copies of a trace run side by side, each from another place on, with
// prefixes of its own. Both programs read the same file and have the same fleets, step times and
// block sizes. User time counts, because other processes do not add to it.
package main

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/tandem-serving/tandem/bench/sim"
	"github.com/tandem-serving/tandem/bench/sim/fleet"
	"github.com/tandem-serving/tandem/engine/kvcache"
)

// workload is a resampled trace and the fleet that serves it.
type workload struct {
	name            string
	azure           bool // else the conversation trace of Mooncake
	requests        int
	prefill, decode int
	speedup         float64
	steps           string
	peer            []string // the same options for the peer
}

var workloads = []workload{
	{"mooncake", false, 100_000, 12, 12, 1, "dynamo", []string{"-model", "mocker", "-run-ahead", "16384", "-kv-load"}},
	{"azure1000", true, 1_000_000, 300, 700, 10, "h100", []string{"-model", "h100-aic", "-run-ahead", "16384"}},
	{"azure10000", true, 1_000_000, 3000, 7000, 100, "h100", []string{"-model", "h100-aic", "-run-ahead", "16384"}},
}

// scale changes the fleet to so many nodes, and the pace with it; 0: it stays as it is.
func (l *workload) scale(nodes int) {
	if nodes > 0 {
		all := l.prefill + l.decode
		l.prefill, l.decode, l.speedup = max(1, l.prefill*nodes/all), max(1, l.decode*nodes/all), l.speedup*float64(nodes)/float64(all)
	}
}

// Sizes of a node, which are the peer's defaults.
const (
	blocks      = 2000
	blockTokens = sim.BlockTokens
	minRemote   = 64
)

type options struct {
	mooncake, azure, peer, dir, only, play, profile, occupy string
	requests, rounds, nodes                                 int
	stepwise, memory                                        bool
}

func main() {
	var o options
	flag.StringVar(&o.mooncake, "mooncake", "bench/sim/testdata/mooncake_conversation.jsonl.gz", "the conversation trace of Mooncake")
	flag.StringVar(&o.azure, "azure", "", "the code trace of Azure, a CSV; empty: its workloads are left out")
	flag.StringVar(&o.peer, "peer", "", "the other simulator; empty: none")
	flag.StringVar(&o.dir, "dir", os.TempDir(), "where the resampled traces are written")
	flag.StringVar(&o.only, "only", "", "workloads to run, with commas; empty: all")
	flag.IntVar(&o.requests, "requests", 0, "the first ones of each workload; 0: all")
	flag.IntVar(&o.nodes, "nodes", 0, "so many nodes in place of the workloads', each with the same load; 0: those of the workloads")
	flag.IntVar(&o.rounds, "rounds", 1, "runs of each program, in turns")
	flag.BoolVar(&o.stepwise, "stepwise", false, "plan no step ahead")
	flag.StringVar(&o.play, "play", "", "play the trace of this file in this process, with the workload of -only")
	flag.StringVar(&o.profile, "cpuprofile", "", "with -play: write a CPU profile to this file")
	flag.BoolVar(&o.memory, "memory", false, "only measure the latency of loads by the size of the memory")
	flag.StringVar(&o.occupy, "occupy", "", "only use a processor core, by memory or compute, until the process is ended")
	flag.Parse()
	run := o.compare
	switch {
	case o.memory:
		run = measureMemory
	case o.occupy != "":
		run = func(io.Writer) error { return occupy(o.occupy) }
	case o.play != "":
		run = o.run
	}
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "speed:", err)
		os.Exit(1)
	}
}

// compare runs each workload by this program and by the peer.
func (o *options) compare(w io.Writer) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	fmt.Fprintln(w, "| workload | program | user s | system s | MB resident | result |\n|---|---|---|---|---|---|")
	for _, l := range workloads {
		if o.only != "" && !slices.Contains(strings.Split(o.only, ","), l.name) || l.azure && o.azure == "" {
			continue
		}
		l.scale(o.nodes)
		path := filepath.Join(o.dir, l.name+".jsonl")
		if err := o.write(path, &l); err != nil {
			return err
		}
		for range o.rounds {
			args := []string{self, "-only", l.name, "-play", path, fmt.Sprintf("-stepwise=%t", o.stepwise), fmt.Sprintf("-nodes=%d", o.nodes)}
			if err := measure(w, l.name, "fleet", args); err != nil {
				return err
			}
			if o.peer == "" {
				continue
			}
			args = append([]string{o.peer, "-trace", path, "-p", fmt.Sprint(l.prefill), "-d", fmt.Sprint(l.decode), "-speedup", fmt.Sprint(l.speedup)}, l.peer...)
			if err := measure(w, l.name, "peer", args); err != nil {
				return err
			}
		}
	}
	return nil
}

// measure runs a program and prints its CPU time, memory and last line.
func measure(w io.Writer, load, name string, args []string) error {
	c := exec.Command(args[0], args[1:]...)
	c.Stderr = os.Stderr
	out, err := c.Output()
	if err != nil {
		return fmt.Errorf("%s: %w", strings.Join(args, " "), err)
	}
	used := c.ProcessState.SysUsage().(*syscall.Rusage)
	_, err = fmt.Fprintf(w, "| %s | %s | %.1f | %.1f | %d | %s |\n", load, name, c.ProcessState.UserTime().Seconds(), c.ProcessState.SystemTime().Seconds(), used.Maxrss>>10, strings.ReplaceAll(strings.TrimSpace(string(out)), "\n", " "))
	return err
}

// run plays a trace in this process.
func (o *options) run(w io.Writer) error {
	if o.profile != "" {
		f, err := os.Create(o.profile)
		if err != nil {
			return err
		}
		if err := pprof.StartCPUProfile(f); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	at := slices.IndexFunc(workloads, func(l workload) bool { return l.name == o.only })
	if at < 0 {
		return fmt.Errorf("-only %q is no workload", o.only)
	}
	l := &workloads[at]
	l.scale(o.nodes)
	trace, err := sim.LoadTrace(o.play)
	if err != nil {
		return err
	}
	steps, err := fleet.StepTimesOf(l.steps)
	if err != nil {
		return err
	}
	r, err := fleet.Run(trace, fleet.Options{
		Prefill: l.prefill, Decode: l.decode, Blocks: blocks, BlockTokens: blockTokens, Steps: steps,
		MinRemote: minRemote, Seed: 1, Speedup: l.speedup, Stepwise: o.stepwise,
	})
	if err != nil {
		return err
	}
	s := r.Summarize(fleet.Goals{TTFT: 2 * time.Second, TPOT: 50 * time.Millisecond})
	_, err = fmt.Fprintf(w, "TTFT mean %.1f ms, p99 %.1f, ITL mean %.2f ms, p99 %.2f, %d failed, %d steps, %d tokens, goodput %.4f, util P %.2f D %.2f, %d checks, output hash %#016x\n", s.TTFTMean.Seconds()*1e3, s.TTFTP99.Seconds()*1e3,
		s.ITLMean.Seconds()*1e3, s.ITLP99.Seconds()*1e3, s.Failed, r.Steps, r.Tokens, s.Goodput, r.PrefillBusy, r.DecodeBusy, r.Checks, r.Digest())
	return err
}

// write writes the resampled trace of a workload.
func (o *options) write(path string, l *workload) error {
	source := o.mooncake
	if l.azure {
		source = o.azure
	}
	trace, err := sim.LoadTrace(source)
	if err != nil {
		return err
	}
	all := resample(trace, l.requests)
	if o.requests > 0 {
		all = all[:min(o.requests, len(all))]
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	b := bufio.NewWriter(f)
	ids := map[kvcache.Hash]int{}
	for _, q := range all {
		fmt.Fprintf(b, `{"timestamp": %.3f, "input_length": %d, "output_length": %d, "hash_ids": [`, q.At.Seconds()*1e3, q.Tokens, max(1, q.Output))
		for i, h := range q.Blocks {
			id, ok := ids[h]
			if !ok {
				id = len(ids)
				ids[h] = id
			}
			if i > 0 {
				b.WriteByte(',')
			}
			fmt.Fprint(b, id)
		}
		b.WriteString("]}\n")
	}
	return errors.Join(b.Flush(), f.Close())
}

// resample returns n requests: copies of a trace side by side. Copy k of m begins at k/m of the
// trace and has blocks of its own. The last copy is thinned evenly.
func resample(trace []sim.Request, n int) (all []sim.Request) {
	span := trace[len(trace)-1].At + time.Millisecond
	copies := (n + len(trace) - 1) / len(trace)
	for k := range copies {
		left := n - k*len(trace) // of which this copy has at most the trace's number
		shift := span * time.Duration(k) / time.Duration(copies)
		for i := range trace {
			if left < len(trace) && (i+1)*left/len(trace) == i*left/len(trace) {
				continue
			}
			q := trace[i]
			q.At = (q.At + span - shift) % span
			q.Blocks = slices.Clone(q.Blocks)
			for b := range q.Blocks {
				q.Blocks[b] += kvcache.Hash(k) << 48
			}
			all = append(all, q)
		}
	}
	slices.SortStableFunc(all, func(a, b sim.Request) int { return int(a.At - b.At) })
	return all
}
