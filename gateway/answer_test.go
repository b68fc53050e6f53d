package gateway

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

var update = flag.Bool("update", false, "write golden files")

const hi = `"messages":[{"role":"user","content":"hi"}]`

var created = regexp.MustCompile(`"created":\d+`)

// The very bytes of streams: head, chunks, events.
func TestStreamBytes(t *testing.T) {
	word := func(r *nodepb.Generate, p int) int32 { return []int32{'H', 'i', 0xc3, 0xb6, eosID}[p-len(r.Prompt)] }
	gate := make(chan struct{})
	b := newBed(t, Options{}, one(nodestest.Options{Token: word, Gate: gate, Cached: 3}))
	for name, req := range map[string][3]string{ // path, body, and for each token whether it shows

		"chat":        {"/v1/chat/completions", `{` + hi + `,"stream":true,"stream_options":{"include_usage":true}}`, "++-++"},
		"completions": {"/v1/completions", `{"prompt":"abc","stream":true,"echo":true,"max_tokens":4}`, "++-+"},
		"continuous":  {"/v1/completions", `{"prompt":[1,2],"stream":true,"max_tokens":3,"stream_options":{"continuous_usage_stats":true}}`, "+++"},
	} {
		c := b.dial()
		c.send("POST", req[0], req[1], "X-Request-Id: golden", "Connection: close")
		var raw lockedBuffer
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_, _ = io.Copy(&raw, c) // ends with the connection
		}()
		// One token at a time, so that chunks do not depend on timing.
		for i, before := 0, b.g.Meters.Counter(metrics.GenerationTokens).Get(); i < len(req[2]); i++ {
			size := len(raw.String())
			gate <- struct{}{}
			b.until(func() bool {
				return b.g.Meters.Counter(metrics.GenerationTokens).Get() > before+float64(i) && (req[2][i] == '-' || len(raw.String()) > size)
			})
		}
		<-ended
		c.Close()
		got := created.ReplaceAllString(raw.String(), `"created":0`)
		file := "testdata/stream-" + name + ".golden"
		if *update {
			if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if got != string(want) {
			t.Errorf("%s:\n%s\nwant\n%s", name, got, want)
		}
	}
}

func TestWholeAnswers(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{Cached: 2}))
	for _, c := range []struct {
		path, body string
		text       string
		finish     string
		stop       any
		tokens     int
	}{
		{"/v1/chat/completions", `{` + hi + `}`, lore, "stop", nil, len(lore) + 1},
		{"/v1/chat/completions", `{` + hi + `,"max_tokens":5}`, "Hello", "length", nil, 5},
		{"/v1/chat/completions", `{` + hi + `,"stop":["wörld","zzz"]}`, "Hello, ", "stop", "wörld", 13},
		{"/v1/chat/completions", `{` + hi + `,"stop":"wörld","include_stop_str_in_output":true}`, "Hello, wörld", "stop", "wörld", 13},
		{"/v1/chat/completions", `{` + hi + `,"stop_token_ids":[33]}`, "Hello, wörld", "stop", float64('!'), 14},
		{"/v1/chat/completions", `{` + hi + `,"stop_token_ids":[33],"include_stop_str_in_output":true}`, "Hello, wörld!", "stop", float64('!'), 14},
		{"/v1/chat/completions", `{` + hi + `,"max_tokens":9}`, "Hello, w\uFFFD", "length", nil, 9},
		{"/v1/completions", `{"prompt":"x"}`, lore[:16], "length", nil, 16},
		{"/v1/completions", `{"prompt":[1,2,3],"max_tokens":3}`, "Hel", "length", nil, 3},
		{"/v1/completions", `{"prompt":"say: ","echo":true,"max_tokens":2}`, "say: He", "length", nil, 2},
		{"/v1/completions", `{"prompt":[65,66],"echo":true,"max_tokens":2}`, "ABHe", "length", nil, 2},
	} {
		for _, stream := range []bool{false, true} {
			body := c.body
			if stream {
				body = strings.TrimSuffix(body, "}") + `,"stream":true,"stream_options":{"include_usage":true}}`
			}
			r := b.post(c.path, body)
			if r.StatusCode != 200 || r.err != nil {
				t.Fatalf("%s: %d %q %v", body, r.StatusCode, r.body, r.err)
			}
			var text, finish string
			var stop any
			var a answer
			if stream {
				s := r.events(t)
				if !s.done || s.usage != 1 || (s.roles == 1) != strings.Contains(c.path, "chat") {
					t.Errorf("%s: %+v", body, s)
				}
				text, finish, stop, a = s.text[0], s.finish[0], s.stop[0], s.last
			} else {
				a = r.parse(t)
				text, finish, stop = a.Choices[0].Text+a.Choices[0].Message.Content, *a.Choices[0].Finish, a.Choices[0].Stop
			}
			prompt := len(lastRequest(b, "d1").Prompt)
			if text != c.text || finish != c.finish || stop != c.stop {
				t.Errorf("%s: %q %s %v, want %q %s %v", body, text, finish, stop, c.text, c.finish, c.stop)
			}
			if u := a.Usage; u == nil || u.Completion != c.tokens || u.Prompt != prompt || u.Total != prompt+c.tokens || u.Details.Cached != min(2, prompt) {
				t.Errorf("%s: usage %+v, want %d for %d", body, u, c.tokens, prompt)
			}
			if a.Model != "tiny" || !strings.HasPrefix(a.ID, "c") {
				t.Errorf("%s: %+v", body, a)
			}
		}
	}
}

