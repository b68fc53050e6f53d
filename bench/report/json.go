package report

import (
	"bytes"
	"encoding/json"
	"math"
	"time"

	"github.com/tandem-serving/tandem/bench/load"
)

// Field is one key of an Object.
type Field struct {
	Key   string
	Value any
}

// Object is a JSON object that keeps the order of its fields.
type Object []Field

// MarshalJSON writes the fields in order.
func (o Object) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, f := range o {
		if i > 0 {
			b.WriteByte(',')
		}
		key, err := json.Marshal(f.Key)
		if err != nil {
			return nil, err
		}
		v, err := json.Marshal(f.Value)
		if err != nil {
			return nil, err
		}
		b.Write(key)
		b.WriteByte(':')
		b.Write(v)
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

// Head is the part of the JSON other than figures.
type Head struct {
	Date                             time.Time
	Backend, Label, Model, Tokenizer string
	NumPrompts                       int
	Metadata                         Object
	Burstiness                       float64
	Ramp                             string
	RampStart, RampEnd               int
	Changes                          []load.Change
	Start                            time.Time
	Probe                            *Probe
	Spec                             *Spec
}

// nullable returns nil for an empty string.
func nullable(s string) any {
	if s == "" {
		return nil
	}
	return s
}

// rateValue returns a number, or "inf".
func rateValue(r float64) any {
	if math.IsInf(r, 1) {
		return "inf"
	}
	return r
}

// Result returns the JSON of a run. detailed adds the figures of each request.
func (s *Summary) Result(h *Head, detailed bool) Object {
	var concurrency, goodput any
	if s.Options.Concurrency > 0 {
		concurrency = s.Options.Concurrency
	}
	if len(s.Options.Goodput) > 0 {
		goodput = s.Goodput()
	}
	o := Object{
		{"date", h.Date.Format("20060102-150405")}, {"endpoint_type", h.Backend}, {"backend", h.Backend}, {"label", nullable(h.Label)},
		{"model_id", h.Model}, {"tokenizer_id", nullable(h.Tokenizer)}, {"num_prompts", h.NumPrompts},
	}
	o = append(o, h.Metadata...)
	o = append(o, Field{"request_rate", rateValue(s.Options.RequestRate)}, Field{"burstiness", h.Burstiness}, Field{"max_concurrency", concurrency})
	if h.Ramp != "" {
		o = append(o, Field{"ramp_up_strategy", h.Ramp}, Field{"ramp_up_start_rps", h.RampStart}, Field{"ramp_up_end_rps", h.RampEnd})
	}
	o = append(o, Object{
		{"duration", s.Duration.Seconds()}, {"completed", s.Completed}, {"failed", s.Failed},
		{"total_input_tokens", s.Input}, {"total_output_tokens", s.Output},
		{"request_throughput", s.RequestThroughput()}, {"request_goodput", goodput},
		{"output_throughput", s.Throughput()}, {"total_token_throughput", s.perSecond(s.Input + s.Output)},
		{"max_output_tokens_per_s", float64(s.PeakTokens)}, {"max_concurrent_requests", s.PeakConcurrent}, {"rtfx", 0.0},
	}...)
	for _, m := range metricTable {
		if !s.shown(m.key) {
			continue
		}
		st := s.Stats[m.key]
		o = append(o, Field{"mean_" + m.key + "_ms", st.Mean}, Field{"median_" + m.key + "_ms", st.Median}, Field{"std_" + m.key + "_ms", st.Std})
		for i, p := range s.Options.Percentiles {
			o = append(o, Field{"p" + percentName(p) + "_" + m.key + "_ms", st.Percentiles[i]})
		}
	}
	if h.Spec != nil {
		o = append(o, h.Spec.json()...)
	}
	if p := h.Probe; p != nil {
		o = append(o, Object{
			{"probe_completed", p.Completed}, {"probe_failed", p.Failed}, {"probe_median_e2el_ms", p.Median},
			{"probe_p99_e2el_ms", p.P99}, {"probe_max_e2el_ms", p.Max},
		}...)
	}
	if h.Ramp != "" {
		changes := []Object{}
		for _, c := range h.Changes {
			changes = append(changes, Object{{"rps", c.RPS}, {"timestamp", h.Start.Add(c.At).Format("2006-01-02T15:04:05.000000")}})
		}
		o = append(o, Field{"rps_change_events", changes})
	}
	o = append(o, s.waits()...)
	if detailed {
		o = append(o, s.details(h.Start)...)
	}
	return o
}

// waits returns the lists that are always included, with one entry per request, in
// seconds: 0 for a failed request.
func (s *Summary) waits() Object {
	latencies, queues := make([]float64, len(s.Requests)), make([]float64, len(s.Requests))
	for i, r := range s.Requests {
		if o := r.Outcome; o.Err == nil {
			latencies[i], queues[i] = o.Latency().Seconds(), (o.Sent - o.Scheduled).Seconds()
		}
	}
	return Object{{"latencies", latencies}, {"queue_times", queues}}
}

// details returns lists with one entry per request, in seconds.
func (s *Summary) details(start time.Time) Object {
	n := len(s.Requests)
	inputs, outputs := make([]int, n), make([]int, n)
	starts, ttfts, itls := make([]float64, n), make([]float64, n), make([][]float64, n)
	texts, errs := make([]string, n), make([]string, n)
	for i, r := range s.Requests {
		o := r.Outcome
		inputs[i], outputs[i], itls[i] = r.Input, r.Output, []float64{}
		starts[i] = float64(start.Add(o.Sent).UnixNano()) / 1e9
		if o.Chunks > 0 {
			ttfts[i] = o.TTFT().Seconds()
		}
		for _, d := range o.ITL {
			itls[i] = append(itls[i], d.Seconds())
		}
		texts[i] = o.Decoded()
		if o.Err != nil {
			errs[i] = o.Err.Error()
		}
	}
	return Object{
		{"input_lens", inputs}, {"output_lens", outputs}, {"start_times", starts}, {"ttfts", ttfts}, {"itls", itls},
		{"generated_texts", texts}, {"errors", errs},
	}
}
