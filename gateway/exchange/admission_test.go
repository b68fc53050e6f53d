package exchange

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/gateway/admit"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// Room is given in the order of priority and of arrival, as much as there is, and
// by whoever leaves.
func TestRoomIsGivenInOrder(t *testing.T) {
	a := NewAdmission(admit.Limits{Requests: 10, Tokens: 1000})
	a.SetRoom(2, 100)
	if !a.pass(1, 10, Room{}) || !a.pass(3, 10, Room{}) || a.pass(1, 10, Room{}) {
		t.Fatal("room for two was not what two requests got")
	}
	var ws []*waiter
	for _, priority := range []int32{5, 0, -3, 0} {
		w := &waiter{Claim: Claim{Choices: 1, Tokens: 90}, ready: make(chan struct{})}
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
		if err := a.Check(false); err != nil {
			t.Error(err)
		}
	}
	let()
	a.Leave(2)
	let()
	a.Leave(1)
	let(2) // and with it 110 tokens are there
	a.Leave(1)
	let(2)
	a.Computed(20)
	let(2, 1)
	if !a.withdraw(ws[3]) || a.withdraw(ws[3]) || a.withdraw(ws[2]) {
		t.Error("who waits was withdrawn wrongly")
	}
	a.SetRoom(10, 1000)
	let(2, 1, 0)
	a.Leave(3)
	for range 3 {
		a.Computed(90)
	}
	if err := a.Check(true); err != nil {
		t.Error(err)
	}
}

// Long prompts that fill the room for tokens keep no short one away, until short ones have
// an eighth of it; those that wait behind long ones go as the first are computed.
func TestShortPromptsPassLongOnes(t *testing.T) {
	a := NewAdmission(admit.Limits{Requests: 100, Tokens: 100_000})
	a.SetRoom(100, 4096)
	for a.pass(1, 1024, Room{}) {
	}
	for n := range 8 {
		if !a.pass(1, 64, Room{}) {
			t.Fatalf("the short prompt %d waits for long ones", n)
		}
	}
	if a.pass(1, 64, Room{}) || a.pass(1, 257, Room{}) {
		t.Error("a ninth short prompt, or a long one, was let through")
	}
	push := func(tokens int) *waiter {
		t.Helper()
		w := &waiter{Claim: Claim{Choices: 1, Tokens: int64(tokens)}, ready: make(chan struct{})}
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
	a.Computed(64)
	if !waits(long) || waits(short) || !waits(last) {
		t.Error("64 tokens of a short prompt were computed: the first short one that waits has its turn, and no other")
	}
	a.Computed(1024)
	if waits(long) || !waits(last) {
		t.Error("1024 tokens were computed: the long prompt has its turn")
	}
	for range 8 {
		a.Computed(64)
	}
	if waits(last) {
		t.Error("no short prompt is left, and one waits")
	}
	for range 4 {
		a.Computed(1024)
	}
	a.Computed(64)
	a.Leave(15)
	if err := a.Check(true); err != nil {
		t.Error(err)
	}
}

// While nobody waits, admission takes no lock and allocates nothing.
func TestAdmissionDoesNotAllocate(t *testing.T) {
	a := NewAdmission(admit.Limits{Requests: 1, Tokens: 1})
	a.SetRoom(100, 100)
	a.mu.Lock() // whoever needs it hangs
	defer a.mu.Unlock()
	if n := testing.AllocsPerRun(1000, func() {
		if !a.pass(1, 50, Room{}) {
			t.Fatal("no room")
		}
		a.Computed(50)
		a.charge(a.anyone, 0, 32)
		a.Leave(1)
	}); n != 0 {
		t.Errorf("%g allocations", n)
	}
}

func BenchmarkAdmission(b *testing.B) {
	a := NewAdmission(admit.Limits{Requests: 1, Tokens: 1})
	a.SetRoom(1<<40, 1<<40)
	b.ReportAllocs()
	b.RunParallel(func(p *testing.PB) {
		for p.Next() {
			if !a.pass(1, 50, Room{}) {
				b.Fatal("no room")
			}
			a.Computed(50)
			a.charge(a.anyone, 0, 32)
			a.Leave(1)
		}
	})
}

// Requests are let through no faster than KV memory lasts, though no heartbeat
// reports those on their way.
func TestRequestsOnTheirWayCountAsKVMemory(t *testing.T) {
	a := NewAdmission(admit.Limits{})
	room := Room{Blocks: 40, On: func(pending int64, _ any) (bool, any) { return pending+40 <= 100, nil }}
	for i, want := range []bool{true, true, false} {
		if a.pass(1, 1, room) != want {
			t.Errorf("request %d of 40 blocks, room for 100: let through %t", i+1, !want)
		}
	}
	a.Routed(40)
	if !a.pass(1, 1, room) {
		t.Error("a request that was routed still counts")
	}
	a.Routed(80)
	a.Computed(3)
	a.Leave(3)
	if err := a.Check(true); err != nil {
		t.Error(err)
	}
}

// A request that would wait longer than it may is refused at once, with the time to come
// back.
func TestLateRequestsAreRefused(t *testing.T) {
	set := metrics.New(metrics.Gateway, "")
	s := &Service{Meters: set, Cut: t.Context()}
	s.SetLimits(Limits{QueueTimeout: time.Minute})
	// The queue has seen eight turns in as many seconds, and four wait.
	a := NewAdmission(admit.Limits{Requests: 100, Tokens: 10_000})
	a.room.Store(0)
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
	now := time.Now()
	x := &Exchange{S: s, Start: now, Deadline: now.Add(2 * time.Second)}
	fault := x.waitForRoom(&Claim{Queue: a, Choices: 1, Tokens: 1})
	if fault == nil || fault.Status != 429 || fault.RetryAfter < 2 || x.Cause != "" || !strings.Contains(fault.Message, "and may wait 2s") {
		t.Fatalf("%+v, %q", fault, x.Cause)
	}
	refused := func(limit string) float64 { return set.Counter(metrics.GatewayRefused, limit).Get() }
	if n := refused("late"); n != 1 {
		t.Errorf("%g refused", n)
	}
}
