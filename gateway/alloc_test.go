package gateway

import (
	"io"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/gateway/api/openai"
	"github.com/tandem-serving/tandem/gateway/exchange"
	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/render"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// testJob is a streamed job whose tokens come from nowhere.
func testJob(t testing.TB) *job {
	m, err := newModel(bundle(), "", "", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	req, fault := openai.Parse(openai.Chat, []byte(`{`+hi+`,"stream":true,"stop":["never seen"]}`))
	if fault != nil {
		t.Fatal(fault)
	}
	g := &Gateway{Service: &exchange.Service{Meters: exchange.NewMeters(metrics.New(metrics.Gateway, "m"))}}
	j := &job{Exchange: exchange.Exchange{S: g.Service, Start: time.Now()}, g: g, req: req, model: m, live: 1, prompts: make([]render.Prompt, 1), encoder: openai.NewEncoder(openai.Chat, "id", 1, "m", "fp")}
	j.in = nodes.NewInbox(100)
	j.choices = []choice{{prompt: &j.prompts[0], finish: openai.NotFinished, text: m.Text.Output(req), node: &nodes.Node{}, output: make([]int32, 0, 1<<20)}}
	j.choices[0].state.Begin()
	j.choices[0].state.Sent()
	return j
}

// From an event to the bytes of its chunk nothing is allocated.
func TestTokenPathDoesNotAllocate(t *testing.T) {
	j := testJob(t)
	at := time.Now()
	e := nodes.Event{Kind: nodes.Token, Attempt: 1, Token: 'q'}
	step := func() {
		if fault := j.take(&e, at); fault != nil {
			t.Fatal(fault)
		}
		if _, err := io.Discard.Write(j.buf); err != nil {
			t.Fatal(err)
		}
		j.buf = j.buf[:0]
	}
	step()
	if n := testing.AllocsPerRun(1000, step); n != 0 {
		t.Fatalf("%g allocations per token", n)
	}
	if len(j.choices[0].output) < 1000 {
		t.Fatalf("%d tokens taken", len(j.choices[0].output))
	}
}

func BenchmarkToken(b *testing.B) {
	j := testJob(b)
	at := time.Now()
	e := nodes.Event{Kind: nodes.Token, Attempt: 1, Token: 'q'}
	b.ReportAllocs()
	for range b.N {
		if fault := j.take(&e, at); fault != nil {
			b.Fatal(fault)
		}
		j.buf, j.choices[0].output = j.buf[:0], j.choices[0].output[:0]
	}
}
