package exchange

import (
	"github.com/tandem-serving/tandem/gateway/api/openai"
	fsm "github.com/tandem-serving/tandem/gateway/exchange/choice"
)

// Failure is the error of one attempt. The backend classifies it once.
type Failure struct {
	Err  error
	Kind string // label code of GatewayAttemptFailures

	fsm.Failure
	Late bool // the request's deadline has passed

	Status  int    // of the answer to the client, if no other attempt follows
	Prefix  string // of the answer's message
	Message string // the rest of it, of any length
}

// Fault returns the answer to a client whose request has no further attempt.
func (f *Failure) Fault() *openai.Error {
	message := f.Prefix + openai.Clip(f.Message, 300)
	switch f.Status {
	case 400:
		return openai.BadRequest("", "%s", message)
	case 404:
		return &openai.Error{Status: 404, Type: openai.TypeNotFound, Param: "model", Message: message}
	case 502:
		return openai.BadGateway("%s", message)
	case 503:
		return openai.Unavailable(RetryAfter, "%s", message)
	case 504:
		return &openai.Error{Status: 504, Type: openai.TypeTimeout, Message: message}
	}
	return &openai.Error{Status: f.Status, Type: openai.TypeInternal, Message: message}
}
