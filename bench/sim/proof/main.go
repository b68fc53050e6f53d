// Command proof compares the simulator with fleets of real processes on this machine, and writes a
// page of predicted figures next to measured ones:
//
//	go run ./bench/sim/proof -commit $(git rev-parse --short HEAD)
//
// Its parts are chosen by -parts:
//
//   - sleep: fleets of up to 16 nodes whose steps sleep for the time of a profile, at loads of .3,
//     .6 and .85 of their capacity, as bench serve measures them.
//   - plan: such a fleet as tandem plan pools chooses it meets its objectives, and fails them with
//     a node less.
//   - engine: a prefill and a decode node with a model of 125 million random parameters, a core
//     each, by a profile of their counters under another load.
//   - shapes: the profile of that model on shapes that were not fitted.
//
// The nodes that sleep are processes of this program, which is tandem but for the engine's model
// (roles.MainWith). No flag or variable makes the program tandem sleep. With -record the nodes that
// compute are such processes, too, whose steps are recorded. The machine must have nothing else to
// do.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/bench/sim/prove"
	"github.com/tandem-serving/tandem/bench/sim/sleep"
	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/internal/roles"
)

// sleeping is the environment variable that makes a process a role of tandem. Its value is the file
// of the profile of whose duration the steps are.
const sleeping = "TANDEM_PROOF_PROFILE"

// options are the command's flags.
type options struct {
	parts, fleets, loads, dir, out, tandem, commit string
	seconds, port                                  int
	budget                                         time.Duration // of tandem profile; 0: its default
	record                                         bool

	profiled *profiled // nil: not yet
}

func main() {
	if file := os.Getenv(sleeping); file != "" {
		os.Exit(role(file))
	}
	if file := os.Getenv(recording); file != "" {
		os.Exit(recorded(file))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	switch args := os.Args[1:]; {
	case len(args) > 0 && args[0] == "nodes":
		err = nodes(ctx, args[1:])
	case len(args) > 0 && args[0] == "wait":
		err = wait(ctx, args[1:])
	default:
		err = proof(ctx, args, os.Stdout, os.Stderr)
	}
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench/sim/proof:", err)
		os.Exit(1)
	}
}

// role runs a role of tandem. Nodes sleep instead of computing. The profile's time between steps is
// not slept, because the engine takes it.
func role(file string) int {
	p, err := profile.Load(file)
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench/sim/proof:", err)
		return 1
	}
	p.Step.Overhead = profile.Overhead{}
	return roles.MainWith(func(o *engine.Options) {
		o.Model = &sleep.Model{Times: p.Times(), Layers: len(o.KV.Layers), Vocab: o.Model.VocabSize(), Token: token}
	}, "0.0.0", os.Args[1:], os.Environ(), os.Stdout, os.Stderr)
}

// token is a token of the built-in model that is text.
const token = 100

func proof(ctx context.Context, args []string, out, errOut io.Writer) error {
	var o options
	f := flag.NewFlagSet("proof", flag.ContinueOnError)
	f.StringVar(&o.parts, "parts", "sleep,plan,engine,shapes", "parts of the proof")
	f.StringVar(&o.fleets, "fleets", "2P2D,4P4D,8P8D", "fleets of sleeping nodes")
	f.StringVar(&o.loads, "loads", "0.3,0.6,0.85", "loads of the sleeping fleets, of their capacity")
	f.IntVar(&o.seconds, "seconds", 120, "of arrivals in each run")
	f.DurationVar(&o.budget, "budget", 0, "of tandem profile; 0: its default")
	f.IntVar(&o.port, "port", 9700, "of the gateway; nodes have those after it")
	f.StringVar(&o.dir, "dir", ".cache/sim-proof", "folder for models, traces and logs")
	f.StringVar(&o.out, "out", "bench/results/sim-proof.md", "the page")
	f.StringVar(&o.tandem, "tandem", "bin/tandem", "program of the nodes that compute")
	f.BoolVar(&o.record, "record", false, "the nodes that compute are processes of this program, and the page has their steps next to the profile's")
	f.StringVar(&o.commit, "commit", "unknown", "for the page")
	if err := f.Parse(args); err != nil {
		return err
	}
	if err := os.MkdirAll(o.dir, 0o755); err != nil {
		return err
	}
	parts := []part{{"sleep", o.sleep}, {"plan", o.plan}, {"engine", o.engine}, {"shapes", o.shapes}}
	chosen := strings.Split(o.parts, ",")
	for _, name := range chosen {
		if !slices.ContainsFunc(parts, func(p part) bool { return p.name == name }) {
			return fmt.Errorf("-parts %s: want some of sleep, plan, engine and shapes", o.parts)
		}
	}
	var texts []string
	var failed error
	for _, p := range parts {
		if !slices.Contains(chosen, p.name) {
			continue
		}
		before := machine()
		text, err := p.run(ctx, out, errOut)
		if err != nil { // the other parts are on the page
			failed = errors.Join(failed, fmt.Errorf("-parts %s: %w", p.name, err))
			continue
		}
		texts = append(texts, fmt.Sprintf("%s\nThe machine's processors worked for %.0f %% of the time, for all that it runs.\n", text, 100*before.share()))
	}
	page := fmt.Sprintf("# Simulated fleets next to real processes\n\n`go run ./bench/sim/proof %s`\n\n- Machine: %s\n- Commit: %s\n- Finished: %s\n- Errors beyond their bounds are bold.\n\n%s",
		strings.Join(args, " "), report.Machine(), o.commit, time.Now().UTC().Format(time.RFC3339), strings.Join(texts, "\n"))
	fmt.Fprint(out, "\n"+page)
	return errors.Join(failed, os.WriteFile(o.out, []byte(page), 0o644))
}

// part is a part of the proof, which returns a section of the page.
type part struct {
	name string
	run  func(ctx context.Context, out, errOut io.Writer) (string, error)
}

// numbers parses numbers above 0 with commas between them.
func numbers(text string) (list []float64, err error) {
	for part := range strings.SplitSeq(text, ",") {
		v, err := strconv.ParseFloat(strings.TrimSpace(part), 64)
		if err != nil || !(v > 0) {
			return nil, fmt.Errorf("%q: want numbers above 0", text)
		}
		list = append(list, v)
	}
	return list, nil
}

// ticks are the times that the processors worked and idled since the start of the system.
type ticks struct{ busy, all float64 }

// machine reads them; the zero value where the system does not have them.
func machine() (t ticks) {
	data, err := os.ReadFile("/proc/stat")
	if err != nil {
		return t
	}
	line, _, _ := strings.Cut(string(data), "\n")
	for i, field := range strings.Fields(line) {
		v, err := strconv.ParseFloat(field, 64)
		if err != nil || i > 8 { // the name, and guests, which are in other fields
			continue
		}
		if t.all += v; i != 4 && i != 5 { // idle, and waiting for disks
			t.busy += v
		}
	}
	return t
}

// share returns the share of the time since then in which processors worked.
func (t ticks) share() float64 {
	now := machine()
	if now.all == t.all {
		return 0
	}
	return (now.busy - t.busy) / (now.all - t.all)
}

// bounds of the parts.
var (
	sleepBounds  = prove.Bounds{P50: .10, P90: .10}
	engineBounds = prove.Bounds{P50: .15, P90: .15}
)
