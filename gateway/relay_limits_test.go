package gateway

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// What native nodes are not asked for, servers of another kind are not, either.
func TestRelayLimits(t *testing.T) {
	b := newRelayed(t, Options{Limits: Limits{MaxN: 4, MaxLogprobs: 5, MaxPromptTokens: 10}}, "s1")
	long := strings.Repeat("word", 25) // 100 bytes, at least 12 tokens
	for body, want := range map[string]string{
		`{"model":"m","prompt":"x","n":5}`:                                               "n is 5: this gateway gives at most 4",
		`{"model":"m","prompt":"x","n":"5"}`:                                             "n is 5",
		`{"model":"m","prompt":"x","logprobs":"6"}`:                                      "logprobs: must be at most 5, not 6",
		`{"model":"m","prompt":"` + long + `","input":"x"}`:                              "longer than 10 tokens of 8 bytes",
		`{"model":"m","prompt":[1,2,3,4,5,6,7,8,9,10,11],"prompt":"x"}`:                  "the prompt has 11 tokens",
		`{"model":"m","messages":[{"role":"user","content":"data:` + long + `"}]}`:       "longer than 10 tokens",
		`{"model":"m","prompt":"x","n":5e0}`:                                             "n is 5",
		`{"model":"m","prompt":"x","logprobs":6}`:                                        "logprobs: must be at most 5, not 6",
		`{"model":"m","prompt":"x","logprobs":true,"top_logprobs":20}`:                   "top_logprobs: must be at most 5, not 20",
		`{"model":"m","prompt":"x","prompt_logprobs":-1}`:                                "prompt_logprobs asks for all tokens",
		`{"model":"m","prompt":[1,2,3,4,5,6,7,8,9,10,11]}`:                               "the prompt has 11 tokens: this gateway takes at most 10",
		`{"model":"m","prompt":[[1],[1,2,3,4,5,6,7,8,9,10,11]]}`:                         "the prompt has 11 tokens",
		`{"model":"m","prompt":"` + long + `"}`:                                          "longer than 10 tokens of 8 bytes",
		`{"model":"m","messages":[{"role":"user","content":"` + long + `"}]}`:            "longer than 10 tokens",
		`{"model":"m","messages":[{"content":[{"type":"text","text":"` + long + `"}]}]}`: "longer than 10 tokens",
	} {
		b.post("/v1/completions", body).wantError(t, 400, want)
	}
	for _, body := range []string{
		`{"model":"m","prompt":"x","n":4,"logprobs":5}`, `{"model":"m","prompt":"x","logprobs":true,"prompt_logprobs":null}`,
		`{"model":"m","prompt":[1,2,3,4,5,6,7,8,9,10]}`, `{"model":"m","prompt":"` + long[:80] + `"}`,
		`{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:` + long + `"}},{"type":"input_audio","input_audio":{"data":"` + long + `"}}]}]}`,
	} {
		if r := b.post("/v1/completions", body); r.StatusCode != 200 {
			t.Errorf("%s: %d %s", body, r.StatusCode, r.body)
		}
	}
	for _, bad := range []string{"0", "soon"} {
		b.post("/v1/completions", `{"model":"m","prompt":"x"}`, "X-Tandem-Timeout: "+bad).wantError(t, 400, bad)
	}
	b.far["s1"].does(never)
	b.post("/v1/completions", `{"model":"m","prompt":"x"}`, "X-Tandem-Timeout: 30ms").wantError(t, 504, "longer than 30ms")
}

