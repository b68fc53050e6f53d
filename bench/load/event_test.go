package load

import (
	"bufio"
	"encoding/json"
	"strings"
	"testing"
	"time"
)

func TestEvents(t *testing.T) {
	for _, c := range []struct {
		data    string
		chat    bool
		choices bool
		text    string
		failed  bool
		out     int
	}{
		{`{"choices":[{"text":"hi"}]}`, false, true, "hi", false, -1},
		{`{"choices": [ {"index": 0, "text" : "a\\\"b"}]}`, false, true, `a\\\"b`, false, -1},
		{`{"choices":[{"text":""}],"usage":{"completion_tokens":4}}`, false, true, "", false, 4},
		{`{"choices":[{"delta":{"role":"assistant","content":""}}]}`, true, true, "", false, -1},
		{`{"choices":[{"delta":{"content":null,"reasoning_content":"hm"}}]}`, true, true, "hm", false, -1},
		{`{"choices":[{"delta":{"content":"x"},"logprobs":{"content":[]}}]}`, true, true, "x", false, -1},
		{`{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":17}}`, false, false, "", false, 17},
		{`{"choices":[{"text":"say \"text\":\"no\""}],"usage":null}`, false, true, `say \"text\":\"no\"`, false, -1},
		{`{"error":{"message":"m"}}`, false, false, "", true, -1},
		{`{"error":null}`, false, false, "", false, -1},
		{``, false, false, "", false, -1},
		{`{"choices":[{"text":`, false, true, "", false, -1},
	} {
		keys := completionKeys
		if c.chat {
			keys = chatKeys
		}
		e := parse([]byte(c.data), keys)
		if e.choices != c.choices || string(e.text) != c.text || (e.failed != nil) != c.failed || e.completion != c.out {
			t.Errorf("%s: %+v", c.data, e)
		}
	}
}

// The token path allocates nothing once its buffers are there.
func TestTokenAllocatesNothing(t *testing.T) {
	c := &Client{keys: completionKeys}
	o := &Outcome{ITL: make([]time.Duration, 0, 2000)}
	data := []byte(`{"id":"x","choices":[{"index":0,"text":"word ","finish_reason":null}]}`)
	if n := testing.AllocsPerRun(1000, func() {
		if err := c.addEvent(data, time.Second, o); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations per token", n)
	}
}

// FuzzEvents: whatever a server sends, reading ends without a panic, and for a
// valid event the text is what a JSON parser finds.
func FuzzEvents(f *testing.F) {
	for _, s := range []string{mockChunk, "data: [DONE]\n\n", "data:{\"choices\":[{\"text\":\"\\u00e9\"}]}\r\n\r\n", ": ping\n\nevent: x\ndata: {\"error\":1}\n", "data: {\"choices\":[{\"text\":\"\\\\\"}],\"usage\":{\"completion_tokens\":99999999999999999999}}\n"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, stream string) {
		c := &Client{keys: completionKeys, target: Target{KeepText: true}}
		k := &conn{clock: NewStamped(nil), lines: bufio.NewReaderSize(strings.NewReader(stream), 16)}
		var o Outcome
		err := c.events(k, time.Time{}, &o)
		if err == nil && o.Chunks > 0 && len(o.ITL) != o.Chunks-1 {
			t.Fatalf("%d chunks, %d gaps", o.Chunks, len(o.ITL))
		}
		_ = o.Decoded()
		var whole struct {
			Choices []struct {
				Text *string `json:"text"`
			} `json:"choices"`
		}
		canonical := `{"choices":[{"text":` + quoted(stream) + `}]}`
		if json.Unmarshal([]byte(canonical), &whole) == nil && *whole.Choices[0].Text != "" {
			e := Outcome{Text: parse([]byte(canonical), completionKeys).text}
			if got := e.Decoded(); got != *whole.Choices[0].Text {
				t.Fatalf("%s: got %q", canonical, got)
			}
		}
	})
}

func quoted(s string) string {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err)
	}
	return string(b)
}

func BenchmarkToken(b *testing.B) {
	c := &Client{keys: completionKeys}
	o := &Outcome{}
	data := []byte(`{"id":"cmpl-73bfacedf8f81e7cfe9958178bbdd403","object":"text_completion","created":1795237191,"model":"index","system_fingerprint":"fp_590f30530d","choices":[{"index":0,"text":"169 ","logprobs":null,"finish_reason":null}]}`)
	for b.Loop() {
		o.ITL = o.ITL[:0]
		if err := c.addEvent(data, time.Second, o); err != nil {
			b.Fatal(err)
		}
	}
}
