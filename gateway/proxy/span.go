package proxy

import (
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/obs/trace"
)

// describe adds the model and the prefill server, which may be nil, to an attempt's span.
func (r *relay) describe(prefill *upstream.Server) {
	r.try.Set(trace.RequestModel.String(r.model.Name))
	if prefill != nil {
		r.try.Set(trace.PrefillPeer.String(prefill.Name))
	}
}
