package proxy

import (
	"bytes"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/httpserver"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
)

// appendHead writes the request's head for a server. What the client said goes
// along, but for what is between two neighbours, and its credentials: they are
// the gateway's. The slice is r.head.
func (r *relay) appendHead(s *upstream.Server, size int) []byte {
	b := s.AppendHead(r.head[:0], "POST", r.sentPath(), cleanQuery(r.Ctx.URI().QueryString()))
	own := len(b)
	b, hops := r.appendFields(b, nil)
	if len(hops) > 0 {
		b, _ = r.appendFields(b[:own], hops)
	}
	if c := r.try.Context(); r.try.On() {
		b = append(append(append(b, "Traceparent: "...), c.Parent...), "\r\n"...)
		if c.State != "" {
			b = append(append(append(b, "Tracestate: "...), c.State...), "\r\n"...)
		}
	}
	b = append(append(b, exchange.RequestIDHeader...), ": "...)
	b = append(append(b, r.ID...), "\r\nContent-Length: "...)
	b = strconv.AppendInt(b, int64(size), 10)
	r.head = append(b, "\r\n\r\n"...)
	return r.head
}

// appendFields writes the client's headers, but for those of one connection: hops
// are their names, in lower case and with commas, as far as Connection headers tell
// of them; it returns those that it met.
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
			if r.try.On() { // the server's span is below the attempt's
				continue
			}
		case "Authorization", "X-Api-Key":
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

// appendHops adds the headers that a Connection header names to a list of those of
// one connection.
func appendHops(hops, connection []byte) []byte {
	if string(connection) == "keep-alive" || string(connection) == "close" {
		return hops
	}
	return append(append(hops, bytes.ToLower(connection)...), ',')
}

// hop says whether a header is in a list that appendHops made.
func hop(hops, name []byte) bool { return upstream.HasToken(hops, strings.ToLower(string(name))) }

// cleanQuery is a query without what cannot stand in a request line.
func cleanQuery(q []byte) []byte {
	for _, c := range q {
		if c <= ' ' || c >= 0x7f {
			return nil
		}
	}
	return q
}

// answerHead takes over the answer's status and headers.
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

// sentPath returns the path of a relayed request as it came, where that decodes to the
// path that its route was found by, and else that path: an upstream never gets dot
// segments or empty ones that were resolved here.
func (r *relay) sentPath() []byte {
	came := r.Ctx.URI().PathOriginal()
	if string(came) == r.Path || bytes.IndexByte(came, '%') >= 0 && httpserver.Unescape(came) == r.Path {
		return came
	}
	if slash := r.Path + "/"; !r.p.o.Routed(r.Path) && (string(came) == slash || httpserver.Unescape(came) == slash) {
		return came
	}
	return []byte(r.Path)
}
