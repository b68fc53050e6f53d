package bench

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench/report"
)

// Bounds on looking at servers' metrics.
const (
	sampleInterval = 500 * time.Millisecond
	sampleTimeout  = 2 * time.Second
	maxMetrics     = 8 << 20 // bytes of one answer
	maxSamples     = 1 << 16 // of one node
)

// Names that are read of a server's metrics; vLLM's have the same meaning.
const (
	fillMetric   = "vllm:kv_cache_usage_perc"
	tokensMetric = "vllm:generation_tokens_total"
	cpuMetric    = "process_cpu_seconds_total"
)

// observer reads metrics beside a run.
type observer struct {
	urls    []string
	client  http.Client
	samples [][]report.Sample // per URL
}

// observe starts to read the metrics of these URLs until the result is called,
// which gives what they said, one node per URL that ever answered.
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

// read is one node's sample; a node that does not answer now has none.
func (o *observer) read(ctx context.Context, url string) (s report.Sample, ok bool) {
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return s, false
	}
	a, err := o.client.Do(q)
	if err != nil {
		return s, false
	}
	defer a.Body.Close()
	if a.StatusCode != http.StatusOK {
		return s, false
	}
	s.At = time.Now()
	return s, readSample(io.LimitReader(a.Body, maxMetrics), &s) == nil
}

// readSample adds up what matters of a text in Prometheus' format: a server with
// several engines tells one line for each.
func readSample(r io.Reader, s *report.Sample) error {
	fills := 0
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxMetrics)
	for lines.Scan() {
		line := lines.Text()
		name, rest, ok := strings.Cut(line, " ")
		if i := strings.IndexByte(line, '{'); i >= 0 && (!ok || i < len(name)) {
			name, rest = line[:i], line[strings.LastIndexByte(line, '}')+1:]
		}
		if name != fillMetric && name != tokensMetric && name != cpuMetric {
			continue
		}
		f := strings.Fields(rest) // the value, and perhaps a time
		if len(f) == 0 {
			continue
		}
		v, err := strconv.ParseFloat(f[0], 64)
		if err != nil {
			continue
		}
		switch name {
		case fillMetric:
			s.Fill += v
			fills++
		case tokensMetric:
			s.Tokens += v
			s.Generates = true
		case cpuMetric:
			s.CPU += v
		}
	}
	s.Fill /= float64(max(1, fills))
	s.HasFill = fills > 0
	return lines.Err()
}
