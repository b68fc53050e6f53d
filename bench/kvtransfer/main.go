// Command kvtransfer compares Tandem's KV transfer with other programs on this machine, in one run:
// iperf3, a plain C program that moves the same scattered pages with writev and readv, another one
// that uses libfabric, memcpy of the pages in one thread, NIXL (UCX over TCP) and Mooncake's
// transfer engine. It is `make bench-kvtransfer`.
//
// The programs take turns, several times, so that other load on the machine affects all of them
// alike. The median of each program's runs counts. Every program but iperf3 compares the bytes that
// arrived. The report is Markdown, with the bars to meet and whether they are met. Invariant: a
// program that could not run has a line with the reason, never a number.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The transfers: 512 MiB as scattered pages of 32 KiB, and 1 MiB.
const (
	nPages      = 16384
	pageBytes   = 32768
	smallPages  = 32
	runTimeout  = 2 * time.Minute
	iperfSecond = "1"
)

// options are the command's flags.
type options struct {
	binary, peers, plain, fabric, python, prefix, out, keep, only string
	repeat, rounds, smalls                                        int
	most                                                          time.Duration
	others                                                        float64
}

// result is the output of one run of a program.
type result struct {
	GBps  float64 `json:"gb_per_second"`
	PerGB float64 `json:"cpu_seconds_per_gb"`
	P50   float64 `json:"small_p50_ms"`
	P90   float64 `json:"small_p90_ms"`
	// Others is the share of the machine, from 0 to 1, that other processes used meanwhile.
	Others float64 `json:"others"`
}

// contender is a program and its runs.
type contender struct {
	id, name string
	run      func(ctx context.Context, o *options) (result, error)
	results  []result
	err      error // of the last run if it failed
	nTries   int
	nFailed  int
	nNoisy   int // runs that do not count, because other processes used too much of the machine
}

func main() {
	var o options
	flag.StringVar(&o.binary, "binary", "bin/tandem", "path of tandem")
	flag.StringVar(&o.peers, "peers", "bench/kvtransfer/peers", "folder of the other programs' sources")
	flag.StringVar(&o.python, "python", "", "Python with nixl and mooncake-transfer-engine; empty: skip both")
	flag.StringVar(&o.prefix, "prefix", "", "command line to prepend to each run, such as 'nice -n -5'")
	flag.StringVar(&o.out, "out", "", "file of the report; empty: standard output")
	flag.StringVar(&o.keep, "keep", "", "file that stores the runs; runs of earlier calls count too, for machines that are seldom quiet")
	flag.StringVar(&o.only, "only", "", "programs to run, by the names in --keep, with * and ?, separated by commas: '*fabric*,memcpy'; empty: all")
	flag.DurationVar(&o.most, "for", time.Hour, "start no run after this time")
	flag.Float64Var(&o.others, "others", 0.1, "largest share of the machine, from 0 to 1, that other processes may use in a run that counts")
	flag.IntVar(&o.repeat, "repeat", 5, "runs of each program")
	flag.IntVar(&o.rounds, "rounds", 3, "rounds of 512 MiB in a run")
	flag.IntVar(&o.smalls, "small-rounds", 200, "transfers of 1 MiB in a run")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := o.bench(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "kvtransfer:", err)
		os.Exit(1)
	}
}

func (o *options) bench(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "kvtransfer")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	o.plain = filepath.Join(dir, "plain")
	if out, err := exec.CommandContext(ctx, "gcc", "-O2", "-o", o.plain, filepath.Join(o.peers, "plain.c")).CombinedOutput(); err != nil {
		return fmt.Errorf("compiling plain.c: %w\n%s", err, out)
	}
	all, err := chosen(contenders(o.python != ""), o.only)
	if err != nil {
		return err
	}
	o.fabric = filepath.Join(dir, "fabric")
	if out, err := exec.CommandContext(ctx, "gcc", "-O2", "-o", o.fabric, filepath.Join(o.peers, "fabric.c"), "-lfabric").CombinedOutput(); err != nil {
		return fmt.Errorf("compiling fabric.c, for which Debian has libfabric-dev: %w\n%s", err, out)
	}
	kept := make(map[string][]result)
	if b, err := os.ReadFile(o.keep); err == nil {
		if err := json.Unmarshal(b, &kept); err != nil {
			return fmt.Errorf("--keep %s: %w", o.keep, err)
		}
	}
	for _, c := range all {
		c.results = kept[c.id]
	}
	began := time.Now()
	for c := next(all, o.repeat); c != nil && ctx.Err() == nil; c = next(all, o.repeat) {
		for machineUse().othersAfter(200*time.Millisecond) > o.others && time.Since(began) < o.most {
		}
		if time.Since(began) >= o.most {
			break
		}
		fmt.Fprintf(os.Stderr, "%d/%d %s: %s\n", len(c.results)+1, o.repeat, c.name, c.turn(ctx, o))
		kept[c.id] = c.results
		if err := o.save(kept); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	text := table(o, all)
	if o.out == "" {
		_, err = os.Stdout.WriteString(text)
		return err
	}
	before, _ := os.ReadFile(o.out) // may not exist
	return os.WriteFile(o.out, []byte(text+notes(string(before))), 0o644)
}

