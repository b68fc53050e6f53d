package gateway

import (
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/upstream/upstreamtest"
)

// A text that no context can hold is refused before it is tokenized, wherever it is.
func TestTextBeyondContext(t *testing.T) {
	b := newBed(t, Options{}, one(upstreamtest.Options{}))
	m, fault := b.g.find("")
	if fault != nil {
		t.Fatal(fault)
	}
	long := strings.Repeat("x", max(anyText, normalizedTo*int(m.bundle.MaxModelLen)*m.text.longest)+1)
	b.post("/v1/completions", `{"prompt":"`+long+`"}`).wantError(t, 400, "bytes of text")
	b.post("/tokenize", `{"prompt":"`+long+`"}`).wantError(t, 400, "bytes of text")
	b.post("/v1/completions", `{"prompt":"`+long[1:]+`"}`).wantError(t, 400, "tokens, which leaves no room")
}

// A body in small chunks, whose length nobody has said, is counted as it comes.
func TestMemoryOfChunks(t *testing.T) {
	b := newBed(t, Options{MaxBodyMemory: 1 << 20}, one(upstreamtest.Options{}))
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

// What has too many elements is refused by name; internal/openai tests every field.
func TestFieldsAreBounded(t *testing.T) {
	b := newBed(t, Options{}, one(upstreamtest.Options{}))
	for _, body := range []string{
		`{"prompt":"x","stop":["a"` + strings.Repeat(`,"a"`, 64) + `]}`,
		`{"prompt":"x","stop_token_ids":[1` + strings.Repeat(`,1`, 64) + `]}`,
		`{"prompt":["a"` + strings.Repeat(`,"a"`, 256) + `]}`,
	} {
		b.post("/v1/completions", body).wantError(t, 400, "too many elements")
	}
	b.post("/v1/completions", `{"prompt":"x","z":`+strings.Repeat("[", 301)).wantError(t, 400, "nest deeper than 300")
}
