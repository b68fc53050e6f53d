package gateway

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/gateway/render/jinja"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// A template given to the gateway wins over the bundle's; one that does not
// parse is told with its line before anything is served.
func TestChatTemplateGiven(t *testing.T) {
	b := newBed(t, Options{ChatTemplate: "{{ messages[0].content }}!"}, one(nodestest.Options{}))
	if r := b.post("/v1/chat/completions", `{`+hi+`}`); r.StatusCode != 200 {
		t.Fatal(r.body)
	}
	if got := b.g.native.Models.Load().Text.Decode(lastRequest(b, "d1").Prompt, false); got != "hi!" {
		t.Errorf("prompt %q, want %q", got, "hi!")
	}
	l, err := rpc.NewNetwork().Listen("gateway")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	o := Options{ChatTemplate: "a\n{% if %}", Listener: l, RPC: rpc.Options{Hello: &nodepb.Hello{NodeId: "gw"}}}
	if _, err := New(o); !errors.Is(err, jinja.ErrSyntax) || !strings.Contains(err.Error(), "line 2") {
		t.Errorf("error %v, want the syntax error in line 2", err)
	}
}

// Every turn of a chat brings the messages before it, whose tokens the gateway
// remembers: the prompts are the tokenizer's own all the same.
func TestChatTurnsFromCache(t *testing.T) {
	b := newBed(t, Options{}, one(nodestest.Options{}))
	text := b.g.native.Models.Load().Text
	messages, rendered := "", ""
	const turns = 12
	for n := range turns {
		if n > 0 {
			messages += ","
		}
		content := fmt.Sprintf("%d %s", n, strings.Repeat("what next? ", 20))
		messages += fmt.Sprintf(`{"role":"user","content":%q}`, content)
		rendered += "<|im_start|>user\n" + content + "<|im_end|>\n"
		if r := b.post("/v1/chat/completions", `{"messages":[`+messages+`],"max_tokens":1}`); r.StatusCode != 200 {
			t.Fatal(r.body)
		}
		want := text.Tokenizer().Encode(rendered+"<|im_start|>assistant\n", false)
		if got := lastRequest(b, "d1").Prompt; !slices.Equal(got, want) {
			t.Fatalf("turn %d: prompt %v, want %v", n, got, want)
		}
	}
	hits, misses, bytes := text.CacheStats()
	if hits != turns*(turns-1)/2 || misses != turns {
		t.Errorf("%d hits and %d misses, want each earlier message found and each new one missed", hits, misses)
	}
	// A token is four bytes, a text of n bytes some n of them at one token each.
	if told := b.g.Meters.Gauge(metrics.TokenizerCacheBytes).Get(); told != float64(bytes) || bytes < 5*len(rendered) {
		t.Errorf("%g bytes are told, %d are kept, of messages of %d bytes", told, bytes, len(rendered))
	}
}

// A request's own template is run only where the gateway trusts it, within steps and the context.
func TestRequestTemplate(t *testing.T) {
	small := bundle()
	small.MaxModelLen = 64
	b := newBed(t, Options{TrustTemplates: true}, one(nodestest.Options{Bundle: small}))
	with := func(template string) string {
		return fmt.Sprintf(`{"messages":[{"role":"user","content":"hi"}],"max_tokens":1,"chat_template":%q}`, template)
	}
	if r := b.post("/v1/chat/completions", with("{{ messages[0].content }}?")); r.StatusCode != 200 {
		t.Fatal(r.body)
	}
	if got := b.g.native.Models.Load().Text.Decode(lastRequest(b, "d1").Prompt, false); got != "hi?" {
		t.Errorf("prompt %q", got)
	}
	for template, want := range map[string]string{
		"{% if %}": "line 1", "{% include 'x' %}": "unsupported", "{{ raise_exception('no') }}": "refuses these messages: no",
		"{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}": "more than 1000000 steps",
		"{% for i in range(1000) %}{{ 'x' * 1000 }}{% endfor %}":                           "the output is longer than",
	} {
		r := b.post("/v1/chat/completions", with(template))
		if e := r.parse(t).Error; r.StatusCode != 400 || *e.Param != "chat_template" || !strings.Contains(e.Message, want) {
			t.Errorf("%s: %d %s", template, r.StatusCode, r.body)
		}
	}
	hi := `[{"role":"user","content":"hi"}]`
	batch := strings.Replace(with("{% for i in range(100000) %}{{ '' }}{% endfor %}x"), hi, "["+strings.Repeat(hi+",", 49)+hi+"]", 1)
	if r := b.post(openai.BatchPath, batch); r.StatusCode != 400 || !strings.Contains(r.body, "more than 50000 steps") {
		t.Errorf("%d %s", r.StatusCode, r.body)
	}
	if r := b.post("/tokenize", with("{{ messages[0].content }}")); !strings.Contains(r.body, `"count":2`) {
		t.Error(r.body)
	}
	untrusting := newBed(t, Options{}, one(nodestest.Options{}))
	for _, path := range []string{"/v1/chat/completions", "/v1/chat/completions/render", "/tokenize"} {
		r := untrusting.post(path, with("x"))
		if e := r.parse(t).Error; r.StatusCode != 400 || *e.Param != "chat_template" || !strings.Contains(e.Message, "--trust-request-chat-template") {
			t.Errorf("%s: %d %s", path, r.StatusCode, r.body)
		}
	}
}
