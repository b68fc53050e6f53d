package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench/report"
)

// Bounds of reading servers' metrics.
const (
	sampleInterval = 500 * time.Millisecond
	sampleTimeout  = 2 * time.Second
	maxMetrics     = 8 << 20 // bytes of one answer
	maxSamples     = 1 << 16 // of one node
	maxValue       = 1e300   // larger values, infinity and NaN are not measurements
)

// Names of metrics that are read; vLLM's have the same meaning.
const (
	fillMetric   = "vllm:kv_cache_usage_perc"
	tokensMetric = "vllm:generation_tokens_total"
	cpuMetric    = "process_cpu_seconds_total"
)

// totals are the histograms that are read, by name without _sum and _count.
var totals = map[string]func(*report.Sample) *report.Total{
	"vllm:request_queue_time_seconds":    func(s *report.Sample) *report.Total { return &s.Queue },
	"vllm:request_prefill_time_seconds":  func(s *report.Sample) *report.Total { return &s.Prompt },
	"tandem:kv_transfer_exposed_seconds": func(s *report.Sample) *report.Total { return &s.Exposed },
	"tandem:engine_step_seconds":         func(s *report.Sample) *report.Total { return &s.Steps },
}

// observer reads metrics during a run.
type observer struct {
	urls    []string
	client  http.Client
	samples [][]report.Sample // per URL
}

// observe reads the metrics of these URLs until stop is called, which returns the
// samples: one node per URL that ever answered.
func observe(ctx context.Context, urls []string) (stop func() []report.Node) {
	ctx, cancel := context.WithCancel(ctx)
	o := &observer{urls: urls, client: http.Client{Timeout: sampleTimeout}, samples: make([][]report.Sample, len(urls))}
	ended := make(chan struct{})
	if len(urls) == 0 {
		close(ended)
		return func() []report.Node { cancel(); return nil }
	}
	go func() {
		defer close(ended)
		t := time.NewTicker(sampleInterval)
		defer t.Stop()
		for ctx.Err() == nil {
			o.look(ctx)
			select {
			case <-t.C:
			case <-ctx.Done():
			}
		}
	}()
	return func() []report.Node {
		cancel()
		<-ended
		var nodes []report.Node
		for i, s := range o.samples {
			if len(s) > 0 {
				nodes = append(nodes, report.Node{Name: o.urls[i], Samples: s})
			}
		}
		return nodes
	}
}

// look reads each node once.
func (o *observer) look(ctx context.Context) {
	for i, url := range o.urls {
		if len(o.samples[i]) >= maxSamples {
			continue
		}
		if s, ok := o.read(ctx, url); ok {
			o.samples[i] = append(o.samples[i], s)
		}
	}
}

// read returns one node's sample. ok is false if the node does not answer now.
func (o *observer) read(ctx context.Context, url string) (s report.Sample, ok bool) {
	body, err := o.get(ctx, url)
	if err != nil {
		return s, false
	}
	defer body.Close()
	s.At = time.Now()
	return s, readSample(io.LimitReader(body, maxMetrics), &s) == nil
}

// get returns the body of an answer with status 200, which the caller closes.
func (o *observer) get(ctx context.Context, url string) (io.ReadCloser, error) {
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	if key := os.Getenv("OPENAI_API_KEY"); key != "" { // a gateway with keys requires one here, too
		q.Header.Set("Authorization", "Bearer "+key)
	}
	a, err := o.client.Do(q)
	if err != nil {
		return nil, err
	}
	if a.StatusCode != http.StatusOK {
		return nil, errors.Join(fmt.Errorf("%w: %s: %s", ErrServer, url, a.Status), a.Body.Close())
	}
	return a.Body, nil
}

