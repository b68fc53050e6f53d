package proxy

import (
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/obs/trace"
)

// describe adds to an attempt's span what is asked, and of which prefill server; nil: none.
func (r *relay) describe(prefill *upstream.Server) {
	r.try.Set(trace.RequestModel.String(r.model.Name))
	if prefill != nil {
		r.try.Set(trace.PrefillPeer.String(prefill.Name))
	}
}
