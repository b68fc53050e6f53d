package gateway

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/valyala/fasthttp"
	"github.com/valyala/fasthttp/fasthttputil"

	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// asked is what a gateway answers a peer at an address, without a connection.
func asked(g *Gateway, port audience, peer, method, path, body string, headers ...string) (int, string) {
	var req fasthttp.Request
	req.Header.SetMethod(method)
	req.SetRequestURI(path)
	req.SetBodyString(body)
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	var ctx fasthttp.RequestCtx
	ctx.Init(&req, &net.TCPAddr{IP: net.ParseIP(peer), Port: 1}, nil)
	g.dispatch(&ctx, path, port)
	return ctx.Response.StatusCode(), string(ctx.Response.Body())
}

func idle(t *testing.T, o Options) *Gateway {
	t.Helper()
	o.Listener = fasthttputil.NewInmemoryListener()
	o.RPC = rpc.Options{Hello: &nodepb.Hello{NodeId: "gw", Role: "gateway"}}
	o.Level = new(slog.LevelVar)
	g, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.native.Nodes.Close)
	return g
}

const here, there = "127.0.0.1", "10.1.2.3"

// Where there are keys, who looks needs one and who changes something one that may;
// where there are none, only this machine changes something.
func TestWhoMayOperate(t *testing.T) {
	key := []string{"Authorization", "Bearer k"}
	for _, c := range []struct {
		keys         []string
		peer         string
		method, path string
		headers      []string
		want         int
	}{
		{nil, here, "GET", "/metrics", nil, 200},
		{nil, there, "GET", "/metrics", nil, 200},
		{[]string{"k"}, here, "GET", "/metrics", nil, 401},
		{[]string{"k"}, here, "PUT", "/log-level", nil, 401},
		{nil, here, "PUT", "/log-level", []string{"Origin", "http://example.com"}, 403},
		{[]string{"k"}, there, "PUT", "/log-level", []string{"Authorization", "Bearer client"}, 403},
		{[]string{"k"}, there, "GET", "/log-level", []string{"Authorization", "Bearer client"}, 200},
		{[]string{"k"}, there, "PUT", "/log-level", []string{"Authorization", "Bearer admin"}, 200},
		{[]string{"k"}, there, "GET", "/metrics", nil, 401},
		{[]string{"k"}, there, "GET", "/metrics", key, 200},
		{[]string{"k"}, there, "GET", "/debug/targets", nil, 401},
		{nil, there, "GET", "/debug/targets", nil, 200},
		{nil, here, "PUT", "/log-level", nil, 200},
		{nil, there, "GET", "/log-level", nil, 200},
		{nil, there, "PUT", "/log-level", nil, 403},
		{nil, here, "PUT", "/log-level", []string{"X-Forwarded-For", here}, 403},
		{nil, here, "PUT", "/log-level", []string{"X-Forwarded-For", ""}, 403},
		{nil, here, "PUT", "/log-level", []string{"Cf-Connecting-Ip", there}, 403},
		{nil, here, "PUT", "/log-level", []string{"CF-Connecting-IPv6", "::1"}, 403},
		{nil, here, "PUT", "/log-level", []string{"True-Client-Ip", there}, 403},
		{nil, here, "PUT", "/log-level", []string{"X-Client-Ip", ""}, 403},
		{nil, here, "PUT", "/log-level", []string{"X-Cluster-Client-Ip", there}, 403},
		{nil, here, "PUT", "/log-level", []string{"X-Real-Ip", ""}, 403},
		{nil, here, "PUT", "/log-level", []string{"X-Original-Forwarded-For", there}, 403},
		{nil, here, "PUT", "/log-level", []string{"X_forwarded_for", there}, 403},
		{nil, here, "PUT", "/log-level", []string{"X-Envoy-External-Address", there}, 403},
		{nil, here, "PUT", "/log-level", []string{"X-Amzn-Trace-Id", "Root=1"}, 403},
		{nil, here, "PUT", "/log-level", []string{"Cdn-Loop", "cloudflare"}, 403},
		{nil, here, "PUT", "/log-level", []string{"Forwarded", ""}, 403},
		{nil, here, "PUT", "/log-level", []string{"X-Request-Id", "7"}, 200},
		{nil, here, "PUT", "/log-level", []string{"Forwarded", "for=127.0.0.1"}, 403},
		{nil, here, "PUT", "/log-level", []string{"Via", "1.1 proxy"}, 403},
		{nil, here, "POST", "/admin/drain/d1", []string{"X-Forwarded-For", "::1"}, 403},
		{[]string{"k"}, here, "PUT", "/log-level", []string{"Authorization", "Bearer admin", "X-Forwarded-For", there}, 200},
		{[]string{"k"}, there, "PUT", "/log-level", nil, 401},
		{[]string{"k"}, there, "PUT", "/log-level", key, 200},

		// Views of the fleet show what prompts other clients sent, and need the same right.
		{nil, here, "GET", "/debug/nodes", nil, 200},
		{nil, there, "GET", "/debug/nodes", nil, 403},
		{nil, there, "HEAD", "/debug/nodes", nil, 403},
		{nil, here, "GET", "/debug/nodes", []string{"X-Forwarded-For", there}, 403},
		{nil, there, "GET", "/debug/route", nil, 403},
		{nil, here, "GET", "/debug/route", nil, 503}, // allowed; there is no node
		{[]string{"k"}, there, "GET", "/debug/nodes", nil, 401},
		{[]string{"k"}, here, "GET", "/debug/nodes", []string{"Authorization", "Bearer client"}, 403},
		{[]string{"k"}, there, "GET", "/debug/nodes", []string{"Authorization", "Bearer admin"}, 200},
		{[]string{"k"}, there, "GET", "/debug/nodes", key, 200},
		{[]string{"k"}, here, "GET", "/debug/route", []string{"Authorization", "Bearer client"}, 403},
		{[]string{"k"}, there, "GET", "/debug/route", []string{"Authorization", "Bearer admin"}, 503},
	} {
		o := Options{APIKeys: c.keys}
		if c.keys != nil {
			o.APIKeyFile = keyFile(t, "client\nadmin admin=yes\n")
		}
		g := idle(t, o)
		if got, body := asked(g, clients, c.peer, c.method, c.path, "debug", c.headers...); got != c.want {
			t.Errorf("%+v: %d %s", c, got, body)
		}
		if changed := g.o.Level.Level() == slog.LevelDebug; changed != (c.method == "PUT" && c.want == 200) {
			t.Errorf("%+v: level changed %v", c, changed)
		}
	}
	g := idle(t, Options{})
	if got, body := asked(g, clients, here, "PUT", "/log-level", "loud"); got != 400 ||
		body != `{"error":{"message":"log level \"loud\"; use debug, info, warning or error","type":"BadRequestError","param":null,"code":400}}` {
		t.Errorf("%d %s", got, body)
	}
	if got, body := asked(g, clients, here, "PUT", "/log-level", "debug"+strings.Repeat(" ", 4000)+"x"); got != 400 || len(body) > 400 {
		t.Errorf("%d %s", got, body)
	}
	if got, body := asked(g, clients, there, "PUT", "/log-level", "debug"); got != 403 || !strings.Contains(body, `"type":"Forbidden","param":null,"code":403`) {
		t.Errorf("%d %s", got, body)
	}
}

