//go:build linux

package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

const (
	distinct = 32 // requests
	streams  = 64 // at once
)

// requests are of every kind that carries something from token to token.
func (b *battle) requests() []map[string]any {
	shared := b.prompt(b.rand, 48)
	var all []map[string]any
	for i := range distinct {
		r := map[string]any{"stream": true, "seed": i, "ignore_eos": true, "temperature": 0.9, "max_tokens": 60 + 6*i,
			"prompt": append(slices.Clone(shared[:16*(i%4)]), b.prompt(b.rand, 8+20*(i%7))...)}
		switch i % 4 {
		case 1:
			r["n"], r["max_tokens"] = 2, 40+8*i
		case 2:
			r["logprobs"], r["presence_penalty"] = 2, 0.5
		case 3:
			r["temperature"], r["frequency_penalty"], r["stream_options"] = 0, 0.3, map[string]any{"include_usage": true}
		}
		switch i % 8 { // constrained, and long
		case 5:
			r["response_format"] = map[string]any{"type": "json_schema", "json_schema": map[string]any{"name": "list", "schema": map[string]any{
				"type": "array", "items": map[string]any{"type": "integer", "maximum": 99_999}, "minItems": 300}}}
		case 6:
			r["structured_outputs"] = map[string]any{"regex": `([A-Z][a-z]{0,9} ){200,}`}
		}
		if i%16 == 0 {
			r["max_tokens"] = 1200 // outlasts a drain
		}
		all = append(all, r)
	}
	return all
}

// told is what a client has at the end of a stream: for each choice the text, the
// log-probabilities and the finish reason, and the usage.
func (c *cluster) told(request map[string]any) (string, error) {
	path := "/v1/completions"
	if request["messages"] != nil {
		path = "/v1/chat/completions"
	}
	resp, err := c.post(path, request)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", fmt.Errorf("%w after %q", err, tail(body))
	}
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%s: %s", resp.Status, body)
	}
	if !bytes.HasSuffix(body, []byte("data: [DONE]\n\n")) {
		return "", fmt.Errorf("it ends in %q", tail(body))
	}
	var text [2]strings.Builder
	var end string
	for event := range strings.SplitSeq(strings.TrimSuffix(string(body), "data: [DONE]\n\n"), "\n\n") {
		if event == "" || event[0] == ':' { // a comment, of --sse-keep-alive
			continue
		}
		var e struct {
			Choices []struct {
				Index int
				Text  string
				Delta struct {
					Content string
					Calls   []struct {
						Function struct{ Name, Arguments string }
					} `json:"tool_calls"`
				}
				Finish   string `json:"finish_reason"`
				LogProbs *struct {
					Tokens []string
					Offset []int     `json:"text_offset"`
					Values []float64 `json:"token_logprobs"`
				}
			}
			Usage *struct {
				Prompt     int `json:"prompt_tokens"`
				Completion int `json:"completion_tokens"`
			}
		}
		if err := json.Unmarshal([]byte(strings.TrimPrefix(event, "data: ")), &e); err != nil {
			return "", fmt.Errorf("%w in %q", err, event)
		}
		for _, choice := range e.Choices {
			text[choice.Index].WriteString(choice.Text + choice.Delta.Content)
			for _, call := range choice.Delta.Calls {
				text[choice.Index].WriteString(call.Function.Name + call.Function.Arguments)
			}
			if choice.LogProbs != nil {
				fmt.Fprintf(&text[choice.Index], "|%q %v %v|", choice.LogProbs.Tokens, choice.LogProbs.Offset, choice.LogProbs.Values)
			}
			if choice.Finish != "" {
				fmt.Fprintf(&text[choice.Index], "<%s>", choice.Finish)
			}
		}
		if e.Usage != nil {
			end = fmt.Sprint(*e.Usage)
		}
	}
	return text[0].String() + "\n" + text[1].String() + "\n" + end, nil
}

func tail(b []byte) []byte { return b[max(0, len(b)-300):] }

