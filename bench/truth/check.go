package truth

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/tandem-serving/tandem/bench"
	"github.com/tandem-serving/tandem/bench/load"
	"github.com/tandem-serving/tandem/bench/report"
)

// ErrWrong means that a load tester's figures are wrong, or cost too much CPU.
var ErrWrong = errors.New("truth: the figures do not hold")

// Options are the settings of Check.
type Options struct {
	Binary   string        // tandem, which serves the mock in a process of its own
	Streams  []int         // concurrent streams, one run for each number
	MaxCores float64       // CPU bound of the client at each of them
	Guidellm string        // the program; empty: only this client
	Runs     []string      // some of Runs; guidellm's needs its program
	Stall    time.Duration // of the runs with a stall
	Out      io.Writer     // the report, as Markdown
	ErrOut   io.Writer     // progress
}

// Runs are the names of the runs for each number of streams.
var Runs = []string{"steady", "stall", "guidellm"}

// Parameters of a run. Each stream is a request of tokensPerStream tokens at
// tokensPerSecond, followed by requestsPerPlace-1 others in the same place.
const (
	tokensPerStream  = 100
	requestsPerPlace = 2
	tokensPerSecond  = 10
	stallTokens      = 20 // shorter answers, so that many requests arrive in the stall
)

// Bounds of a stall. Requests arrive for 20 s. Those in a shorter stall are too few to be
// seen in the slowest 1 %; those in a longer one reach the median, with which the tail is
// compared.
const shortestStall, longestStall = 1500 * time.Millisecond, 8 * time.Second

// millis is the slack of small times.
const millis = 1.0

// server is a mock in a process of its own.
type server struct {
	url   string
	start time.Time
	cmd   *exec.Cmd
}

// serve starts a mock.
func serve(ctx context.Context, binary string, args ...string) (*server, error) {
	cmd := exec.CommandContext(ctx, binary, append([]string{"bench", "mock", "--port", "0"}, args...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	s := &server{cmd: cmd}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return nil, errors.Join(fmt.Errorf("the mock did not start: %w", err), s.stop())
	}
	s.url = strings.TrimSpace(line)
	var nanos int64
	if err := s.get(ctx, "/truth/start", &nanos); err != nil {
		return nil, errors.Join(err, s.stop())
	}
	s.start = time.Unix(0, nanos)
	return s, nil
}

func (s *server) stop() error {
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	err := s.cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) && !exit.Exited() {
		return nil // our signal ended it before it handled signals
	}
	return err
}

func (s *server) get(ctx context.Context, path string, v any) error {
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+path, nil)
	if err != nil {
		return err
	}
	a, err := http.DefaultClient.Do(q)
	if err != nil {
		return err
	}
	defer a.Body.Close()
	return json.NewDecoder(a.Body).Decode(v)
}

// postNothing returns the status of an empty POST.
func postNothing(ctx context.Context, url string) (int, error) {
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, url, nil)
	if err != nil {
		return 0, err
	}
	a, err := http.DefaultClient.Do(q)
	if err != nil {
		return 0, err
	}
	return a.StatusCode, a.Body.Close()
}

// measured is one run of bench serve, and the truth.
type measured struct {
	got, truth *report.Summary
	self       load.Self
}

// cpuPerToken returns the client's CPU time per token.
func (m *measured) cpuPerToken() time.Duration {
	return time.Duration(m.self.Cores * float64(m.got.Duration) / float64(max(1, m.got.Output)))
}

// measure runs bench serve in this process against a mock.
func measure(ctx context.Context, s *server, args ...string) (*measured, error) {
	var o bench.Options
	set := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	o.Register(set)
	if err := set.Parse(append([]string{"--base-url", s.url, "--model", "mock", "--skip-tokenizer-init", "--random-input-len", "64", "--temperature", "0",
		"--metric-percentiles", "50,90,99,99.9", "--goodput", "ttft:150", "--disable-tqdm"}, args...)); err != nil {
		return nil, err
	}
	res, err := bench.Serve(ctx, &o, io.Discard, io.Discard)
	if err != nil {
		return nil, err
	}
	var streams []*Stream
	if err := s.get(ctx, "/truth", &streams); err != nil {
		return nil, err
	}
	rec, err := Record(res.Record, streams, s.start, res.RequestID)
	if err != nil {
		return nil, err
	}
	return &measured{res.Summary, report.Summarize(rec, res.Summary.Options,
		func(i int) int { return rec.Outcomes[i].Prompt }, func(i int) int { return rec.Outcomes[i].Output }), res.Self}, nil
}

