//go:build linux

package e2e

import (
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/bench/checkpoint"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
)

// thinkingModel writes a model of random weights whose chats have reasoning and tool calls, and
// returns its folder. Tokens are bytes and the markers of the template. The greedy model repeats the
// last byte of a prompt, so that reasoning begins with a letter.
func thinkingModel(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "thinking")
	special := []string{"<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"}
	s := checkpoint.Shape{Vocab: 256 + len(special), Hidden: 64, FFN: 256, Layers: 4, Heads: 4, KVHeads: 2, HeadDim: 16, Positions: 4096, RopeTheta: 10000}
	if err := s.HuggingFace(dir); err != nil {
		t.Fatal(err)
	}
	const template = `{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{{ '<think>\nHm' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}`
	for name, text := range map[string][]byte{
		"tokenizer.json": nodestest.Tokenizer(nil, special...), "tokenizer_config.json": []byte(`{"eos_token": "<|im_end|>"}`),
		"generation_config.json": []byte(`{"eos_token_id": 257}`), "chat_template.jinja": []byte(template),
	} {
		put(t, filepath.Join(dir, name), text)
	}
	return dir
}

// agentStream is a stream with tools or reasoning that a client reads.
type agentStream struct {
	path, body string
	phase      string // that it is in when the first decode process is killed: a text of its events

	mu    sync.Mutex
	got   []byte
	ended error // io.EOF after a complete body; nil: it has not ended
}

// count returns how often an event with the text has arrived, and fails the test if the stream has
// ended.
func (s *agentStream) count(t *testing.T, text string) int {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != nil {
		t.Fatalf("%s ended (%v) before it was disturbed: %s", s.path, s.ended, tail(s.got))
	}
	return strings.Count(string(s.got), text)
}

// start sends the request, and reads the answer on a goroutine of its own.
func (s *agentStream) start(c *cluster, id int, wg *sync.WaitGroup) {
	c.t.Helper()
	req, err := http.NewRequestWithContext(c.t.Context(), http.MethodPost, c.url(s.path), strings.NewReader(s.body))
	if err != nil {
		c.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", fmt.Sprint("agent-", id))
	resp, err := c.client().Do(req)
	if err != nil {
		c.t.Fatal(err)
	}
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(resp.Body)
		c.t.Fatalf("%s: %s: %s", s.path, resp.Status, text)
	}
	s.got, s.ended = nil, nil
	wg.Go(func() {
		defer resp.Body.Close()
		p := make([]byte, 16<<10)
		for {
			n, err := resp.Body.Read(p)
			s.mu.Lock()
			s.got = append(s.got, p[:n]...)
			s.ended = err
			s.mu.Unlock()
			if err != nil {
				return
			}
		}
	})
}

var (
	callIDs   = regexp.MustCompile(`"call_[^"]*"`)
	createdIn = regexp.MustCompile(`"created(_at)?":[0-9]+`)
)

// text returns the events without the time, and with the ids of Messages' calls by their order:
// their seed is drawn for each request.
func (s *agentStream) text() string {
	out := createdIn.ReplaceAllString(string(s.got), "")
	if s.path == "/v1/messages" {
		known := map[string]string{}
		out = callIDs.ReplaceAllStringFunc(out, func(id string) string {
			if known[id] == "" {
				known[id] = fmt.Sprint(`"call `, len(known), `"`)
			}
			return known[id]
		})
	}
	return out
}

