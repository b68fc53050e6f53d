package proxy

import (
	"bytes"
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
)

// appendHead returns the request's head for a server, in r.head. It has the client's headers,
// except hop-by-hop headers and credentials.
func (r *relay) appendHead(s *upstream.Server, size int) []byte {
	b := s.AppendHead(r.head[:0], cmp.Or(r.method, "POST"), r.sentPath(), cleanQuery(r.Ctx.URI().QueryString()))
	own := len(b)
	b, hops := r.appendFields(b, nil)
	if len(hops) > 0 {
		b, _ = r.appendFields(b[:own], hops)
	}
	if c := r.try.Context(); r.try.On() {
		b = append(append(append(b, "Traceparent: "...), c.Traceparent...), "\r\n"...)
		if c.Tracestate != "" {
			b = append(append(append(b, "Tracestate: "...), c.Tracestate...), "\r\n"...)
		}
	}
	b = append(append(b, exchange.RequestIDHeader...), ": "...)
	b = append(append(b, r.ID...), "\r\nContent-Length: "...)
	b = strconv.AppendInt(b, int64(size), 10)
	r.head = append(b, "\r\n\r\n"...)
	return r.head
}

// appendFields appends the client's headers, except hop-by-hop headers. hops is a list by
// appendHops of the names in Connection headers; met is that list for the headers that it read.
func (r *relay) appendFields(b, hops []byte) (out, met []byte) {
	for name, value := range r.Ctx.Request.Header.All() {
		switch string(name) {
		case "Connection":
			met = appendHops(met, value)
			continue
		case "Host", "Content-Length", "Keep-Alive", "Transfer-Encoding", "Te", "Trailer", "Upgrade", "Expect",
			"Proxy-Connection", "Proxy-Authorization", "Proxy-Authenticate", exchange.RequestIDHeader, exchange.PolicyHeader:
			continue
		case "Traceparent", "Tracestate":
			if r.try.On() { // the attempt's span is the parent of the server's
				continue
			}
		case "Authorization", "X-Api-Key", "Api-Key", "Cookie":
			if !r.p.o.ForwardAuthorization {
				continue
			}
		}
		if len(hops) > 0 && hop(hops, name) || !httpserver.FieldName(name) || bytes.ContainsAny(value, "\r\n\x00") {
			continue
		}
		b = append(append(b, name...), ": "...)
		b = append(append(b, value...), "\r\n"...)
	}
	return b, met
}

// appendHops appends the names in a Connection header to a list, in lower case and separated by
// commas.
func appendHops(hops, connection []byte) []byte {
	if string(connection) == "keep-alive" || string(connection) == "close" {
		return hops
	}
	return append(append(hops, bytes.ToLower(connection)...), ',')
}

// hop reports whether a header is in a list of appendHops.
func hop(hops, name []byte) bool { return upstream.HasToken(hops, strings.ToLower(string(name))) }

// cleanQuery returns a query, or nil if it has bytes that a request line must not have.
func cleanQuery(q []byte) []byte {
	if bytes.ContainsFunc(q, func(c rune) bool { return c <= ' ' || c >= 0x7f }) {
		return nil
	}
	return q
}

// answerHead copies the status and headers of the server's answer.
func (r *relay) answerHead() {
	h := &r.Ctx.Response.Header
	r.Ctx.SetStatusCode(r.Status)
	kind := false
	var hops []byte
	for lines := r.lines; len(lines) > 0; {
		var name, value []byte
		if name, value, lines = upstream.CutLine(lines); strings.EqualFold(string(name), "connection") {
			hops = appendHops(hops, value)
		}
	}
	for lines := r.lines; len(lines) > 0; {
		var name, value []byte
		if name, value, lines = upstream.CutLine(lines); skipped(name) || !httpserver.FieldName(name) || len(hops) > 0 && hop(hops, name) {
			continue
		}
		if strings.EqualFold(string(name), "content-type") {
			h.SetContentTypeBytes(value)
			kind = true
			continue
		}
		h.AddBytesKV(name, value)
	}
	h.SetNoDefaultContentType(!kind)
}

// ownHeaders are headers of an answer that do not pass: they concern the connection to the server,
// or the gateway sets its own.
var ownHeaders = []string{"te", "date", "server", "trailer", "upgrade", "connection", "keep-alive", exchange.RequestIDHeader, "content-length",
	"transfer-encoding", "proxy-authenticate"}

// skipped reports whether a header of an answer does not pass. CORS headers are the gateway's own.
func skipped(name []byte) bool {
	const cors = "access-control-"
	return len(name) > len(cors) && strings.EqualFold(string(name[:len(cors)]), cors) ||
		slices.ContainsFunc(ownHeaders, func(own string) bool { return len(own) == len(name) && strings.EqualFold(string(name), own) })
}

// sentPath returns the path of a relayed request as it was received, if it decodes to the path by
// which its route was found, and otherwise that path. So a server never gets dot segments or empty
// segments that the gateway has resolved.
func (r *relay) sentPath() []byte {
	came := r.Ctx.URI().PathOriginal()
	if string(came) == r.path() || bytes.IndexByte(came, '%') >= 0 && httpserver.Unescape(came) == r.path() {
		return came
	}
	if slash := r.path() + "/"; !r.p.o.Routed(r.path()) && (string(came) == slash || httpserver.Unescape(came) == slash) {
		return came
	}
	return []byte(r.path())
}
