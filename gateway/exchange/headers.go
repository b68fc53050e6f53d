package exchange

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/cespare/xxhash/v2"
	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/route"
)

// Headers with routing hints.
const (
	PolicyHeader  = "X-Tandem-Policy"
	sessionHeader = "X-Session-Id"
)

// RouteHints are the routing hints of a request.
type RouteHints struct {
	Policy  route.Policy
	Session kvcache.Hash // of the session's name; 0: none
	Turn    uint64       // number of the request in this gateway
}

// Request returns the router's input for a prompt with a key.
func (h *RouteHints) Request(key kvcache.Hash) route.Request {
	r := route.Request{Policy: h.Policy, Key: key, Turn: h.Turn}
	switch {
	case h.Policy == route.Session && h.Session != 0:
		r.Key = h.Session
	case h.Policy == route.PowerOfTwo:
		r.Draw = rand.Uint64()
	}
	return r
}

// Routing reads the routing hints of a request.
func (s *Service) Routing(h *fasthttp.RequestHeader) (RouteHints, *openai.Error) {
	b := RouteHints{Policy: s.Policy, Turn: s.turn.Add(1)}
	if name := h.Peek(PolicyHeader); len(name) > 0 {
		p, err := route.ParsePolicy(string(name))
		if err != nil {
			return b, openai.BadRequest("", "the header %s is %q: want one of %s", PolicyHeader, openai.Clip(string(name), 100), route.Policies())
		}
		b.Policy = p
	}
	if id := h.Peek(sessionHeader); len(id) > 0 {
		b.Session = kvcache.Hash(xxhash.Sum64(id))
	}
	return b, nil
}

// timeoutHeader is the client's limit for the whole request, in seconds or in the form 1m30s.
const timeoutHeader = "X-Tandem-Timeout"

// timeout returns how long a request may take.
func (s *Service) timeout(h *fasthttp.RequestHeader) (time.Duration, *openai.Error) {
	given := h.Peek(timeoutHeader)
	if len(given) == 0 {
		return s.Limits().RequestTimeout, nil
	}
	d, err := time.ParseDuration(string(given))
	if s, bare := strconv.ParseFloat(string(given), 64); bare == nil {
		d, err = time.Duration(min(s, maxTimeout.Seconds())*float64(time.Second)), nil
	}
	if err != nil || d <= 0 {
		return 0, openai.BadRequest("", "the header %s is %q: want seconds above 0, or a time such as 500ms", timeoutHeader, openai.Clip(string(given), 50))
	}
	return min(d, s.Limits().RequestTimeout), nil
}

// maxTimeout keeps a header's number within the range of a duration.
const maxTimeout = 365 * 24 * time.Hour

// CheckJSON refuses a body whose Content-Type is not JSON. Besides giving a clearer error than the
// parser, this keeps web pages from posting to a gateway on the reader's machine, because browsers
// send a preflight before they send JSON.
func CheckJSON(h *fasthttp.RequestHeader) *openai.Error {
	refuse := func(format string, what []byte) *openai.Error {
		return &openai.Error{Status: 415, Type: openai.TypeMedia, Message: fmt.Sprintf(format, openai.Clip(string(what), 100))}
	}
	if e := h.ContentEncoding(); len(e) > 0 && !bytes.EqualFold(e, []byte("identity")) {
		return refuse("the body's Content-Encoding is %q: send it as it is", e)
	}
	kind, _, _ := bytes.Cut(h.ContentType(), []byte{';'})
	if kind = bytes.TrimSpace(kind); len(kind) > 0 && !bytes.EqualFold(kind, []byte("application/json")) {
		return refuse("the body's Content-Type is %q: send JSON, as application/json", kind)
	}
	return nil
}