// chosen returns the contenders whose id matches a pattern of only.
func chosen(all []*contender, only string) ([]*contender, error) {
	if only == "" {
		return all, nil
	}
	var some []*contender
	for _, c := range all {
		for p := range strings.SplitSeq(only, ",") {
			if ok, err := path.Match(p, c.id); err != nil {
				return nil, fmt.Errorf("--only %s: %w", p, err)
			} else if ok {
				some = append(some, c)
				break
			}
		}
	}
	if len(some) == 0 {
		return nil, fmt.Errorf("--only %s: no program has such a name", only)
	}
	return some, nil
}

// maxTries bounds the runs of a program for each run that counts.
const maxTries = 10

// next returns the program to run: the one with the fewest runs that count, and of those with the
// fewest runs; nil if all have enough.
func next(all []*contender, repeat int) (c *contender) {
	for _, x := range all {
		if x.run == nil || len(x.results) >= repeat || x.nTries >= maxTries*repeat {
			continue
		}
		if c == nil || len(x.results) < len(c.results) || len(x.results) == len(c.results) && x.nTries < c.nTries {
			c = x
		}
	}
	return c
}

// turn runs a program once and describes the result.
func (c *contender) turn(ctx context.Context, o *options) string {
	c.nTries++
	before := machineUse()
	r, err := c.run(ctx, o)
	if err != nil {
		c.err = err
		c.nFailed++
		return err.Error()
	}
	if r.Others = before.others(); r.Others > o.others {
		c.nNoisy++
		return fmt.Sprintf("%.2f GB/s, which does not count: others took %.0f %% of the machine", r.GBps, 100*r.Others)
	}
	c.results = append(c.results, r)
	return fmt.Sprintf("%.2f GB/s", r.GBps)
}

// save stores the runs so far.
func (o *options) save(kept map[string][]result) error {
	if o.keep == "" {
		return nil
	}
	b, err := json.Marshal(kept)
	if err != nil {
		return err
	}
	return os.WriteFile(o.keep, b, 0o644)
}

// contenders returns all programs, in the order of their turns.
func contenders(python bool) []*contender {
	all := []*contender{
		{id: "iperf", name: "iperf3", run: iperf("1")},
		{id: "c", name: "C, writev and readv", run: plain(strconv.Itoa(nPages), strconv.Itoa(pageBytes))},
		{id: "tcp", name: "Tandem", run: ours("--transport", "tcp", "--streams", "1", "--no-checksum")},
		{id: "crc", name: "Tandem with CRC32C", run: ours("--transport", "tcp", "--streams", "1")},
		{id: "iperf2", name: "iperf3 -P2", run: iperf("2")},
		{id: "tcp2", name: "Tandem, 2 streams", run: ours("--transport", "tcp", "--streams", "2", "--no-checksum")},
		{id: "crc2", name: "Tandem, 2 streams, with CRC32C: as nodes do", run: ours("--transport", "tcp", "--streams", "2")},
		{id: "memcpy", name: "memcpy, one thread", run: plain("memcpy", strconv.Itoa(nPages), strconv.Itoa(pageBytes))},
		{id: "shm", name: "Tandem, shared memory", run: ours("--transport", "shm", "--streams", "1", "--no-checksum")},
		{id: "shmcrc", name: "Tandem, shared memory, with CRC32C", run: ours("--transport", "shm", "--streams", "1")},
	}
	for _, p := range []string{"tcp", "shm"} {
		all = append(all,
			&contender{id: "c-fabric-" + p, name: "C, libfabric " + p, run: writes(p)},
			&contender{id: "fabric-" + p, name: "Tandem, rdma by libfabric " + p, run: ours("--transport", "rdma", "--fabric-provider", p, "--streams", "1", "--no-checksum")})
	}
	nixl := &contender{id: "nixl", name: "NIXL, UCX over TCP", run: script("nixl_tcp.py")}
	mooncake := &contender{id: "mooncake", name: "Mooncake, TCP", run: script("mooncake_tcp.py")}
	if !python {
		nixl.run, mooncake.run = nil, nil
		nixl.err, mooncake.err = errors.New("no --python given"), errors.New("no --python given")
	}
	return append(all, nixl, mooncake)
}

// command returns a program's command with the prefix and a time limit.
func (o *options) command(ctx context.Context, name string, args ...string) (*exec.Cmd, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, runTimeout)
	words := append(append(strings.Fields(o.prefix), name), args...)
	cmd := exec.CommandContext(ctx, words[0], words[1:]...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 5 * time.Second
	return cmd, cancel
}

