package gateway

import (
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/proxy"
)

const (
	chatPath     = "/v1/chat/completions"
	completePath = "/v1/completions"
)

// farTokenizer is bundle's, with a template for chats with tools.
func farTokenizer(t *testing.T, template string) *proxy.Tokenizer {
	t.Helper()
	tok, err := proxy.NewTokenizer(bundle(), template)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// Whole requests: writings of one prompt meet at one server, which gets the client's
// own bytes; what cannot be tokenized is served all the same; /debug/route says which.
func TestRelayByTokens(t *testing.T) {
	b := newRelayed(t, Options{Policy: "consistent_hash", Upstreams: Upstreams{Tokenizers: map[string]*proxy.Tokenizer{"m": farTokenizer(t, "")}}}, "s1", "s2", "s3", "s4")
	var at string // that got the last request, and what it got
	send := func(path, body string) string {
		t.Helper()
		before := map[string]int{}
		for name, s := range b.far {
			before[name] = len(s.requests())
		}
		if r := b.post(path, body); r.StatusCode != 200 || r.err != nil {
			t.Fatal(r.StatusCode, r.body, r.err)
		}
		for name, s := range b.far {
			if got := s.requests(); len(got) > before[name] {
				if at = name; got[len(got)-1].body != body {
					t.Fatalf("sent %s, %s got %s", body, name, got[len(got)-1].body)
				}
			}
		}
		return at
	}
	explain := func(query string) (e proxy.Explanation) {
		t.Helper()
		r := b.do("GET", "/debug/route?model=m&"+query, "")
		if err := json.Unmarshal([]byte(r.body), &e); err != nil {
			t.Fatal(r.body, err)
		}
		return e
	}
	for i := range 8 {
		word := fmt.Sprintf("q%d", i)
		home := send(chatPath, fmt.Sprintf(`{"model":"m","stream":true,"messages":[{"role":"user","content":"%s"}]}`, word))
		for path, body := range map[string]string{
			chatPath:     fmt.Sprintf(`{"messages":[{"content":[{"text":"\u0071%d","type":"text"}],"role":"user"}],"stream":true,"model":"m"}`, i),
			completePath: fmt.Sprintf(`{"model":"m","stream":true,"prompt":"<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n"}`, word),
		} {
			if got := send(path, body); got != home {
				t.Errorf("%s went to %s, %s to %s", word, home, body, got)
			}
		}
		e := explain("messages=" + url.QueryEscape(`[{"role":"user","content":"`+word+`"}]`))
		if e.Upstream != "http://"+home || e.Tokens == 0 || !strings.Contains(strings.Join(e.Words, " "), fmt.Sprintf("the hash of the prompt's %d tokens", e.Tokens)) {
			t.Errorf("%s is at %s and explained as %+v", word, home, e)
		}
	}
	send(chatPath, `{"model":"m","stream":true,"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}`)
	send(chatPath, `{"model":"m","stream":true,"messages":[{]}}`) // theirs to refuse
	if e := explain("messages=" + url.QueryEscape(`[{"role":"user","content":[{"type":"audio"}]}]`)); e.Tokens != 0 || !strings.Contains(strings.Join(e.Words, " "), "the hash of the prompt's first bytes: messages[0]") {
		t.Errorf("%+v", e)
	}
}
