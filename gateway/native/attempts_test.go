package native

import (
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/gateway/admit"
	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	fsm "github.com/tandem-serving/tandem/gateway/exchange/choice"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/gateway/render"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// testRequest is a streamed request whose tokens come from nowhere.
func testRequest(t testing.TB) *request {
	m, err := NewModel(&nodepb.Bundle{Model: "tiny", TokenizerJson: nodestest.Tokenizer(nil, "<|im_start|>", "<|im_end|>"), EosToken: "<|im_end|>"}, "", "", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	req, fault := openai.Parse(openai.Chat, []byte(`{"messages":[{"role":"user","content":"hi"}],"stream":true,"stop":["never seen"]}`))
	if fault != nil {
		t.Fatal(fault)
	}
	s := &exchange.Service{Meters: metrics.New(metrics.Gateway, "m")}
	x := &request{Exchange: exchange.Exchange{S: s, Start: time.Now()}, fleet: &Fleet{Service: s}, req: req, model: m, live: 1, prompts: make([]render.Prompt, 1), encoder: openai.NewEncoder(openai.Chat, "id", 1, "m", "fp")}
	x.in = nodes.NewInbox(100)
	x.choices = []choice{{prompt: &x.prompts[0], delta: openai.Delta{Begin: true, Finish: openai.NotFinished}, text: m.Text.Output(req), node: &nodes.Node{}, output: make([]int32, 0, 1<<20)}}
	x.choices[0].state.Begin()
	x.choices[0].state.Sent()
	return x
}

// From an event to the bytes of its chunk nothing is allocated.
func TestTokenPathDoesNotAllocate(t *testing.T) {
	x := testRequest(t)
	at := time.Now()
	e := nodes.Event{Kind: nodes.Token, Attempt: 1, Token: 'q'}
	step := func() {
		if fault := x.handle(&e, at); fault != nil {
			t.Fatal(fault)
		}
		if _, err := io.Discard.Write(x.buf); err != nil {
			t.Fatal(err)
		}
		x.buf = x.buf[:0]
	}
	step()
	if n := testing.AllocsPerRun(1000, step); n != 0 {
		t.Fatalf("%g allocations per token", n)
	}
	if len(x.choices[0].output) < 1000 {
		t.Fatalf("%d tokens taken", len(x.choices[0].output))
	}
}

// Neither does a token of content, reasoning or arguments that a parser splits.
func TestParsedTokenDoesNotAllocate(t *testing.T) {
	at := time.Now()
	for _, before := range []string{"", "<think>", `<tool_call>{"name": "f", "arguments": {"a": "`} {
		x := testRequest(t)
		parseHermes(t, x)
		step := func(id byte) {
			if fault := x.handle(&nodes.Event{Kind: nodes.Token, Attempt: 1, Token: int32(id)}, at); fault != nil {
				t.Fatal(fault)
			}
		}
		for i := range len(before) {
			step(before[i])
		}
		step('q')
		if n := testing.AllocsPerRun(1000, func() {
			x.buf = x.buf[:0]
			step('q')
		}); n != 0 || len(x.buf) == 0 {
			t.Errorf("after %q: %g allocations per token, %q", before, n, x.buf)
		}
	}
}

// parseHermes lets a request of testRequest read calls and reasoning.
func parseHermes(t *testing.T, x *request) {
	m, err := NewModel(&nodepb.Bundle{Model: "tiny", TokenizerJson: nodestest.Tokenizer(nil, "<|im_start|>", "<|im_end|>"), ChatTemplate: "x"}, "", "", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if _, err = m.Text.ChooseFormat("hermes", "qwen3"); err != nil {
		t.Fatal(err)
	}
	x.model, x.On, x.req.Functions = m, openai.Chat, []openai.Function{{Name: "f"}}
	c := &x.choices[0]
	c.text, c.parser = m.Text.Output(x.req), x.parsers(m)(c.prompt)
}

func BenchmarkToken(b *testing.B) {
	x := testRequest(b)
	at := time.Now()
	e := nodes.Event{Kind: nodes.Token, Attempt: 1, Token: 'q'}
	b.ReportAllocs()
	for range b.N {
		if fault := x.handle(&e, at); fault != nil {
			b.Fatal(fault)
		}
		x.buf, x.choices[0].output = x.buf[:0], x.choices[0].output[:0]
	}
}

// A stream that its slow client had paused and that then finds no node looks again
// when its time has come, not with every token of the request's other choices.
func TestPausedStreamWaitsItsTurn(t *testing.T) {
	s := &exchange.Service{Meters: metrics.New(metrics.Gateway, "m"), Log: slog.New(slog.DiscardHandler)}
	s.SetLimits(exchange.Limits{MaxAttempts: 3, ResumeTimeout: time.Minute})
	fleet := New(s, Options{Nodes: nodes.Options{RPC: rpc.Options{Hello: &nodepb.Hello{NodeId: "gw"}}, Log: s.Log}})
	defer fleet.Close()
	end := time.Now().Add(time.Hour)
	x := &request{Exchange: exchange.Exchange{S: s, Deadline: end}, fleet: fleet, req: new(openai.Request), model: &Model{Model: render.Model{BlockTokens: 16}, queue: exchange.NewAdmission(admit.Limits{})}, timer: time.NewTimer(time.Hour), timerAt: end}
	c := &choice{prompt: &render.Prompt{Tokens: []int32{1}}, output: []int32{2}}
	c.state.Begin()
	c.state.Sent()
	c.state.Accepted()
	c.state.Token()
	c.state.Pause()
	if fault := x.attempt(c); fault != nil || c.state.State != fsm.Waiting || !x.timerAt.Equal(c.state.RetryAt) || c.state.Check() != nil {
		t.Errorf("%v; %+v", fault, c.state)
	}
}

// What a client may ask for at most takes no memory before it comes.
func TestEchoTakesWhatItTells(t *testing.T) {
	x := &request{req: &openai.Request{Endpoint: openai.Completions, Echo: true, Logprobs: true, MaxTokens: 1 << 30}, model: &Model{}}
	c := &choice{prompt: &render.Prompt{Tokens: []int32{1, 2, 3}, Probs: openai.PromptLogprobs{Tokens: []int32{1, 2, 3}, Logprobs: []float32{-1, -2}, Ranks: []uint32{1, 1}}}}
	if all := x.promptProbs(c); len(all) != 3 || cap(all) > 16 {
		t.Errorf("%d log-probabilities in room for %d", len(all), cap(all))
	}
}
