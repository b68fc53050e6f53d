package gateway

import (
	"errors"
	"fmt"

	"github.com/tandem-serving/tandem/gateway/upstream"
	"github.com/tandem-serving/tandem/internal/metrics"
	"github.com/tandem-serving/tandem/internal/openai"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

var errNotAccepted = errors.New("gateway: attempt not accepted")

// retry ends a choice's current attempt, which failed, and starts the next one
// where that is allowed: before the first token, on another node, within the
// budgets.
func (j *job) retry(c *choice, err error) *openai.Error {
	node := c.node
	c.leave()
	c.stream = nil
	if len(c.output) > 0 {
		j.failure(node, err)
		j.cause = "upstream"
		return faultOf(err)
	}
	if fault := j.failed(c, node, err); fault != nil {
		return fault
	}
	return j.attempt(c)
}

// failed books a failed attempt; it returns an error when there may be no other.
func (j *job) failed(c *choice, node *upstream.Node, err error) *openai.Error {
	j.failure(node, err)
	c.tried, c.lastErr = append(c.tried, node), err
	c.failures++
	var code *upstream.CodeError
	if errors.As(err, &code) && !elsewhere(code.Code) {
		return faultOf(err)
	}
	if c.failures >= j.g.o.MaxAttempts || !j.g.budget.Allow() {
		return faultOf(err)
	}
	return nil
}

// failure counts and logs a failed attempt.
func (j *job) failure(node *upstream.Node, err error) {
	j.g.meters.set.Counter(metrics.GatewayAttemptFailures, kindOf(err)).Inc()
	j.g.log.Warn("attempt failed", "request", j.req.RequestID, "node", node.Name, "error", err)
}

// elsewhere says whether another node may do what one refused with the code.
func elsewhere(c nodepb.Code) bool {
	switch c {
	case nodepb.Code_CODE_OVERLOADED, nodepb.Code_CODE_DRAINING, nodepb.Code_CODE_MISMATCH:
		return true
	}
	return false
}

// refuses says whether the error is a node's own no, not a broken connection.
func refuses(err error) bool {
	var code *upstream.CodeError
	return errors.As(err, &code)
}

// kindOf is the error's value of the label code of GatewayAttemptFailures.
func kindOf(err error) string {
	var code *upstream.CodeError
	if !errors.As(err, &code) {
		switch {
		case errors.Is(err, errNotAccepted):
			return "timeout"
		case errors.Is(err, upstream.ErrLost), errors.Is(err, upstream.ErrNode):
			return "connection"
		}
		return "other"
	}
	switch code.Code {
	case nodepb.Code_CODE_OVERLOADED:
		return "overloaded"
	case nodepb.Code_CODE_DRAINING:
		return "draining"
	case nodepb.Code_CODE_MISMATCH:
		return "mismatch"
	case nodepb.Code_CODE_INVALID, nodepb.Code_CODE_NOT_FOUND:
		return "invalid"
	case nodepb.Code_CODE_DEADLINE:
		return "timeout"
	case nodepb.Code_CODE_INTERNAL:
		return "internal"
	}
	return "other"
}

// faultOf is what a client is told of a failed attempt.
func faultOf(err error) *openai.Error {
	var code *upstream.CodeError
	if !errors.As(err, &code) {
		return openai.Unavailable(retryAfter, "the decode node failed while it answered: %s", clip(err.Error(), 300))
	}
	say := clip(code.Message, 300)
	switch code.Code {
	case nodepb.Code_CODE_INVALID:
		return openai.BadRequest("", "%s", say)
	case nodepb.Code_CODE_NOT_FOUND:
		return &openai.Error{Status: 404, Type: openai.TypeNotFound, Param: "model", Message: say}
	case nodepb.Code_CODE_OVERLOADED:
		return openai.Unavailable(retryAfter, "the decode nodes are overloaded: %s", say)
	case nodepb.Code_CODE_DRAINING:
		return openai.Unavailable(retryAfter, "the decode nodes are leaving: %s", say)
	case nodepb.Code_CODE_MISMATCH:
		return openai.Unavailable(retryAfter, "the decode nodes do not fit this gateway's model: %s", say)
	case nodepb.Code_CODE_DEADLINE:
		return &openai.Error{Status: 504, Type: openai.TypeTimeout, Message: say}
	}
	return &openai.Error{Status: 500, Type: openai.TypeInternal, Message: fmt.Sprintf("the decode node failed: %s", say)}
}
