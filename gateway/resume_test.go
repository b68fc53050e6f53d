package gateway

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/limits"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// letters is a token function of the seed, the choice and the position.
func letters(r *nodepb.Generate, position int) int32 {
	return 'a' + nodestest.Token(r, position, 26)
}

// bodies are requests of every kind that carries something from token to token.
var bodies = []string{
	`{"prompt":"x","max_tokens":30,"seed":5,"stream":true}`,
	`{"prompt":"x","max_tokens":30,"seed":6}`,
	`{"prompt":["x","why"],"max_tokens":30,"seed":7,"n":3,"stream":true}`,
	`{"prompt":"x","max_tokens":30,"seed":8,"logprobs":2}`,
	`{"prompt":"x","max_tokens":30,"seed":8,"logprobs":2,"stream":true}`,
	`{"prompt":"x","max_tokens":90,"seed":9,"stop":["%s"],"stream":true,"stream_options":{"include_usage":true}}`,
	`{"prompt":"x","max_tokens":30,"seed":10,"echo":true,"stream":true}`,
	`{` + hi + `,"max_tokens":30,"seed":11,"stream":true,"presence_penalty":1,"min_tokens":20}`,
}

// text is what a client has of an answer: each choice's text and end.
func text(t *testing.T, r reply) string {
	t.Helper()
	if r.StatusCode != 200 || r.err != nil {
		t.Fatalf("%d %v %q", r.StatusCode, r.err, r.body)
	}
	if r.Header.Get("Content-Type") == "application/json" {
		a, out := r.parse(t), ""
		for _, c := range a.Choices {
			out += fmt.Sprintf("%d %q %s %v; ", c.Index, c.Text, *c.Finish, c.Stop)
		}
		return out + fmt.Sprint(*a.Usage)
	}
	s, out := r.events(t), ""
	if !s.done || s.failure != nil {
		t.Fatalf("%q", r.body)
	}
	for i := range len(s.text) {
		out += fmt.Sprintf("%d %q %s %v; ", i, s.text[i], s.finish[i], s.stop[i])
	}
	return out
}

// Streams whose nodes end in every way in the middle, more than once, are what
// they are on nodes that live.
func TestResume(t *testing.T) {
	whole := newBed(t, Options{}, one(nodestest.Options{Token: letters}))
	// A stop string that two nodes' tokens make together.
	first := whole.post("/v1/completions", `{"prompt":"x","max_tokens":90,"seed":9}`).parse(t).Choices[0].Text
	stop := first[8:12]
	var want []string
	for _, body := range bodies {
		want = append(want, text(t, whole.post(path(body), filled(body, stop))))
	}
	lost := func(at int) nodestest.Options { return nodestest.Options{Token: letters, CutAfter: at} }
	told := func(at int, code nodepb.Code) nodestest.Options {
		return nodestest.Options{Token: letters, CutAfter: at, CutCode: code}
	}
	garbled := nodestest.Options{Token: letters, Garble: func(t rpc.Token) rpc.Token {
		if t.Attempt == 1 && t.Position%7 == 6 {
			t.Position++
		}
		return t
	}}
	for name, nodes := range map[string]map[string]nodestest.Options{
		"lost":       {"d1": lost(3), "d2": lost(10), "d3": {Token: letters}},
		"draining":   {"d1": told(10, nodepb.Code_CODE_DRAINING), "d2": {Token: letters}},
		"aborted":    {"d1": told(10, nodepb.Code_CODE_CANCELLED), "d2": {Token: letters}},
		"internal":   {"d1": told(10, nodepb.Code_CODE_INTERNAL), "d2": {Token: letters}},
		"overflow":   {"d1": told(10, nodepb.Code_CODE_OVERLOADED)}, // goes on where it was
		"misordered": {"d1": garbled, "d2": {Token: letters}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, Options{}, nodes)
			for i, body := range bodies {
				if got := text(t, b.post(path(body), filled(body, stop))); got != want[i] {
					t.Errorf("%s:\n got %s\nwant %s", body, got, want[i])
				}
			}
			if b.g.Meters.Counter(metrics.GatewayResumes).Get() < 1 { // how many meet a node that loses them depends on how fast it is back
				t.Errorf("%g resumes", b.g.Meters.Counter(metrics.GatewayResumes).Get())
			}
			for at, n := range b.nodes {
				for _, r := range n.Requests() {
					if r.Attempt == 1 && len(r.Output) > 0 {
						t.Errorf("%s got attempt %d with %d tokens of output", at, r.Attempt, len(r.Output))
					}
				}
			}
		})
	}
}

