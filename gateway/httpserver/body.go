package httpserver

import (
	"math/bits"
	"sync"

	"github.com/valyala/fasthttp"
)

// Bodies from lendFrom to lendMost bytes are read into pooled buffers. Allocating a buffer costs
// more than the rest of a request with 100 KB: zeroing, page faults and garbage collection.
// fasthttp's own pool keeps only the sizes that most of its last 42,000 requests had.
const (
	lendFrom = 2 << 10
	lendMost = 1 << 20
)

// fasthttp lets a handler choose a body's buffer only for clients that sent Expect: 100-continue.
// So headReceived adds that header to requests with such bodies, with a second value that marks it
// as added. Requests that headReceived refuses are answered in the same way.
const (
	expectHeader   = "Expect"
	expectContinue = "100-continue"
	expectLoan     = "loan"
)

// loan is a pooled buffer that a request's body uses until the request ends.
type loan struct {
	buf []byte
	old []byte            // the buffer that fasthttp would have used
	req *fasthttp.Request // nil: the loan is in the pool
}

var loans = sync.Pool{New: func() any { return new(loan) }}

// loanKey is the key of a request's loan among its user values. fasthttp closes such values before
// it reuses the request.
type loanKey struct{}

// headReceived checks a request's head and returns the bound of its body.
func (s *Server) headReceived(h *fasthttp.RequestHeader) fasthttp.RequestConfig {
	most := s.limits.Load().MaxBodyBytes
	if err := checkHead(h); err != nil {
		refuseHead(h, err)
		return fasthttp.RequestConfig{}
	}
	if n := h.ContentLength(); n >= lendFrom && n <= most && h.IsHTTP11() && len(h.Peek(expectHeader)) == 0 {
		h.Set(expectHeader, expectContinue)
		h.Add(expectHeader, expectLoan)
	}
	return fasthttp.RequestConfig{MaxRequestBodySize: most}
}

// expect answers a request that headReceived refused, and gives any other request the buffer for
// its body. A large body is reserved within MaxBodyMemory before its buffer is allocated. The
// buffer is as long as the body, whereas fasthttp's would be rounded up to a power of two.
func (s *Server) expect(ctx *fasthttp.RequestCtx) int {
	h := &ctx.Request.Header
	if all := h.PeekAll(expectHeader); len(all) == 2 {
		for _, f := range headFaults {
			if string(all[1]) == f.err.Error() {
				s.fail(ctx, f.err)
				return f.status
			}
		}
		if c, ok := ctx.Conn().(*Conn); ok {
			c.suppress100 = true
		}
		h.Del(expectHeader)
	}
	n := h.ContentLength()
	if n <= 0 || n > s.limits.Load().MaxBodyBytes { // fasthttp reads chunks, and refuses bodies that are too large
		return fasthttp.StatusContinue
	}
	if c := bodyConn(ctx); c != nil && n > HeadBytes {
		if !c.reserve(n) {
			s.fail(ctx, ErrNoMemory)
			return fasthttp.StatusTooManyRequests
		}
		c.sized = true
	}
	if n > lendMost {
		ctx.Request.SwapBody(make([]byte, 0, n))
	} else {
		l := loans.Get().(*loan)
		if cap(l.buf) < n {
			l.buf = make([]byte, 0, 1<<bits.Len(uint(n-1)))
		}
		l.req = &ctx.Request
		l.old, l.buf = l.req.SwapBody(l.buf), nil
		l.req.SetUserValue(loanKey{}, l)
	}
	return fasthttp.StatusContinue
}

// Close returns the buffer to the pool. The body must not be used afterwards.
func (l *loan) Close() error {
	if l.req == nil {
		return nil
	}
	// fasthttp's pool learns sizes from the lengths of returned buffers.
	l.buf = l.req.SwapBody(l.old[:cap(l.old)])[:0]
	l.old, l.req = nil, nil
	loans.Put(l)
	return nil
}

// DropBody frees the body of a large request before the request ends. A small body stays, for the
// connection's next request.
func DropBody(ctx *fasthttp.RequestCtx) {
	large := len(ctx.PostBody()) > HeadBytes
	if l, ok := ctx.Request.UserValue(loanKey{}).(*loan); ok {
		ctx.Request.RemoveUserValue(loanKey{})
		_ = l.Close() // it returns no error
	} else if large {
		ctx.Request.SwapBody(nil)
	}
	if c := bodyConn(ctx); c != nil {
		c.release() // also after a small body, because rendering it may have reserved more
	}
}
