package native

import (
	"io"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
)

// Surface is the form of an API other than OpenAI's completions. It translates a request into the
// body of a chat completion, and the chat's Deltas into the API's answer. One Surface belongs to
// one request. Chats and completions themselves have none, so that a token needs no call through
// an interface.
type Surface interface {
	// Chat returns the body of the chat completion that body requests. charge is as in
	// openai.ParseWithin. The error names a field of the API.
	Chat(body []byte, charge func(bytes int) *openai.Error) ([]byte, *openai.Error)
	// Begin sets the common parts of the answer, and returns the answer's id. created is in seconds
	// since 1970, model is the name of the model that answers.
	Begin(requestID string, created int64, model string) (id string)
	// Fault returns an error about the chat's body as an error about the API's request.
	Fault(fault *openai.Error) *openai.Error

	// The methods below append to a buffer. AppendDelta appends the events of a Delta, AppendEnd the
	// end of a stream (usage is nil unless Chat asked for it), and AppendWhole an answer that is not
	// streamed.
	AppendDelta(dst []byte, d *openai.Delta) []byte
	AppendEnd(dst []byte, usage *openai.Usage) []byte
	AppendWhole(dst []byte, choices []openai.Delta, usage openai.Usage) []byte
}

// keepAlive is a Surface with an event of its own for silent streams. Others get a comment.
type keepAlive interface {
	AppendKeepAlive(dst []byte) []byte
}

// splicer is a Surface whose appended events may lack parts. Splices returns the parts of what was
// appended to the buffer since the last call.
type splicer interface {
	Splices() []openai.Splice
}

// faults is a Surface whose failed streams end with events of their own. Others end with the error
// of the path's API.
type faults interface {
	AppendFault(dst []byte, fault *openai.Error) []byte
}

// clipper is a Surface of an API in which max_tokens may be more than the context has room for.
type clipper interface {
	ClipMaxTokens()
}

// ServeAs lets decode nodes answer a request of another API.
func (fl *Fleet) ServeAs(ctx *fasthttp.RequestCtx, path string, s Surface) {
	fl.Answer(ctx, path, openai.Chat, &request{fleet: fl, surface: s})
}

// body returns the body of the chat or of the completions that the client's body requests.
func (x *request) body(charge func(bytes int) *openai.Error) (body []byte, fault *openai.Error) {
	body = x.Ctx.PostBody()
	switch {
	case x.surface != nil:
		body, fault = x.surface.Chat(body, charge)
	case x.Path == openai.TokensPath:
		if fault = charge(len(body)); fault == nil {
			body, fault = openai.CompletionOfTokens(body)
		}
	default:
		return body, nil
	}
	if fault == nil {
		x.Ctx.Request.SetBodyRaw(body)
	}
	return body, fault
}

// beginAnswer sets the answer's id and its encoder.
func (x *request) beginAnswer(m *Model) {
	id, now := x.req.RequestID, time.Now().Unix()
	switch {
	case x.pools():
		x.answerID = vectorIDs[x.req.Endpoint] + id
	case x.surface != nil:
		x.answerID = x.surface.Begin(id, now, m.Name)
	case x.Path == openai.TokensPath:
		x.answerID, x.encoder = "cmpl-"+id, openai.NewTokensEncoder(id)
	case x.On == openai.Chat:
		x.answerID = "chatcmpl-" + id
		x.encoder = openai.NewEncoder(x.On, x.answerID, now, m.Name, m.systemPrint)
	default:
		x.answerID = "cmpl-" + id
		x.encoder = openai.NewEncoder(x.On, x.answerID, now, m.Name, m.systemPrint)
	}
}

func (x *request) appendDelta(dst []byte, d *openai.Delta) []byte {
	if x.surface != nil {
		return x.surface.AppendDelta(dst, d)
	}
	return x.encoder.AppendDelta(dst, d)
}

func (x *request) appendEnd(dst []byte, usage *openai.Usage) []byte {
	if x.surface != nil {
		return x.surface.AppendEnd(dst, usage)
	}
	return x.encoder.AppendEnd(dst, usage)
}

// appendKeepAlive appends what a stream gets after silence.
func (x *request) appendKeepAlive(dst []byte) []byte {
	if s, ok := x.surface.(keepAlive); ok {
		return s.AppendKeepAlive(dst)
	}
	return append(dst, exchange.KeepAlive...)
}

// AppendFault implements exchange.Backend. A client of chats that does not know the error event
// would take the answer for complete, so that bodies of chats are cut.
func (x *request) AppendFault(dst []byte, fault *openai.Error) ([]byte, error) {
	if s, ok := x.surface.(faults); ok {
		return s.AppendFault(dst, fault), io.EOF
	}
	dst, end := x.Exchange.AppendFault(dst, fault)
	if x.surface != nil {
		end = io.EOF
	}
	return dst, end
}

func (x *request) appendWhole(dst []byte, choices []openai.Delta, usage openai.Usage) []byte {
	if x.surface != nil {
		return x.surface.AppendWhole(dst, choices, usage)
	}
	return x.encoder.AppendWhole(dst, choices, usage)
}