// Every path asks for a key, but for the probes'; also what is nowhere, in any
// method, from any peer, with or without a trailing slash.
func TestEveryPathAsksForAKey(t *testing.T) {
	g := idle(t, Options{APIKeys: []string{"k"}})
	probes := map[string]bool{"/livez": true, "/readyz": true, "/health": true, "/ping": true}
	paths := []string{"/", "/nothing", "/v1", "/v1/nothing", "/docs", "/admin", "/debug/pprof", "/debug/pprof/", "/metrics/", "//metrics", "/v1/completions/", "/livez/x", "/inference/v1/generate", "/reset_prefix_cache", "/sleep"}
	for i := range routes {
		paths = append(paths, strings.NewReplacer("{model}", "tiny", "{node}", "d1").Replace(routes[i].Path))
	}
	for _, path := range paths {
		for _, method := range []string{"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "CONNECT", "TRACE", "NONSENSE"} {
			for _, peer := range []string{here, there} {
				for _, key := range []string{"", "Bearer ", "Bearer x", "Basic k", "k", "Bearer kk"} {
					got, body := asked(g, clients, peer, method, path, "{}", "Authorization", key)
					if open := probes[path] && (method == "GET" || method == "HEAD"); (got == 401) == open && path != "/ping" {
						t.Errorf("%s %s from %s with %q: %d %s", method, path, peer, key, got, body)
					}
				}
			}
		}
	}
	for i := range routes {
		if probes[routes[i].Path] == routes[i].Key {
			t.Errorf("%s: the document says that it asks for a key: %t", routes[i].Path, routes[i].Key)
		}
	}
}

