package proxy

import (
	"errors"

	"github.com/tandem-serving/tandem/gateway/exchange"
	fsm "github.com/tandem-serving/tandem/gateway/exchange/choice"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
)

// errStatus reports an upstream's status after which another server is tried.
var errStatus = errors.New("gateway: the upstream answered with an error")

// upstreamFailure returns the failure of an attempt that ended with err.
func upstreamFailure(err error) *exchange.Failure {
	f := &exchange.Failure{Err: err, Kind: "other", Status: 503, Prefix: "no upstream answered: ", Message: err.Error(),
		Failure: fsm.Failure{Lost: errors.Is(err, upstream.ErrStale)}} // the kept connection was closed before
	switch {
	case errors.Is(err, errStatus):
		f.Kind = "internal"
	case errors.Is(err, upstream.ErrServer), errors.Is(err, upstream.ErrBroken):
		f.Kind = "connection"
	}
	if errors.Is(err, upstream.ErrMalformed) {
		f.Status = 502
	}
	return f
}
