package native

import (
	"io"
	"sync"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
)

// stream is a streamed response's body. The server reads it on the connection's
// own goroutine, each Read becoming one chunk and one flush, and closes it in any
// case.
type stream struct {
	j    *job
	sent int   // bytes of j.buf
	end  error // of the body, once j.buf is sent; nil: it goes on
}

// buffers are kept between streams, unless a slow client made one large.
var buffers = sync.Pool{New: func() any {
	b := make([]byte, 0, newBuffer)
	return &b
}}

const (
	newBuffer     = 512 // bytes: a step's events of one choice, without log-probabilities
	maxKeptBuffer = 64 << 10
)

// takeBuffer gives the job the buffer for its events, giveBuffer returns it.
func (j *job) takeBuffer() {
	j.buf = (*buffers.Get().(*[]byte))[:0]
	j.countBuffer()
}

// countBuffer keeps the sum of all streams' buffers.
func (j *job) countBuffer() {
	if n := cap(j.buf); n != j.counted {
		j.fleet.Buffered.Add(int64(n - j.counted))
		j.counted = n
	}
}

func (j *job) giveBuffer() {
	j.fleet.Buffered.Add(-int64(j.counted))
	j.counted = 0
	if b := j.buf; b != nil && cap(b) <= maxKeptBuffer {
		buffers.Put(&b)
	}
	j.buf = nil
}

// Read implements io.Reader. Any error but io.EOF makes the server abort the
// connection.
func (s *stream) Read(p []byte) (n int, err error) {
	j := s.j
	defer j.Caught(&n, &err)
	for s.sent == len(j.buf) && s.end == nil && j.live > 0 {
		s.fill()
	}
	if j.live == 0 && s.end == nil { // the last piece and what ends the body leave together
		var u *openai.Usage
		if j.req.IncludeUsage {
			all := j.usage()
			u = &all
		}
		j.buf, s.end = j.encoder.AppendEnd(j.buf, u), io.EOF
	}
	if s.sent == len(j.buf) {
		return 0, s.end
	}
	n = copy(p, j.buf[s.sent:])
	s.sent += n
	return n, nil
}

// fill waits for what is to be sent next; what was begin's is there already.
func (s *stream) fill() {
	j := s.j
	if len(j.buf) > 0 {
		j.buf, s.sent = j.buf[:0], 0
	}
	defer j.countBuffer()
	if fault := j.advance(); fault != nil {
		if s.end = exchange.ErrCut; !j.Unread() {
			j.buf = fault.AppendEvent(j.buf)
		}
	}
}

// CloseWithError implements fasthttp.ReadCloserWithError; err is why the body
// could not be written to its end, or nil.
func (s *stream) CloseWithError(err error) error {
	s.j.CloseBody(err, s.end != nil)
	return nil
}