// Several prompts with several answers each: every one is its own attempt with
// its own choice, under one seed, in the order of the response.
func TestManyChoices(t *testing.T) {
	letters := func(r *nodepb.Generate, p int) int32 {
		return 'a' + r.Prompt[0] + int32(r.Sampling.Choice)*10
	}
	b := newBed(t, Options{}, one(nodestest.Options{Token: letters}))
	const body = `{"prompt":[[1],[2],[3]],"n":2,"max_tokens":3,"seed":-5,"temperature":0.5,"top_p":0.9,"top_k":7`
	want := []string{"bbb", "lll", "ccc", "mmm", "ddd", "nnn"}
	a := b.post("/v1/completions", body+`}`).parse(t)
	s := b.post("/v1/completions", body+`,"stream":true}`).events(t)
	for i, w := range want {
		if a.Choices[i].Text != w || a.Choices[i].Index != i || s.text[i] != w || s.finish[i] != "length" {
			t.Errorf("choice %d: %q and %q, want %q", i, a.Choices[i].Text, s.text[i], w)
		}
	}
	if a.Usage.Completion != 18 || a.Usage.Prompt != 3 {
		t.Errorf("usage %+v", a.Usage)
	}
	for _, r := range b.nodes["d1"].Requests() {
		if s := r.Sampling; s.Seed != ^uint64(4) || s.Temperature != 0.5 || s.TopP != 0.9 || s.TopK != 7 || r.Attempt != 1 || r.MaxTokens != 3 {
			t.Errorf("%v", r)
		}
	}
}

// What a client leaves out: the seed is drawn anew for each request, sampling
// comes from the checkpoint and then from the API's defaults.
func TestDefaultsOfSampling(t *testing.T) {
	bu := bundle()
	temp, k := float32(0.25), int32(11)
	bu.Defaults = &nodepb.GenerationDefaults{Temperature: &temp, TopK: &k}
	b := newBed(t, Options{}, one(nodestest.Options{Bundle: bu}))
	seeds := map[uint64]bool{}
	for range 4 {
		b.post("/v1/completions", `{"prompt":"x","max_tokens":1,"ignore_eos":true,"cache_salt":"s","priority":3}`)
		r := lastRequest(b, "d1")
		seeds[r.Sampling.Seed] = true
		if s := r.Sampling; s.Temperature != 0.25 || s.TopP != 1 || s.TopK != 11 || !r.IgnoreEos || r.Priority != 3 || r.DeadlineMs == 0 {
			t.Fatalf("%v", r)
		}
		if r.PrefixRoot == 0 || r.PrefixRoot != uint64(b.g.native.Models.Load().Root("s")) || r.PrefixRoot == uint64(b.g.native.Models.Load().Root("")) {
			t.Fatalf("prefix root %x", r.PrefixRoot)
		}
		if m := b.g.native.Models.Load(); !bytes.Equal(r.PrefixDigest, m.RootDigest("s")) || bytes.Equal(r.PrefixDigest, m.RootDigest("")) {
			t.Fatalf("prefix digest %x", r.PrefixDigest)
		}
	}
	if len(seeds) != 4 {
		t.Fatalf("seeds %v", seeds)
	}
	b.post("/v1/completions", `{"prompt":"x","max_tokens":1,"temperature":0,"top_k":-1}`)
	if s := lastRequest(b, "d1").Sampling; s.Temperature != 0 || s.TopK != -1 {
		t.Fatalf("%v", s)
	}
}

