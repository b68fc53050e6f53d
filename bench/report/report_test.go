package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/bench/load"
)

var update = flag.Bool("update", false, "write the golden files")

func msec(n float64) time.Duration { return time.Duration(n * float64(time.Millisecond)) }

// record is three answers and a failure whose figures are known by hand.
func record() *load.Record {
	return &load.Record{Start: time.Unix(1700000000, 0), Duration: 2 * time.Second, Outcomes: []load.Outcome{
		{Scheduled: 0, Sent: 0, First: msec(100), Last: msec(300), ITL: []time.Duration{msec(50), msec(150)}, Chunks: 3, Output: 3, Prompt: 9, Text: []byte(`a\nb`)},
		{Scheduled: msec(400), Sent: msec(500), First: msec(700), Last: msec(1300), ITL: []time.Duration{msec(600)}, Chunks: 2, Output: 5, Prompt: 11},
		{Scheduled: msec(600), Sent: msec(600), First: msec(900), Last: msec(900), Chunks: 1, Output: 1, Prompt: 10},
		{Scheduled: msec(700), Sent: msec(700), Err: errors.New("refused")},
	}}
}

func summary(o Options) *Summary {
	r := record()
	return Summarize(r, o, func(i int) int { return r.Outcomes[i].Prompt }, func(i int) int { return r.Outcomes[i].Output })
}

func full() Options {
	return Options{Metrics: MetricNames(), Percentiles: []float64{50, 99, 99.9}, Goodput: map[string]float64{"ttft": 250, "tpot": 140, "e2el": 900}, RequestRate: 4, Concurrency: 2}
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := "testdata/" + name
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s: got\n%s\nwant\n%s", name, got, want)
	}
}

// The printed blocks are the reference's, line by line.
func TestPrint(t *testing.T) {
	for name, c := range map[string]struct {
		o     Options
		probe *Probe
		spec  *Spec
	}{
		"default.txt": {Options{Metrics: []string{"ttft", "tpot", "itl"}, Percentiles: []float64{99}, RequestRate: math.Inf(1)}, nil, nil},
		"full.txt":    {full(), &Probe{Completed: 3, Failed: 1, Median: 1.5, P99: 2.25, Max: 3}, &Spec{Drafts: 10, DraftTokens: 40, Accepted: 25, PerPosition: []float64{9, 8, 5, 3}}},
	} {
		var b bytes.Buffer
		if err := summary(c.o).Print(&b, c.probe, c.spec); err != nil {
			t.Fatal(err)
		}
		golden(t, name, b.Bytes())
	}
	var b bytes.Buffer
	failed := summary(full())
	failed.Completed, failed.Failed = 0, 2
	if err := failed.Print(&b, nil, nil); err != nil || strings.Contains(b.String(), "(ms)") || strings.Contains(b.String(), "throughput") || !strings.Contains(b.String(), "No request succeeded") {
		t.Errorf("a run that failed: %v\n%s", err, b.String())
	}
}

// The figures are those of the definitions, worked out by hand.
func TestFigures(t *testing.T) {
	s := summary(full())
	for _, c := range []struct {
		name      string
		got, want float64
	}{
		{"completed", float64(s.Completed), 3}, {"failed", float64(s.Failed), 1}, {"input", float64(s.Input), 30}, {"output", float64(s.Output), 9},
		{"throughput", s.Throughput(), 4.5}, {"requests", s.RequestThroughput(), 1.5},
		{"ttft mean", s.Stats["ttft"].Mean, 200}, {"ttft median", s.Stats["ttft"].Median, 200}, {"ttft std", s.Stats["ttft"].Std, math.Sqrt(20000.0 / 3)},
		{"ttft p99", s.Stats["ttft"].Percentiles[1], 298},      // between 200 and 300
		{"tpot mean", s.Stats["tpot"].Mean, (100 + 150) / 2.0}, // the answer of one token has none
		{"itl mean", s.Stats["itl"].Mean, 800 / 3.0}, {"itl median", s.Stats["itl"].Median, 150},
		{"e2el mean", s.Stats["e2el"].Mean, (300 + 800 + 300) / 3.0},
		{"queue mean", s.Stats["client_queue_time"].Mean, 100 / 3.0},
		{"queue e2el", s.Stats["e2el_including_client_queue"].Mean, (300 + 900 + 300) / 3.0},
		{"goodput", s.Goodput(), 0.5}, // the first; the second's TPOT, the third's TTFT are too long
		{"peak tokens", float64(s.PeakTokens), 5}, {"peak requests", float64(s.PeakConcurrent), 3},
	} {
		if math.Abs(c.got-c.want) > 1e-9 {
			t.Errorf("%s: %g, want %g", c.name, c.got, c.want)
		}
	}
	if e := Summarize(&load.Record{}, full(), nil, nil); e.Throughput() != 0 || e.Stats["ttft"].Mean != 0 {
		t.Errorf("of nothing: %+v", e)
	}
}