// What is no JSON takes room at a server as well.
func TestRelayedFilesTakeRoom(t *testing.T) {
	b := newRelayed(t, Options{Limits: Limits{UpstreamRequests: 1}}, "s1")
	b.far["s1"].does(func(w http.ResponseWriter, r *http.Request) {
		n := int64(0)
		b.g.EachQueue(func(_ any, a *exchange.Admission) { n += a.Running() })
		fmt.Fprint(w, n)
	})
	if r := b.post("/v1/audio/transcriptions", "--x\r\n\r\n--x--", "Content-Type: multipart/form-data; boundary=x"); r.StatusCode != 200 || r.body != "1" {
		t.Errorf("%d, counted: %s", r.StatusCode, r.body)
	}
	b.until(func() bool { return b.g.InFlight.Load() == 0 })
	if err := b.g.Check(); err != nil {
		t.Error(err)
	}
}

// gated is a relay bed whose servers answer one request for each value in gate, or
// all once it is closed; told gets each request's prompt as it comes.
func gated(t *testing.T, o Options, names ...string) (b *relayed, gate chan struct{}, told func() []string) {
	b = newRelayed(t, o, names...)
	gate = make(chan struct{})
	var mu sync.Mutex
	var prompts []string
	for _, s := range b.far {
		s.does(func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			look, _ := upstream.ParseEnvelope(body)
			mu.Lock()
			prompts = append(prompts, strings.Trim(string(look.Prompt), `"`))
			mu.Unlock()
			select {
			case <-gate:
			case <-r.Context().Done():
			}
			streams(w, r)
		})
	}
	return b, gate, func() []string {
		mu.Lock()
		defer mu.Unlock()
		return append([]string(nil), prompts...)
	}
}

// askFor sends a request and waits until it is on a server or in the queue.
func (b *relayed) askFor(prompt string, priority int, headers ...string) *client {
	b.Helper()
	at := func() int64 {
		n := int64(0)
		b.g.EachQueue(func(_ any, a *exchange.Admission) { n += a.Running() + a.Waiting() })
		return n
	}
	before, c := at(), b.dial()
	c.send("POST", "/v1/completions", fmt.Sprintf(`{"model":"m","prompt":%q,"stream":true,"priority":%d}`, prompt, priority), headers...)
	b.until(func() bool { return at() > before })
	return c
}

// What servers of another kind have no room for waits as it does for nodes: by
// priority and in order, with bounds, and leaves when its client does.
func TestRelayWaits(t *testing.T) {
	b, gate, told := gated(t, Options{Limits: Limits{UpstreamRequests: 1, MaxQueuedRequests: 4}, Policy: "least_load"}, "s1", "s2")
	var answers sync.WaitGroup
	ask := func(prompt string, priority int) {
		c := b.askFor(prompt, priority)
		answers.Go(func() {
			defer c.Close()
			if r := c.receive(); r.StatusCode != 200 || !strings.HasSuffix(r.body, "[DONE]\n\n") {
				b.Errorf("%s: %d %s", prompt, r.StatusCode, r.body)
			}
		})
	}
	ask("a", 0)
	ask("b", 0)
	b.until(func() bool { return len(told()) == 2 })
	ask("c", 5)
	leaves := b.askFor("d", 1)
	ask("e", 0)
	ask("f", -3)
	if got := told(); len(got) != 2 {
		t.Fatalf("%q reached the servers", got)
	}
	b.post("/v1/completions", `{"model":"m","prompt":"x","priority":9}`).wantError(t, 429, "4 requests wait")
	b.post("/v1/completions", `{"model":"m","prompt":"x","priority":9}`, "X-Tandem-Timeout: 20ms").wantError(t, 429, "4 requests wait")
	if err := b.g.Check(); err != nil {
		t.Error(err)
	}
	leaves.Close()
	waiting := func() (n int64) {
		b.g.EachQueue(func(_ any, a *exchange.Admission) { n += a.Waiting() })
		return n
	}
	b.until(func() bool { return waiting() == 3 })
	b.post("/v1/completions", `{"model":"m","prompt":"y","priority":9}`, "X-Tandem-Timeout: 20ms").wantError(t, 504, "longer than 20ms")
	for n := range 3 { // one place at a time
		gate <- struct{}{}
		b.until(func() bool { return len(told()) == 3+n })
	}
	close(gate)
	answers.Wait()
	if got := strings.Join(told()[2:], ""); got != "fec" {
		t.Errorf("the servers got %q after the first two", got)
	}
	b.until(func() bool { return b.g.InFlight.Load() == 0 })
	if err := b.g.Check(); err != nil {
		t.Error(err)
	}
	if n := b.refused("queue"); n != 2 {
		t.Errorf("%g refusals", n)
	}
}

