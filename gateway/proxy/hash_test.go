package proxy

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/tokenizer"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/gateway/proxy/upstream"
	"github.com/tandem-serving/tandem/gateway/render/jinja"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

const (
	chatPath     = "/v1/chat/completions"
	completePath = "/v1/completions"

	chatML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}" +
		"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

// bundle has a tokenizer whose tokens are bytes.
func bundle() *nodepb.Bundle {
	return &nodepb.Bundle{Model: "tiny", TokenizerJson: nodestest.Tokenizer(nil, "<|im_start|>", "<|im_end|>"), ChatTemplate: chatML, EosToken: "<|im_end|>"}
}

// farTokenizer is bundle's, with a template for chats with tools.
func farTokenizer(t *testing.T, template string) *Tokenizer {
	t.Helper()
	tok, err := NewTokenizer(bundle(), template)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// hashed is a request after its hashing, at a gateway with the tokenizers.
func hashed(t *testing.T, tokenizers map[string]*Tokenizer, m *upstream.Model, how exchange.RouteHints, path, body string) (*relay, *openai.Error) {
	t.Helper()
	look, err := upstream.ParseEnvelope([]byte(body))
	if err != nil {
		t.Fatal(body, err)
	}
	r := &relay{Exchange: exchange.Exchange{Path: path, Hints: how}, p: &Proxy{o: Options{Tokenizers: tokenizers}}, model: m, envelope: look}
	return r, r.hash([]byte(body))
}

// Prompts with equal tokens have one key, however they are written, and share it with
// those that begin with the same blocks; others have others.
func TestRelayHashesTokens(t *testing.T) {
	const toolChat = "{% for x in tools or [] %}{{ x.function.name }};{% endfor %}" + chatML
	tokenizers := map[string]*Tokenizer{"": farTokenizer(t, toolChat)}
	m, alias := &upstream.Model{Name: "m"}, &upstream.Model{Name: "best", As: "m"}
	key := func(m *upstream.Model, path, body string) kvcache.Hash {
		t.Helper()
		r, fault := hashed(t, tokenizers, m, exchange.RouteHints{Policy: route.ConsistentHash}, path, body)
		if fault != nil || r.nPrompt == 0 {
			t.Fatalf("%s: %v, %d tokens", body, fault, r.nPrompt)
		}
		return r.prompt
	}
	want := key(m, chatPath, `{"model":"m","messages":[{"role":"user","content":"grün & <b>"}]}`)
	for _, same := range []string{
		`{"messages" : [ {"content":"gr\u00fcn \u0026 <b\u003e",  "role":"user"} ], "model":"m", "temperature":0.5, "response_format":{"type":"json_object"}}`,
		`{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"grün & <b>"}]}]}`,
		`{"model":"m","messages":[{"role":"user","content":"grün & <b>","name":"x"}],"add_generation_prompt":true,"unheard_of":{}}`,
		`{"model":"m","messages":[{"role":"user","content":"no"}],"messages":[{"role":"user","content":"grün & <b>"}]}`,
	} {
		if got := key(m, chatPath, same); got != want {
			t.Errorf("%s: key %x, want %x", same, got, want)
		}
	}
	text := `<|im_start|>user\ngrün & <b><|im_end|>\n<|im_start|>assistant\n`
	ids, err := json.Marshal(tokenizers[""].m.Text.Tokens(strings.ReplaceAll(text, `\n`, "\n"), true))
	if err != nil {
		t.Fatal(err)
	}
	for body, path := range map[string]string{
		`{"model":"m","prompt":"` + text + `"}`:                               completePath,
		`{"model":"m","prompt":["` + text + `","other"]}`:                     completePath,
		fmt.Sprintf(`{"model":"m","prompt":%s}`, ids):                         completePath,
		fmt.Sprintf(`{"model":"m","token_ids":%s,"sampling_params":{}}`, ids): openai.TokensPath,
	} {
		if got := key(m, path, body); got != want {
			t.Errorf("%s: key %x, want %x", body, got, want)
		}
	}
	if key(alias, chatPath, `{"model":"best","messages":[{"role":"user","content":"grün & <b>"}]}`) != want {
		t.Error("a model's further name has keys of its own")
	}
	for _, other := range []string{
		`{"messages":[{"role":"user","content":"grün & <B>"}]}`,
		`{"messages":[{"role":"system","content":"grün & <b>"}]}`,
		`{"messages":[{"role":"user","content":"grün & <b>"}],"tools":[{"type":"function","function":{"name":"f"}}]}`,
		`{"messages":[{"role":"user","content":"grün & <b>"}],"cache_salt":"s"}`,
	} {
		if key(m, chatPath, other) == want {
			t.Errorf("%s: it has the key of another prompt", other)
		}
	}
	long := strings.Repeat("0123456789abcdef", 16) // tokens are bytes: the largest key's blocks
	a, b := key(m, completePath, `{"prompt":"`+long+`and so on"}`), key(m, completePath, `{"prompt":"\u0030`+long[1:]+`or not"}`)
	if a != b || a == key(m, completePath, `{"prompt":"x`+long[1:]+`"}`) {
		t.Error("prompts that begin alike do not share their key, or others do")
	}
}

// What cannot be turned into tokens goes by its bytes, as without a tokenizer.
func TestRelayHashesBytes(t *testing.T) {
	own := farTokenizer(t, "")
	bare := bundle()
	bare.ChatTemplate = ""
	noChat, err := NewTokenizer(bare, "")
	if err != nil {
		t.Fatal(err)
	}
	const hello = `{"messages":[{"role":"user","content":"hello"}]}`
	for what, c := range map[string]struct {
		tokenizers       map[string]*Tokenizer
		policy           route.Policy
		path, body, want string
	}{
		"no tokenizer":     {nil, route.Prefix, chatPath, hello, "no tokenizer"},
		"another model's":  {map[string]*Tokenizer{"n": own}, route.Prefix, chatPath, hello, "no tokenizer"},
		"policy":           {map[string]*Tokenizer{"": own}, route.RoundRobin, chatPath, hello, "policy"},
		"no template":      {map[string]*Tokenizer{"m": noChat}, route.Prefix, chatPath, hello, "no chat template"},
		"template raises":  {map[string]*Tokenizer{"m": farTokenizer(t, "{{ raise_exception('no') }}")}, route.Prefix, chatPath, hello, "refuses"},
		"template's bound": {map[string]*Tokenizer{"m": farTokenizer(t, "{% for i in range(1000000) %}x{% endfor %}")}, route.Prefix, chatPath, hello, "cannot render"},
		"broken JSON":      {map[string]*Tokenizer{"m": own}, route.Prefix, chatPath, `{"messages":[{]}}`, "not valid JSON"},
		"not UTF-8":        {map[string]*Tokenizer{"m": own}, route.Prefix, chatPath, "{\"messages\":[{\"role\":\"user\",\"content\":\"\xff\"}]}", "UTF-8"},
		"no messages":      {map[string]*Tokenizer{"m": own}, route.Prefix, chatPath, `{"prompt":"x"}`, "messages is required"},
		"a picture":        {map[string]*Tokenizer{"m": own}, route.Prefix, chatPath, `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:"}}]}]}`, "image_url"},
		"own template":     {map[string]*Tokenizer{"m": own}, route.Prefix, chatPath, `{"chat_template":"x",` + hello[1:], "chat_template"},
		"empty prompt":     {map[string]*Tokenizer{"m": own}, route.Prefix, completePath, `{"prompt":""}`, "empty"},
		"too many prompts": {map[string]*Tokenizer{"m": own}, route.Prefix, completePath, `{"prompt":["a"` + strings.Repeat(`,"a"`, openai.MaxPrompts) + `]}`, "at most 256"},
		"embeddings":       {map[string]*Tokenizer{"m": own}, route.Prefix, "/v1/embeddings", `{"input":"x"}`, "only chats"},
		"no token ids":     {map[string]*Tokenizer{"m": own}, route.Prefix, openai.TokensPath, `{"model":"m"}`, "not valid JSON"},
	} {
		m := &upstream.Model{Name: "m"}
		r, fault := hashed(t, c.tokenizers, m, exchange.RouteHints{Policy: c.policy}, c.path, c.body)
		if fault == nil || !strings.Contains(fault.Message, c.want) {
			t.Errorf("%s: %+v, want a reason with %q", what, fault, c.want)
		}
		if want := keyOf("m", r.envelope.Prompt, []byte(c.body)); r.prompt != want || r.nPrompt != 0 {
			t.Errorf("%s: key %x of %d tokens, want that of its bytes, %x", what, r.prompt, r.nPrompt, want)
		}
	}
	if _, err := NewTokenizer(&nodepb.Bundle{TokenizerJson: []byte("{}")}, ""); !errors.Is(err, tokenizer.ErrInvalid) {
		t.Errorf("a torn tokenizer: %v", err)
	}
	if _, err := NewTokenizer(bundle(), "{% if %}"); !errors.Is(err, jinja.ErrSyntax) {
		t.Errorf("a torn template: %v", err)
	}
}

// Requests in any number share a tokenizer.
func TestRelayHashesAtOnce(t *testing.T) {
	tokenizers := map[string]*Tokenizer{"m": farTokenizer(t, "")}
	body := fmt.Sprintf(`{"messages":[{"role":"user","content":%q}]}`, strings.Repeat("again ", 100))
	keys := make([]kvcache.Hash, 8)
	var wg sync.WaitGroup
	for i := range keys {
		wg.Go(func() {
			r, fault := hashed(t, tokenizers, &upstream.Model{Name: "m"}, exchange.RouteHints{}, chatPath, body)
			if fault != nil {
				t.Error(fault)
			}
			keys[i] = r.prompt
		})
	}
	wg.Wait()
	for _, k := range keys {
		if k != keys[0] {
			t.Fatalf("keys %x", keys)
		}
	}
}
