package console

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// ErrCounters means that the metrics of a server are not those of a gateway, or that it was started
// again between two readings.
var ErrCounters = errors.New("no counters of a gateway")

// Counters are what a gateway has counted since its start, of all models.
type Counters struct {
	At                         time.Time // when they were read
	TTFT, ITL                  Histogram
	PromptTokens, OutputTokens float64
}

// Histogram counts durations.
type Histogram struct {
	Bounds []float64 // seconds, ascending, without +Inf
	Counts []float64 // of the durations up to each bound; the last one counts all
}

// counterTimeout bounds the duration of a call.
const counterTimeout = 10 * time.Second

// Counters returns what the gateway has counted.
func (c *Client) Counters(ctx context.Context) (*Counters, error) {
	ctx, cancel := context.WithTimeout(ctx, counterTimeout)
	defer cancel()
	resp, err := c.do(ctx, http.MethodGet, "/metrics", nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	n, err := readCounters(io.LimitReader(resp.Body, maxBody))
	if err != nil {
		return nil, fmt.Errorf("%s/metrics: %w", c.Shown(), err)
	}
	n.At = time.Now()
	return n, nil
}

// readCounters reads counters in Prometheus' text format.
func readCounters(r io.Reader) (*Counters, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(r)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCounters, err)
	}
	histogram := func(name string) (h Histogram) {
		counts := map[float64]float64{}
		for _, m := range families[name].GetMetric() {
			for _, b := range m.GetHistogram().GetBucket() {
				if !math.IsNaN(b.GetUpperBound()) {
					counts[b.GetUpperBound()] += float64(b.GetCumulativeCount())
				}
			}
		}
		for bound := range counts {
			if !math.IsInf(bound, 1) {
				h.Bounds = append(h.Bounds, bound)
			}
		}
		slices.Sort(h.Bounds)
		for _, bound := range h.Bounds {
			h.Counts = append(h.Counts, counts[bound])
		}
		h.Counts = append(h.Counts, counts[math.Inf(1)])
		return h
	}
	sum := func(name string) (v float64) {
		for _, m := range families[name].GetMetric() {
			v += m.GetCounter().GetValue()
		}
		return v
	}
	n := &Counters{
		TTFT: histogram("vllm:time_to_first_token_seconds"), ITL: histogram("vllm:inter_token_latency_seconds"),
		PromptTokens: sum("vllm:prompt_tokens_total"), OutputTokens: sum("vllm:generation_tokens_total"),
	}
	if len(n.TTFT.Bounds) == 0 || len(n.ITL.Bounds) == 0 {
		return nil, fmt.Errorf("%w: vllm:time_to_first_token_seconds is missing: give --url the address of --port or --admin-listen of a gateway", ErrCounters)
	}
	return n, nil
}

// Since returns what was counted after an earlier reading.
func (n *Counters) Since(before *Counters) (*Counters, error) {
	d := &Counters{At: n.At, PromptTokens: n.PromptTokens - before.PromptTokens, OutputTokens: n.OutputTokens - before.OutputTokens}
	least := min(d.PromptTokens, d.OutputTokens)
	for _, h := range []struct{ to, now, then *Histogram }{{&d.TTFT, &n.TTFT, &before.TTFT}, {&d.ITL, &n.ITL, &before.ITL}} {
		if !slices.Equal(h.now.Bounds, h.then.Bounds) {
			return nil, fmt.Errorf("%w: the histograms have other buckets than before: the gateway was replaced by another release", ErrCounters)
		}
		h.to.Bounds = h.now.Bounds
		for i := range h.now.Counts {
			v := h.now.Counts[i] - h.then.Counts[i]
			h.to.Counts = append(h.to.Counts, v)
			least = min(least, v)
		}
	}
	if !(least >= 0) {
		return nil, fmt.Errorf("%w: they are less than before: the gateway was started again", ErrCounters)
	}
	return d, nil
}

// Quantile returns a quantile, from 0 to 1, as Prometheus' histogram_quantile does, and the bounds
// of its bucket. high is +Inf in the last bucket. It returns NaN if nothing was counted.
func (h *Histogram) Quantile(q float64) (seconds, low, high float64) {
	total := h.Counts[len(h.Counts)-1]
	if !(total > 0) {
		return math.NaN(), math.NaN(), math.NaN()
	}
	below := 0.0
	for i, bound := range h.Bounds {
		if h.Counts[i] >= q*total {
			return low + (bound-low)*(q*total-below)/max(h.Counts[i]-below, math.SmallestNonzeroFloat64), low, bound
		}
		below, low = h.Counts[i], bound
	}
	return low, low, math.Inf(1)
}