// readSample sums the relevant values of a text in Prometheus' format. A server with
// several engines has a line for each.
func readSample(r io.Reader, s *report.Sample) error {
	fills := 0
	err := eachMetric(r, func(name, _ string, v float64) {
		switch name {
		case fillMetric:
			s.Fill += v
			fills++
		case tokensMetric:
			s.Tokens += v
			s.Generates = true
		case cpuMetric:
			s.CPU += v
		case "tandem:prefill_tokens_computed_total":
			s.Prompted += v
		case "vllm:num_requests_running":
			s.Running += v
		default:
			if of := totals[strings.TrimSuffix(name, "_sum")]; of != nil {
				of(s).Sum += v
			} else if of := totals[strings.TrimSuffix(name, "_count")]; of != nil {
				of(s).Count += v
			}
		}
	})
	s.Fill /= float64(max(1, fills))
	s.HasFill = fills > 0
	return err
}

// eachMetric calls f for each value of a text in Prometheus' format. labels are as
// written, without their braces.
func eachMetric(r io.Reader, f func(name, labels string, v float64)) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxMetrics)
	for lines.Scan() {
		line := lines.Text()
		name, rest, _ := strings.Cut(line, " ")
		labels := ""
		if i := strings.IndexByte(line, '{'); i >= 0 && i <= len(name) {
			end := strings.LastIndexByte(line, '}')
			if end < i {
				continue
			}
			name, labels, rest = line[:i], line[i+1:end], line[end+1:]
		}
		fields := strings.Fields(rest) // the value, and perhaps a time
		if len(fields) == 0 {
			continue
		}
		if v, err := strconv.ParseFloat(fields[0], 64); err == nil && math.Abs(v) < maxValue {
			f(name, labels, v)
		}
	}
	return lines.Err()
}

// specCounters returns the server's counters of speculative decoding, or nil if it has none.
func (r *run) specCounters(ctx context.Context) *report.Spec {
	if r.native() {
		return nil
	}
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, r.BaseURL+"/metrics", nil)
	if err != nil {
		return nil
	}
	if key := os.Getenv("OPENAI_API_KEY"); key != "" {
		q.Header.Set("Authorization", "Bearer "+key)
	}
	t := transport(r.Insecure)
	defer t.CloseIdleConnections()
	a, err := (&http.Client{Timeout: sampleTimeout, Transport: t}).Do(q)
	if err != nil {
		return nil
	}
	defer a.Body.Close()
	if a.StatusCode != http.StatusOK {
		return nil
	}
	return readSpec(io.LimitReader(a.Body, maxMetrics))
}

// maxPositions bounds the positions of a draft.
const maxPositions = 256

func readSpec(r io.Reader) *report.Spec {
	s := &report.Spec{}
	found := false
	if err := eachMetric(r, func(name, labels string, v float64) {
		switch name {
		case "vllm:spec_decode_num_drafts_total":
			s.Drafts += v
			found = true
		case "vllm:spec_decode_num_draft_tokens_total":
			s.DraftTokens += v
		case "vllm:spec_decode_num_accepted_tokens_total":
			s.Accepted += v
		case "vllm:spec_decode_num_accepted_tokens_per_pos_total":
			_, rest, _ := strings.Cut(labels, `position="`)
			at, err := strconv.Atoi(rest[:max(0, strings.IndexByte(rest, '"'))])
			if err != nil || at < 0 || at >= maxPositions {
				return
			}
			for len(s.PerPosition) <= at {
				s.PerPosition = append(s.PerPosition, 0)
			}
			s.PerPosition[at] += v
		}
	}); err != nil || !found {
		return nil
	}
	return s
}

// specDuring returns the increase between two readings, or nil if nothing was counted.
func specDuring(before, after *report.Spec) *report.Spec {
	if before == nil || after == nil || after.Drafts <= before.Drafts {
		return nil
	}
	s := &report.Spec{Drafts: after.Drafts - before.Drafts, DraftTokens: after.DraftTokens - before.DraftTokens, Accepted: after.Accepted - before.Accepted}
	for i, n := range after.PerPosition {
		if i < len(before.PerPosition) {
			n -= before.PerPosition[i]
		}
		s.PerPosition = append(s.PerPosition, n)
	}
	return s
}
