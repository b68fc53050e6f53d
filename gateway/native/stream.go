package native

import (
	"io"
	"sync"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
)

// stream is the body of a streamed response. The server reads it on the connection's own goroutine,
// sends each Read as one chunk and one flush, and closes it in any case.
type stream struct {
	x    *request
	sent int   // bytes of request.buf
	end  error // of the body, once buf is sent; nil: more follows
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

// takeBuffer takes a buffer for the request's events, and giveBuffer returns it.
func (x *request) takeBuffer() {
	x.buf = (*buffers.Get().(*[]byte))[:0]
	x.countBuffer()
}

// countBuffer updates the total size of all streams' buffers.
func (x *request) countBuffer() {
	if n := cap(x.buf); n != x.counted {
		x.fleet.Buffered.Add(int64(n - x.counted))
		x.counted = n
	}
}

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
	for s.sent == len(x.buf) && s.end == nil && x.live > 0 {
		s.fill()
	}
	if x.live == 0 && s.end == nil { // the last piece and what ends the body leave together
		var u *openai.Usage
		if x.req.IncludeUsage {
			all := x.usage()
			u = &all
		}
		x.buf, s.end = x.encoder.AppendEnd(x.buf, u), io.EOF
	}
	if s.sent == len(x.buf) {
		return 0, s.end
	}
	n = copy(p, x.buf[s.sent:])
	s.sent += n
	return n, nil
}

// fill waits for the next events. The first are there already, from Run.
func (s *stream) fill() {
	x := s.x
	if len(x.buf) > 0 {
		x.buf, s.sent = x.buf[:0], 0
	}
	defer x.countBuffer()
	if fault := x.advance(); fault != nil {
		if s.end = exchange.ErrCut; !x.Unread() {
			x.buf = fault.AppendEvent(x.buf)
		}
	}
}

// CloseWithError implements fasthttp.ReadCloserWithError. err is why the body could not be written
// completely; nil: it was.
func (s *stream) CloseWithError(err error) error {
	s.x.CloseBody(err, s.end != nil)
	return nil
}