// waves is clients that stream the same requests again and again, at a fixed rate,
// and hold each answer against its undisturbed one.
type waves struct {
	b        *battle
	requests []map[string]any
	want     []string
	every    time.Duration // between two waves of streams
	doors    []*battle     // clients use them by turns
	served   atomic.Int64
	failed   atomic.Int64
	stop     chan struct{}
	ended    chan struct{}
}

// under is the battle as seen by clients that ask for a routing policy.
func (b *battle) under(policy string) *battle {
	other := b.at(b.gateways[slices.IndexFunc(b.gateways, func(m *member) bool { return m.host == b.host })])
	other.headers = map[string]string{"X-Tandem-Policy": policy}
	return other
}

// learn finds out what the requests give when nothing happens, and how fast.
func (b *battle) learn() *waves {
	b.t.Helper()
	l := &waves{b: b, requests: b.requests(), want: make([]string, distinct), stop: make(chan struct{}), ended: make(chan struct{})}
	for _, g := range b.gateways {
		at := b.at(g)
		// What is cached where decides by default; the others see to it that every
		// node has streams at all times.
		l.doors = append(l.doors, at, at.under("round_robin"), at.under("least_load"))
	}
	var wg sync.WaitGroup
	room := make(chan struct{}, 8)
	for i, r := range l.requests {
		wg.Go(func() {
			room <- struct{}{}
			defer func() { <-room }()
			var err error
			if l.want[i], err = b.told(r); err != nil {
				b.t.Errorf("request %d, undisturbed: %v", i, err)
			}
		})
	}
	wg.Wait()
	began := time.Now()
	l.wave(0)
	wg.Wait()
	if b.t.Failed() {
		b.t.FailNow()
	}
	// Half of what this machine does at this moment.
	l.every = max(time.Second, 2*time.Since(began))
	return l
}

// wave is as many streams as there are clients, half of them at once and half one
// after the other until the next wave; it returns with the last.
func (l *waves) wave(n int) {
	var wg sync.WaitGroup
	for i := range streams {
		wg.Go(func() {
			time.Sleep(max(0, time.Duration(i-streams/2)) * l.every / (streams / 2))
			l.stream(n*streams+i, i%distinct)
		})
	}
	wg.Wait()
}

// stream is one of them.
func (l *waves) stream(n, request int) {
	got, err := l.doors[(n+n/distinct)%len(l.doors)].told(l.requests[request])
	switch {
	case err != nil && l.failed.Add(1) < 10:
		l.b.t.Errorf("stream %d (request %d) failed: %v", n, request, err)
	case err == nil && got != l.want[request] && l.failed.Add(1) < 10:
		l.b.t.Errorf("stream %d (request %d) was altered:\n got %q\nwant %q", n, request, got, l.want[request])
	}
	l.served.Add(1)
}

// run sends a wave after the other until end; a wave that is late is not made up for.
func (l *waves) run() {
	defer close(l.ended)
	tick := time.NewTicker(l.every)
	defer tick.Stop()
	for n := 1; ; n++ {
		l.wave(n)
		select {
		case <-l.stop:
			return
		case <-tick.C:
		}
	}
}

// disturb streams the requests while do does its worst, and says how many streams
// were resumed.
func (b *battle) disturb(do func()) (resumes int) {
	b.t.Helper()
	l := b.learn()
	before := b.gatewayMetric("tandem:gateway_resumes_total")
	go l.run()
	began := time.Now()
	func() {
		defer func() { close(l.stop); <-l.ended }() // also when do gives up
		do()
	}()
	resumes = int(b.gatewayMetric("tandem:gateway_resumes_total") - before)
	b.t.Logf("note: %d streams, %d every %v, %d resumed, %v", l.served.Load(), streams, l.every.Round(time.Millisecond), resumes, time.Since(began).Round(time.Second))
	return resumes
}

// blow is one thing that a campaign does: some nodes are killed a while after all
// had recovered from the blow before.
type blow struct {
	after   time.Duration
	victims []int // places of the nodes
}

