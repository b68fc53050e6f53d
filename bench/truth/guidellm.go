package truth

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/engine/builtin"
)

// Largest difference between guidellm's figures and ours, in percent, and the least factor
// between guidellm's CPU per token and ours.
const (
	maxApart    = 5.0
	leastFactor = 3.0
)

// guidellmDist is a distribution in guidellm's JSON.
type guidellmDist struct {
	Successful struct {
		Mean        float64            `json:"mean"`
		Median      float64            `json:"median"`
		Percentiles map[string]float64 `json:"percentiles"`
	} `json:"successful"`
}

// guidellmReport is the part of guidellm's JSON that is read.
type guidellmReport struct {
	Benchmarks []struct {
		Metrics struct {
			Requests guidellmDist `json:"requests_per_second"`
			Tokens   guidellmDist `json:"output_tokens_per_second"`
			TTFT     guidellmDist `json:"time_to_first_token_ms"`
			ITL      guidellmDist `json:"inter_token_latency_ms"` // per request, first to last token: our TPOT
			Latency  guidellmDist `json:"request_latency"`        // seconds
		} `json:"metrics"`
	} `json:"benchmarks"`
}

// compareGuidellm loads one mock with this client and then with guidellm. Both use the same number
// of streams, requests and tokens; all streams start at once, and each request that ends
// is followed by another.
func (o *Options) compareGuidellm(ctx context.Context, n int) error {
	s, err := serve(ctx, o.Binary)
	if err != nil {
		return err
	}
	defer s.stop() //nolint:errcheck // all runs have ended
	fmt.Fprintf(o.ErrOut, "%d streams, this client and guidellm\n", n)
	requests := requestsPerPlace * n
	ours, err := measure(ctx, s, "--backend", "openai-chat", "--random-output-len", strconv.Itoa(tokensPerStream), "--num-prompts", strconv.Itoa(requests), "--max-concurrency", strconv.Itoa(n))
	if err != nil {
		return err
	}
	if a, err := postNothing(ctx, s.url+"/truth/forget"); err != nil || a != 200 {
		return fmt.Errorf("the mock's record cannot be cleared: status %d: %w", a, err)
	}
	theirs, cpu, err := o.runGuidellm(ctx, s, n, requests)
	if err != nil {
		return err
	}
	var streams []*Stream
	if err := s.get(ctx, "/truth", &streams); err != nil {
		return err
	}
	tokens := 0
	for _, t := range streams {
		tokens += len(t.Sent)
	}
	if len(streams) < requests {
		return fmt.Errorf("guidellm sent %d of %d requests", len(streams), requests)
	}
	return o.reportGuidellm(n, ours, theirs, cpu/time.Duration(tokens))
}

// reportGuidellm writes and checks the figures of both.
func (o *Options) reportGuidellm(n int, ours *measured, theirs *guidellmReport, cpu time.Duration) error {
	m := &theirs.Benchmarks[0].Metrics
	st := func(key string) report.Stats { return ours.got.Stats[key] }
	var wrong []error
	fmt.Fprintf(o.Out, "\n| %d streams | tandem bench serve | truth of its run | guidellm | difference |\n|---|---|---|---|---|\n", n)
	for _, r := range []struct {
		name            string
		a, truth, other float64
	}{
		{"Requests/s", ours.got.RequestThroughput(), ours.truth.RequestThroughput(), m.Requests.Successful.Mean},
		{"Output tokens/s", ours.got.Throughput(), ours.truth.Throughput(), m.Tokens.Successful.Mean},
		{"Mean TTFT (ms)", st("ttft").Mean, ours.truth.Stats["ttft"].Mean, m.TTFT.Successful.Mean},
		{"Median TTFT (ms)", st("ttft").Median, ours.truth.Stats["ttft"].Median, m.TTFT.Successful.Median},
		{"P99 TTFT (ms)", st("ttft").Percentiles[2], ours.truth.Stats["ttft"].Percentiles[2], m.TTFT.Successful.Percentiles["p99"]},
		{"Mean TPOT (ms)", st("tpot").Mean, ours.truth.Stats["tpot"].Mean, m.ITL.Successful.Mean},
		{"Median TPOT (ms)", st("tpot").Median, ours.truth.Stats["tpot"].Median, m.ITL.Successful.Median},
		{"Mean E2EL (ms)", st("e2el").Mean, ours.truth.Stats["e2el"].Mean, 1e3 * m.Latency.Successful.Mean},
		{"Median E2EL (ms)", st("e2el").Median, ours.truth.Stats["e2el"].Median, 1e3 * m.Latency.Successful.Median},
		{"P99 E2EL (ms)", st("e2el").Percentiles[2], ours.truth.Stats["e2el"].Percentiles[2], 1e3 * m.Latency.Successful.Percentiles["p99"]},
	} {
		apart := share(r.other, r.a)
		fmt.Fprintf(o.Out, "| %s | %.2f | %.2f | %.2f | %.2f %% |\n", r.name, r.a, r.truth, r.other, apart)
		if apart > maxApart {
			wrong = append(wrong, fmt.Errorf("%w: %s: %.2f here, %.2f by guidellm", ErrWrong, r.name, r.a, r.other))
		}
	}
	factor := cpu.Seconds() / ours.cpuPerToken().Seconds()
	fmt.Fprintf(o.Out, "| CPU per token | %v | | %v | %.0f times |\n", ours.cpuPerToken().Round(100*time.Nanosecond), cpu.Round(100*time.Nanosecond), factor)
	if factor < leastFactor {
		wrong = append(wrong, fmt.Errorf("%w: guidellm uses %.1f times our CPU per token, want at least %.0f", ErrWrong, factor, leastFactor))
	}
	return errors.Join(wrong...)
}

