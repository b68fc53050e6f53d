package native

import (
	"github.com/tandem-serving/tandem/gateway/native/nodes"
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

// attemptSpan begins the span of a choice's next attempt.
func (j *job) attemptSpan(c *choice, node *nodes.Node, d route.Decision) {
	c.span = j.Span.Child("attempt", trace.Client, c.since)
	if c.span.On() {
		c.span.Set(trace.Peer.String(node.Name), trace.Choice.Int(c.index), trace.Attempt.Int(int(c.state.Attempt())), trace.Resumed.Int(c.state.From()),
			trace.RouteReason.String(string(d.Reason)), trace.PrefillReason.String(string(d.PrefillReason)))
	}
}
