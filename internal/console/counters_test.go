package console

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// scraped returns metrics with these cumulative counts of first tokens, of two models together.
func scraped(counts [3]int, tokens int) string {
	var b strings.Builder
	for _, name := range []string{"vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"} {
		fmt.Fprintf(&b, "# TYPE %s histogram\n", name)
		for model := range 2 {
			for i, le := range []string{"0.1", "0.5", "+Inf"} {
				fmt.Fprintf(&b, "%s_bucket{model_name=\"m%d\",le=%q} %d\n", name, model, le, counts[i]*(1-model))
			}
			fmt.Fprintf(&b, "%s_sum{model_name=\"m%d\"} 1\n%s_count{model_name=\"m%d\"} %d\n", name, model, name, model, counts[2]*(1-model))
		}
	}
	fmt.Fprintf(&b, "# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total{model_name=\"m0\"} %d\nvllm:generation_tokens_total{model_name=\"m1\"} 3\n", tokens)
	return b.String()
}

// What was counted between two readings has quantiles like Prometheus', with the bounds of the
// bucket. A gateway that was started again has none.
func TestCounters(t *testing.T) {
	texts := []string{scraped([3]int{0, 2, 2}, 10), scraped([3]int{10, 32, 42}, 110), scraped([3]int{1, 1, 1}, 110), "nothing", "# TYPE a counter\na 1\n"}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/metrics" {
			t.Errorf("path %s", r.URL.Path)
		}
		fmt.Fprint(w, texts[0])
		texts = texts[1:]
	}))
	defer server.Close()
	c := &Client{URL: server.URL}
	var read []*Counters
	for range 3 {
		n, err := c.Counters(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		read = append(read, n)
	}
	d, err := read[1].Since(read[0])
	if err != nil || d.OutputTokens != 100 || d.PromptTokens != 0 {
		t.Fatalf("%+v, %v", d, err)
	}
	for _, q := range []struct{ q, value, low, high float64 }{{.1, .04, 0, .1}, {.25, .1, 0, .1}, {.5, .3, .1, .5}, {.99, .5, .5, math.Inf(1)}} {
		value, low, high := d.TTFT.Quantile(q.q)
		if math.Abs(value-q.value) > 1e-9 || low != q.low || high != q.high {
			t.Errorf("%g: %g, %g to %g", q.q, value, low, high)
		}
	}
	empty, err := read[0].Since(read[0])
	if v, _, _ := empty.ITL.Quantile(.5); err != nil || !math.IsNaN(v) {
		t.Errorf("%g, %v", v, err)
	}
	if _, err := read[2].Since(read[1]); !errors.Is(err, ErrCounters) || !strings.Contains(err.Error(), "started again") {
		t.Error(err)
	}
	other := *read[1]
	other.ITL.Bounds = []float64{1, 2}
	if _, err := other.Since(read[0]); !errors.Is(err, ErrCounters) {
		t.Error(err)
	}
	for range 2 {
		if n, err := c.Counters(context.Background()); !errors.Is(err, ErrCounters) {
			t.Errorf("%+v, %v", n, err)
		}
	}
}