// runGuidellm returns its report, and the CPU time that it and its workers used from the
// first request to the last token.
func (o *Options) runGuidellm(ctx context.Context, s *server, n, requests int) (*guidellmReport, time.Duration, error) {
	dir, err := os.MkdirTemp("", "tandem-guidellm-")
	if err != nil {
		return nil, 0, err
	}
	defer os.RemoveAll(dir)
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		data, err := fs.ReadFile(builtin.FS(), name)
		if err != nil {
			return nil, 0, err
		}
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			return nil, 0, err
		}
	}
	result := filepath.Join(dir, "result.json")
	cmd := exec.CommandContext(ctx, o.Guidellm, "run",
		"--backend", "kind=openai_http,model=mock,target="+s.url, "--profile", "kind=concurrent,streams="+strconv.Itoa(n),
		"--constraint", "kind=max_requests,count="+strconv.Itoa(requests), "--tokenizer", "kind=huggingface_auto,model="+dir,
		"--data", fmt.Sprintf("kind=synthetic_text,prompt_tokens=64,output_tokens=%d", tokensPerStream),
		"--output", "kind=json,path="+result, "--disable-console")
	cmd.Env = append(os.Environ(), "HF_HUB_OFFLINE=1")
	cmd.Stderr = o.ErrOut
	if err := cmd.Start(); err != nil {
		return nil, 0, err
	}
	cpu := watchCPU(ctx, s, cmd.Process.Pid, requests)
	if err := cmd.Wait(); err != nil {
		return nil, 0, fmt.Errorf("guidellm: %w", err)
	}
	used, err := cpu()
	if err != nil {
		return nil, 0, err
	}
	data, err := os.ReadFile(result)
	if err != nil {
		return nil, 0, err
	}
	var r guidellmReport
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, 0, fmt.Errorf("guidellm's result: %w", err)
	}
	if len(r.Benchmarks) != 1 {
		return nil, 0, fmt.Errorf("guidellm's result has %d benchmarks", len(r.Benchmarks))
	}
	return &r, used, nil
}

// watchInterval is how often a program's CPU time is read.
const watchInterval = 100 * time.Millisecond

// watchCPU follows a process tree's CPU time. The returned function waits for its end and
// returns the time used between the first request's arrival and the last answer's end.
func watchCPU(ctx context.Context, s *server, pid, requests int) func() (time.Duration, error) {
	var mu sync.Mutex
	var from, to time.Duration
	var seen error
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			used, alive := treeCPU(pid)
			var count struct{ Began, Ended int }
			err := s.get(ctx, "/truth/count", &count)
			mu.Lock()
			seen = err
			if count.Began == 0 {
				from = used
			}
			to = max(to, used) // used shrinks when processes end
			mu.Unlock()
			if err != nil || !alive || count.Ended >= requests {
				return
			}
			time.Sleep(watchInterval)
		}
	}()
	return func() (time.Duration, error) {
		<-ended
		mu.Lock()
		defer mu.Unlock()
		return to - from, seen
	}
}

// treeCPU returns the CPU time of a process and its descendants, by Linux's /proc, and
// whether the process still exists.
func treeCPU(root int) (sum time.Duration, alive bool) {
	parents, cpu := map[int]int{}, map[int]time.Duration{}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0, false
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		data, err := os.ReadFile(filepath.Join("/proc", e.Name(), "stat"))
		if err != nil {
			continue
		}
		// After the name, which ends with the last parenthesis: state, parent, …, and from
		// the twelfth field on user and system time, in hundredths of a second.
		_, rest, _ := strings.Cut(string(data[strings.LastIndexByte(string(data), ')'):]), " ")
		f := strings.Fields(rest)
		if len(f) < 13 {
			continue
		}
		parents[pid], _ = strconv.Atoi(f[1])
		user, _ := strconv.Atoi(f[11])
		system, _ := strconv.Atoi(f[12])
		cpu[pid] = time.Duration(user+system) * 10 * time.Millisecond
	}
	_, alive = cpu[root]
	for pid := range cpu {
		for p, hops := pid, 0; p > 0 && hops < 64; p, hops = parents[p], hops+1 {
			if p == root {
				sum += cpu[pid]
				break
			}
		}
	}
	return sum, alive
}