// Decode processes that are killed within reasoning and within the arguments of a call change no
// event of a stream, by any of the three APIs: text, calls, ids, usage and order are those of the
// undisturbed stream, and no event is repeated.
func TestBinaryToolsKilled(t *testing.T) {
	t.Parallel()
	const (
		schema  = `{"type":"object","properties":{"notes":{"type":"array","items":{"type":"string","minLength":40,"maxLength":40},"minItems":90,"maxItems":90}},"required":["notes"],"additionalProperties":false}`
		chatArg = `"function":{"arguments":"`
		thinks  = `"reasoning_content":"`
	)
	streams := []*agentStream{
		{path: "/v1/chat/completions", phase: thinks, body: `{"messages":[{"role":"user","content":"Note."}],"stream":true,"stream_options":{"include_usage":true},"temperature":0,"seed":5,"max_tokens":N,
			"chat_template_kwargs":{"enable_thinking":true},"thinking_token_budget":80,"tool_choice":"required","tools":[{"type":"function","function":{"name":"note","strict":true,"parameters":` + schema + `}}]}`},
		{path: "/v1/responses", phase: `response.function_call_arguments.delta`, body: `{"input":"Note.","stream":true,"temperature":0,"seed":5,"max_output_tokens":N,
			"tool_choice":"required","tools":[{"type":"function","name":"note","strict":true,"parameters":` + schema + `}]}`},
		{path: "/v1/messages", phase: `"input_json_delta"`, body: `{"messages":[{"role":"user","content":"Note."}],"stream":true,"temperature":0,"max_tokens":N,
			"tool_choice":{"type":"any"},"tools":[{"name":"note","strict":true,"input_schema":` + schema + `}]}`},
		{path: "/v1/responses", phase: `response.reasoning_text.delta`, body: `{"input":"Think.","stream":true,"temperature":0,"seed":5,"max_output_tokens":N,"reasoning":{"effort":"high"}}`},
		{path: "/v1/messages", phase: `"thinking_delta"`, body: `{"messages":[{"role":"user","content":"Think."}],"stream":true,"temperature":0,"max_tokens":N,"thinking":{"type":"adaptive"}}`},
	}
	binary(t)
	c := newCluster(t)
	c.port = freePorts(t, 5)
	c.startUp(append([]string{"--model", thinkingModel(t), "--decode", "3", "--kv-cache-memory-bytes", "64MiB"}, slow...)...)
	b := &battle{cluster: c}
	order := func(method, node string) {
		t.Helper()
		b.order(method, "/admin/drain/"+node+"?timeout=1ms")
		c.wait(startBound, node+" is drained or taken back", func() bool { return b.fleet()[node].serves() == (method == http.MethodDelete) })
	}
	// All streams run on decode-0, and then on the next one that is not drained.
	order(http.MethodPost, "decode-1")
	order(http.MethodPost, "decode-2")
	run := func(disturb func()) (all []string) {
		t.Helper()
		var wg sync.WaitGroup
		for i, s := range streams {
			s.start(c, i, &wg)
		}
		disturb()
		wg.Wait()
		for i, s := range streams {
			if all = append(all, s.text()); s.ended != io.EOF {
				t.Errorf("stream %d, %s: %v after %s", i, s.path, s.ended, tail(s.got))
			}
		}
		return all
	}
	const warm = 50
	began := time.Now()
	for _, s := range streams { // the prompts are cached then
		resp, err := http.Post(c.url(s.path), "application/json", strings.NewReader(strings.Replace(s.body, `tokens":N`, fmt.Sprintf(`tokens":%d`, warm), 1)))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	// Streams last a second or more, however fast the machine is.
	n := min(max(300, int(time.Second/(time.Since(began)/time.Duration(warm*len(streams))))), 3500)
	for _, s := range streams {
		s.body = strings.Replace(s.body, `tokens":N`, fmt.Sprintf(`tokens":%d`, n), 1)
	}
	t.Logf("note: streams of %d tokens", n)
	began = time.Now()
	want := run(func() {})
	t.Logf("note: undisturbed, the streams take %v", time.Since(began).Round(time.Millisecond))
	resumes := func() float64 {
		n, _ := pick(c.scrape(gatewayNode), "tandem:gateway_resumes_total", "")
		return n
	}
	began = time.Now()
	got := run(func() {
		order(http.MethodDelete, "decode-1")
		c.wait(startBound, "reasoning and arguments are streamed", func() bool {
			return !slices.ContainsFunc(streams, func(s *agentStream) bool { return s.count(t, s.phase) < 10 })
		})
		if n := c.metric(1, "vllm:num_requests_running", ""); n != int64(len(streams)) {
			t.Errorf("decode-0 runs %d streams", n)
		}
		c.kill("decode-0")
		t.Logf("note: decode-0 is killed after %v", time.Since(began).Round(time.Millisecond))
		chat := streams[0]
		events := func() int { return chat.count(t, thinks) + chat.count(t, chatArg) }
		c.wait(startBound, "all streams are resumed", func() bool { return resumes() >= float64(len(streams)) })
		before := events()
		c.wait(startBound, "the chat continues on decode-1", func() bool { return events() > before })
		order(http.MethodDelete, "decode-2")
		c.wait(startBound, "the chat's arguments are streamed", func() bool { return chat.count(t, chatArg) >= 10 })
		c.kill("decode-1")
		t.Logf("note: decode-1 is killed after %v", time.Since(began).Round(time.Millisecond))
	})
	for i, s := range streams {
		if got[i] != want[i] {
			t.Errorf("stream %d, %s:\n got %s\nwant %s", i, s.path, got[i], want[i])
		}
		for _, begin := range []string{`"role":"assistant","content":""`, "event: response.created\n", "event: message_start\n"} {
			if n := strings.Count(got[i], begin); n > 1 {
				t.Errorf("stream %d, %s has %d times %s", i, s.path, n, begin)
			}
		}
		ids := callIDs.FindAllString(string(s.got), -1)
		if strings.Contains(s.body, `"tools"`) && len(ids) == 0 {
			t.Errorf("stream %d, %s has no call: %s", i, s.path, got[i])
		}
		if slices.Sort(ids); s.path != "/v1/responses" && len(slices.Compact(slices.Clone(ids))) != len(ids) {
			t.Errorf("stream %d, %s begins a call twice: %v", i, s.path, ids)
		}
	}
	if n := resumes(); n <= float64(len(streams)) {
		t.Errorf("%g streams resumed", n)
	}
}
