package gateway

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
)

// refuse answers 422, as a server does that finds a field wrong.
func refuse(t testing.TB, w http.ResponseWriter, format string, args ...any) {
	t.Errorf("a strict server refuses: "+format, args...)
	w.WriteHeader(422)
}

func object(t testing.TB, r *http.Request) map[string]json.RawMessage {
	t.Helper()
	var o map[string]json.RawMessage
	if err := json.NewDecoder(r.Body).Decode(&o); err != nil {
		t.Error(err)
	}
	return o
}

// body makes a request's body readable once more.
func strict(t testing.TB, f func(w http.ResponseWriter, r *http.Request, o map[string]json.RawMessage)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) { f(w, r, object(t, r)) }
}

// vllmPair is a prefill and a decode server that take exactly what vLLM's with its
// NIXL connector take: the decode server wants parameters that a prefill server
// has handed out, once.
type vllmPair struct {
	testing.TB
	mu    sync.Mutex
	given map[string]string // parameters, by the user field of their request
	alone int               // requests that decode servers computed by themselves
}

const remoteWanted = `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`

func (p *vllmPair) prefill(w http.ResponseWriter, r *http.Request, o map[string]json.RawMessage) {
	for name, want := range map[string]string{"max_tokens": "1", "min_tokens": "1", "stream": "false", "stream_options": "", "kv_transfer_params": remoteWanted, "novel": `{"a":[1, 2]}`} {
		if string(o[name]) != want {
			refuse(p, w, "%s is %s, want %s", name, o[name], want)
			return
		}
	}
	if v, there := o["max_completion_tokens"]; there && string(v) != "1" || r.Header.Get("X-Request-Id") == "" {
		refuse(p, w, "max_completion_tokens is %s; %v", v, r.Header)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	params := fmt.Sprintf(`{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[%d, 7]],"remote_engine_id":"e","remote_request_id":%q,"remote_host":"10.0.0.1","remote_port":5600,"tp_size":1}`,
		len(p.given), r.Header.Get("X-Request-Id"))
	p.given[string(o["user"])] = params
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"id":"x","choices":[{"message":{"content":"o"}}],"kv_transfer_params":%s}`, params)
}

func (p *vllmPair) decode(w http.ResponseWriter, r *http.Request, o map[string]json.RawMessage) {
	p.mu.Lock()
	params, user := string(o["kv_transfer_params"]), string(o["user"])
	switch {
	case params == "":
		p.alone++
	case params != p.given[user]:
		p.mu.Unlock()
		refuse(p, w, "kv_transfer_params %s of %s were not handed out", params, user)
		return
	default:
		delete(p.given, user)
	}
	p.mu.Unlock()
	if string(o["max_tokens"]) != "5" || string(o["novel"]) != `{"a":[1, 2]}` {
		refuse(p, w, "max_tokens %s, novel %s", o["max_tokens"], o["novel"])
		return
	}
	if string(o["stream"]) == "true" {
		streams(w, r)
		return
	}
	whole(w, r)
}

// pairBody is a request that names its user.
func pairBody(stream bool, user string, more string) string {
	return fmt.Sprintf(`{"model":"m","user":%q,"max_tokens":5,"novel":{"a":[1, 2]},"stream":%v,"messages":[{"role":"user","content":"hello"}]%s}`, user, stream, more)
}

// newPairs is a gateway in front of prefill servers p… and decode servers d….
func newPairs(t testing.TB, protocol upstream.Protocol, names ...string) *relayed {
	o := Options{Upstreams: Upstreams{Options: upstream.Options{Protocol: protocol}}}
	for _, name := range names {
		role := upstream.Prefill
		if name[0] == 'd' {
			role = upstream.Decode
		}
		o.Upstreams.Targets = append(o.Upstreams.Targets, upstream.Target{Role: role, URL: "http://" + name})
	}
	return newRelayed(t, o, names...)
}

func TestVLLMPairs(t *testing.T) {
	b := newPairs(t, upstream.VLLM, "p1", "p2", "d1", "d2")
	p := &vllmPair{TB: t, given: map[string]string{}}
	for name, s := range b.far {
		s.does(strict(t, map[bool]func(http.ResponseWriter, *http.Request, map[string]json.RawMessage){true: p.prefill, false: p.decode}[name[0] == 'p']))
	}
	served := func() (prefill, decode int) {
		for name, s := range b.far {
			if n := len(s.requests()); name[0] == 'p' {
				prefill += n
			} else {
				decode += n
			}
		}
		return
	}
	for i := range 6 {
		r := b.post("/v1/chat/completions", pairBody(true, fmt.Sprint("s", i), `,"stream_options":{"include_usage":true},"max_completion_tokens":9`))
		if s := r.events(t); r.err != nil || s.text[0] != "one two three" || !s.done {
			t.Fatal(r.StatusCode, r.body)
		}
		if r := b.post("/v1/chat/completions", pairBody(false, fmt.Sprint("w", i), "")); r.StatusCode != 200 {
			t.Fatal(r.StatusCode, r.body)
		}
	}
	if prefill, decode := served(); prefill != 12 || decode != 12 || p.alone != 0 {
		t.Fatalf("%d, %d, %d alone", prefill, decode, p.alone)
	}
	// Several answers to one prompt, and a prompt's own log-probabilities: one server.
	for _, more := range []string{`,"n":2`, `,"prompt_logprobs":1`, `,"echo":true`} {
		if r := b.post("/v1/chat/completions", pairBody(false, "n", more)); r.StatusCode != 200 {
			t.Fatal(r.StatusCode, r.body)
		}
	}
	if p.alone != 3 {
		t.Fatal(p.alone)
	}
	// What the client did wrong it hears from the first leg, once.
	before, _ := served()
	for name, s := range b.far {
		if name[0] == 'p' {
			s.does(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(400); _, _ = io.WriteString(w, "wrong") })
		}
	}
	if r := b.post("/v1/chat/completions", pairBody(true, "x", "")); r.StatusCode != 400 || r.body != "wrong" {
		t.Fatal(r.StatusCode, r.body)
	}
	if after, _ := served(); after != before+1 {
		t.Fatalf("%d legs", after-before)
	}
	// No prefill server left: the decode server does it all.
	for name, s := range b.far {
		if name[0] == 'p' {
			s.kill()
		}
	}
	if r := b.post("/v1/chat/completions", pairBody(true, "x", "")); r.StatusCode != 200 || !r.events(t).done {
		t.Fatal(r.StatusCode, r.body)
	}
}

// A leg of either kind that fails is done again with another server.
func TestPairsRetry(t *testing.T) {
	for _, protocol := range []upstream.Protocol{upstream.VLLM, upstream.SGLang} {
		for _, bad := range []string{"p1", "p2", "d1", "d2"} {
			for how, f := range map[string]func(w http.ResponseWriter){"closes": breaks, "500": func(w http.ResponseWriter) { w.WriteHeader(500) }} {
				t.Run(fmt.Sprint(protocol, " ", bad, " ", how), func(t *testing.T) {
					b := newPairs(t, protocol, "p1", "p2", "d1", "d2")
					v := &vllmPair{TB: t, given: map[string]string{}}
					s := newSGLangPair(t)
					for name, far := range b.far {
						far.does(strict(t, func(w http.ResponseWriter, r *http.Request, o map[string]json.RawMessage) {
							switch {
							case name == bad:
								f(w)
							case protocol == upstream.VLLM && name[0] == 'p':
								v.prefill(w, r, o)
							case protocol == upstream.VLLM:
								v.decode(w, r, o)
							case name[0] == 'p':
								s.prefill(w, r, o)
							default:
								s.decode(w, r, o)
							}
						}))
					}
					for i := range 4 {
						r := b.post("/v1/chat/completions", pairBody(i%2 == 0, fmt.Sprint(i), ""), exchange.PolicyHeader+": round_robin")
						if r.StatusCode != 200 || r.err != nil || i%2 == 0 && !r.events(t).done {
							t.Fatal(r.StatusCode, r.body, b.log.String())
						}
					}
				})
			}
		}
	}
}

// sglangPair is servers that take exactly what SGLang's take: both legs at once
// with the same body, a room that nobody had before and the prefill server's
// address; each waits for the other.
type sglangPair struct {
	testing.TB
	mu    sync.Mutex
	rooms map[int64]*room
	port  int
}

// room is where the two legs meet.
type room struct {
	body    [2][]byte // prefill's, decode's
	came    chan struct{}
	arrived int
}

func newSGLangPair(t testing.TB) *sglangPair {
	return &sglangPair{TB: t, rooms: map[int64]*room{}, port: 8998}
}

// meet waits for the other leg; false: it did not come, or something is wrong.
func (p *sglangPair) meet(w http.ResponseWriter, r *http.Request, o map[string]json.RawMessage, side int) bool {
	var host string
	var port int
	var id int64
	if json.Unmarshal(o["bootstrap_host"], &host) != nil || json.Unmarshal(o["bootstrap_port"], &port) != nil || json.Unmarshal(o["bootstrap_room"], &id) != nil ||
		!strings.HasPrefix(host, "p") || port != p.port || id < 0 {
		refuse(p, w, "bootstrap %s:%s room %s", o["bootstrap_host"], o["bootstrap_port"], o["bootstrap_room"])
		return false
	}
	if side == 0 && r.Host != host {
		refuse(p, w, "the room is at %s, the leg came to %s", host, r.Host)
		return false
	}
	body, err := json.Marshal(o)
	if err != nil {
		p.Error(err)
	}
	p.mu.Lock()
	m := p.rooms[id]
	if m == nil {
		m = &room{came: make(chan struct{})}
		p.rooms[id] = m
	}
	if m.body[side] != nil {
		p.mu.Unlock()
		refuse(p, w, "room %d is taken", id)
		return false
	}
	m.body[side] = body
	if m.arrived++; m.arrived == 2 {
		close(m.came)
		if !bytes.Equal(m.body[0], m.body[1]) {
			p.Errorf("the legs differ: %s and %s", m.body[0], m.body[1])
		}
	}
	p.mu.Unlock()
	select {
	case <-m.came:
		return true
	case <-r.Context().Done():
	case <-time.After(soon):
		p.Error("the other leg did not come")
	}
	return false
}

func (p *sglangPair) prefill(w http.ResponseWriter, r *http.Request, o map[string]json.RawMessage) {
	if p.meet(w, r, o, 0) {
		whole(w, r)
	}
}

func (p *sglangPair) decode(w http.ResponseWriter, r *http.Request, o map[string]json.RawMessage) {
	switch {
	case !p.meet(w, r, o, 1):
	case string(o["stream"]) == "true":
		streams(w, r)
	default:
		whole(w, r)
	}
}

func TestSGLangPairs(t *testing.T) {
	b := newPairs(t, upstream.SGLang, "p1", "d1")
	p := newSGLangPair(t)
	b.far["p1"].does(strict(t, p.prefill))
	b.far["d1"].does(strict(t, p.decode))
	for i := range 6 {
		r := b.post("/v1/chat/completions", pairBody(i%2 == 0, fmt.Sprint(i), ""))
		if r.StatusCode != 200 || r.err != nil || i%2 == 0 && !r.events(t).done {
			t.Fatal(r.StatusCode, r.body)
		}
	}
	if len(p.rooms) != 6 {
		t.Fatal(len(p.rooms))
	}
	// A client's fault: the prefill server says no, and decode is not left waiting.
	b.far["p1"].does(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(400); _, _ = io.WriteString(w, "wrong") })
	if r := b.post("/v1/chat/completions", pairBody(true, "x", "")); r.StatusCode != 400 || r.body != "wrong" {
		t.Fatal(r.StatusCode, r.body)
	}
	b.until(func() bool { return b.far["d1"].running.Load() == 0 })
	// The client goes: both legs end.
	b.far["p1"].does(never)
	c := b.dial()
	c.send("POST", "/v1/chat/completions", pairBody(true, "x", ""))
	b.until(func() bool { return b.far["d1"].running.Load() == 1 && b.far["p1"].running.Load() == 1 })
	c.Close()
	b.until(func() bool { return b.far["d1"].running.Load() == 0 && b.far["p1"].running.Load() == 0 })
	// No prefill server: nobody can answer.
	b.far["p1"].kill()
	if r := b.post("/v1/chat/completions", pairBody(true, "x", "")); r.StatusCode != 503 {
		t.Fatal(r.StatusCode, r.body)
	}
}

// The bodies of a pair's legs are counted, before a server is asked: those of SGLang
// are longer than the client's by an address for each prompt of a batch.
func TestMemoryOfPairs(t *testing.T) {
	for protocol, body := range map[upstream.Protocol]string{
		upstream.VLLM:   `{"model":"m","prompt":"` + strings.Repeat("x", 200_000) + `"}`,
		upstream.SGLang: `{"model":"m","prompt":["a"` + strings.Repeat(`,"a"`, 4095) + `]}`,
	} {
		t.Run(fmt.Sprint(protocol), func(t *testing.T) {
			b := newPairs(t, protocol, "p1", "d1")
			l := *b.g.Limits()
			l.MaxBodyMemory = 300_000
			b.g.http.SetLimits(l)
			b.post("/v1/completions", body).wantError(t, 429, "--max-body-memory")
			for name, s := range b.far {
				for _, r := range s.requests() {
					if r.body != "" { // a question about its bootstrap port has none
						t.Errorf("%s was asked %.80s", name, r.body)
					}
				}
			}
			b.until(func() bool { return b.g.http.Held() == 0 })
		})
	}
}
