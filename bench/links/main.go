//go:build linux

// Command links measures KV transfer over networks that this machine does not have. It connects two
// network namespaces, each with a real TCP stack, by internal/netlab, which drops, delays and
// limits packets. It is `make bench-links`.
//
// It answers two questions. How many bytes a second arrive over a link with loss and delay, with
// the kernel's congestion controls and several connections, in comparison with iperf3. And how long
// a request waits after its last layer has been computed, over a link hardly faster than the
// layers. Invariant: figures count bytes that have landed and matched their checksums.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/internal/netlab"
)

// options are the command's flags.
type options struct {
	out     string
	seconds time.Duration
	repeat  int
	only    string // "exposed" or "throughput"; empty: both
	seed    uint64
}

// mtu is Ethernet's.
const mtu = 1500

func main() {
	var o options
	flag.StringVar(&o.out, "out", "", "file of the report; empty: standard output")
	flag.DurationVar(&o.seconds, "for", 2*time.Second, "duration of each throughput measurement, after two seconds of warm-up")
	flag.IntVar(&o.repeat, "repeat", 5, "runs of each exposed time")
	flag.Uint64Var(&o.seed, "seed", 1, "seed of the packet loss")
	flag.StringVar(&o.only, "only", "", "part to measure: exposed or throughput; empty: both")
	flag.Parse()
	if o.only != "" && o.only != "exposed" && o.only != "throughput" {
		fmt.Fprintf(os.Stderr, "links: --only %q, want exposed or throughput\n", o.only)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := o.bench(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "links:", err)
		os.Exit(1)
	}
}

func (o *options) bench(ctx context.Context) error {
	var b strings.Builder
	commit, _ := exec.Command("git", "rev-parse", "--short", "HEAD").Output() // outside of a checkout it stays unknown
	fmt.Fprintf(&b, "# KV transfer over slow, lossy and long links\n\nMachine: %s. Commit %s.\n\n    make bench-links\n\n", report.Machine(), strings.TrimSpace(string(commit)))
	fmt.Fprintf(&b, "Two network namespaces, the kernel's TCP (Linux %s; its congestion controls: %s), packets of %d bytes carried between them by `internal/netlab`.\n\n",
		kernel(), strings.TrimSpace(readFile("/proc/sys/net/ipv4/tcp_available_congestion_control")), mtu)
	var err error
	if o.only != "throughput" {
		err = o.exposed(ctx, &b)
	}
	if o.only != "exposed" {
		err = errors.Join(err, o.throughput(ctx, &b))
	}
	if err != nil {
		fmt.Fprint(os.Stderr, b.String()) // the part that has been measured
		return err
	}
	if o.out == "" {
		_, err := os.Stdout.WriteString(b.String())
		return err
	}
	return os.WriteFile(o.out, []byte(b.String()), 0o644)
}

func readFile(name string) string {
	b, _ := os.ReadFile(name) // empty if it cannot be read
	return string(b)
}

func kernel() string {
	return strings.TrimSpace(readFile("/proc/sys/kernel/osrelease")) + "/" + runtime.GOARCH
}

// ends are the two places of a lab.
type ends struct {
	lab            *netlab.Lab
	writer, reader *netlab.Place
	from, to       netip.Addr
}

func newEnds(seed uint64) (*ends, error) {
	e := &ends{lab: netlab.New(mtu, seed), from: netip.MustParseAddr("10.78.0.1"), to: netip.MustParseAddr("10.78.0.2")}
	var err error
	if e.writer, err = e.lab.Place(e.from); err == nil {
		e.reader, err = e.lab.Place(e.to)
	}
	if err != nil {
		e.lab.Close()
		return nil, err
	}
	return e, nil
}