// Check makes all runs and writes the report. Its error lists the checks that failed.
func Check(ctx context.Context, o Options) error {
	if o.Stall < shortestStall || o.Stall > longestStall {
		return fmt.Errorf("%w: --stall %v: want %v to %v: a shorter one is not in the slowest 1 %% of the requests, a longer one is in their median", bench.ErrOption, o.Stall, shortestStall, longestStall)
	}
	for _, n := range o.Streams {
		if n < 1 {
			return fmt.Errorf("%w: --streams %d: want at least 1", bench.ErrOption, n)
		}
	}
	for _, r := range o.Runs {
		if !slices.Contains(Runs, r) {
			return fmt.Errorf("%w: --runs %s: want some of %s", bench.ErrOption, r, strings.Join(Runs, ","))
		}
	}
	if o.Guidellm == "" && slices.Equal(o.Runs, []string{"guidellm"}) {
		return fmt.Errorf("%w: --runs guidellm needs its program: --guidellm", bench.ErrOption)
	}
	var wrong []error
	keep := func(err error) error {
		if errors.Is(err, ErrWrong) {
			wrong, err = append(wrong, err), nil
		}
		return err
	}
	if err := o.runTandem(ctx, keep); err != nil {
		return err
	}
	if o.Guidellm != "" && slices.Contains(o.Runs, "guidellm") {
		for _, n := range o.Streams {
			if err := keep(o.compareGuidellm(ctx, n)); err != nil {
				return err
			}
		}
	}
	return errors.Join(wrong...)
}

// runTandem makes the runs without guidellm, if requested. keep collects the failed checks
// from their errors.
func (o *Options) runTandem(ctx context.Context, keep func(error) error) error {
	if !slices.ContainsFunc(o.Runs, func(r string) bool { return r != "guidellm" }) {
		return nil
	}
	fmt.Fprintf(o.Out, "| streams | run | generated tokens | tokens/s | figures | worst figure | reported | truth | client, cores | CPU per token | sending late, P99 |\n|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, n := range o.Streams {
		for _, stall := range []bool{false, true} {
			if !slices.Contains(o.Runs, map[bool]string{false: "steady", true: "stall"}[stall]) {
				continue
			}
			fmt.Fprintf(o.ErrOut, "%d streams, stall: %v\n", n, stall)
			if err := keep(o.runStreams(ctx, n, stall)); err != nil {
				return err
			}
		}
	}
	return nil
}

// runStreams makes a run with n streams.
func (o *Options) runStreams(ctx context.Context, n int, stall bool) error {
	args := []string{"--random-output-len", strconv.Itoa(tokensPerStream), "--num-prompts", strconv.Itoa(n * requestsPerPlace),
		"--max-concurrency", strconv.Itoa(n), "--request-rate", strconv.Itoa(n)}
	var pace []string
	name := "steady"
	if stall {
		// Without a bound on concurrency, the stall does not delay arrivals.
		seconds := stallTokens / tokensPerSecond
		args = []string{"--random-output-len", strconv.Itoa(stallTokens), "--num-prompts", strconv.Itoa(10 * n), "--request-rate", fmt.Sprint(float64(n) / float64(seconds))}
		pace = []string{"--stall-after", "8s", "--stall", o.Stall.String()}
		name = o.Stall.String() + " stall"
	}
	s, err := serve(ctx, o.Binary, pace...)
	if err != nil {
		return err
	}
	m, err := measure(ctx, s, args...)
	if err := errors.Join(err, s.stop()); err != nil {
		return err
	}
	rows := Compare(m.got, m.truth, millis)
	right := 0
	var wrong []error
	for _, r := range rows {
		if r.Deviation() <= 1 {
			right++
			continue
		}
		wrong = append(wrong, fmt.Errorf("%w: %d streams, %s: %s is reported as %.3f and was %.3f", ErrWrong, n, name, r.Name, r.Got, r.Truth))
	}
	w := Worst(rows)
	fmt.Fprintf(o.Out, "| %d | %s | %d | %.0f | %d of %d | %s | %.2f | %.2f | %.3f | %v | %v |\n", n, name, m.got.Output, m.got.Throughput(), right, len(rows),
		w.Name, w.Got, w.Truth, m.self.Cores, m.cpuPerToken().Round(100*time.Nanosecond), m.self.Lag.Round(10*time.Microsecond))
	if cores := m.cpuPerToken().Seconds() * float64(n) * tokensPerSecond; o.MaxCores > 0 && max(cores, m.self.Cores) > o.MaxCores {
		wrong = append(wrong, fmt.Errorf("%w: %d streams, %s: the client uses %.2f cores, want at most %.2f", ErrWrong, n, name, cores, o.MaxCores))
	}
	if stall {
		for _, key := range []string{"ttft", "e2el"} {
			tail, least := m.got.Stats[key].Percentiles[2]-m.got.Stats[key].Percentiles[0], 0.8*o.Stall.Seconds()*1e3
			fmt.Fprintf(o.ErrOut, "P99 %s is %.0f ms above the median\n", key, tail)
			if tail < least {
				wrong = append(wrong, fmt.Errorf("%w: %d streams: a stall of %v makes P99 %s only %.0f ms longer than the median", ErrWrong, n, o.Stall, key, tail))
			}
		}
	}
	return errors.Join(wrong...)
}

// share returns a deviation in percent.
func share(a, b float64) float64 { return 100 * math.Abs(a-b) / b }
