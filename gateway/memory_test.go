package gateway

import (
	"fmt"
	"io"
	"runtime"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// A text that no context can hold is refused before it is tokenized, wherever it is.
func TestTextBeyondContext(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	m, fault := b.g.native.Find("")
	if fault != nil {
		t.Fatal(fault)
	}
	long := strings.Repeat("x", m.MaxText()+1)
	b.post("/v1/completions", `{"prompt":"`+long+`"}`).wantError(t, 400, "bytes of text")
	b.post("/tokenize", `{"prompt":"`+long+`"}`).wantError(t, 400, "bytes of text")
	b.post("/v1/completions", `{"prompt":"`+long[1:]+`"}`).wantError(t, 400, "tokens, which leaves no room")
}

// A body in small chunks, whose length nobody has said, is counted as it comes.
func TestMemoryOfChunks(t *testing.T) {
	b := newBed(t, Options{Limits: Limits{MaxBodyMemory: 1 << 20}}, one(nodestest.Options{}))
	c := b.dial()
	defer c.Close()
	if _, err := io.WriteString(c, "POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	piece := fmt.Sprintf("1000\r\n%s\r\n", strings.Repeat(" ", 0x1000))
	for range 1 << 20 / 0x1000 * 2 {
		if _, err := io.WriteString(c, piece); err != nil { // refused meanwhile
			break
		}
	}
	c.receive().wantError(t, 429, "--max-body-memory")
}

// A body that there is no memory for is refused before its buffer is allocated, by the
// head alone; otherwise it counts for its length.
func TestMemoryIsTakenByTheHead(t *testing.T) {
	const most, length = 4 << 20, 3<<20 + 1
	b := newBed(t, Options{Limits: Limits{MaxBodyMemory: most}}, one(nodestest.Options{}))
	head := fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n", length)
	first, second := b.dial(), b.dial()
	defer second.Close()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if _, err := io.WriteString(first, head); err != nil {
		t.Fatal(err)
	}
	b.until(func() bool { return b.g.http.Held() == length })
	if _, err := io.WriteString(second, head); err != nil {
		t.Fatal(err)
	}
	second.receive().wantError(t, 429, "--max-body-memory")
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n < length || n > length+1<<20 {
		t.Errorf("%d bytes allocated for one body of %d bytes", n, length)
	}
	first.Close()
	b.until(func() bool { return b.g.http.Held() == 0 })
}

// A long word takes some 40 times its bytes while it is tokenized, which a small body
// may bring: it is counted, and given back when the prompt has its tokens.
func TestMemoryOfLongWords(t *testing.T) {
	const size = 90_000
	b := newBed(t, Options{Limits: Limits{MaxBodyMemory: 30 * size}}, one(nodestest.Options{}))
	word := strings.Repeat("x", size)
	b.post("/v1/completions", `{"max_tokens":1,"prompt":"`+word+`"}`).wantError(t, 429, "--max-body-memory")
	b.post("/v1/chat/completions", `{"max_tokens":1,"messages":[{"role":"user","content":"`+word+`"}]}`).wantError(t, 429, "--max-body-memory")
	b.post("/tokenize", `{"prompt":"`+word+`"}`).wantError(t, 429, "--max-body-memory")
	text := strings.Repeat("xyz uvw ", size/8)
	if r := b.post("/v1/completions", `{"max_tokens":1,"prompt":"`+text+`"}`); r.StatusCode != 200 {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
	b.until(func() bool { return b.g.http.Held() == 0 })
}

// A template that goes through its messages for each of them makes text out of proportion.
func TestTemplateBeyondRequest(t *testing.T) {
	b := newBed(t, Options{ChatTemplate: "{% for a in messages %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfor %}"}, one(nodestest.Options{}))
	message := `{"role":"user","content":"` + strings.Repeat("x", 100) + `"}`
	b.post("/v1/chat/completions", `{"messages":[`+message+strings.Repeat(","+message, 199)+`]}`).wantError(t, 400, "the output is longer than")
}

// What has too many elements is refused by name; gateway/api/openai tests every field.
func TestFieldsAreBounded(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	for _, body := range []string{
		`{"prompt":"x","stop":["a"` + strings.Repeat(`,"a"`, 64) + `]}`,
		`{"prompt":"x","stop_token_ids":[1` + strings.Repeat(`,1`, 64) + `]}`,
		`{"prompt":["a"` + strings.Repeat(`,"a"`, 256) + `]}`,
	} {
		b.post("/v1/completions", body).wantError(t, 400, "too many elements")
	}
	b.post("/v1/completions", `{"prompt":"x","z":`+strings.Repeat("[", 301)).wantError(t, 400, "nest deeper than 300")
}

// Answers whose size follows from the request have memory together with large bodies, from the
// admission of a request until its client has the answer.
func TestMemoryOfAnswers(t *testing.T) {
	const size, texts, most = 16_384, 8, 6 << 20 // an answer is 2.6 MB
	gate := make(chan struct{})
	o := vectorNode("a", func(v *nodepb.Vectors) { v.Size = size })
	vector := make([]float32, size)
	for i := range vector {
		vector[i] = -1.1754944e-38 // the longest number
	}
	o.Vector = func(*nodepb.Generate) []float32 { <-gate; return vector }
	b := newBed(t, Options{Limits: Limits{MaxBodyMemory: most}}, one(o))
	body := `{"normalize":false,"input":["x"` + strings.Repeat(`,"x"`, texts-1) + `]}`
	var clients []*client
	for range 2 {
		c := b.dial()
		t.Cleanup(func() { c.Close() })
		c.send("POST", "/v1/embeddings", body)
		clients = append(clients, c)
		b.until(func() bool { return b.g.http.Held() > int64(len(clients))*texts*size*19 })
	}
	held := b.g.http.Held()
	r := b.post("/v1/embeddings", body)
	r.wantError(t, 429, "--max-body-memory")
	if r.Header.Get("Retry-After") != "1" {
		t.Errorf("%v", r.Header)
	}
	b.post("/v2/embed", `{"embedding_types":["float","base64"],"texts":["x"`+strings.Repeat(`,"x"`, texts-1)+`]}`).wantError(t, 429, "--max-body-memory")
	b.post("/score", `{"text_1":"x","text_2":["x"`+strings.Repeat(`,"x"`, 40)+`]}`).wantError(t, 429, "--max-body-memory")
	if n := b.g.http.Held(); n != held {
		t.Errorf("%d bytes are reserved after refusals, %d before", n, held)
	}
	close(gate)
	for i, c := range clients {
		if r := c.receive(); r.StatusCode != 200 || len(r.body) < texts*size*15 {
			t.Errorf("%d: %d bytes", r.StatusCode, len(r.body))
		} else if n := int64(len(r.body) + texts*size*4); n > held/2+1024 {
			t.Errorf("answer %d takes %d bytes of the reserved %d", i, n, held/2)
		}
		c.Close()
	}
	b.until(func() bool { return b.g.http.Held() == 0 })
	if r := b.post("/v1/embeddings", body); r.StatusCode != 200 {
		t.Errorf("%d %.200s", r.StatusCode, r.body)
	}
	if n := b.refused("body_memory"); n != 3 {
		t.Errorf("%g refusals", n)
	}
}

// Log-probabilities of prompts are counted for each token, best token and choice. A client that
// goes away frees them.
func TestMemoryOfPromptLogprobs(t *testing.T) {
	gate := make(chan struct{})
	b := newBed(t, Options{Limits: Limits{MaxBodyMemory: 1 << 20}}, one(nodestest.Options{Gate: gate}))
	prompt := strings.Repeat("x", 150)
	c := b.dial()
	defer c.Close()
	c.send("POST", "/v1/completions", `{"prompt":"`+prompt+`","prompt_logprobs":20,"max_tokens":1}`)
	b.until(func() bool { return b.g.http.Held() > 150*21*256 })
	for _, fields := range []string{`"prompt_logprobs":20`, `"echo":true,"logprobs":5,"n":3`, `"echo":true,"logprobs":20,"stream":true`} {
		b.post("/v1/completions", `{"prompt":"`+prompt+`","max_tokens":1,`+fields+`}`).wantError(t, 429, "--max-body-memory")
	}
	b.post("/v1/chat/completions", `{"messages":[{"role":"user","content":"`+prompt+`"}],"max_tokens":1,"prompt_logprobs":20}`).wantError(t, 429, "--max-body-memory")
	c.Close()
	b.until(func() bool { return b.g.http.Held() == 0 })
	go func() { gate <- struct{}{} }()
	if r := b.post("/v1/completions", `{"prompt":"`+prompt+`","prompt_logprobs":20,"max_tokens":1}`); r.StatusCode != 200 || len(r.body) > 150*21*256 {
		t.Errorf("%d, %d bytes", r.StatusCode, len(r.body))
	}
}