// output runs a program and returns its standard output.
func (o *options) output(ctx context.Context, name string, args ...string) ([]byte, error) {
	cmd, cancel := o.command(ctx, name, args...)
	defer cancel()
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		lines := strings.Split(strings.TrimSpace(stderr.String()), "\n")
		return nil, fmt.Errorf("%s: %w: %s", filepath.Base(name), err, lines[len(lines)-1])
	}
	return out, nil
}

func iperf(streams string) func(context.Context, *options) (result, error) {
	return func(ctx context.Context, o *options) (result, error) {
		script := `iperf3 -s -1 -p 5998 >/dev/null & sleep 0.3; iperf3 -c 127.0.0.1 -p 5998 -t ` + iperfSecond + ` -J -P ` + streams + `; wait`
		out, err := o.output(ctx, "sh", "-c", script)
		if err != nil {
			return result{}, err
		}
		var r struct {
			Error string `json:"error"`
			End   struct {
				Received struct {
					Bits    float64 `json:"bits_per_second"`
					Bytes   float64 `json:"bytes"`
					Seconds float64 `json:"seconds"`
				} `json:"sum_received"`
				CPU struct {
					Host   float64 `json:"host_total"`
					Remote float64 `json:"remote_total"`
				} `json:"cpu_utilization_percent"`
			} `json:"end"`
		}
		if err := json.Unmarshal(out, &r); err != nil || r.Error != "" || r.End.Received.Bytes == 0 {
			return result{}, fmt.Errorf("iperf3: %w %s", errors.Join(err), r.Error)
		}
		seconds := (r.End.CPU.Host + r.End.CPU.Remote) / 100 * r.End.Received.Seconds
		return result{GBps: r.End.Received.Bits / 8e9, PerGB: seconds / (r.End.Received.Bytes / 1e9)}, nil
	}
}

func plain(args ...string) func(context.Context, *options) (result, error) {
	return func(ctx context.Context, o *options) (result, error) {
		all := append(slices.Clone(args), strconv.Itoa(o.rounds))
		if args[0] != "memcpy" {
			all = append(all, strconv.Itoa(smallPages), strconv.Itoa(o.smalls))
		}
		out, err := o.output(ctx, o.plain, all...)
		if err != nil {
			return result{}, err
		}
		var r result
		return r, json.Unmarshal(out, &r)
	}
}

// writes returns a function that runs the C program over a provider of libfabric.
func writes(provider string) func(context.Context, *options) (result, error) {
	return func(ctx context.Context, o *options) (result, error) {
		out, err := o.output(ctx, o.fabric, provider, strconv.Itoa(nPages), strconv.Itoa(pageBytes), strconv.Itoa(o.rounds), strconv.Itoa(smallPages), strconv.Itoa(o.smalls))
		if err != nil {
			return result{}, err
		}
		var r result
		return r, json.Unmarshal(out, &r)
	}
}

func script(name string) func(context.Context, *options) (result, error) {
	return func(ctx context.Context, o *options) (result, error) {
		out, err := o.output(ctx, o.python, filepath.Join(o.peers, name), strconv.Itoa(nPages), strconv.Itoa(pageBytes),
			strconv.Itoa(o.rounds), strconv.Itoa(smallPages), strconv.Itoa(o.smalls))
		if err != nil {
			return result{}, err
		}
		var r result
		_, line, ok := bytes.Cut(out, []byte("RESULT "))
		if !ok {
			return r, fmt.Errorf("%s printed no result", name)
		}
		line, _, _ = bytes.Cut(line, []byte("\n"))
		return r, json.Unmarshal(line, &r)
	}
}

// ours returns a function that runs both sides of tandem bench transfer, in two processes.
func ours(args ...string) func(context.Context, *options) (result, error) {
	return func(ctx context.Context, o *options) (result, error) {
		text := `"$0" bench transfer --listen 127.0.0.1:7498 >/dev/null & P=$!; sleep 0.2; "$0" bench transfer --peer 127.0.0.1:7498 --json "$@"; RC=$?; kill -INT $P; wait $P; exit $RC`
		words := append([]string{"-c", text, o.binary}, args...)
		words = append(words, "--pages", strconv.Itoa(nPages), "--page-bytes", strconv.Itoa(pageBytes), "--small-pages", strconv.Itoa(smallPages),
			"--rounds", strconv.Itoa(o.rounds), "--small-rounds", strconv.Itoa(o.smalls))
		out, err := o.output(ctx, "sh", words...)
		if err != nil {
			return result{}, err
		}
		var r struct {
			GBps   float64   `json:"gb_per_second"`
			Writer float64   `json:"writer_cpu_seconds_per_gb"`
			Reader float64   `json:"reader_cpu_seconds_per_gb"`
			Small  []float64 `json:"small_millis"`
		}
		if err := json.Unmarshal(out, &r); err != nil || len(r.Small) != 5 {
			return result{}, fmt.Errorf("tandem bench transfer: %w: %s", err, out)
		}
		return result{GBps: r.GBps, PerGB: r.Writer + r.Reader, P50: r.Small[1], P90: r.Small[2]}, nil
	}
}