// A key's priority bounds that of its requests.
func TestRelayKeyPriority(t *testing.T) {
	b, gate, told := gated(t, Options{Limits: Limits{UpstreamRequests: 1}, APIKeyFile: keyFile(t, "one\nlow priority=7\n")}, "s1")
	var answers sync.WaitGroup
	ask := func(prompt, key string, priority int) {
		c := b.askFor(prompt, priority, "Authorization: Bearer "+key)
		answers.Go(func() { defer c.Close(); c.receive() })
	}
	ask("0", "one", 0)
	b.until(func() bool { return len(told()) == 1 })
	ask("low", "low", -9)
	ask("one", "one", 0)
	gate <- struct{}{}
	b.until(func() bool { return len(told()) == 2 })
	close(gate)
	answers.Wait()
	if got := strings.Join(told(), " "); got != "0 one low" {
		t.Errorf("the server got %q", got)
	}
}

// With priorities alike, tokens are in the ratio of weights.
func TestRelayWeights(t *testing.T) {
	b, gate, told := gated(t, Options{Limits: Limits{UpstreamRequests: 1}, APIKeyFile: keyFile(t, "two weight=2\none weight=1\n")}, "s1")
	var answers sync.WaitGroup
	for n := range 91 {
		key := []string{"one", "two"}[n%2]
		c := b.askFor(key, 0, "Authorization: Bearer "+key)
		answers.Go(func() { defer c.Close(); c.receive() })
	}
	for n := range 61 { // as long as both have some that wait
		gate <- struct{}{}
		b.until(func() bool { return len(told()) == 2+n })
	}
	twos := 0
	for _, key := range told()[1:61] {
		if key == "two" {
			twos++
		}
	}
	if twos < 38 || twos > 42 {
		t.Errorf("two of weight 2 got %d of 60 turns", twos)
	}
	close(gate)
	answers.Wait()
}

