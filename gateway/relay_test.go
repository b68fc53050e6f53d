package gateway

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/proxy"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
)

// What a client sends arrives as it was written, and its answer comes back; what
// is between neighbours and what is secret does not.
func TestRelayForwards(t *testing.T) {
	for name, o := range map[string]Options{
		"plain":   {APIKeys: []string{"inner"}},
		"own key": {APIKeys: []string{"inner"}, Upstreams: Upstreams{Options: upstream.Options{APIKey: "outer"}}},
		"passed":  {APIKeys: []string{"inner"}, Upstreams: Upstreams{ForwardAuthorization: true}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newRelayed(t, o, "s1")
			s := b.far["s1"]
			s.does(whole)
			const body = `{ "messages":[{"role":"user","content":"h\u00e9 \"\\"}], "novel":{"a":[1, 2,{}]},"model" : "m", "temperature":1e-3 }`
			r := b.post("/v1/chat/completions?x=1", body, "Authorization: Bearer inner", "X-Request-Id: id-7", "Traceparent: 00-abc", "X-Novel: yes",
				"Connection: keep-alive, x-hop", "X-Hop: no", "Te: trailers", "X-Api-Key: inner", "Api-Key: inner", "Cookie: session=1")
			if r.StatusCode != 200 || r.body != `{"id":"x","choices":[{"message":{"content":"hi"}}]}` || r.Header.Get("X-Own") != "kept" || r.Header.Get("X-Request-Id") != "id-7" {
				t.Fatalf("%d %q %v", r.StatusCode, r.body, r.Header)
			}
			got := s.requests()[0]
			want := map[string]string{"plain": "", "own key": "Bearer outer", "passed": "Bearer inner"}[name]
			if got.body != body || got.path != "/v1/chat/completions?x=1" || got.header.Get("Authorization") != want ||
				got.header.Get("X-Novel") != "yes" || got.header.Get("X-Hop") != "" || got.header.Get("X-Request-Id") != "id-7" || got.header.Get("Traceparent") != "00-abc" {
				t.Fatalf("%+v", got)
			}
			for header, value := range map[string]string{"X-Api-Key": "inner", "Api-Key": "inner", "Cookie": "session=1"} {
				if name != "passed" {
					value = ""
				}
				if got.header.Get(header) != value {
					t.Errorf("%s is %q, want %q", header, got.header.Get(header), value)
				}
			}
		})
	}
}

func TestRelayStream(t *testing.T) {
	b := newRelayed(t, Options{}, "s1")
	r := b.post("/v1/chat/completions", ask(true, "hello"))
	if s := r.events(t); r.err != nil || s.text[0] != "one two three" || !s.done || r.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("%q %v", r.body, r.err)
	}
	// Events in pieces, several at once, with other line ends, and one larger than
	// what is held back.
	large := chunkEvent(strings.Repeat("x", 3*maxEvent))
	b.far["s1"].does(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		e := chunkEvent("abc")
		event(w, e[:9], e[9:]+e+e[:3], e[3:], strings.ReplaceAll(e, "\n", "\r\n"), ": comment\n\n", large[:100], large[100:], "data:[DONE]\r\n", "\r\n")
	})
	r = b.post("/v1/chat/completions", ask(true, "hello"))
	if n := strings.Count(r.body, "abc"); r.err != nil || n != 4 || !strings.Contains(r.body, large) || !strings.HasSuffix(r.body, "data:[DONE]\r\n\r\n") {
		t.Fatalf("%d %v", n, r.err)
	}
	// A connection serves one request after the other.
	c := b.dial()
	defer c.Close()
	b.far["s1"].does(streams)
	for range 3 {
		c.send("POST", "/v1/completions", `{"prompt":"x","stream":true,"model":"m"}`)
		if r := c.receive(); r.err != nil || !r.events(t).done {
			t.Fatal(r.body, r.err)
		}
	}
}