func path(body string) string {
	if strings.Contains(body, "messages") {
		return "/v1/chat/completions"
	}
	return "/v1/completions"
}

func filled(body, stop string) string {
	if strings.Contains(body, "%s") {
		return fmt.Sprintf(body, stop)
	}
	return body
}

// The only node is gone in the middle of a stream and comes back within the
// bound: the client sees a pause.
func TestResumeWaitsForANode(t *testing.T) {
	gate := make(chan struct{})
	b := newBed(t, Options{}, one(nodestest.Options{Gate: gate}))
	c := b.breaksOff(gate)
	defer c.Close()
	b.node("d1", nodestest.Options{})
	if got := text(t, c.receive()); got != fmt.Sprintf("0 %q length <nil>; ", lore[:40]) {
		t.Error(got)
	}
}

// breaksOff starts a stream, and stops its node after the first token.
func (b *bed) breaksOff(gate chan struct{}) *client {
	b.Helper()
	c := b.dial()
	c.send("POST", "/v1/completions", streamed)
	gate <- struct{}{}
	if _, err := c.r.Peek(1); err != nil {
		b.Fatal(err)
	}
	b.nodes["d1"].Stop()
	return c
}

// A stream whose node is gone continues on a node of its numerics class. Where none is
// usable it continues on another: what was sent stays, and the change is counted.
func TestResumePrefersItsClass(t *testing.T) {
	other := func(*nodepb.Generate, int) int32 { return 'X' }
	for name, c := range map[string]struct {
		same    []string // nodes of the stream's class, besides the one that is lost
		want    string
		changes float64
	}{
		"a node of its class": {[]string{"s"}, lore[:40], 0},
		"none of its class":   {nil, lore[:1] + strings.Repeat("X", 39), 1},
	} {
		t.Run(name, func(t *testing.T) {
			gate := make(chan struct{})
			b := newBed(t, Options{}, one(nodestest.Options{Gate: gate}))
			conn := b.dial()
			defer conn.Close()
			conn.send("POST", "/v1/completions", streamed)
			gate <- struct{}{}
			if _, err := conn.r.Peek(1); err != nil {
				t.Fatal(err)
			}
			members := []nodes.Member{decodeMember("d1")}
			for _, addr := range c.same {
				b.node(addr, nodestest.Options{})
				members = append(members, decodeMember(addr))
			}
			for _, addr := range []string{"x1", "x2", "x3", "x4", "x5", "x6"} {
				b.node(addr, nodestest.Options{Token: other})
				m := decodeMember(addr)
				m.Class = "another"
				members = append(members, m)
			}
			b.g.SetMembers(members)
			b.until(func() bool { return b.g.native.Usable() == len(members) })
			b.nodes["d1"].Stop()
			if got := text(t, conn.receive()); got != fmt.Sprintf("0 %q length <nil>; ", c.want) {
				t.Error(got)
			}
			if got := b.g.Meters.Counter(metrics.GatewayClassChanges).Get(); got != c.changes {
				t.Errorf("%g changes of class, want %g", got, c.changes)
			}
			if got := strings.Count(b.log.String(), "stream continues in another numerics class"); got != int(c.changes) {
				t.Errorf("%d lines in the log, want %g", got, c.changes)
			}
		})
	}
}

// Where nobody takes a stream within the bound, it ends in a visible error.
func TestResumeGivesUp(t *testing.T) {
	virtually(t, func(t *testing.T) {
		gate := make(chan struct{})
		b := newBed(t, Options{Limits: Limits{ResumeTimeout: 200 * time.Millisecond}}, one(nodestest.Options{Gate: gate}))
		c := b.breaksOff(gate)
		defer c.Close()
		r := c.receive()
		if s := r.events(t); r.err == nil || s.done || s.failure == nil || s.failure.Error.Code != 503.0 {
			t.Fatalf("%v %q", r.err, r.body)
		}
		b.until(func() bool { return b.g.Meters.Counter(metrics.GatewayStreamsAborted, "upstream").Get() == 1 })
	})
}