// With --admin-listen what is for operators is there and only there, and what is
// for clients is not.
func TestAdminListener(t *testing.T) {
	admin := fasthttputil.NewInmemoryListener()
	b := newBed(t, Options{AdminListener: admin, APIKeys: []string{"k"}}, map[string]nodestest.Options{"d": {}})
	for path, want := range map[string][2]int{
		"/": {401, 404}, "/metrics": {401, 200}, "/debug/targets": {401, 200}, "/livez": {200, 200}, "/readyz": {200, 200}, "/version": {401, 200}, "/v1/models": {401, 404}, "/openapi.json": {401, 404},
		"/debug/nodes": {401, 200}, "/debug/route?prompt=x": {401, 200},
	} {
		if r := b.do("GET", path, ""); r.StatusCode != want[0] {
			t.Errorf("clients: %s is %d, want %d", path, r.StatusCode, want[0])
		}
		c := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) { return admin.Dial() }}}
		resp, err := c.Get("http://admin" + path)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != want[1] {
			t.Errorf("operators: %s is %d, want %d: %v", path, resp.StatusCode, want[1], err)
		}
		if path != "/debug/targets" {
			continue
		}
		var groups []targetGroup
		if err := json.Unmarshal(body, &groups); err != nil || len(groups) != 1 || groups[0].Labels["role"] != "gateway" {
			t.Errorf("targets are %s, %v", body, err)
		}
	}
}

func TestLostNodesStayTargets(t *testing.T) {
	var s scraped
	at := time.Unix(1000, 0)
	ids := func(members []nodes.Member) (all string) {
		for _, m := range members {
			all += m.ID
		}
		return all
	}
	a, b, c := nodes.Member{ID: "a", HTTP: "1"}, nodes.Member{ID: "b", HTTP: "2"}, nodes.Member{ID: "c", HTTP: "2"}
	leaving := a
	leaving.Draining = true
	for _, step := range []struct {
		members []nodes.Member
		after   time.Duration
		want    string
	}{
		{[]nodes.Member{b, a}, 0, "ab"},
		{[]nodes.Member{b}, time.Minute, "ab"},        // a is lost
		{[]nodes.Member{a, b}, 2 * time.Minute, "ab"}, // and back
		{[]nodes.Member{leaving, b}, 3 * time.Minute, "ab"},
		{[]nodes.Member{b}, 4 * time.Minute, "b"}, // it had said so
		{nil, 5 * time.Minute, "b"},
		{[]nodes.Member{c}, 6 * time.Minute, "c"}, // started again at b's address
		{nil, 22 * time.Minute, ""},
	} {
		if got := ids(s.update(step.members, at.Add(step.after))); got != step.want {
			t.Errorf("after %v: %q, want %q", step.after, got, step.want)
		}
	}
}
