package native

import (
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/obs/trace"
)

// describe adds to the job's span what the request asks and why its choices ended.
func (j *job) describe() {
	s, r := &j.Span, j.req
	if !s.On() {
		return
	}
	var reasons []string
	for i := range j.choices {
		if c := &j.choices[i]; c.done() {
			reasons = append(reasons, c.finish.Reason)
		}
	}
	s.Set(trace.ResponseModel.String(j.model.Name), trace.ResponseID.String(j.answerID), trace.FinishReasons.StringSlice(reasons))
	if r.Temperature != nil {
		s.Set(trace.Temperature.Float64(float64(*r.Temperature)))
	}
	if r.TopP != nil {
		s.Set(trace.TopP.Float64(float64(*r.TopP)))
	}
	if r.TopK != nil {
		s.Set(trace.TopK.Int(int(*r.TopK)))
	}
	if r.Seed != nil {
		s.Set(trace.Seed.Int64(int64(*r.Seed)))
	}
}

// describeAttempt adds to the span of an attempt where it goes, and why.
func (c *choice) describeAttempt(d route.Decision) {
	c.span.Set(trace.Choice.Int(c.index), trace.Resumed.Int(c.state.From()),
		trace.RouteReason.String(string(d.Reason)), trace.PrefillReason.String(string(d.PrefillReason)))
}
