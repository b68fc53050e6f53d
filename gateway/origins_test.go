package gateway

import (
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/valyala/fasthttp"
	"github.com/valyala/fasthttp/fasthttputil"
)

// answered dispatches a request for clients and returns the whole answer.
func answered(g *Gateway, method, target string, headers ...string) *fasthttp.Response {
	return answeredTo(g, clients, method, target, headers...)
}

// answeredTo is answered on the port of clients or of operators.
func answeredTo(g *Gateway, port audience, method, target string, headers ...string) *fasthttp.Response {
	var req fasthttp.Request
	req.Header.SetMethod(method)
	req.SetRequestURI(target)
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	var ctx fasthttp.RequestCtx
	ctx.Init(&req, &net.TCPAddr{IP: net.ParseIP(here), Port: 1}, nil)
	g.dispatch(&ctx, string(ctx.Path()), port)
	return &ctx.Response
}

// A gateway without keys goes by addresses, localhost, --host and --allowed-hosts
// alone; one with keys by any name.
func TestHostOfKeylessGateway(t *testing.T) {
	own := []string{"gw.lan", "api.example"}
	for _, c := range []struct {
		target, host string
		keys, hosts  []string
		want         int
	}{
		{"/version", "127.0.0.1:8000", nil, own, 200},
		{"/version", "10.1.2.3", nil, own, 200},
		{"/version", "[::1]:8000", nil, own, 200},
		{"/version", "[::1]", nil, own, 200},
		{"/version", "LOCALHOST:8000", nil, own, 200},
		{"/version", "localhost.", nil, own, 200},
		{"/version", "gw.lan:8000", nil, own, 200},
		{"/version", "API.example", nil, own, 200},
		{"/version", "evil.example", nil, own, 403},
		{"/version", "evil.example:8000", nil, own, 403},
		{"/version", "127.0.0.1.evil.example", nil, own, 403},
		{"/version", "localhost.evil.example", nil, own, 403},
		{"/version", "evil.example:127.0.0.1", nil, own, 403},
		{"http://evil.example/version", "127.0.0.1", nil, own, 403},
		{"/v1/nothing", "evil.example", nil, own, 403},
		{"/livez", "evil.example", nil, own, 200},
		{"/version", "evil.example", nil, []string{"*"}, 200},
		{"/version", "evil.example", nil, nil, 200},
		{"/version", "evil.example", []string{"k"}, own, 401},
	} {
		g := idle(t, Options{APIKeys: c.keys, AllowedHosts: c.hosts})
		r := answered(g, "GET", c.target, "Host", c.host)
		if r.StatusCode() != c.want || c.want == 403 && !strings.Contains(string(r.Body()), "--allowed-hosts") {
			t.Errorf("%+v: %d %s", c, r.StatusCode(), r.Body())
		}
	}
}

// The port of operators asks for no key, so that it checks the Host also where the
// gateway has keys; it has no CORS headers.
func TestHostOfAdminListener(t *testing.T) {
	for _, keys := range [][]string{nil, {"k"}} {
		admin := fasthttputil.NewInmemoryListener()
		g := idle(t, Options{APIKeys: keys, AllowedHosts: []string{"gw.lan"}, AllowedOrigins: []string{"https://app.example"}, AdminListener: admin})
		for _, c := range []struct {
			method, target, host string
			want                 int
		}{
			{"GET", "/metrics", "127.0.0.1:9000", 200},
			{"GET", "/metrics", "gw.lan:9000", 200},
			{"GET", "/metrics", "localhost", 200},
			{"GET", "/metrics", "evil.example:9000", 403},
			{"GET", "/debug/nodes", "evil.example", 403},
			{"PUT", "/log-level", "evil.example", 403},
			{"GET", "http://evil.example/metrics", "127.0.0.1", 403},
			{"GET", "/livez", "evil.example", 200},
		} {
			r := answeredTo(g, operators, c.method, c.target, "Host", c.host, "Origin", "https://app.example")
			if r.StatusCode() != c.want || c.want == 403 && !strings.Contains(string(r.Body()), "add it to --allowed-hosts") || len(r.Header.Peek("Access-Control-Allow-Origin")) > 0 {
				t.Errorf("keys %v, %+v: %d %s", keys, c, r.StatusCode(), r.Body())
			}
		}
	}
}

// Pages of allowed origins may read answers, errors among them; preflights are
// answered without a key and alike for every path; other pages get no headers.
func TestOrigins(t *testing.T) {
	const page = "https://app.example"
	for _, c := range []struct {
		origins []string
		origin  string
		allowed bool
	}{
		{[]string{page}, page, true},
		{[]string{"*"}, page, true},
		{[]string{page}, "https://evil.example", false},
		{[]string{page}, page + ".evil.example", false},
		{[]string{page}, "null", false},
		{nil, page, false},
	} {
		g := idle(t, Options{APIKeys: []string{"k"}, AllowedOrigins: c.origins})
		want := ""
		if c.allowed {
			want = c.origin
		}
		for _, path := range []string{"/version", "/v1/nothing"} {
			for _, key := range []string{"Bearer k", "Bearer wrong"} {
				r := answered(g, "GET", path, "Origin", c.origin, "Authorization", key)
				if got := string(r.Header.Peek("Access-Control-Allow-Origin")); got != want {
					t.Errorf("%+v: %s with %q: allowed origin %q, want %q", c, path, key, got, want)
				}
				if got := string(r.Header.Peek("Access-Control-Expose-Headers")); c.allowed && got != "X-Request-Id, Request-Id, Retry-After" || !c.allowed && got != "" {
					t.Errorf("%+v: a page may read %q", c, got)
				}
			}
			r := answered(g, "OPTIONS", path, "Origin", c.origin, "Access-Control-Request-Method", "POST", "Access-Control-Request-Headers", "authorization, content-type")
			if ok := r.StatusCode() == 204; ok != c.allowed || ok != (string(r.Header.Peek("Access-Control-Allow-Headers")) == "authorization, content-type") || len(r.Header.Peek("Allow")) > 0 {
				t.Errorf("%+v: preflight of %s: %s", c, path, &r.Header)
			}
		}
		if r := answered(g, "PUT", "/log-level", "Origin", c.origin, "Authorization", "Bearer k"); r.StatusCode() != 403 {
			t.Errorf("%+v: a page changed the log level: %d", c, r.StatusCode())
		}
	}
	for origin, ok := range map[string]bool{"*": true, page: true, "http://localhost:3000": true, "app.example": false, page + "/": false, "https://*.example/x": false, "": false} {
		if err := CheckOrigins([]string{origin}); (err == nil) != ok {
			t.Errorf("%q: %v", origin, err)
		}
	}
}

// An upstream's CORS headers do not pass; the gateway's do.
func TestRelayedOrigins(t *testing.T) {
	for _, origins := range [][]string{nil, {"https://app.example"}} {
		b := newRelayed(t, Options{AllowedOrigins: origins}, "s1")
		b.far["s1"].does(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Access-Control-Allow-Origin", "*")
			w.Header().Set("Access-Control-Allow-Credentials", "true")
			whole(w, r)
		})
		r := b.post("/v1/chat/completions", ask(false, "hello"), "Origin: https://app.example")
		if got := r.Header.Values("Access-Control-Allow-Origin"); r.StatusCode != 200 || strings.Join(got, ",") != strings.Join(origins, ",") || r.Header.Get("Access-Control-Allow-Credentials") != "" {
			t.Errorf("%v: %d %v", origins, r.StatusCode, r.Header)
		}
	}
}