// keys of a JSON object in order.
func keys(t *testing.T, data []byte) (ks []string) {
	d := json.NewDecoder(bytes.NewReader(data))
	depth := 0
	isKey := false
	for {
		tok, err := d.Token()
		if err != nil {
			return ks
		}
		switch v := tok.(type) {
		case json.Delim:
			if v == '{' || v == '[' {
				depth++
				isKey = depth == 1
				continue
			}
			depth--
			isKey = depth == 1
		case string:
			if depth == 1 && isKey {
				ks = append(ks, v)
				isKey = false
				continue
			}
			isKey = depth == 1
		default:
			isKey = depth == 1
		}
	}
}

// The keys, and their order, are the reference's.
func TestJSONKeys(t *testing.T) {
	const head = "date endpoint_type backend label model_id tokenizer_id num_prompts version request_rate burstiness max_concurrency "
	const sums = "duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput output_throughput total_token_throughput max_output_tokens_per_s max_concurrent_requests rtfx "
	const waits = "latencies queue_times"
	three := "mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms "
	h := &Head{Date: time.Unix(0, 0).UTC(), Backend: "openai", Model: "m", Tokenizer: "m", NumPrompts: 4, Metadata: Object{{"version", "1"}}, Burstiness: 1, Start: time.Unix(1700000000, 0)}
	o := Options{Metrics: []string{"ttft", "tpot", "itl"}, Percentiles: []float64{99}, RequestRate: math.Inf(1)}
	for _, c := range []struct {
		o        Options
		change   func()
		detailed bool
		want     string
	}{
		{o, func() {}, false, head + sums + three + waits},
		{Options{Metrics: append(o.Metrics, "e2el"), Percentiles: o.Percentiles, RequestRate: 3}, func() { h.Probe = &Probe{} }, true,
			head + sums + three + "mean_e2el_ms median_e2el_ms std_e2el_ms p99_e2el_ms probe_completed probe_failed probe_median_e2el_ms probe_p99_e2el_ms probe_max_e2el_ms " + waits + " input_lens output_lens start_times ttfts itls generated_texts errors"},
		{o, func() { h.Spec, h.Probe = &Spec{PerPosition: []float64{1}}, nil }, false, head + sums + three +
			"spec_decode_acceptance_rate spec_decode_acceptance_length spec_decode_num_drafts spec_decode_draft_tokens spec_decode_accepted_tokens spec_decode_per_position_acceptance_rates " + waits},
		{o, func() { h.Spec, h.Ramp, h.RampEnd = nil, "linear", 9 }, false,
			strings.Replace(head, "max_concurrency ", "max_concurrency ramp_up_strategy ramp_up_start_rps ramp_up_end_rps ", 1) + sums + three + "rps_change_events " + waits},
	} {
		c.change()
		data, err := json.Marshal(summary(c.o).Result(h, c.detailed))
		if err != nil {
			t.Fatal(err)
		}
		if got := keys(t, data); !slices.Equal(got, strings.Fields(c.want)) {
			t.Errorf("got  %q\nwant %q", got, strings.Fields(c.want))
		}
		var v map[string]any
		if err := json.Unmarshal(data, &v); err != nil {
			t.Fatal(err)
		}
		if c.o.RequestRate != 3 && v["request_rate"] != "inf" || v["request_goodput"] != nil || v["mean_ttft_ms"] != 200.0 {
			t.Errorf("%s", data)
		}
		if c.detailed && (v["generated_texts"].([]any)[0] != "a\nb" || v["errors"].([]any)[3] != "refused" || v["itls"].([]any)[0].([]any)[1] != 0.15) {
			t.Errorf("%s", data)
		}
	}
}