// A stream that breaks off never looks whole: an error event, and an aborted
// body. Behind [DONE] there is nothing left to break.
func TestRelayBrokenStream(t *testing.T) {
	b := newRelayed(t, Options{}, "s1")
	for name, c := range map[string]struct {
		answer func(w http.ResponseWriter)
		text   string
		whole  bool
	}{
		"cut":          {func(w http.ResponseWriter) { event(w, chunkEvent("one ")); breaks(w) }, "one ", false},
		"in an event":  {func(w http.ResponseWriter) { event(w, chunkEvent("one "), "data: {\"cho"); breaks(w) }, "one ", false},
		"before any":   {func(w http.ResponseWriter) { event(w, ": hello\n\n"); breaks(w) }, "", false},
		"without done": {func(w http.ResponseWriter) { event(w, chunkEvent("one ")) }, "one ", false},
		"with a length": {func(w http.ResponseWriter) {
			w.Header().Set("Content-Length", strconv.Itoa(len(chunkEvent("one "))+50)) // the event that tells of the end is longer
			event(w, chunkEvent("one "))
			breaks(w)
		}, "one ", false},
		"behind done": {func(w http.ResponseWriter) { event(w, chunkEvent("one "), "data: [DONE]\n\n"); breaks(w) }, "one ", true},
	} {
		t.Run(name, func(t *testing.T) {
			b.far["s1"].does(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "text/event-stream")
				c.answer(w)
			})
			r := b.post("/v1/chat/completions", ask(true, "hello"))
			r.body = strings.TrimPrefix(r.body, ": hello\n\n")
			s := r.events(t)
			if s.text[0] != c.text || s.done != c.whole || (r.err == nil) != c.whole || (s.failure == nil) != c.whole {
				t.Fatalf("%q %v", r.body, r.err)
			}
		})
	}
}

// Before an answer's first byte another server is asked; what a client did wrong
// is told to it by the first.
func TestRelayRetries(t *testing.T) {
	var bad func(w http.ResponseWriter, r *http.Request)
	var mine atomic.Int64 // attempts that the bad servers saw
	b := newRelayed(t, Options{Policy: "round_robin"}, "s1", "s2", "s3")
	for name, c := range map[string]struct {
		bad    http.HandlerFunc
		status int
		tries  int64 // at bad servers, of 6 requests; -1: any
	}{
		"closed": {func(w http.ResponseWriter, _ *http.Request) { breaks(w) }, 200, -1},
		"500":    {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }, 200, -1},
		"503":    {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) }, 200, -1},
		"half a body": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "100")
			event(w, "half")
			breaks(w)
		}, 200, -1},
		"400": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(400) }, 0, 2},
		"429": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(429) }, 0, 2},
	} {
		t.Run(name, func(t *testing.T) {
			mine.Store(0)
			bad = func(w http.ResponseWriter, r *http.Request) { mine.Add(1); c.bad(w, r) }
			b.far["s1"].does(whole)
			b.far["s2"].does(bad)
			b.far["s3"].does(whole)
			b.until(func() bool { // the breaker and the probes of the case before
				for _, s := range b.g.proxy.Pool.Now().Servers {
					if !s.Up() || s.Breaker() == "open" {
						return false
					}
				}
				return true
			})
			for i := range 6 {
				r := b.post("/v1/chat/completions", ask(false, fmt.Sprint(i)))
				if c.status != 0 && r.StatusCode != c.status {
					t.Fatalf("%d %q", r.StatusCode, r.body)
				}
			}
			if n := mine.Load(); c.tries >= 0 && n != c.tries {
				t.Fatalf("%d attempts at the bad server, want %d", n, c.tries)
			}
		})
	}
	// All fail: their own word, as long as it is one.
	for _, s := range b.far {
		s.does(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500); _, _ = io.WriteString(w, "sorry") })
	}
	if r := b.post("/v1/chat/completions", ask(false, "x")); r.StatusCode != 500 || r.body != "sorry" {
		t.Fatalf("%d %q", r.StatusCode, r.body)
	}
}

// A large answer that is no stream is whole or broken off, too.
func TestRelayLargeAnswer(t *testing.T) {
	b := newRelayed(t, Options{}, "s1")
	text := strings.Repeat("0123456789", 20000)
	for _, told := range []bool{true, false} {
		for _, broken := range []bool{false, true} {
			b.far["s1"].does(func(w http.ResponseWriter, _ *http.Request) {
				if told {
					w.Header().Set("Content-Length", fmt.Sprint(len(text)))
				}
				event(w, text[:len(text)/2])
				if broken {
					breaks(w)
					return
				}
				event(w, text[len(text)/2:])
			})
			r := b.post("/v1/embeddings", `{"model":"m","input":"x"}`)
			if (r.err != nil) != broken || !strings.HasPrefix(text, r.body) || !broken && r.body != text {
				t.Fatalf("length told: %v, broken: %v: %d bytes, %v", told, broken, len(r.body), r.err)
			}
		}
	}
}

