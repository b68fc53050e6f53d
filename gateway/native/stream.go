package native

import (
	"io"
	"sync"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// Run implements exchange.Backend. It waits for the first event of a stream, or for the whole
// answer.
func (x *request) Run() *openai.Error {
	if fault := x.chargeAnswer(); fault != nil {
		return fault
	}
	if x.req.Stream {
		x.buf = (*buffers.Get().(*[]byte))[:0]
		x.countBuffer()
	}
	if fault := x.startAll(); fault != nil {
		return fault
	}
	for len(x.buf) == 0 && x.live > 0 {
		if fault := x.advance(); fault != nil {
			return fault
		}
	}
	return nil
}

// Streams implements exchange.Backend.
func (x *request) Streams() bool { return x.req.Stream }

// Respond implements exchange.Backend. A stream's status line waits for its first event: until then
// an error is an HTTP status, and the head leaves with the first token.
func (x *request) Respond(begun bool) (fasthttp.ReadCloserWithError, *openai.Error) {
	if !x.req.Stream {
		x.Ctx.SetContentType("application/json")
		x.Ctx.Response.SetBodyRaw(x.response())
		return nil, nil
	}
	body := &stream{x: x}
	body.splicer, _ = x.surface.(splicer)
	body.splice()
	if !begun {
		exchange.EventsHead(x.Ctx)
		x.Ctx.Response.SetBodyStream(body, -1)
	}
	return body, nil
}

// ClientGone implements exchange.Backend.
func (x *request) ClientGone() { x.in.Wake() }

// Stop implements exchange.Backend.
func (x *request) Stop() {
	most := 0
	for i := range x.choices {
		c := &x.choices[i]
		if c.stream != nil {
			c.stream.Cancel("request ended")
		}
		x.leave(c)
		most = max(most, len(c.output))
		end := EndRefused
		switch {
		case c.done():
			x.CountAnswer(&c.times, len(c.prompt.Tokens), x.outputOf(c))
			end = EndAnswered
			x.CountFinished(c.countedReason(), 1)
		case x.Admitted:
			end = EndIncomplete
			x.CountFinished(x.Broken(), 1)
		}
		if ended := x.fleet.o.Ended; ended != nil {
			ended(&Ended{end, x.Start, c.prompt, x.model.BlockTokens, c.cached, len(c.output), c.times})
		}
	}
	if len(x.choices) > 0 && x.live == 0 && !x.pools() {
		x.S.Meters.Histogram(metrics.RequestMaxNumGenerationTokens).Observe(float64(most))
	}
	if x.timer != nil {
		x.timer.Stop()
		x.uncut()
	}
	x.giveBuffer()
}

// Ending implements exchange.Backend.
func (x *request) Ending() exchange.Ending {
	if len(x.choices) == 0 {
		return exchange.Ending{}
	}
	x.describe()
	u, c := x.usage(), &x.choices[0]
	e := exchange.Ending{Model: x.model.Name, Node: c.last, Prompt: u.Prompt, Cached: u.Cached, Output: u.Completion, Choices: len(x.choices),
		MaxTokens: c.prompt.MaxTokens, Stream: x.req.Stream, Unserved: x.nPrompt}
	for i := range x.choices {
		c := &x.choices[i]
		if c.done() {
			e.Finish = c.delta.Finish.Reason
		}
		if c.state.Started() || c.done() {
			e.Unserved = 0
		}
		if at := c.times.First; !at.IsZero() && (e.First.IsZero() || at.Before(e.First)) {
			e.First = at
		}
	}
	if n := x.fleet.o.LogPromptText; x.S.LogRequests && n > 0 && x.model.Text != nil {
		e.Text = openai.Clip(x.model.Text.Decode(c.prompt.Tokens, false), n)
	}
	return e
}

// Free implements exchange.Backend. The collector frees the request.
func (x *request) Free() {}

// stream is the body of a streamed response. The server reads it on the connection's own goroutine,
// sends each Read as one chunk and one flush, and closes it in any case.
type stream struct {
	x    *request
	sent int   // bytes of request.buf
	end  error // of the body, once buf is sent; nil: more follows

	client *httpserver.Conn // for events after the first piece; nil: fasthttp writes them

	splicer splicer         // nil: buf has all events
	splices []openai.Splice // of buf, that are not sent
	inPart  int             // bytes of the first splice's first part that are sent
}

// buffers are reused between streams, unless a slow client made one large.
var buffers = sync.Pool{New: func() any {
	b := make([]byte, 0, newBuffer)
	return &b
}}

const (
	newBuffer     = 512 // bytes: a step's events of one choice, without log-probabilities
	maxKeptBuffer = 64 << 10
)

// countBuffer updates the total size of all streams' buffers.
func (x *request) countBuffer() {
	if n := cap(x.buf); n != x.counted {
		x.fleet.Buffered.Add(int64(n - x.counted))
		x.counted = n
	}
}

// giveBuffer returns the request's buffer.
func (x *request) giveBuffer() {
	x.fleet.Buffered.Add(-int64(x.counted))
	x.counted = 0
	if b := x.buf; b != nil && cap(b) <= maxKeptBuffer {
		buffers.Put(&b)
	}
	x.buf = nil
}

// Read implements io.Reader. Any error but io.EOF makes the server abort the connection.
func (s *stream) Read(p []byte) (n int, err error) {
	x := s.x
	defer x.RecoverRead(&n, &err)
	for len(s.next()) == 0 && s.end == nil && x.live > 0 {
		s.fill()
		if s.client != nil && s.end == nil && x.live > 0 && len(x.buf) > 0 {
			if err := s.write(); err != nil {
				return 0, err
			}
		}
	}
	if x.live == 0 && s.end == nil { // the last piece and what ends the body leave together
		var u *openai.Usage
		if x.req.IncludeUsage {
			all := x.usage()
			u = &all
		}
		x.buf, s.end = x.appendEnd(x.buf, u), io.EOF
		s.splice()
	}
	if n = copy(p, s.next()); n == 0 {
		return 0, s.end
	}
	s.skip(n)
	s.client = httpserver.ChunkWriter(x.Ctx)
	return n, nil
}

// splice takes the splices of what was added to the request's buffer.
func (s *stream) splice() {
	if s.splicer != nil {
		s.splices = append(s.splices, s.splicer.Splices()...)
	}
}

// next returns the next bytes of the events; empty: all are sent.
func (s *stream) next() []byte {
	for len(s.splices) > 0 {
		switch p := &s.splices[0]; {
		case s.sent < p.At:
			return s.x.buf[s.sent:p.At]
		case len(p.Parts) > 0:
			return p.Parts[0][s.inPart:]
		}
		s.splices = s.splices[1:]
	}
	return s.x.buf[s.sent:]
}

// skip marks n bytes of next as sent.
func (s *stream) skip(n int) {
	if len(s.splices) == 0 || s.sent < s.splices[0].At {
		s.sent += n
		return
	}
	p := &s.splices[0]
	if s.inPart += n; s.inPart == len(p.Parts[0]) {
		p.Parts, s.inPart = p.Parts[1:], 0
	}
}

// write sends the events directly to the client, past fasthttp's buffers. Most of a stream's events
// are sent here.
func (s *stream) write() error {
	for b := s.next(); len(b) > 0; b = s.next() {
		rest, err := s.client.WriteChunkNow(b)
		if err == nil && len(rest) > 0 {
			_, err = s.client.Write(rest)
		}
		if err != nil {
			return err
		}
		s.skip(len(b))
	}
	return nil
}

// fill waits for the next events. The first are there already, from Run.
func (s *stream) fill() {
	x := s.x
	if len(x.buf) > 0 {
		x.buf, s.sent = x.buf[:0], 0
	}
	defer x.countBuffer()
	defer s.splice()
	if x.quiet == 0 { // the head was sent
		if x.quiet, x.wrote = x.S.Limits().SSEKeepAlive, time.Now(); x.quiet > 0 {
			x.wake(x.wrote.Add(x.quiet))
		}
	}
	if fault := x.advance(); fault != nil {
		if s.end = exchange.ErrCut; !x.Unread() {
			x.buf, s.end = x.AppendFault(x.buf, fault)
		}
	}
}

// CloseWithError implements fasthttp.ReadCloserWithError. err is why the body could not be written
// completely; nil: it was.
func (s *stream) CloseWithError(err error) error {
	s.x.CloseBody(err, s.end != nil)
	return nil
}