func TestChatTemplate(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	for body, want := range map[string]string{
		`{` + hi + `}`: "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
		`{` + hi + `,"add_generation_prompt":false}`:                                                                                                       "<|im_start|>user\nhi<|im_end|>\n",
		`{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]}`:                                                 "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n",
		`{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"so far"}],"continue_final_message":true,"add_generation_prompt":false}`: "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nso far",
	} {
		if r := b.post("/v1/chat/completions", body); r.StatusCode != 200 {
			t.Fatalf("%s: %s", body, r.body)
		}
		if got := b.g.native.Models.Load().Text.Decode(lastRequest(b, "d1").Prompt, false); got != want {
			t.Errorf("%s:\n%q, want\n%q", body, got, want)
		}
	}
}

func TestPrefillChoice(t *testing.T) {
	prefill := nodes.Member{Role: "prefill", RPC: "p1", Fingerprint: 7, Class: "test", Ready: true}
	other := nodes.Member{Role: "prefill", RPC: "p2", Fingerprint: 7, Class: "another", Ready: true}
	b := newBed(t, Options{MinRemotePrefillTokens: 20, Members: []nodes.Member{decodeMember("d1"), prefill, other}}, one(nodestest.Options{}))
	for n, want := range map[int]string{20: "[]", 21: "[p1]", 500: "[p1]"} {
		b.post("/v1/completions", fmt.Sprintf(`{"prompt":%q,"max_tokens":2}`, strings.Repeat("x", n)))
		if got := fmt.Sprint(lastRequest(b, "d1").Prefill); got != want {
			t.Errorf("%d tokens: %s, want %s", n, got, want)
		}
	}
}

// Equal prefixes meet on one node; requests on an idle fleet spread.
func TestPrefixAffinity(t *testing.T) {
	nodes := map[string]nodestest.Options{"d1": {}, "d2": {}, "d3": {}}
	b := newBed(t, Options{}, nodes)
	for i := range 30 {
		for range 2 {
			b.post("/v1/completions", fmt.Sprintf(`{"prompt":"%s %d","max_tokens":1}`, strings.Repeat("p", 16*(i%3)), i))
		}
	}
	homes, total := map[string]string{}, 0
	for addr, n := range b.nodes {
		rs := n.Requests()
		total += len(rs)
		if len(rs) < 4 {
			t.Errorf("%s got %d of 60", addr, len(rs))
		}
		for _, r := range rs {
			p := fmt.Sprint(r.Prompt)
			if h := homes[p]; h != "" && h != addr {
				t.Errorf("prompt %s on %s and %s", p, h, addr)
			}
			homes[p] = addr
		}
	}
	if total != 60 {
		t.Errorf("%d requests", total)
	}
}

// A connection serves request after request, pipelined ones included, also
// after streams.
func TestKeepAliveAndPipelining(t *testing.T) {
	gate := make(chan struct{})
	b := newBed(t, Options{}, one(nodestest.Options{Gate: gate}))
	c := b.dial()
	defer c.Close()
	const whole = `{"prompt":"x","max_tokens":4}`
	c.send("POST", "/v1/completions", `{"prompt":"x","max_tokens":4,"stream":true}`)
	b.until(func() bool { return b.nodes["d1"].Running() == 1 })
	c.send("POST", "/v1/completions", whole) // while the first runs
	c.send("GET", "/v1/models", "")
	go feed(gate, 8)
	if s := c.receive().events(t); s.text[0] != "Hell" || !s.done {
		t.Fatalf("%+v", s)
	}
	if a := c.receive().parse(t); a.Choices[0].Text != "Hell" {
		t.Fatalf("%+v", a)
	}
	if r := c.receive(); r.StatusCode != 200 || !strings.Contains(r.body, `"id":"tiny"`) {
		t.Fatalf("%+v", r)
	}
	go feed(gate, 4)
	c.send("POST", "/v1/completions", whole)
	if a := c.receive().parse(t); a.Choices[0].Text != "Hell" {
		t.Fatalf("%+v", a)
	}
}
