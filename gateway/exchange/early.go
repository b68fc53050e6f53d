package exchange

import (
	"io"
	"runtime/debug"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/openai"
)

// EventsHead sets the head of a stream of events.
func EventsHead(ctx *fasthttp.RequestCtx) {
	ctx.SetContentType("text/event-stream; charset=utf-8")
	ctx.Response.Header.Set("Cache-Control", "no-cache")
	ctx.Response.Header.Set("X-Accel-Buffering", "no")
}

// run admits the request and runs its attempts. If the limits have an early head, a stream that is
// silent for SSEKeepAlive is answered by the returned body, which waits for the rest of run.
func (x *Exchange) run() (*earlyBody, *openai.Error) {
	l := x.S.Limits()
	if !l.SSEEarlyHead || l.SSEKeepAlive <= 0 || !x.b.Streams() {
		return nil, x.admitAndRun()
	}
	x.WatchClient()
	// Until done has a value, the new goroutine owns the exchange, and the calling one the response.
	done := make(chan *openai.Error, 1)
	go func() {
		defer func() {
			if r := recover(); r != nil {
				x.S.Log.Error("panic while streaming", "request", string(x.ID), "panic", r, "stack", string(debug.Stack()))
				done <- &openai.Error{Status: 500, Type: openai.TypeInternal, Message: "internal error of the gateway; its log has the details"}
			}
		}()
		done <- x.admitAndRun()
	}()
	silence := time.NewTimer(l.SSEKeepAlive)
	defer silence.Stop()
	select {
	case fault := <-done:
		return nil, fault
	case <-silence.C:
		return &earlyBody{x: x, done: done, quiet: l.SSEKeepAlive, buf: []byte(KeepAlive)}, nil
	}
}

func (x *Exchange) admitAndRun() *openai.Error {
	if fault := x.admit(); fault != nil {
		return fault
	}
	return x.b.Run()
}

// earlyBody is the body of a stream whose head leaves while the request still waits. It sends
// comments until the backend has the answer, whose body follows. A request that is refused ends in
// an error event.
type earlyBody struct {
	x     *Exchange
	done  <-chan *openai.Error // of run; nil: it has returned
	quiet time.Duration
	buf   []byte // that is to be sent
	end   error  // follows buf; nil: more follows
	body  fasthttp.ReadCloserWithError
}

// Read implements io.Reader.
func (b *earlyBody) Read(p []byte) (n int, err error) {
	if b.body != nil {
		return b.body.Read(p)
	}
	defer b.x.RecoverRead(&n, &err)
	if len(b.buf) == 0 && b.end == nil {
		b.wait()
	}
	if n = copy(p, b.buf); n > 0 {
		b.buf = b.buf[n:]
		return n, nil
	}
	if b.body != nil {
		return b.body.Read(p)
	}
	return 0, b.end
}

// wait waits for the backend, or for the next comment.
func (b *earlyBody) wait() {
	silence := time.NewTimer(b.quiet)
	defer silence.Stop()
	select {
	case fault := <-b.done:
		b.answer(fault)
	case <-silence.C:
		b.buf = append(b.buf, KeepAlive...)
	}
}

// answer sets what follows the comments.
func (b *earlyBody) answer(fault *openai.Error) {
	x := b.x
	if b.done = nil; fault == nil {
		b.body, fault = x.b.Respond(true)
	}
	if fault == nil {
		return
	}
	if b.end = ErrCut; !x.Unread() {
		b.buf, b.end = x.b.AppendFault(b.buf, fault)
	}
}

// CloseWithError implements fasthttp.ReadCloserWithError.
func (b *earlyBody) CloseWithError(err error) error {
	if b.body != nil {
		return b.body.CloseWithError(err)
	}
	if b.done != nil { // the client did not take a comment: its watch ends the request
		if c, ok := b.x.Ctx.Conn().(io.Closer); ok {
			_ = c.Close()
		}
		<-b.done
	}
	b.x.CloseBody(err, b.end != nil)
	return nil
}
