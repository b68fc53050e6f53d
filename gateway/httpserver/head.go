package httpserver

import (
	"bytes"
	"errors"
	"net"

	"github.com/valyala/fasthttp"
)

// ErrFraming refuses a request whose end a proxy may find elsewhere than the
// gateway: the bytes between both ends would be another request (RFC 9112, 6.1).
var ErrFraming = errors.New("Transfer-Encoding must be chunked, without Content-Length, in HTTP/1.1")

// Errors of heads that the server's parser takes and the gateway refuses.
var (
	ErrVersion    = errors.New("the request's version of HTTP is not served here: send HTTP/1.1 or HTTP/1.0")
	ErrHeaderName = errors.New("a header's name has a space in it")
	ErrHost       = errors.New("the request has no Host header, which HTTP/1.1 requires")
	ErrExpect     = errors.New("the only expectation that is known here is Expect: 100-continue")
)

// headFaults are the errors of checkHead by the mark that refuseHead leaves for expect.
var headFaults = [...]struct {
	mark   string
	err    error
	status int
}{
	{"framing", ErrFraming, 400},
	{"version", ErrVersion, 505},
	{"name", ErrHeaderName, 400},
	{"host", ErrHost, 400},
	{"expectation", ErrExpect, 417},
}

// checkHead returns why a request's head is refused; nil: it is not. Major versions
// other than 1 are refused (RFC 9110, 15.6.6). Minor versions above 1 become HTTP/1.1,
// the highest that is known here (RFC 9110, 2.5). Of expectations only 100-continue is
// left, in any case; HTTP/1.0 has none (RFC 9110, 10.1.1).
func checkHead(h *fasthttp.RequestHeader) error {
	if !h.IsHTTP11() {
		version := h.Protocol()
		if len(version) < len("HTTP/1.0") || version[len("HTTP/")] != '1' {
			return ErrVersion
		}
		if version[len("HTTP/1.")] > '1' {
			h.SetProtocol("HTTP/1.1")
			if len(h.Host()) == 0 {
				return ErrHost
			}
		}
	}
	if err := checkLines(h); err != nil {
		return err
	}
	if len(h.Peek(expectHeader)) == 0 {
		return nil
	}
	if !h.IsHTTP11() {
		h.Del(expectHeader)
		return nil
	}
	for _, value := range h.PeekAll(expectHeader) {
		if !bytes.EqualFold(value, []byte(expectGoOn)) {
			return ErrExpect
		}
	}
	h.Del(expectHeader) // Set leaves a second value
	h.Set(expectHeader, expectGoOn)
	return nil
}

// checkLines refuses a request with a Transfer-Encoding that is not the only thing that
// says where its body ends, and one with a header name that is no token (RFC 9110, 5.6.2).
// The server's parser drops such headers, so the lines are read as they came.
func checkLines(h *fasthttp.RequestHeader) error {
	coded, sized := false, false
	for lines := h.RawHeaders(); len(lines) > 0; {
		var line []byte
		line, lines, _ = bytes.Cut(lines, []byte{'\n'})
		if len(line) > 0 && (line[0] == ' ' || line[0] == '\t') {
			continue // of the value before
		}
		colon := bytes.IndexByte(line, ':')
		if colon < 0 {
			continue
		}
		if bytes.IndexByte(line[:colon], ' ') >= 0 {
			return ErrHeaderName
		}
		switch colon {
		case len(fasthttp.HeaderTransferEncoding):
			coded = coded || bytes.EqualFold(line[:colon], []byte("transfer-encoding"))
		case len(fasthttp.HeaderContentLength):
			sized = sized || bytes.EqualFold(line[:colon], []byte("content-length"))
		}
	}
	if coded && (sized || h.ContentLength() != -1 || !h.IsHTTP11()) {
		return ErrFraming
	}
	return nil
}

// refuseHead makes the request one without a body after which the connection closes,
// and has expect answer it: what follows the head is never read as a request.
func refuseHead(h *fasthttp.RequestHeader, err error) {
	h.SetContentLength(0)
	h.SetConnectionClose()
	h.Del(expectHeader) // Set leaves a second value
	h.Set(expectHeader, expectGoOn)
	for i := range headFaults {
		if headFaults[i].err == err {
			h.Add(expectHeader, headFaults[i].mark)
		}
	}
}

// SendUnchunked sends a streamed answer of unknown length to an HTTP/1.0 client, which
// knows no chunks: the connection's end is the answer's. It runs in the handler, because
// the server sends such answers in chunks alone.
func sendUnchunked(ctx *fasthttp.RequestCtx) {
	h := &ctx.Response.Header
	body := ctx.Response.BodyStream()
	h.Del(fasthttp.HeaderTransferEncoding)
	h.SetConnectionClose()
	_, err := ctx.Conn().Write(h.Header())
	buf := make([]byte, answerBytes)
	for err == nil {
		n, end := body.Read(buf)
		if n > 0 {
			_, err = ctx.Conn().Write(buf[:n])
		}
		if end != nil {
			break
		}
	}
	if c, ok := body.(fasthttp.ReadCloserWithError); ok {
		_ = c.CloseWithError(err) // it gives no error
	}
	ctx.HijackSetNoResponse(true)
	ctx.Hijack(func(net.Conn) {}) // the server closes the connection
}
