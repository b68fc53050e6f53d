package gateway

import (
	"errors"
	"io"
	"os"
	"runtime/debug"
	"sync"

	"github.com/tandem-serving/tandem/internal/openai"
)

// errCut ends a body without its last chunk: the server then closes the
// connection, and the client sees that the answer is not whole.
var errCut = errors.New("gateway: answer cut")

// stream is a streamed response's body. The server calls WriteTo on the
// connection's own goroutine, each Write becoming one chunk and one flush, and
// Close in any case.
type stream struct {
	j    *job
	path string
}

// buffers are kept between streams, unless a slow client made one large.
var buffers = sync.Pool{New: func() any { return new([]byte) }}

const maxKeptBuffer = 64 << 10

// takeBuffer gives the job the buffer for its events, giveBuffer returns it.
func (j *job) takeBuffer() { j.buf = (*buffers.Get().(*[]byte))[:0] }

func (j *job) giveBuffer() {
	if b := j.buf; b != nil && cap(b) <= maxKeptBuffer {
		buffers.Put(&b)
	}
	j.buf = nil
}

// begin starts a streamed request and waits for the first thing to send.
func (j *job) begin() *openai.Error {
	j.takeBuffer()
	if fault := j.startAll(); fault != nil {
		return fault
	}
	for len(j.buf) == 0 && j.live > 0 {
		if fault := j.advance(); fault != nil {
			return fault
		}
	}
	return nil
}

// SupportsBodyWriteTo implements fasthttp.BodyWriterTo.
func (s *stream) SupportsBodyWriteTo() bool { return true }

// Read implements io.Reader, which the server asks of a body but does not use.
func (s *stream) Read([]byte) (int, error) { return 0, errCut }

// WriteTo implements io.WriterTo. Any error makes the server abort the
// connection.
func (s *stream) WriteTo(w io.Writer) (sent int64, err error) {
	j := s.j
	defer func() {
		if r := recover(); r != nil {
			j.g.log.Error("panic while streaming", "request", j.req.RequestID, "panic", r, "stack", string(debug.Stack()))
			err = errCut
		}
	}()
	for {
		if j.live == 0 {
			if j.req.IncludeUsage {
				j.buf = j.answer.AppendUsage(j.buf, j.usage())
			}
			j.buf = append(j.buf, openai.Done...)
		}
		if len(j.buf) > 0 {
			n, err := w.Write(j.buf)
			sent += int64(n)
			j.buf = j.buf[:0]
			if err != nil {
				j.gone, j.cause = true, "client_gone"
				if errors.Is(err, os.ErrDeadlineExceeded) {
					j.cause = "slow_client"
				}
				return sent, err
			}
		}
		if j.live == 0 {
			return sent, nil
		}
		if fault := j.advance(); fault != nil {
			if !j.gone {
				j.buf = fault.AppendEvent(j.buf)
				n, _ := w.Write(j.buf) // errCut follows in any case
				sent += int64(n)
			}
			return sent, errCut
		}
	}
}

// Close implements io.Closer.
func (s *stream) Close() error {
	if !s.j.closed {
		s.j.close()
		s.j.g.count(s.path, 200)
	}
	return nil
}