// A client that goes takes its request along, whether it waits for the first
// byte or reads.
func TestRelayClientGone(t *testing.T) {
	b := newRelayed(t, Options{}, "s1")
	s := b.far["s1"]
	s.does(never)
	c := b.dial()
	c.send("POST", "/v1/chat/completions", ask(false, "x"))
	b.until(func() bool { return s.running.Load() == 1 })
	c.Close()
	b.until(func() bool { return s.running.Load() == 0 && b.g.InFlight.Load() == 0 })

	s.does(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		event(w, chunkEvent("one "))
		never(w, r)
	})
	c = b.dial()
	c.send("POST", "/v1/chat/completions", ask(true, "x"))
	if _, err := c.r.Peek(1); err != nil {
		t.Fatal(err)
	}
	c.Close()
	b.until(func() bool { return s.running.Load() == 0 && b.g.InFlight.Load() == 0 })
}

// Each request goes to a server of its model.
func TestRelayModels(t *testing.T) {
	b := newRelayed(t, Options{}, "s1", "s2")
	b.far["s1"].models.Store(&[]string{"a", "both"})
	b.far["s2"].models.Store(&[]string{"b", "both"})
	b.far["s1"].does(whole)
	b.far["s2"].does(whole)
	for _, s := range b.far { // whoever was down is asked for its models anew
		s.kill()
	}
	b.until(func() bool {
		for _, s := range b.g.proxy.Pool.Now().Servers {
			s.Kick()
		}
		return b.g.proxy.Pool.Now().Up() == 0
	})
	for _, s := range b.far {
		s.start()
	}
	b.until(func() bool { return b.g.proxy.Pool.Now().Up() == 2 && b.g.proxy.Pool.Now().Find("both") != nil })
	for model, want := range map[string]string{"a": "s1", "b": "s2"} {
		for range 4 {
			if r := b.post("/v1/embeddings", fmt.Sprintf(`{"input":"x","model":%q}`, model)); r.StatusCode != 200 {
				t.Fatal(r.StatusCode, r.body)
			}
		}
		got := b.far[want].requests()
		if len(got) != 4 || got[0].path != "/v1/embeddings" {
			t.Fatalf("%s: %v", model, got)
		}
	}
	if r := b.post("/v1/chat/completions", `{"model":"c","messages":[]}`); r.StatusCode != 404 || *r.parse(t).Error.Param != "model" {
		t.Fatal(r.StatusCode, r.body)
	}
	if r := b.post("/v1/chat/completions", `{"messages":[]}`); r.StatusCode != 400 {
		t.Fatal(r.StatusCode, r.body)
	}
	if r := b.post("/v1/chat/completions", `{"model":"a","messages":[`); r.StatusCode != 400 {
		t.Fatal(r.StatusCode, r.body)
	}
	r := b.do("GET", "/v1/models", "")
	for _, m := range []string{"a", "b", "both"} {
		if !strings.Contains(r.body, fmt.Sprintf(`{"id":%q,"object":"model","own":true}`, m)) {
			t.Fatal(r.body)
		}
	}
	if r := b.do("GET", "/v1/models/both", ""); r.StatusCode != 200 || !strings.Contains(r.body, `"both"`) {
		t.Fatal(r.StatusCode, r.body)
	}
	if r := b.post("/v1/load_lora_adapter", `{"lora_name":"a1","lora_path":"/a"}`); r.StatusCode != 503 || !strings.Contains(r.body, "no node is connected") {
		t.Fatal(r.StatusCode, r.body)
	}
}

