package gateway

import (
	"errors"
	"fmt"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	fsm "github.com/tandem-serving/tandem/gateway/exchange/choice"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

var (
	errNotAccepted = errors.New("gateway: attempt not accepted")
	// errStatus is an upstream server's status that another server may do better than.
	errStatus = errors.New("gateway: the upstream answered with an error")
)

// failure is the error of one attempt at a node or an upstream server, classified once:
// by nodeFailure or upstreamFailure.
type failure struct {
	err  error
	kind string // value of the label code of GatewayAttemptFailures

	fsm.Failure
	late bool // the request's deadline has passed

	status  int    // of the answer to the client, where no other attempt follows
	prefix  string // of its message
	message string // the rest, without a bound on its length
}

// nodeFailure says what the error of an attempt at a decode node means.
func nodeFailure(err error) *failure {
	var code *nodes.CodeError
	if errors.As(err, &code) {
		f := &failure{err: err, Failure: fsm.Failure{Refused: true, Untouched: true}, message: code.Message}
		f.code(code.Code)
		return f
	}
	f := &failure{err: err, kind: "other", status: 503, prefix: "the decode node failed while it answered: ", message: err.Error(),
		Failure: fsm.Failure{Lost: errors.Is(err, nodes.ErrLost), Untouched: errors.Is(err, nodes.ErrNode)}}
	switch {
	case errors.Is(err, errNotAccepted):
		f.kind = "timeout"
	case f.Lost, f.Untouched:
		f.kind = "connection"
	}
	return f
}

// upstreamFailure says what the error of an attempt at an upstream server means.
func upstreamFailure(err error) *failure {
	f := &failure{err: err, kind: "other", status: 503, prefix: "no upstream answered: ", message: err.Error(),
		Failure: fsm.Failure{Lost: errors.Is(err, upstream.ErrStale)}} // a kept connection was closed already
	switch {
	case errors.Is(err, errStatus):
		f.kind = "internal"
	case errors.Is(err, upstream.ErrServer), errors.Is(err, upstream.ErrBroken):
		f.kind = "connection"
	}
	if errors.Is(err, upstream.ErrMalformed) {
		f.status = 502
	}
	return f
}

// code fills in what a node's code means.
func (f *failure) code(c nodepb.Code) {
	f.kind, f.prefix, f.status = "other", "the decode node failed: ", 500
	switch c {
	case nodepb.Code_CODE_INVALID:
		f.kind, f.Final, f.prefix, f.status = "invalid", true, "", 400
	case nodepb.Code_CODE_NOT_FOUND:
		f.kind, f.Final, f.prefix, f.status = "invalid", true, "", 404
	case nodepb.Code_CODE_DEADLINE:
		f.kind, f.Final, f.late, f.prefix, f.status = "timeout", true, true, "", 504
	case nodepb.Code_CODE_OVERLOADED:
		f.kind, f.HandedOver, f.prefix, f.status = "overloaded", true, "the decode nodes are overloaded: ", 503
	case nodepb.Code_CODE_DRAINING:
		f.kind, f.HandedOver, f.prefix, f.status = "draining", true, "the decode nodes are leaving: ", 503
	case nodepb.Code_CODE_FORBIDDEN:
		f.prefix, f.status = "the decode nodes refuse this gateway: ", 503
	case nodepb.Code_CODE_MISMATCH:
		f.kind, f.prefix, f.status = "mismatch", "the decode nodes do not fit this gateway's model: ", 503
	case nodepb.Code_CODE_INTERNAL:
		f.kind, f.Untouched = "internal", false
	case nodepb.Code_CODE_CANCELLED:
		f.Untouched = false
	}
}

// fault is the answer to a client whose request has no further attempt.
func (f *failure) fault() *openai.Error {
	message := f.prefix + openai.Clip(f.message, 300)
	switch f.status {
	case 400:
		return openai.BadRequest("", "%s", message)
	case 404:
		return &openai.Error{Status: 404, Type: openai.TypeNotFound, Param: "model", Message: message}
	case 502:
		return badGateway("%s", message)
	case 503:
		return openai.Unavailable(retryAfter, "%s", message)
	case 504:
		return &openai.Error{Status: 504, Type: openai.TypeTimeout, Message: message}
	}
	return &openai.Error{Status: f.status, Type: openai.TypeInternal, Message: message}
}

// badGateway is a 502: an upstream's answer cannot be passed on.
func badGateway(format string, args ...any) *openai.Error {
	return &openai.Error{Status: 502, Type: "Bad Gateway", Message: fmt.Sprintf(format, args...)}
}
