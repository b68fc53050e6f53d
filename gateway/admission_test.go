package gateway

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/gateway/admit"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// crowd is a gateway whose one node runs one request and has one more wait.
func crowd(t *testing.T, o Options) (b *bed, gate chan struct{}) {
	gate = make(chan struct{})
	o.NodeBacklog = 1
	b = newBed(t, o, one(nodestest.Options{Gate: gate, MaxRunning: 1}))
	b.until(func() bool { return b.g.admission.room.Load() == 2 })
	return b, gate
}

const words = `{"prompt":%q,"max_tokens":2,"priority":%d}`

// ask sends a request that is answered later, and waits until it is on the node or
// in the queue.
func (b *bed) ask(prompt string, priority int, headers ...string) *client {
	b.Helper()
	c := b.dial()
	b.Cleanup(func() { c.Close() })
	before := b.g.admission.waiting.Load() + int64(len(b.nodes["d1"].Requests()))
	c.send("POST", "/v1/completions", fmt.Sprintf(words, prompt, priority), headers...)
	b.until(func() bool { return b.g.admission.waiting.Load()+int64(len(b.nodes["d1"].Requests())) > before })
	return c
}

// prompts are those of the requests that the node got, in order.
func (b *bed) prompts() (out []string) {
	for _, r := range b.nodes["d1"].Requests() {
		text := ""
		for _, id := range r.Prompt {
			text += string(rune(id))
		}
		out = append(out, text)
	}
	return out
}

func (b *bed) refused(limit string) float64 {
	return b.g.meters.set.Counter(metrics.GatewayRefused, limit).Get()
}

// wantError holds an answer against an error that it should be.
func (r reply) wantError(t *testing.T, status int, says string) {
	t.Helper()
	e := r.parse(t).Error
	if after := r.Header.Get("Retry-After"); r.StatusCode != status || e == nil || !strings.Contains(e.Message, says) || (status == 429 || status == 503) != (after != "") {
		t.Errorf("%d %s, Retry-After %q, want %d and %q", r.StatusCode, r.body, after, status, says)
	}
}

// What the fleet has no room for waits in the gateway, and leaves when its client
// does.
func TestRequestsWait(t *testing.T) {
	b, gate := crowd(t, Options{})
	var answers sync.WaitGroup
	ask := func(prompt string, priority int) {
		c := b.ask(prompt, priority)
		answers.Go(func() {
			if r := c.receive(); r.StatusCode != 200 {
				b.Errorf("%s: %d %s", prompt, r.StatusCode, r.body)
			}
		})
	}
	ask("a", 0)
	ask("b", 0)
	ask("c", 5)
	leaves := b.ask("d", 1)
	ask("e", 0)
	ask("f", -3)
	if got := strings.Join(b.prompts(), ""); got != "ab" || b.g.admission.waiting.Load() != 4 {
		t.Fatalf("%q on the node, %d wait", got, b.g.admission.waiting.Load())
	}
	if err := b.g.Check(); err != nil {
		t.Error(err)
	}
	leaves.Close()
	b.until(func() bool { return b.g.admission.waiting.Load() == 3 })
	close(gate)
	answers.Wait()
	if got := b.prompts(); len(got) != 5 || slices.Contains(got, "d") {
		t.Errorf("the node got %q", got)
	}
	b.until(func() bool { return b.g.inFlight.Load() == 0 })
	if err := b.g.Check(); err != nil {
		t.Error(err)
	}
	if n := b.g.meters.queueTime.Count(); n != 4 {
		t.Errorf("%d waits recorded", n)
	}
}

// Room is given in the order of priority and of arrival, as much as there is, and
// by whoever leaves.
func TestRoomIsGivenInOrder(t *testing.T) {
	a := newAdmission(admit.Limits{Requests: 10, Tokens: 1000})
	a.setRoom(2, 100)
	if !a.pass(1, 10, kvRoom{}) || !a.pass(3, 10, kvRoom{}) || a.pass(1, 10, kvRoom{}) {
		t.Fatal("room for two was not what two requests got")
	}
	var ws []*waiter
	for _, priority := range []int32{5, 0, -3, 0} {
		w := &waiter{choices: 1, tokens: 90, ready: make(chan struct{})}
		w.item = admit.Item{Flow: a.anyone, Priority: priority, Tokens: 90, Owner: w}
		if no := a.push(w, time.Hour); no != nil {
			t.Fatalf("%+v", no)
		}
		ws = append(ws, w)
	}
	let := func(want ...int) {
		t.Helper()
		for n, w := range ws {
			select {
			case <-w.ready:
				if !slices.Contains(want, n) {
					t.Errorf("%d was let through, want %v", n, want)
				}
			default:
				if slices.Contains(want, n) {
					t.Errorf("%d was not let through, want %v", n, want)
				}
			}
		}
		if err := a.check(false); err != nil {
			t.Error(err)
		}
	}
	let()
	a.leave(2)
	let()
	a.leave(1)
	let(2) // and with it 110 tokens are there
	a.leave(1)
	let(2)
	a.computed(20)
	let(2, 1)
	if !a.withdraw(ws[3]) || a.withdraw(ws[3]) || a.withdraw(ws[2]) {
		t.Error("who waits was withdrawn wrongly")
	}
	a.setRoom(10, 1000)
	let(2, 1, 0)
	a.leave(3)
	for range 3 {
		a.computed(90)
	}
	if err := a.check(true); err != nil {
		t.Error(err)
	}
}

