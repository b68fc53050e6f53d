package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-serving/tandem/bench/report"
)

// A gate compares two binaries of tandem: -before and -tandem. A round starts both and puts the
// same load on both at the same time, so that other load of the machine affects both alike. The
// median of the rounds' ratios counts, because the speed of a process also depends on its memory
// layout, which differs between starts. Counts are taken over the same number of answers, without
// other load.

// gateLoad is one load of a gate.
type gateLoad struct {
	name   string
	native bool // with decode nodes; false: with upstreams
	conns  int
	ask    ask
}

var gateLoads = []gateLoad{
	{"upstreams, answer of 100 bytes", false, 8, ask{prompt: 100}},
	{"upstreams, prompt of 100 KB", false, 8, ask{prompt: 100 << 10}},
	{"upstreams, 128 streams", false, 128, ask{prompt: 200, tokens: 64}},
	{"native, answer of one token", true, 8, ask{prompt: 200, tokens: 1}},
	{"native, 128 streams", true, 128, ask{prompt: 200, tokens: 64}},
}

// gateFigure is a figure of a gate. It passes if the ratio is at most most, or if the figures
// differ by at most slack, by which two runs of one binary differ.
type gateFigure struct {
	name        string
	most, slack float64
}

var gateFigures = []gateFigure{
	{"CPU, µs", 1.05, 0},
	{"allocations", 1.02, .5},
	{"allocated bytes", 1.02, 64},
	{"reads and writes", 1.02, 0},
	{"wakes of threads", 1.10, .05}, // it depends on how long idle threads spin
}

// middle returns the median.
func middle(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

// usage is the use of resources by a gateway's process since its start, in the order of
// gateFigures.
type usage [5]float64

// gate measures both binaries. It returns an error if -tandem does not pass.
func gate(ctx context.Context, o *options) error {
	samples := map[string]map[string][]usage{} // by load and binary, one a round
	for round := range o.rounds {
		for _, native := range []bool{false, true} {
			if err := gateRound(ctx, o, round, native, samples); err != nil {
				return err
			}
		}
		fmt.Fprintf(os.Stderr, "round %d of %d\n", round+1, o.rounds)
	}
	text, ok := gatePage(o, samples)
	fmt.Print(text)
	if !ok {
		return fmt.Errorf("%s needs more than %s", o.binary, o.before)
	}
	return nil
}

// gateRound starts both binaries and measures each load once.
func gateRound(ctx context.Context, o *options, round int, native bool, samples map[string]map[string][]usage) error {
	b := &bed{versions: map[string]string{}}
	defer b.close()
	var urls []string
	for range backends {
		c, url, err := startBackend("")
		if err != nil {
			return err
		}
		b.children, urls = append(b.children, c), append(urls, url)
	}
	names, binaries := []string{"before", "after"}, []string{o.before, o.binary}
	for i := range names {
		name, binary := names[(i+round)%2], binaries[(i+round)%2]
		if native {
			p, err := b.startNative(o, "native-"+name, binary)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			p.name, b.proxies = name, append(b.proxies, p)
			continue
		}
		p := peers[0]
		p.name, p.binary = name, func(*options) string { return binary }
		if err := b.startPeer(o, p, urls, ""); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	for _, p := range b.proxies {
		if err := p.await(ctx); err != nil {
			return err
		}
	}
	for _, l := range gateLoads {
		if l.native != native {
			continue
		}
		got, err := l.run(ctx, o, b.proxies)
		if err != nil {
			return fmt.Errorf("%s: %w", l.name, err)
		}
		if samples[l.name] == nil {
			samples[l.name] = map[string][]usage{}
		}
		for i, p := range b.proxies {
			counts, err := l.count(ctx, p)
			if err != nil {
				return fmt.Errorf("%s, %s: %w", p.name, l.name, err)
			}
			counts[0] = got[i][0]
			got[i] = counts
			samples[l.name][p.name] = append(samples[l.name][p.name], got[i])
		}
	}
	return nil
}

// run measures the CPU time that each gateway uses for an answer, or for a token of streams.
func (l *gateLoad) run(ctx context.Context, o *options, proxies []*proxy) (all []usage, err error) {
	clients := make([]*client, len(proxies))
	for i, p := range proxies {
		clients[i] = drive(p, l.conns, l.ask)
	}
	defer func() {
		for i, c := range clients {
			if ended := c.end(); ended != nil {
				err = fmt.Errorf("%s: %w", proxies[i].name, ended)
			}
		}
	}()
	warm := o.window / 4
	if l.ask.tokens > 1 {
		warm = time.Duration(l.ask.tokens) * gap * 3 / 2
	}
	units := func(c *client) int64 {
		if l.ask.tokens > 1 {
			return c.tokens.Load()
		}
		return c.answers.Load()
	}
	if err := pause(ctx, warm); err != nil {
		return nil, err
	}
	before, began := make([]usage, len(proxies)), make([]int64, len(proxies))
	for i, p := range proxies {
		if before[i], err = p.usage(ctx); err != nil {
			return nil, err
		}
		began[i] = units(clients[i])
	}
	if err := pause(ctx, o.window); err != nil {
		return nil, err
	}
	for i, p := range proxies {
		got := float64(units(clients[i]) - began[i])
		u, err := p.usage(ctx)
		if err != nil {
			return nil, err
		}
		if got == 0 {
			return nil, fmt.Errorf("%s: no answer in %v", p.name, o.window)
		}
		all = append(all, usage{(u[0] - before[i][0]) / got})
	}
	return all, nil
}

// gateAnswers is the number of answers of a connection while usage is counted.
const gateAnswers = 2000

// count returns the usage per answer, or per token of streams, of everything but CPU time.
func (l *gateLoad) count(ctx context.Context, p *proxy) (u usage, err error) {
	n, units := gateAnswers, 1
	if l.ask.tokens > 1 {
		n, units = 4, l.ask.tokens
	}
	conns := make([]*conn, l.conns)
	defer func() {
		for _, k := range conns {
			if k != nil {
				k.c.Close()
			}
		}
	}()
	for i := range conns {
		if conns[i], err = dial(p); err != nil {
			return u, err
		}
	}
	exchange := func(n int) error {
		var all sync.WaitGroup
		errs := make([]error, len(conns))
		for i, k := range conns {
			all.Go(func() {
				request, seen := l.ask.request(p.addr, i), new(atomic.Int64)
				for n := n; n > 0 && errs[i] == nil; n-- {
					_, _, errs[i] = k.exchange(request, l.ask.tokens, seen)
				}
			})
		}
		all.Wait()
		return errors.Join(errs...)
	}
	if err := exchange(max(1, n/10)); err != nil { // fills connections and pools
		return u, err
	}
	var at [3]usage
	for i := range at {
		if at[i], err = p.usage(ctx); err != nil {
			return u, err
		}
		if i == 1 {
			if err := exchange(n); err != nil {
				return u, err
			}
		}
	}
	for i := range u { // without the usage of reading the usage
		u[i] = (at[2][i] - at[1][i] - (at[1][i] - at[0][i])) / float64(n*units*len(conns))
	}
	return u, nil
}

// usage reads the usage of the gateway's process.
func (p *proxy) usage(ctx context.Context) (u usage, err error) {
	cpu, err := p.cpu()
	if err != nil {
		return u, err
	}
	u[0] = float64(cpu.Microseconds())
	heap, err := p.heap(ctx)
	if err != nil {
		return u, err
	}
	u[1], u[2] = heap["go_memstats_mallocs_total"], heap["go_memstats_alloc_bytes_total"]
	pid := p.children[0].cmd.Process.Pid
	calls, err := sumOf(fmt.Sprintf("/proc/%d/io", pid), "syscr:", "syscw:")
	if err != nil {
		return u, err
	}
	u[3] = calls
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil {
		return u, err
	}
	for _, t := range tasks {
		n, err := sumOf(t, "voluntary_ctxt_switches:")
		if err != nil {
			return u, err
		}
		u[4] += n
	}
	return u, nil
}

// sumOf returns the sum of the numbers in lines "NAME NUMBER" of a file.
func sumOf(path string, names ...string) (sum float64, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) == 2 && slices.Contains(names, f[0]) {
			var v float64
			if _, err := fmt.Sscan(f[1], &v); err != nil {
				return 0, fmt.Errorf("%s: %q: %w", path, line, err)
			}
			sum += v
		}
	}
	return sum, nil
}

