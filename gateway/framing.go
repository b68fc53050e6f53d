package gateway

import (
	"bytes"
	"errors"

	"github.com/valyala/fasthttp"
)

// errFraming refuses a request whose end a proxy may find elsewhere than the
// gateway: the bytes between both ends would be another request (RFC 9112, 6.1).
var errFraming = errors.New("Transfer-Encoding must be chunked, without Content-Length, in HTTP/1.1")

// faultyFraming reports whether a request has a Transfer-Encoding that is not the
// only thing that says where its body ends. The server's parser drops the other
// header, so the lines are read as they came.
func faultyFraming(h *fasthttp.RequestHeader) bool {
	coded, sized := false, false
	for lines := h.RawHeaders(); len(lines) > 0; {
		var line []byte
		line, lines, _ = bytes.Cut(lines, []byte{'\n'})
		switch colon := bytes.IndexByte(line, ':'); colon {
		case len(fasthttp.HeaderTransferEncoding):
			coded = coded || is(line[:colon], "transfer-encoding")
		case len(fasthttp.HeaderContentLength):
			sized = sized || is(line[:colon], "content-length")
		}
	}
	return coded && (sized || h.ContentLength() != -1 || !h.IsHTTP11())
}

// refuseFraming makes the request one without a body after which the connection
// closes, and has expect answer it: what follows the head is never read as a request.
func refuseFraming(h *fasthttp.RequestHeader) {
	h.SetContentLength(0)
	h.SetConnectionClose()
	h.Set(expectHeader, expectGoOn)
	h.Add(expectHeader, expectRefusal)
}
