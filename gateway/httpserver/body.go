package httpserver

import (
	"math/bits"
	"sync"

	"github.com/valyala/fasthttp"
)

// Bodies from lendFrom to lendMost bytes are read into memory that requests share in
// turn: made anew for each of them, its zeroing, its pages and the collection cost
// more than all else of a request with 100 KB. The server has a pool for that, which
// keeps only sizes that most of its last 42,000 requests had.
const (
	lendFrom = 2 << 10
	lendMost = 1 << 20
)

// The server lets a body's memory be chosen only where its client waits to be told to
// go on. So requests with such bodies are taken for those, with a second value that
// says that nobody waits. The same way leads requests that headCame refuses to an answer.
const (
	expectHeader = "Expect"
	expectGoOn   = "100-continue"
	expectLoan   = "loan"
)

// loan is the memory of a request's body, lent until the request is over.
type loan struct {
	buf []byte
	old []byte            // what the server would have used
	req *fasthttp.Request // nil: it is in loans
}

var loans = sync.Pool{New: func() any { return new(loan) }}

// loanKey is where a request keeps its loan: the server closes such values before it
// uses the request for the next one.
type loanKey struct{}

// headCame is what the server asks when it has a request's head.
func (s *Server) headCame(h *fasthttp.RequestHeader) fasthttp.RequestConfig {
	most := int(s.maxBody.Load())
	if err := checkHead(h); err != nil {
		refuseHead(h, err)
		return fasthttp.RequestConfig{}
	}
	if n := h.ContentLength(); n >= lendFrom && n <= most && h.IsHTTP11() && len(h.Peek(expectHeader)) == 0 {
		h.Set(expectHeader, expectGoOn)
		h.Add(expectHeader, expectLoan)
	}
	return fasthttp.RequestConfig{MaxRequestBodySize: most}
}

// expect answers a request that headCame refused, and gives any other the memory
// that its body is then read into. MaxBodyMemory counts that of a large body before it
// is allocated, and it is as long as the body: the server rounds up to a power of two.
func (s *Server) expect(ctx *fasthttp.RequestCtx) int {
	h := &ctx.Request.Header
	if all := h.PeekAll(expectHeader); len(all) == 2 {
		for i := range headFaults {
			if f := &headFaults[i]; string(all[1]) == f.mark {
				s.fail(ctx, f.err)
				return f.status
			}
		}
		if c, ok := ctx.Conn().(*Conn); ok {
			c.unasked = true
		}
		h.Del(expectHeader)
	}
	n := h.ContentLength()
	if n <= 0 || n > int(s.maxBody.Load()) { // the server reads chunks, and refuses what is too large
		return fasthttp.StatusContinue
	}
	if c := bodyConn(ctx); c != nil && n > HeadBytes {
		if !c.take(n) {
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

// Close ends the loan; the body must not be used any more.
func (l *loan) Close() error {
	if l.req == nil {
		return nil
	}
	// The server's pool learns sizes by the lengths that it gets back.
	l.buf = l.req.SwapBody(l.old[:cap(l.old)])[:0]
	l.old, l.req = nil, nil
	loans.Put(l)
	return nil
}

// DropBody frees a large request's body before the request is over; what is small
// stays, for the connection's next request.
func DropBody(ctx *fasthttp.RequestCtx) {
	large := len(ctx.PostBody()) > HeadBytes
	if l, ok := ctx.Request.UserValue(loanKey{}).(*loan); ok {
		ctx.Request.RemoveUserValue(loanKey{})
		_ = l.Close() // it gives no error
	} else if large {
		ctx.Request.SwapBody(nil)
	}
	if c := bodyConn(ctx); c != nil {
		c.release() // also of a small body, from which a template may have made much
	}
}
