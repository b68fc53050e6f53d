package proxy

import (
	"time"

	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/obs/trace"
)

// attemptSpan begins the span of a relayed request's next attempt.
func (r *relay) attemptSpan(s, prefill *upstream.Server) {
	if !r.Span.On() {
		return
	}
	r.try = r.Span.Child("attempt", trace.Client, time.Now())
	r.try.Set(trace.Peer.String(s.Name), trace.Attempt.Int(int(r.life.Attempt())), trace.RequestModel.String(r.model.Name))
	if prefill != nil {
		r.try.Set(trace.PrefillPeer.String(prefill.Name))
	}
}

// answeredSpan records when the attempt's answer began.
func (r *relay) answeredSpan() {
	if r.try.On() {
		r.try.Event("first byte", time.Now())
	}
}