// heap returns the memory metrics of a gateway's Go runtime.
func (p *proxy) heap(ctx context.Context) (map[string]float64, error) {
	req, err := http.NewRequestWithContext(ctx, "GET", "http://"+p.addr+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+apiKey)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	got := map[string]float64{}
	lines := bufio.NewScanner(io.LimitReader(resp.Body, 4<<20))
	for lines.Scan() {
		var v float64
		name, value, _ := strings.Cut(lines.Text(), " ")
		if !strings.HasPrefix(name, "go_memstats_") {
			continue
		}
		if _, err := fmt.Sscan(value, &v); err != nil {
			return nil, fmt.Errorf("/metrics: %q: %w", lines.Text(), err)
		}
		got[name] = v
	}
	if got["go_memstats_mallocs_total"] == 0 {
		return nil, fmt.Errorf("/metrics answered %s without go_memstats_mallocs_total", resp.Status)
	}
	return got, lines.Err()
}

// gatePage returns the table, and whether every figure passes.
func gatePage(o *options, samples map[string]map[string][]usage) (string, bool) {
	var b strings.Builder
	fmt.Fprintf(&b, "# Comparison of two binaries\n\n`bench/gateway -before %s -tandem %s -rounds %d -window %v` at %s; %s.\nEach figure is per answer, or per token of streams. Medians of the rounds, of figures and of ratios.\n\n",
		o.before, o.binary, o.rounds, o.window, commit(), report.Machine())
	fmt.Fprint(&b, "| load | figure | before | after | after / before | at most | passes |\n|---|---|---|---|---|---|---|\n")
	all := true
	for _, l := range gateLoads {
		for i, f := range gateFigures {
			var v [2][]float64 // before and after
			var ratios []float64
			for round := range o.rounds {
				for at, name := range []string{"before", "after"} {
					v[at] = append(v[at], samples[l.name][name][round][i])
				}
				ratios = append(ratios, v[1][round]/v[0][round])
			}
			ratio := middle(ratios)
			ok := ratio <= f.most || middle(v[1])-middle(v[0]) <= f.slack && f.slack > 0
			all = all && ok
			fmt.Fprintf(&b, "| %s | %s | %.4g | %.4g | %.3f | %.2f | %v |\n", l.name, f.name, middle(v[0]), middle(v[1]), ratio, f.most, ok)
		}
	}
	return b.String(), all
}