// Long prompts that fill the room for tokens keep no short one away, until short ones have
// an eighth of it; those that wait behind long ones go as the first are computed.
func TestShortPromptsPassLongOnes(t *testing.T) {
	a := newAdmission(admit.Limits{Requests: 100, Tokens: 100_000})
	a.setRoom(100, 4096)
	for a.pass(1, 1024, kvRoom{}) {
	}
	for n := range 8 {
		if !a.pass(1, 64, kvRoom{}) {
			t.Fatalf("the short prompt %d waits for long ones", n)
		}
	}
	if a.pass(1, 64, kvRoom{}) || a.pass(1, 257, kvRoom{}) {
		t.Error("a ninth short prompt, or a long one, was let through")
	}
	push := func(tokens int) *waiter {
		t.Helper()
		w := &waiter{choices: 1, tokens: int64(tokens), ready: make(chan struct{})}
		w.item = admit.Item{Flow: a.anyone, Tokens: tokens, Owner: w}
		if no := a.push(w, time.Hour); no != nil {
			t.Fatalf("%+v", no)
		}
		return w
	}
	waits := func(w *waiter) bool {
		select {
		case <-w.ready:
			return false
		default:
			return true
		}
	}
	long, short, last := push(1024), push(64), push(64)
	if !waits(long) || !waits(short) || !waits(last) {
		t.Error("there is no room for any of the three")
	}
	a.computed(64)
	if !waits(long) || waits(short) || !waits(last) {
		t.Error("64 tokens of a short prompt were computed: the first short one that waits has its turn, and no other")
	}
	a.computed(1024)
	if waits(long) || !waits(last) {
		t.Error("1024 tokens were computed: the long prompt has its turn")
	}
	for range 8 {
		a.computed(64)
	}
	if waits(last) {
		t.Error("no short prompt is left, and one waits")
	}
	for range 4 {
		a.computed(1024)
	}
	a.computed(64)
	a.leave(15)
	if err := a.check(true); err != nil {
		t.Error(err)
	}
}