// What an answer tells of its end is what is counted.
func TestRelayCounts(t *testing.T) {
	b := newRelayed(t, Options{}, "s1")
	done := func(reason string) float64 { return b.g.Meters.Counter(metrics.RequestSuccess, reason).Get() }
	m := b.g.Meters
	b.far["s1"].does(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		event(w, chunkEvent("two tokens"), `data: {"choices":[{"index":0,"delta":{},"finish_reason":null}]}`+"\n\n",
			`data: {"choices":[{"index":0,"delta":{"content":"\"finish_reason\":\"stop\""},"finish_reason": "length"},{"index":1,"delta":{},"finish_reason":"tool_calls"}]}`+"\n\n",
			`data: {"choices":[],"usage":{"prompt_tokens":70,"total_tokens":90,"completion_tokens":20,"prompt_tokens_details":{"cached_tokens":64}}}`+"\n\n", "data: [DONE]\n\n")
	})
	if r := b.post("/v1/chat/completions", ask(true, "x")); r.err != nil {
		t.Fatal(r.err)
	}
	b.until(func() bool { return b.g.InFlight.Load() == 0 })
	if s, l := done("stop"), done("length"); s != 1 || l != 1 || m.Counter(metrics.GenerationTokens).Get() != 20 || m.Counter(metrics.PromptTokens).Get() != 70 || m.Counter(metrics.PromptTokensCached).Get() != 64 {
		t.Errorf("%g stop, %g length, %g tokens, %g prompt, %g cached", s, l, m.Counter(metrics.GenerationTokens).Get(), m.Counter(metrics.PromptTokens).Get(), m.Counter(metrics.PromptTokensCached).Get())
	}
	b.far["s1"].does(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"choices":[{"message":{"content":"x"},"finish_reason":"abort"}],"usage":{"prompt_tokens":5,"completion_tokens":3}}`)
	})
	b.post("/v1/chat/completions", ask(false, "x"))
	if a := done("abort"); a != 1 || m.Counter(metrics.GenerationTokens).Get() != 23 || m.Counter(metrics.PromptTokens).Get() != 75 {
		t.Errorf("%g abort, %g tokens, %g prompt", a, m.Counter(metrics.GenerationTokens).Get(), m.Counter(metrics.PromptTokens).Get())
	}
}

// A large answer has the name that its client knows, however it comes in pieces.
func TestRelayRenamesLargeAnswers(t *testing.T) {
	b := newRelayed(t, Options{Upstreams: Upstreams{Options: upstream.Options{Names: map[string]string{"best": "m"}}}}, "s1")
	for _, size := range []int{maxHeld - 20, maxHeld, maxHeld + 13, 3 * maxHeld} {
		text := strings.Repeat("x", size)
		for _, cut := range []int{1, 5, 9, 11, 12, 100} {
			b.far["s1"].does(func(w http.ResponseWriter, _ *http.Request) {
				tail := `","model":"m","again":{"model": "m"}}`
				event(w, `{"text":"`+text+tail[:min(cut, len(tail))], tail[min(cut, len(tail)):])
			})
			r := b.post("/v1/chat/completions", `{"model":"best","messages":[]}`)
			if want := `{"text":"` + text + `","model":"best","again":{"model": "best"}}`; r.err != nil || r.body != want {
				t.Fatalf("%d bytes cut at %d: %d bytes, %v: …%s", size, cut, len(r.body), r.err, r.body[max(0, len(r.body)-60):])
			}
		}
	}
}

// A request's body is not kept for as long as its answer streams.
func TestBodiesAreLetGo(t *testing.T) {
	b := newRelayed(t, Options{}, "s1")
	gate := make(chan struct{})
	b.far["s1"].does(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		event(w, chunkEvent("one "))
		<-gate
		event(w, "data: [DONE]\n\n")
	})
	c := b.dial()
	defer c.Close()
	c.send("POST", "/v1/chat/completions", ask(true, strings.Repeat("x", 200<<10)))
	if _, err := c.r.Peek(1); err != nil {
		t.Fatal(err)
	}
	b.until(func() bool { return b.g.http.Held() == 0 })
	close(gate)
	if r := c.receive(); r.err != nil || !r.events(t).done {
		t.Fatal(r.body, r.err)
	}
	for range 2 { // the connection goes on
		c.send("POST", "/v1/chat/completions", ask(true, strings.Repeat("y", 100<<10)))
		if r := c.receive(); r.StatusCode != 200 {
			t.Fatal(r.StatusCode, r.body)
		}
	}
	if got := b.far["s1"].requests(); len(got) != 3 || len(got[2].body) < 100<<10 {
		t.Fatal(len(got))
	}
	b.until(func() bool { return b.g.InFlight.Load() == 0 && b.g.http.Held() == 0 })
}

// A bound that is set while the gateway runs holds, and so does its end.
func TestRelayRoomChanges(t *testing.T) {
	b, gate, told := gated(t, Options{}, "s1")
	set := func(each int) {
		if err := b.g.SetLimits(Limits{UpstreamRequests: each}); err != nil {
			t.Fatal(err)
		}
	}
	set(1)
	first, second := b.askFor("a", 0), b.askFor("b", 0)
	defer first.Close()
	defer second.Close()
	time.Sleep(10 * time.Millisecond)
	if n := len(told()); n > 1 {
		t.Fatalf("%d requests reached the server", n)
	}
	set(0)
	b.until(func() bool { return len(told()) == 2 })
	close(gate)
	first.receive()
	second.receive()
}
