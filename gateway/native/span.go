package native

import (
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/obs/trace"
)

// describe adds to the request's span what it asked, and why its choices ended.
func (x *request) describe() {
	s, r := &x.Span, x.req
	if !s.On() {
		return
	}
	var reasons []string
	for i := range x.choices {
		if c := &x.choices[i]; c.done() {
			reasons = append(reasons, c.delta.Finish.Reason)
		}
	}
	s.Set(trace.ResponseModel.String(x.model.Name), trace.ResponseID.String(x.answerID), trace.FinishReasons.StringSlice(reasons))
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

// describeAttempt adds to the span of an attempt where it was sent, and why.
func (c *choice) describeAttempt(d route.Decision) {
	c.span.Set(trace.Choice.Int(c.delta.Index), trace.Resumed.Int(c.state.From()),
		trace.RouteReason.String(string(d.Reason)), trace.PrefillReason.String(string(d.PrefillReason)))
}