// A request that every node dies of does not go round for ever.
func TestResumeOfDeath(t *testing.T) {
	dies := nodestest.Options{Garble: func(tok rpc.Token) rpc.Token {
		if tok.Position == 4 {
			tok.ID = -7 // ends the connection
		}
		return tok
	}}
	b := newBed(t, Options{}, map[string]nodestest.Options{"d1": dies, "d2": dies, "d3": dies, "d4": dies})
	if r := b.post("/v1/completions", `{"prompt":"x","max_tokens":30}`); r.StatusCode != 503 {
		t.Fatalf("%d %q", r.StatusCode, r.body)
	}
	asked := 0
	for _, n := range b.nodes {
		asked += len(n.Requests())
	}
	if asked != 1+limits.Default().MaxAttempts {
		t.Errorf("%d attempts", asked)
	}
}

// More streams than the pace allows are resumed one after the other.
func TestResumePace(t *testing.T) {
	b := newBed(t, Options{Limits: Limits{ResumesPerSecond: 20}}, one(nodestest.Options{CutAfter: 2, CutCode: nodepb.Code_CODE_OVERLOADED}))
	for b.g.Resumes.Allow() { // the burst is used up
	}
	r := b.post("/v1/completions", `{"prompt":"x","max_tokens":9}`)
	if r.StatusCode != 200 || r.parse(t).Choices[0].Text != "Hello, w\uFFFD" {
		t.Fatalf("%d %q", r.StatusCode, r.body)
	}
}

// A node whose engine makes no step any more loses its streams to another, and
// gets none until it has moved.
func TestStalledNode(t *testing.T) {
	virtually(t, func(t *testing.T) {
		gate := make(chan struct{})
		b := newBed(t, Options{StallTimeout: 300 * time.Millisecond}, map[string]nodestest.Options{"d1": {Gate: gate}, "d2": {Gate: gate}})
		c := b.dial()
		defer c.Close()
		c.send("POST", "/v1/completions", streamed)
		var hung, other string
		b.until(func() bool {
			for at, n := range b.nodes {
				if n.Running() == 1 {
					hung = at
				}
			}
			return hung != ""
		})
		if other = "d1"; hung == other {
			other = "d2"
		}
		gate <- struct{}{}
		steps := uint64(7)
		beats := func(cond func() bool) {
			t.Helper()
			b.until(func() bool {
				b.nodes[hung].Send(rpc.FrameStats, &nodepb.Stats{Steps: steps, Running: 1})
				time.Sleep(10 * time.Millisecond)
				return cond()
			})
		}
		beats(func() bool { return b.nodes[other].Running() == 1 && b.nodes[hung].Running() == 0 })
		close(gate)
		if got := text(t, c.receive()); got != fmt.Sprintf("0 %q length <nil>; ", lore[:40]) {
			t.Error(got)
		}
		fleet := b.g.native.Nodes.Now()
		usable := func() int {
			n := 0
			v := fleet.View()
			v.Look(nodes.Query{Fingerprint: 7})
			for _, s := range v.Decode {
				if s.Usable {
					n++
				}
			}
			return n
		}
		b.until(func() bool { return b.nodes[hung].Connected() == 1 })
		beats(func() bool { return usable() == 1 })
		steps++
		beats(func() bool { return usable() == 2 })
	})
}

// The usage's cached tokens are those that a prompt met, not what the request's
// own earlier attempts and other choices have left.
func TestCachedTokensOfTheFirstAttempt(t *testing.T) {
	node := func(cached uint32) nodestest.Options {
		return nodestest.Options{Token: letters, CutAfter: 3, CutCode: nodepb.Code_CODE_OVERLOADED, Cached: cached}
	}
	b := newBed(t, Options{}, map[string]nodestest.Options{"d1": node(1), "d2": node(5)})
	lower := 0
	for i := range 8 {
		u := b.post("/v1/completions", fmt.Sprintf(`{"prompt":"prompt number %d","max_tokens":8}`, i)).parse(t).Usage
		want := 5
		for _, r := range b.nodes["d1"].Requests() {
			if r.Attempt == 1 && r.Prompt[len(r.Prompt)-1] == int32('0'+i) {
				want, lower = 1, lower+1
			}
		}
		if u.Completion != 8 || u.Details.Cached != want {
			t.Errorf("prompt %d: %+v, want %d cached", i, u, want)
		}
	}
	if lower == 0 || b.g.Meters.Counter(metrics.GatewayResumes).Get() < 8 {
		t.Errorf("%d prompts began where less was cached, %g resumes", lower, b.g.Meters.Counter(metrics.GatewayResumes).Get())
	}
}