// A queue's bounds: requests, prompt tokens, time; each with its own refusal.
func TestQueueIsBounded(t *testing.T) {
	t.Run("requests", func(t *testing.T) {
		b, gate := crowd(t, Options{MaxQueuedRequests: 1})
		for _, p := range []string{"a", "b", "c"} {
			b.ask(p, 0)
		}
		b.post("/v1/completions", fmt.Sprintf(words, "d", 0)).wantError(t, 429, "1 requests wait")
		first := b.refused("queue")
		better := b.dial()
		defer better.Close()
		better.send("POST", "/v1/completions", fmt.Sprintf(words, "e", -1))
		b.until(func() bool { return b.refused("evicted") == 1 })
		close(gate)
		if r := better.receive(); r.StatusCode != 200 || first != 1 {
			t.Errorf("%d %s, %g refused", r.StatusCode, r.body, first)
		}
		if got := strings.Join(b.prompts(), ""); got != "abe" {
			t.Errorf("the node got %q", got)
		}
	})
	t.Run("tokens", func(t *testing.T) {
		b, gate := crowd(t, Options{MaxQueuedTokens: 100})
		long := strings.Repeat("y", 90)
		for _, p := range []string{"a", "b", long} {
			b.ask(p, 0)
		}
		b.post("/v1/completions", fmt.Sprintf(words, long, 0)).wantError(t, 429, "90 prompt tokens wait for the fleet and this request has 90 more: the bound is 100")
		close(gate)
	})
	t.Run("time", func(t *testing.T) {
		b, gate := crowd(t, Options{QueueTimeout: 50 * time.Millisecond})
		b.ask("a", 0)
		b.ask("b", 0)
		b.post("/v1/completions", fmt.Sprintf(words, "c", 0)).wantError(t, 429, "no room for this request within 50ms")
		if n := b.refused("timeout"); n != 1 {
			t.Errorf("%g refusals", n)
		}
		close(gate)
	})
	t.Run("deadline", func(t *testing.T) {
		b, gate := crowd(t, Options{})
		b.ask("a", 0)
		b.ask("b", 0)
		b.post("/v1/completions", fmt.Sprintf(words, "c", 0), "X-Tandem-Timeout: 20ms").wantError(t, 504, "longer than 20ms")
		b.post("/v1/completions", fmt.Sprintf(words, "c", 0), "X-Tandem-Timeout: 0.02").wantError(t, 504, "longer than 20ms")
		for _, bad := range []string{"0", "-1s", "soon", "NaN"} {
			b.post("/v1/completions", fmt.Sprintf(words, "c", 0), "X-Tandem-Timeout: "+bad).wantError(t, 400, strconv.Quote(bad)[1:len(bad)])
		}
		close(gate)
	})
	t.Run("late", func(t *testing.T) {
		b, gate := crowd(t, Options{})
		b.ask("a", 0)
		b.ask("b", 0)
		// The queue has seen eight turns in as many seconds, and four wait.
		a := b.g.admission
		a.mu.Lock()
		a.q = admit.New(admit.Limits{Requests: 100, Tokens: 10_000})
		past := time.Now().Add(-8 * time.Second)
		for n := range 12 {
			i := &admit.Item{Flow: a.anyone, Tokens: 10, Owner: &waiter{ready: make(chan struct{})}}
			if _, no := a.q.Push(past, i, time.Hour); no != nil {
				t.Fatal(no)
			}
			if n >= 4 {
				a.q.Take(past.Add(time.Duration(n-3) * time.Second))
			}
		}
		a.mu.Unlock()
		r := b.post("/v1/completions", fmt.Sprintf(words, "x", 0), "X-Tandem-Timeout: 2s")
		r.wantError(t, 429, "and may wait 2s")
		if after, err := strconv.Atoi(r.Header.Get("Retry-After")); err != nil || after < 2 || b.refused("late") != 1 {
			t.Errorf("Retry-After %d, %v, %g refused", after, err, b.refused("late"))
		}
		a.mu.Lock()
		a.q = admit.New(admit.Limits{Requests: 100, Tokens: 10_000})
		a.waiting.Store(0)
		a.mu.Unlock()
		close(gate)
	})
}

// Keys that wait share the fleet by their weights; their priority is bounded.
func TestKeysShare(t *testing.T) {
	b, gate := crowd(t, Options{APIKeyFile: keyFile(t, "two weight=2\none priority=0\nlow priority=7\n")})
	var answers sync.WaitGroup
	ask := func(prompt, key string, priority int) {
		c := b.ask(prompt, priority, "Authorization: Bearer "+key)
		answers.Go(func() {
			if r := c.receive(); r.StatusCode != 200 {
				b.Errorf("%s: %d %s", prompt, r.StatusCode, r.body)
			}
		})
	}
	ask("0", "one", 0)
	ask("0", "one", 0)
	ask("l", "low", -9)
	for range 4 {
		ask("1", "one", -9)
	}
	for range 8 {
		ask("2", "two", 0)
	}
	close(gate)
	answers.Wait()
	got := strings.Join(b.prompts(), "")
	if at := strings.Index(got, "l"); at < 10 {
		t.Errorf("low came at %d of %q", at, got)
	}
	if ones := strings.Count(got[2:8], "1"); ones > 4 {
		t.Errorf("the node got %q", got)
	}
	if n := b.nodes["d1"].Requests()[2].Priority; n != 0 {
		t.Errorf("a priority of %d was passed on", n)
	}
}

// While nobody waits, admission takes no lock and allocates nothing.
func TestAdmissionDoesNotAllocate(t *testing.T) {
	a := newAdmission(admit.Limits{Requests: 1, Tokens: 1})
	a.setRoom(100, 100)
	a.mu.Lock() // whoever needs it hangs
	defer a.mu.Unlock()
	if n := testing.AllocsPerRun(1000, func() {
		if !a.pass(1, 50, kvRoom{}) {
			t.Fatal("no room")
		}
		a.computed(50)
		a.charge(a.anyone, 0, 32)
		a.leave(1)
	}); n != 0 {
		t.Errorf("%g allocations", n)
	}
}

func BenchmarkAdmission(b *testing.B) {
	a := newAdmission(admit.Limits{Requests: 1, Tokens: 1})
	a.setRoom(1<<40, 1<<40)
	b.ReportAllocs()
	b.RunParallel(func(p *testing.PB) {
		for p.Next() {
			if !a.pass(1, 50, kvRoom{}) {
				b.Fatal("no room")
			}
			a.computed(50)
			a.charge(a.anyone, 0, 32)
			a.leave(1)
		}
	})
}
