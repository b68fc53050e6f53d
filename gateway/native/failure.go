package native

import (
	"errors"

	"github.com/tandem-serving/tandem/gateway/exchange"
	fsm "github.com/tandem-serving/tandem/gateway/exchange/choice"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

var errNotAccepted = errors.New("gateway: attempt not accepted")

// nodeFailure classifies the error of an attempt on a decode node.
func nodeFailure(err error) *exchange.Failure {
	var code *nodes.CodeError
	if errors.As(err, &code) {
		f := &exchange.Failure{Err: err, Failure: fsm.Failure{Refused: true, Untouched: true}, Message: code.Message}
		classify(f, code.Code)
		return f
	}
	f := &exchange.Failure{Err: err, Kind: "other", Status: 503, Prefix: "the decode node failed while it answered: ", Message: err.Error(),
		Failure: fsm.Failure{Lost: errors.Is(err, nodes.ErrLost), Untouched: errors.Is(err, nodes.ErrNode)}}
	switch {
	case errors.Is(err, errNotAccepted):
		f.Kind = "timeout"
	case f.Lost, f.Untouched:
		f.Kind = "connection"
	}
	return f
}

// classify sets what a node's code means.
func classify(f *exchange.Failure, c nodepb.Code) {
	f.Kind, f.Prefix, f.Status = "other", "the decode node failed: ", 500
	switch c {
	case nodepb.Code_CODE_INVALID:
		f.Kind, f.Final, f.Prefix, f.Status = "invalid", true, "", 400
	case nodepb.Code_CODE_NOT_FOUND:
		f.Kind, f.Final, f.Prefix, f.Status = "invalid", true, "", 404
	case nodepb.Code_CODE_DEADLINE:
		f.Kind, f.Final, f.Late, f.Prefix, f.Status = "timeout", true, true, "", 504
	case nodepb.Code_CODE_OVERLOADED:
		f.Kind, f.HandedOver, f.Prefix, f.Status = "overloaded", true, "the decode nodes are overloaded: ", 503
	case nodepb.Code_CODE_DRAINING:
		f.Kind, f.HandedOver, f.Prefix, f.Status = "draining", true, "the decode nodes are leaving: ", 503
	case nodepb.Code_CODE_FORBIDDEN:
		f.Prefix, f.Status = "the decode nodes refuse this gateway: ", 503
	case nodepb.Code_CODE_MISMATCH:
		f.Kind, f.Prefix, f.Status = "mismatch", "the decode nodes do not fit this gateway's model: ", 503
	case nodepb.Code_CODE_INTERNAL:
		f.Kind, f.Untouched = "internal", false
	case nodepb.Code_CODE_CANCELLED:
		f.Untouched = false
	}
}
