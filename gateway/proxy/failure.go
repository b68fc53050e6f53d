package proxy

import (
	"errors"

	"github.com/tandem-serving/tandem/gateway/exchange"
	fsm "github.com/tandem-serving/tandem/gateway/exchange/choice"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
)

// errStatus is an upstream server's status that another server may do better than.
var errStatus = errors.New("gateway: the upstream answered with an error")

// upstreamFailure says what the error of an attempt at an upstream server means.
func upstreamFailure(err error) *exchange.Failure {
	f := &exchange.Failure{Err: err, Kind: "other", Status: 503, Prefix: "no upstream answered: ", Message: err.Error(),
		Failure: fsm.Failure{Lost: errors.Is(err, upstream.ErrStale)}} // a kept connection was closed already
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
