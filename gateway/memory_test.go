package gateway

import (
	"fmt"
	"io"
	"runtime"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
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