// What begins alike goes to one server, what does not spreads; a session stays.
func TestRelayAffinity(t *testing.T) {
	b := newRelayed(t, Options{}, "s1", "s2", "s3", "s4")
	for _, s := range b.far {
		s.does(whole)
	}
	used := func(n int, body func(i int) string, headers ...string) (servers, most int) {
		before := map[string]int{}
		for name, s := range b.far {
			before[name] = len(s.requests())
		}
		for i := range n {
			if r := b.post("/v1/chat/completions", body(i), headers...); r.StatusCode != 200 {
				t.Fatal(r.StatusCode, r.body)
			}
		}
		for name, s := range b.far {
			if got := len(s.requests()) - before[name]; got > 0 {
				servers, most = servers+1, max(most, got)
			}
		}
		return servers, most
	}
	long := strings.Repeat("a long system prompt ", 60)
	if n, _ := used(12, func(i int) string { return ask(false, long+fmt.Sprint(i)) }); n != 1 {
		t.Errorf("one prefix met %d servers", n)
	}
	if n, _ := used(64, func(i int) string { return ask(false, fmt.Sprint(i)+long) }); n != 4 {
		t.Errorf("64 prefixes met %d servers", n)
	}
	if n, _ := used(12, func(i int) string { return ask(false, fmt.Sprint(i)+long) }, exchange.PolicyHeader+": session", "X-Session-Id"+": me"); n != 1 {
		t.Errorf("one session met %d servers", n)
	}
	if n, most := used(12, func(int) string { return ask(false, long) }, exchange.PolicyHeader+": round_robin"); n != 4 || most != 3 {
		t.Errorf("round robin met %d servers, one of them %d times", n, most)
	}
}

// A server that is killed loses no request that has not begun, and serves again
// soon after it is back.
func TestRelayRestart(t *testing.T) {
	b := newRelayed(t, Options{Policy: "round_robin"}, "s1", "s2")
	for _, s := range b.far {
		s.does(whole)
	}
	for i := range 20 {
		if i == 5 {
			b.far["s1"].kill()
		}
		if r := b.post("/v1/chat/completions", ask(false, "x")); r.StatusCode != 200 {
			t.Fatal(i, r.StatusCode, r.body)
		}
	}
	b.until(func() bool { return b.g.proxy.Pool.Now().Up() == 1 })
	had := len(b.far["s1"].requests())
	b.far["s1"].start()
	back := time.Now()
	b.until(func() bool {
		if r := b.post("/v1/chat/completions", ask(false, "x")); r.StatusCode != 200 {
			t.Fatal(r.StatusCode, r.body)
		}
		return len(b.far["s1"].requests()) > had
	})
	t.Logf("served again after %v", time.Since(back))
	// Nobody left: a clear error at once.
	for _, s := range b.far {
		s.kill()
	}
	if r := b.post("/v1/chat/completions", ask(true, "x")); r.StatusCode != 503 || r.Header.Get("Retry-After") == "" {
		t.Fatal(r.StatusCode, r.body)
	}
}

// Clients and servers of every manner: what ends well is whole.
func TestRelayRandom(t *testing.T) {
	b := newRelayed(t, Options{}, "s1", "s2", "s3")
	for _, s := range b.far {
		s.does(func(w http.ResponseWriter, r *http.Request) {
			rnd := rand.IntN(10)
			if rnd == 0 {
				breaks(w)
				return
			}
			w.Header().Set("Content-Type", "text/event-stream")
			for i := range 20 {
				event(w, chunkEvent(fmt.Sprint(i, " ")))
				if rnd == 1 && i == 10 {
					breaks(w)
					return
				}
			}
			event(w, "data: [DONE]\n\n")
		})
	}
	want := ""
	for i := range 20 {
		want += fmt.Sprint(i, " ")
	}
	ends := make(chan struct{}, 40)
	for i := range 40 {
		r := rand.New(rand.NewPCG(3, uint64(i)))
		c := b.dial()
		go func() {
			defer func() { ends <- struct{}{} }()
			defer c.Close()
			c.send("POST", "/v1/chat/completions", ask(true, fmt.Sprint(i)))
			if r.IntN(4) == 0 {
				time.Sleep(time.Duration(r.IntN(3)) * time.Millisecond)
				return
			}
			resp, err := http.ReadResponse(c.r, nil)
			if err != nil || resp.StatusCode != 200 {
				return
			}
			body, err := io.ReadAll(resp.Body)
			s := (reply{resp, string(body), nil}).events(t)
			if !strings.HasPrefix(want, s.text[0]) || (err == nil) != (s.text[0] == want && s.done) || (s.failure != nil) != (err != nil) {
				t.Errorf("client %d: %v %q", i, err, body)
			}
		}()
	}
	for range 40 {
		<-ends
	}
	b.until(func() bool { return b.g.InFlight.Load() == 0 })
}

