package httpserver

import (
	"bytes"
	"errors"
	"io"
	"net"

	"github.com/valyala/fasthttp"
)

// ErrFraming refuses a request whose end is ambiguous: a proxy could take the bytes behind it for
// another request (RFC 9112, 6.1).
var ErrFraming = errors.New("Transfer-Encoding must be chunked, without Content-Length, in HTTP/1.1")

// Errors of heads that fasthttp accepts and the gateway refuses.
var (
	ErrVersion    = errors.New("the request's HTTP version is not supported: send HTTP/1.1 or HTTP/1.0")
	ErrHeaderName = errors.New("a header's name has a space in it")
	ErrHost       = errors.New("the request has no Host header, which HTTP/1.1 requires")
	ErrExpect     = errors.New("the only supported expectation is Expect: 100-continue")
)

// headFaults has the errors of checkHead with their statuses.
var headFaults = [...]struct {
	err    error
	status int
}{{ErrFraming, 400}, {ErrVersion, 505}, {ErrHeaderName, 400}, {ErrHost, 400}, {ErrExpect, 417}}

// checkHead returns why a request's head is refused, or nil. Major versions other than 1 are
// refused (RFC 9110, 15.6.6). Minor versions above 1 become HTTP/1.1, the highest that is supported
// (RFC 9110, 2.5). The only expectation is 100-continue, in upper or lower case, and HTTP/1.0 has
// none (RFC 9110, 10.1.1).
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
		if !bytes.EqualFold(value, []byte(expectContinue)) {
			return ErrExpect
		}
	}
	h.Del(expectHeader) // because Set keeps a second value
	h.Set(expectHeader, expectContinue)
	return nil
}

// checkLines refuses a request with a Transfer-Encoding if anything else also determines the end of
// its body, and a request with a header name that is no token (RFC 9110, 5.6.2). fasthttp drops
// such headers, so the lines are read as they were received.
func checkLines(h *fasthttp.RequestHeader) error {
	coded, sized := false, false
	for lines := h.RawHeaders(); len(lines) > 0; {
		var line []byte
		line, lines, _ = bytes.Cut(lines, []byte{'\n'})
		if len(line) > 0 && (line[0] == ' ' || line[0] == '\t') {
			continue // a folded value
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

// refuseHead has expect answer the request, to which it passes the error's text as a second Expect
// header. The request gets no body and closes the connection, so that no byte behind its head is
// read as a request.
func refuseHead(h *fasthttp.RequestHeader, err error) {
	h.SetContentLength(0)
	h.SetConnectionClose()
	h.Del(expectHeader) // because Set keeps a second value
	h.Set(expectHeader, expectContinue)
	h.Add(expectHeader, err.Error())
}

// sendUnchunked sends a streamed answer of unknown length to an HTTP/1.0 client, which does not
// know chunks: the end of the connection is the end of the answer. It runs in the handler, because
// fasthttp always sends such answers in chunks.
func sendUnchunked(ctx *fasthttp.RequestCtx) {
	h := &ctx.Response.Header
	body := ctx.Response.BodyStream()
	h.Del(fasthttp.HeaderTransferEncoding)
	h.SetConnectionClose()
	_, err := ctx.Conn().Write(h.Header())
	if err == nil {
		_, err = io.CopyBuffer(ctx.Conn(), body, make([]byte, answerBytes))
	}
	if c, ok := body.(fasthttp.ReadCloserWithError); ok {
		_ = c.CloseWithError(err) // it returns no error
	}
	ctx.HijackSetNoResponse(true)
	ctx.Hijack(func(net.Conn) {}) // fasthttp closes the connection
}
