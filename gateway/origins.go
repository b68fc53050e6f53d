package gateway

import (
	"bytes"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/valyala/fasthttp"

	"github.com/tandem-serving/tandem/gateway/api/messages"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/httpserver"
)

// preflightAge is how long browsers may cache the answer to a preflight, in seconds.
const preflightAge = "600"

// CheckOrigins returns an error unless each origin is "*" or SCHEME://HOST[:PORT].
func CheckOrigins(origins []string) error {
	for _, o := range origins {
		u, err := url.Parse(o)
		if o != "*" && (err != nil || u.Scheme == "" || u.Host == "" || u.Scheme+"://"+u.Host != o) {
			return fmt.Errorf("the origin %q: want SCHEME://HOST or SCHEME://HOST:PORT as browsers send it, or *", o)
		}
	}
	return nil
}

// browser refuses requests with a Host that is not the gateway's on ports without keys. On the
// clients' port it sets the CORS headers for pages of allowed origins and answers their preflights.
// It reports whether it answered the request.
func (g *Gateway) browser(ctx *fasthttp.RequestCtx, path string, port audience) bool {
	if fault := g.checkHost(ctx, path, port); fault != nil {
		g.fail(ctx, fault)
		return true
	}
	if port != clients || len(g.o.AllowedOrigins) == 0 {
		return false
	}
	h := &ctx.Response.Header
	h.Add("Vary", "Origin")
	origin := ctx.Request.Header.Peek("Origin")
	if len(origin) == 0 || !slices.Contains(g.o.AllowedOrigins, "*") && !slices.Contains(g.o.AllowedOrigins, string(origin)) {
		return false
	}
	h.SetBytesV("Access-Control-Allow-Origin", origin)
	h.Set("Access-Control-Expose-Headers", exchange.RequestIDHeader+", "+messages.RequestIDHeader+", Retry-After")
	if !ctx.IsOptions() || len(ctx.Request.Header.Peek("Access-Control-Request-Method")) == 0 {
		return false
	}
	// The answer is the same for every path, so that it lists no routes.
	h.Set("Access-Control-Allow-Methods", "GET, HEAD, POST")
	if names := ctx.Request.Header.Peek("Access-Control-Request-Headers"); fieldNames(names) {
		h.SetBytesV("Access-Control-Allow-Headers", names)
	}
	h.Set("Access-Control-Max-Age", preflightAge)
	ctx.SetStatusCode(fasthttp.StatusNoContent)
	return true
}

// fieldNames reports whether list is names of headers separated by commas.
func fieldNames(list []byte) bool {
	for name := range bytes.SplitSeq(list, []byte{','}) {
		if !httpserver.FieldName(bytes.TrimSpace(name)) {
			return false
		}
	}
	return true
}

// checkHost refuses a Host that is not the gateway's where no key is required: at a gateway without
// keys, and on the operators' port. Otherwise a web page whose name was made to resolve to this
// machine (DNS rebinding) would be of the same origin. Probes are exempt.
func (g *Gateway) checkHost(ctx *fasthttp.RequestCtx, path string, port audience) *openai.Error {
	if g.o.AllowedHosts == nil || port == clients && g.keys.Len() > 0 || probe(path) {
		return nil
	}
	advice := "add it to --allowed-hosts, or give the gateway API keys"
	if port == operators {
		advice = "add it to --allowed-hosts"
	}
	for _, host := range [...][]byte{ctx.Request.Header.Host(), ctx.URI().Host()} { // the second is that of an absolute target
		if len(host) > 0 && !g.ownHost(string(host)) {
			return &openai.Error{Status: 403, Type: openai.TypeForbidden,
				Message: fmt.Sprintf("the Host %q is no IP address, localhost, --host, that of --admin-listen or one of --allowed-hosts: %s", openai.Clip(string(host), 100), advice)}
		}
	}
	return nil
}

// ownHost reports whether host, with or without a port, may name a gateway that requires no key.
func (g *Gateway) ownHost(host string) bool {
	if i := strings.LastIndexByte(host, ':'); i > strings.LastIndexByte(host, ']') && (host[0] == '[' || strings.Count(host, ":") == 1) {
		host = host[:i]
	}
	if inner, ok := strings.CutPrefix(host, "["); ok {
		host = strings.TrimSuffix(inner, "]")
	}
	if _, err := netip.ParseAddr(host); err == nil {
		return true
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	return host == "localhost" || slices.ContainsFunc(g.o.AllowedHosts, func(own string) bool { return own == "*" || strings.EqualFold(own, host) })
}
