// Command gateway compares Tandem's gateway with nginx, haproxy, vllm-router and smg. One run
// measures each of them in turn, on one machine and with the same mock backends, and writes a table
// with a verdict for every bar.
//
// One client (client.go) keeps a number of connections busy. The main figure is the CPU time of the
// proxy's processes, by the kernel's accounts, per request or token that the client received.
// Unlike rates and times, it hardly depends on other load of the machine. A round measures every
// proxy once; a figure is the median of the rounds. In the part native, Tandem serves a mock of its
// decode nodes over TLS, as in a cluster.
//
// Invariant: figures count complete answers only. Any other answer fails the run, and the table has
// no figure that was not measured.
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

// parts are the parts that -only selects. All proxies of a part are measured together.
var parts = []string{"requests", "streams", "many", "flood", clientsTLS, upstreamsTLS, "native", "decision"}

// Parts in which clients or upstreams use TLS.
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
	flag.StringVar(&o.binary, "tandem", "bin/tandem", "tandem's binary")
	flag.StringVar(&o.before, "before", "", "an earlier binary of tandem, to compare -tandem with instead of peers")
	flag.StringVar(&o.dir, "dir", ".cache/bench-gateway", "folder for configurations, logs and results")
	flag.StringVar(&o.out, "out", "bench/results/gateway.md", "file of the table; empty: none, as with -before")
	flag.StringVar(&o.only, "only", "", "parts, separated by commas: "+strings.Join(parts, ", ")+"; empty: all")
	flag.StringVar(&o.proxies, "proxies", "", "proxies, separated by commas: "+strings.Join(names(), ", ")+"; empty: all")
	flag.StringVar(&o.nginx, "nginx", "nginx", "nginx's binary")
	flag.StringVar(&o.haproxy, "haproxy", "haproxy", "haproxy's binary")
	flag.StringVar(&o.vllm, "vllm-router", "", "vllm-router's binary")
	flag.StringVar(&o.smg, "smg", "", "smg's binary")
	flag.IntVar(&o.rounds, "rounds", 3, "rounds; a figure is their median")
	flag.DurationVar(&o.window, "window", time.Second, "minimum time of a measurement")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, &o); err != nil {
		fmt.Fprintln(os.Stderr, "bench/gateway:", err)
		os.Exit(1)
	}
}

// roles are the roles in which the command starts itself as a child.
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
	}
	for _, part := range chosen {
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
			p := b.proxies[(i+round)%len(b.proxies)] // so that the order differs between rounds
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

// decision runs the Go benchmarks of routing decisions: the choice alone, and with the view of the
// nodes, over 1,000 and 10,000 nodes.
func decision(ctx context.Context, res *result) error {
	cmd := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-bench", "^Benchmark(Decision|LookAndPick)(10000)?$", "./gateway/route", "./gateway/native/nodes")
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
	if len(res.Samples) != 4 {
		return errors.New("go test printed no such benchmarks:\n" + string(out))
	}
	return nil
}

// folder makes an empty folder of that name within -dir.
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
