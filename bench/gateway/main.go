// Command gateway measures Tandem's gateway beside nginx, haproxy, vllm-router
// and smg: in one run on one machine, each in front of the same mock backend, in
// turn. It writes a table with a verdict for every bar.
//
// Requests and streams are driven to the full by one client (client.go) that
// keeps a number of connections busy; what counts is the CPU time that the
// proxy's processes used, as the kernel accounts it, per unit that the client
// got. That figure hardly depends on what else the machine does, unlike rates and
// times. A round measures every proxy once; a figure is the median of the rounds.
// With the native part Tandem stands in front of a mock of its own decode nodes,
// over TLS, as in a cluster.
//
// Invariant: a figure counts only answers that came whole; a cell with any other
// answer fails the run, and no figure stands that was not measured.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

type options struct {
	binary, before, dir, out, only, proxies string
	nginx, haproxy, vllm, smg               string
	rounds                                  int
	window                                  time.Duration
}

// parts are what -only picks: each is measured, with all proxies, in one go.
var parts = []string{"requests", "streams", "many", "flood", clientsTLS, upstreamsTLS, "native", "decision"}

// Parts with TLS on one side of the proxies.
const (
	clientsTLS   = "clients-tls"
	upstreamsTLS = "upstreams-tls"
)

func main() {
	if len(os.Args) == 2 {
		if role := roles[os.Args[1]]; role != nil {
			if err := role(); err != nil {
				fmt.Fprintln(os.Stderr, "bench/gateway:", os.Args[1]+":", err)
				os.Exit(1)
			}
			return
		}
	}
	var o options
	flag.StringVar(&o.binary, "tandem", "bin/tandem", "our binary")
	flag.StringVar(&o.before, "before", "", "an earlier binary of ours, to compare -tandem with instead of peers")
	flag.StringVar(&o.dir, "dir", ".cache/bench-gateway", "folder for configurations, logs and results")
	flag.StringVar(&o.out, "out", "bench/results/gateway.md", "the table's file; empty: none, as with -before")
	flag.StringVar(&o.only, "only", "", "parts, with commas between: "+strings.Join(parts, ", ")+"; empty: all")
	flag.StringVar(&o.proxies, "proxies", "", "proxies beside direct, with commas between: "+strings.Join(names(), ", ")+"; empty: all")
	flag.StringVar(&o.nginx, "nginx", "nginx", "nginx's binary")
	flag.StringVar(&o.haproxy, "haproxy", "haproxy", "haproxy's binary")
	flag.StringVar(&o.vllm, "vllm-router", "", "vllm-router's binary")
	flag.StringVar(&o.smg, "smg", "", "smg's binary")
	flag.IntVar(&o.rounds, "rounds", 3, "rounds, whose median counts")
	flag.DurationVar(&o.window, "window", time.Second, "time that a figure is measured for, at least")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, &o); err != nil {
		fmt.Fprintln(os.Stderr, "bench/gateway:", err)
		os.Exit(1)
	}
}

// roles are what the command runs as its own child.
var roles = map[string]func() error{"mock-backend": serveBackend, "mock-node": serveNode}

func run(ctx context.Context, o *options) error {
	if o.rounds < 1 || o.window <= 0 {
		return fmt.Errorf("-rounds %d -window %v: want more", o.rounds, o.window)
	}
	if err := os.MkdirAll(o.dir, 0o755); err != nil {
		return err
	}
	if o.before != "" {
		return gate(ctx, o)
	}
	all, err := load(o.dir)
	if err != nil {
		return err
	}
	chosen := parts
	if o.only != "" {
		chosen = strings.Split(o.only, ",")
	}
	for _, part := range chosen {
		if !slices.Contains(parts, part) {
			return fmt.Errorf("-only %s: want some of %s", part, strings.Join(parts, ", "))
		}
		got, err := measure(ctx, o, part)
		if err != nil {
			return fmt.Errorf("%s: %w", part, err)
		}
		all[part] = got
		if err := save(o.dir, all); err != nil {
			return err
		}
	}
	text := page(all)
	fmt.Print(text)
	if o.out == "" {
		return nil
	}
	return os.WriteFile(o.out, []byte(text), 0o644)
}

// measure runs the rounds of a part.
func measure(ctx context.Context, o *options, part string) (*result, error) {
	res := newResult()
	if part == "decision" {
		return res, decision(ctx, res)
	}
	if gap = steady; part == "flood" {
		gap = flood
	}
	b, err := startBed(ctx, o, part)
	if err != nil {
		return nil, err
	}
	defer b.close()
	res.Versions = b.versions
	for round := range o.rounds {
		for i := range b.proxies {
			p := b.proxies[(i+round)%len(b.proxies)] // none is always behind the same one
			for _, c := range cells[part] {
				if err := c.run(ctx, o, b, p, res); err != nil {
					return nil, fmt.Errorf("%s, %s: %w", p.name, c.name, err)
				}
			}
		}
		fmt.Fprintf(os.Stderr, "%s: round %d of %d\n", part, round+1, o.rounds)
	}
	if info, err := os.Stat(o.binary); err == nil && part == "many" {
		res.add("tandem", binarySize, float64(info.Size())/1e6)
	}
	return res, nil
}

// decision runs the benchmarks of routing decisions, which are beside the code.
func decision(ctx context.Context, res *result) error {
	cmd := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-bench", "^Benchmark(Decision|LookAndPick)$", "./gateway/route", "./gateway/native/nodes")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if len(f) < 4 || !strings.HasPrefix(f[0], "Benchmark") {
			continue
		}
		name, _, _ := strings.Cut(strings.TrimPrefix(f[0], "Benchmark"), "-")
		for i := 2; i+1 < len(f); i += 2 {
			var v float64
			if _, err := fmt.Sscan(f[i], &v); err != nil {
				return fmt.Errorf("go test printed %q: %w", line, err)
			}
			res.add(name, f[i+1], v)
		}
	}
	if len(res.Samples) != 2 {
		return errors.New("go test printed no such benchmarks:\n" + string(out))
	}
	return nil
}

// folder is a new folder of that name below the command's.
func (o *options) folder(name string) (string, error) {
	dir, err := filepath.Abs(filepath.Join(o.dir, name))
	if err != nil {
		return "", err
	}
	if err := os.RemoveAll(dir); err != nil {
		return "", err
	}
	return dir, os.MkdirAll(dir, 0o755)
}
