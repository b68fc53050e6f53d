package gateway

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/messages"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// serve serves one request. A panic in it is answered and logged, and does not end other requests.
func (g *Gateway) serve(ctx *fasthttp.RequestCtx) {
	defer func() {
		if r := recover(); r != nil {
			g.Log.Error("panic while serving a request", "panic", r, "stack", string(debug.Stack()))
			ctx.Response.ResetBody()
			g.fail(ctx, &openai.Error{Status: 500, Type: openai.TypeInternal, Message: "internal error of the gateway; its log has the details"})
			ctx.SetConnectionClose()
		}
	}()
	id := ctx.Request.Header.Peek(exchange.RequestIDHeader)
	if openai.ValidID(id) {
		ctx.Response.Header.SetBytesV(exchange.RequestIDHeader, id)
	} else {
		ctx.Response.Header.Set(exchange.RequestIDHeader, newID())
	}
	path := pathOf(ctx)
	g.dispatch(ctx, path, clients)
	if !ctx.Response.IsBodyStream() { // a stream is counted at its end
		g.count(path, ctx.Response.StatusCode())
	}
}

// errorBody returns the body for a connection that is refused.
func errorBody(status int, message string) []byte {
	e := &openai.Error{Status: status, Type: openai.TypeUnavailable, Message: message}
	switch status {
	case fasthttp.StatusTooManyRequests:
		e.Type = openai.TypeRateLimit
	case fasthttp.StatusBadRequest:
		e.Type = openai.TypeBadRequest
	}
	return e.Append(nil)
}

// badHTTP answers what could not be read as a request.
func (g *Gateway) badHTTP(ctx *fasthttp.RequestCtx, err error) {
	var small *fasthttp.ErrSmallBuffer
	e := openai.BadRequest("", "the HTTP request could not be read: %s", openai.Clip(err.Error(), 200))
	switch {
	case errors.Is(err, fasthttp.ErrBodyTooLarge):
		e = &openai.Error{Status: 413, Type: openai.TypeTooLarge,
			Message: fmt.Sprintf("the request body is larger than %d bytes", g.Limits().MaxBodyBytes)}
	case errors.As(err, &small):
		e = &openai.Error{Status: 431, Type: "Request Header Fields Too Large",
			Message: fmt.Sprintf("the request's head is larger than %d bytes", httpserver.HeadBytes)}
	case errors.Is(err, os.ErrDeadlineExceeded):
		e = &openai.Error{Status: 408, Type: "Request Timeout", Message: fmt.Sprintf("the request did not arrive in time: its head has %v, its body %d bytes a second (--header-timeout, --min-body-rate)", g.Limits().HeaderTimeout, g.Limits().MinBodyRate)}
	case errors.Is(err, httpserver.ErrVersion):
		e = &openai.Error{Status: 505, Type: "HTTP Version Not Supported", Message: err.Error()}
	case errors.Is(err, httpserver.ErrExpect):
		e = &openai.Error{Status: 417, Type: "Expectation Failed", Message: err.Error()}
	case errors.Is(err, httpserver.ErrNoMemory):
		e = g.NoMemory()
	}
	ctx.Response.Header.Set(exchange.RequestIDHeader, newID())
	g.fail(ctx, e)
	g.count("other", e.Status)
}

// fail answers with an error, in the form of the path's API.
func (g *Gateway) fail(ctx *fasthttp.RequestCtx, e *openai.Error) {
	ctx.SetStatusCode(e.Status)
	ctx.SetContentType("application/json")
	if e.RetryAfter > 0 {
		ctx.Response.Header.Set("Retry-After", strconv.Itoa(e.RetryAfter))
	}
	if messages.Serves(pathOf(ctx)) {
		id := ctx.Response.Header.Peek(exchange.RequestIDHeader)
		ctx.Response.SetBodyRaw(messages.AppendError(nil, e, id))
		ctx.Response.Header.SetBytesV(messages.RequestIDHeader, id)
		return
	}
	ctx.Response.SetBodyRaw(e.Append(nil))
}

// appendFault appends an error as the last event of a stream, in the form of the path's API.
func appendFault(dst []byte, path string, id []byte, e *openai.Error) []byte {
	if messages.Serves(path) {
		return messages.AppendErrorEvent(dst, e, id)
	}
	return e.AppendEvent(dst)
}

// count counts an answered request by its route and status. Paths without a route share a label,
// and so do statuses of one class that only upstreams answer.
func (g *Gateway) count(path string, status int) {
	g.Meters.Counter(metrics.HTTPRequests, routeLabel(path), statusLabel(status)).Inc()
}

// routeLabel returns the path of the route that serves path, such as /v1/models/{model}.
func routeLabel(path string) string {
	for i := range routes {
		if routes[i].at(path) {
			return routes[i].Path
		}
	}
	return "other"
}

// statusLabel returns the status, or its class, such as 4xx, if the table of metrics does not have
// the status.
func statusLabel(status int) string {
	if status == fasthttp.StatusOK { // fast path
		return "200"
	}
	code := strconv.Itoa(status)
	if !slices.Contains(metrics.HTTPStatuses, code) && len(code) == 3 {
		return code[:1] + "xx"
	}
	return code
}

func (g *Gateway) health(ctx *fasthttp.RequestCtx) {
	if err := g.Ready(); err != nil {
		ctx.SetStatusCode(503)
		ctx.SetBodyString(err.Error() + "\n")
		return
	}
	ctx.SetBodyString("ok\n")
}

func (g *Gateway) version(ctx *fasthttp.RequestCtx) {
	sendJSON(ctx, append(openai.AppendString([]byte(`{"version":`), g.o.Version), '}'))
}

func (g *Gateway) exposition(ctx *fasthttp.RequestCtx) {
	ctx.SetContentType(metrics.ContentType)
	ctx.Response.SetBodyRaw(g.Meters.Append(nil))
}

func (g *Gateway) models(ctx *fasthttp.RequestCtx) {
	b := []byte(`{"object":"list","data":[`)
	for _, card := range g.native.Cards() {
		b = append(card.Append(b), ',')
	}
	if g.proxy != nil {
		for _, m := range g.proxy.Pool.Now().Models {
			b = append(append(b, m.Card...), ',')
		}
	}
	sendJSON(ctx, append(bytes.TrimSuffix(b, []byte{','}), "]}"...))
}

func (g *Gateway) oneModel(ctx *fasthttp.RequestCtx) {
	name := strings.TrimPrefix(pathOf(ctx), modelsPath)
	if g.proxy != nil {
		switch m := g.proxy.Pool.Now().Find(name); {
		case m != nil && m.Name == name:
			sendJSON(ctx, m.Card)
			return
		case g.native.Models.Load() == nil:
			g.fail(ctx, openai.NoModel(name))
			return
		}
	}
	m, fault := g.native.Find(name)
	if fault != nil {
		g.fail(ctx, fault)
		return
	}
	sendJSON(ctx, m.Card().Append(nil))
}

// load answers with the number of requests in flight.
func (g *Gateway) load(ctx *fasthttp.RequestCtx) {
	sendJSON(ctx, fmt.Appendf(nil, `{"server_load":%d}`, g.InFlight.Load()))
}

// newID returns 128 random bits in hexadecimal. An id is not a secret: do not use it for
// authentication.
func newID() string {
	var id [16]byte
	binary.BigEndian.PutUint64(id[:8], rand.Uint64())
	binary.BigEndian.PutUint64(id[8:], rand.Uint64())
	return hex.EncodeToString(id[:])
}