// A model's further name goes to its servers as their own, and comes back.
func TestRelayServedNames(t *testing.T) {
	b := newRelayed(t, Options{Upstreams: Upstreams{Options: upstream.Options{Names: map[string]string{"best": "m"}}}}, "s1")
	s := b.far["s1"]
	const own = `{"user":"me", "model":"best", "stream":%v,"messages":[]}`
	if r := b.post("/v1/chat/completions", fmt.Sprintf(own, true)); r.err != nil || strings.Count(r.body, `"model":"best"`) != 3 || strings.Contains(r.body, `"m"`) {
		t.Fatal(r.body)
	}
	if got, want := s.requests()[0].body, strings.Replace(fmt.Sprintf(own, true), "best", "m", 1); got != want {
		t.Fatal(got)
	}
	s.does(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"model": "m","text":"\"model\": \"m\""}`)
	})
	if r := b.post("/v1/chat/completions", fmt.Sprintf(own, false)); r.body != `{"model": "best","text":"\"model\": \"m\""}` {
		t.Fatal(r.body)
	}
	if r := b.do("GET", "/v1/models", ""); !strings.Contains(r.body, `"id":"best"`) || !strings.Contains(r.body, `"id":"m"`) {
		t.Fatal(r.body)
	}
}

// A decision is explained, and the explanation is what then happens.
func TestRelayExplains(t *testing.T) {
	b := newRelayed(t, Options{}, "s1", "s2", "s3")
	r := b.do("GET", "/debug/route?model=m&prompt=once+upon+a+time", "")
	var e proxy.Explanation
	if err := json.Unmarshal([]byte(r.body), &e); err != nil || len(e.Words) < 2 || len(e.Upstreams) != 3 || e.Policy != "prefix" {
		t.Fatal(r.body, err)
	}
	if r := b.post("/v1/completions", `{"model":"m","prompt":"once upon a time","stream":true}`); r.StatusCode != 200 {
		t.Fatal(r.body)
	}
	if n := len(b.far[strings.TrimPrefix(e.Upstream, "http://")].requests()); n != 1 {
		t.Fatalf("%s was named and got %d requests", e.Upstream, n)
	}
	if r := b.do("GET", "/debug/route?model=m", ""); r.StatusCode != 400 {
		t.Fatal(r.StatusCode, r.body)
	}
	if r := b.do("GET", "/debug/nodes", ""); strings.Count(r.body, `"up":true`) != 3 || strings.Count(r.body, `"models":["m"]`) != 3 {
		t.Fatal(r.body)
	}
}

// A decision about no model of the upstreams is refused as requests are.
func TestRelayExplainsNoModel(t *testing.T) {
	virtually(t, func(t *testing.T) {
		b := newRelayed(t, Options{}, "s1", "s2")
		b.far["s2"].models.Store(&[]string{"m", "other"})
		b.until(func() bool { return b.g.proxy.Pool.Now().Find("other") != nil })
		for model, want := range map[string]int{"": 400, "third": 404} {
			asked := b.post("/v1/completions", fmt.Sprintf(`{"model":%q,"prompt":"x"}`, model))
			r := b.do("GET", "/debug/route?prompt=x&model="+model, "")
			if r.StatusCode != want || r.body != asked.body || asked.StatusCode != want {
				t.Errorf("model %q: %d %s, want %d %s", model, r.StatusCode, r.body, want, asked.body)
			}
		}
	})
}

// A server that hangs loses what nothing was heard of: the request goes elsewhere.
func TestRelayHang(t *testing.T) {
	virtually(t, func(t *testing.T) {
		b := newRelayed(t, Options{StallTimeout: 200 * time.Millisecond, Policy: "round_robin"}, "s1", "s2")
		hangs := make(chan *stranger, 1)
		for _, s := range b.far {
			s.does(func(w http.ResponseWriter, r *http.Request) {
				select {
				case hangs <- s: // the first that is asked hangs, the other does not
					b.net.Silence(s.name+":80", true)
					never(w, r)
				default:
					streams(w, r)
				}
			})
		}
		if r := b.post("/v1/chat/completions", ask(true, "x")); r.err != nil || !r.events(t).done {
			t.Fatalf("%d %q %v", r.StatusCode, r.body, r.err)
		}
		b.net.Silence((<-hangs).name+":80", false)
		b.until(func() bool { return b.g.proxy.Pool.Now().Up() == 2 })
	})
}

// Limits that are changed hold for what goes to other servers, too.
func TestRelayNewLimits(t *testing.T) {
	b := newRelayed(t, Options{}, "s1")
	b.far["s1"].does(never)
	if err := b.g.SetLimits(Limits{RequestTimeout: 50 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	b.post("/v1/chat/completions", ask(true, "x")).wantError(t, 504, "longer than 50ms")
}