// blows draws blows that leave a node of each role alive, with so many kills.
func blows(seed uint64, kills int) (all []blow) {
	rng := rand.New(rand.NewPCG(seed, 3))
	for n := 0; n < kills; {
		w := blow{after: time.Duration(rng.IntN(500)) * time.Millisecond}
		for _, role := range [][]int{ofPrefill, ofDecode} {
			for _, i := range rng.Perm(len(role))[:rng.IntN(len(role))] {
				w.victims = append(w.victims, role[i])
			}
		}
		if n += len(w.victims); len(w.victims) > 0 {
			all = append(all, w)
		}
	}
	return all
}

// Nodes of every role are killed at any moment while clients stream, as long as
// one of each lives, and no stream fails, ends early or differs by a byte from its
// undisturbed run. A node that was started again is used again.
func TestBinaryKills(t *testing.T) {
	t.Parallel()
	kills, seed := 20, uint64(20261122)
	if os.Getenv("TANDEM_SOAK") != "" {
		kills, seed = 500, soakSeed(t, rand.Uint64())
	}
	b := newBattle(t, seed, ranks{})
	var back []time.Duration
	resumes := b.disturb(func() {
		end := time.Now().Add(time.Hour)
		if os.Getenv("TANDEM_SOAK") != "" {
			end = time.Now().Add(soakMinutes(t))
		}
		for n, w := range blows(seed, kills) {
			if time.Now().After(end) {
				break
			}
			time.Sleep(w.after)
			var victims []*member
			for _, v := range w.victims {
				victims = append(victims, b.nodes[v])
			}
			t.Logf("blow %d: %v after the last, %v", n, w.after, names(victims))
			b.replace(victims...)
			back = append(back, b.returned(victims)...)
			b.whole(b.gateways...)
			if t.Failed() {
				return
			}
		}
	})
	slices.Sort(back)
	t.Logf("note: seed %d, %d of %d kills; from its own readiness to its use by the gateway a node took %v, %v at most", seed, len(back), kills, back[len(back)/2], back[len(back)-1])
	if resumes == 0 {
		t.Error("no stream was resumed: the kills have met nobody in the middle of one")
	}
}

func names(ms []*member) (ns []string) {
	for _, m := range ms {
		ns = append(ns, m.name)
	}
	return ns
}

// returned waits until each of the members is ready by its own word, and then used
// by the gateway, and says how long that took after it.
func (b *battle) returned(ms []*member) (took []time.Duration) {
	b.t.Helper()
	ready, done := map[*member]time.Time{}, map[*member]bool{}
	b.wait(startBound, fmt.Sprintf("%v are ready and used", names(ms)), func() bool {
		fleet := b.fleet()
		for _, m := range ms {
			if ready[m].IsZero() && b.ready(m) {
				ready[m] = time.Now()
			}
			if !ready[m].IsZero() && !done[m] && fleet[m.name].serves() {
				done[m], took = true, append(took, time.Since(ready[m]).Round(time.Millisecond))
			}
		}
		return len(done) == len(ms)
	})
	return took
}

// A decode and a prefill node and one of two gateways freeze for longer than anyone
// waits for them and than any lease lasts, and thaw: what they still say changes
// nothing.
func TestBinaryFreeze(t *testing.T) {
	t.Parallel()
	b := newBattle(t, 7, ranks{gateways: 2})
	frozen := []*member{b.nodes[0], b.nodes[2], b.gateways[1]}
	b.disturb(func() {
		time.Sleep(time.Second) // for streams to be under way
		for _, m := range frozen {
			m.signal(t, syscall.SIGSTOP)
			defer m.signal(t, syscall.SIGCONT)
		}
		time.Sleep(12 * time.Second) // nodes give up on each other after 6, leases end after 10
		for _, m := range frozen {
			m.signal(t, syscall.SIGCONT)
		}
		b.whole(b.gateways...)
	})
}
