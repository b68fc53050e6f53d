package e2e

import (
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/gateway"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
)

// Requests that end before their answer does, in virtual time.

// at starts clients, spread over so long.
func (v *virtual) at(clients *sync.WaitGroup, n int, spread time.Duration) {
	for range n {
		mine := rand.New(rand.NewPCG(v.rng.Uint64(), 37))
		clients.Go(func() {
			time.Sleep(time.Duration(mine.Int64N(int64(spread))))
			v.client(mine)
		})
	}
}

// inBubble runs f in a bubble of its own and looks that it leaves no goroutine.
func inBubble(t *testing.T, ds []*engine.Loaded, qs []*inquiry, count *counts, change func(*virtual, *gateway.Options), f func(*virtual)) {
	synctest.Test(t, func(t *testing.T) {
		before := goleak.IgnoreCurrent()
		v := newVirtual(t, 1, ds, qs, count, change)
		f(v)
		if err := goleak.Find(before, sampler); err != nil {
			v.errorf("%v", err)
		}
	})
}

// Clients that go away at any moment, whether their request waits in the gateway or
// on a node, is prefilled, travels or is answered, leave nothing behind on any node, a second later.
func TestVirtualCancel(t *testing.T) {
	ds, _ := virtualDevices(t)
	qs, count := inquiries(64), &counts{n: map[string]int{}}
	calmAnswers(t, ds, qs)
	n := 1000
	switch {
	case os.Getenv("TANDEM_SOAK") != "":
		n = 50_000
	case raceEnabled:
		n = 300
	}
	inBubble(t, ds, qs, count, func(v *virtual, o *gateway.Options) {
		v.gentle = true
		v.behave = func(*rand.Rand) manner { return leaves }
	}, func(v *virtual) {
		var clients sync.WaitGroup
		time.Sleep(time.Second) // the gateway knows what room there is
		v.at(&clients, n, time.Duration(n)*time.Millisecond/4)
		clients.Wait()
		time.Sleep(time.Second)
		v.check("a second after the last client has gone")
		for _, n := range v.nodes {
			n.idle("a second after the last client has gone")
		}
		if gone := int(v.meters.Counter(metrics.GatewayStreamsAborted, "client_gone").Get()); gone < n/4 {
			v.errorf("only %d of %d clients went away while they were answered", gone, n)
		}
		if waited := v.meters.Histogram(metrics.GatewayQueueTime).Count(); waited < uint64(n/20) {
			v.errorf("only %d requests of %d clients waited in the gateway", waited, n)
		}
		v.end(&clients)
	})
	t.Logf("%d clients: %v", n, count.n)
}

// Nodes are drained through the gateway while they serve, one after the other, and
// taken back: no answer differs, none fails, and what outlasts the timeout goes on
// elsewhere.
func TestVirtualDrain(t *testing.T) {
	ds, _ := virtualDevices(t)
	qs, count := inquiries(24), &counts{n: map[string]int{}}
	calmAnswers(t, ds, qs)
	inBubble(t, ds, qs, count, func(v *virtual, o *gateway.Options) {
		v.gentle = true
		v.behave = func(*rand.Rand) manner { return patient }
		o.Limits.MaxAttempts = 8
	}, func(v *virtual) {
		var clients sync.WaitGroup
		v.at(&clients, 120, 800*time.Millisecond)
		for i := range 8 {
			n := v.nodes[i%4]
			v.ask("POST", "/admin/drain/"+n.addr+"?timeout=2ms")
			time.Sleep(100 * time.Millisecond)
			if n.decode != nil && n.decode.Running() > 0 {
				v.errorf("%s has %d attempts after its drain", n.addr, n.decode.Running())
			}
			n.idle("drained")
			v.ask("DELETE", "/admin/drain/"+n.addr)
			v.recovered("after a drain")
		}
		v.end(&clients)
		if v.meters.Counter(metrics.GatewayResumes).Get() == 0 {
			v.errorf("no stream was resumed")
		}
	})
	t.Log(count.n)
}

// With no decode node left, gone or silent, every request ends with a clear error
// before its deadline, and service returns with the nodes.
func TestVirtualNoNodeLeft(t *testing.T) {
	ds, _ := virtualDevices(t)
	qs := inquiries(64)
	calmAnswers(t, ds, qs)
	for what, take := range map[string]struct{ away, back func(*virtual, *node) }{
		"gone":   {func(_ *virtual, n *node) { n.kill() }, func(v *virtual, n *node) { n.start(v.rng) }},
		"silent": {func(v *virtual, n *node) { v.net.Silence(n.addr, true) }, func(v *virtual, n *node) { v.net.Silence(n.addr, false) }},
	} {
		t.Run(what, func(t *testing.T) {
			count := &counts{n: map[string]int{}}
			inBubble(t, ds, qs, count, func(v *virtual, o *gateway.Options) {
				v.timeout = 4 * time.Second
				v.behave = func(*rand.Rand) manner { return patient }
			}, func(v *virtual) {
				var clients sync.WaitGroup
				v.at(&clients, 60, 100*time.Millisecond)
				time.Sleep(50 * time.Millisecond)
				for _, n := range v.nodes[:2] {
					take.away(v, n)
				}
				v.at(&clients, 60, 5*time.Second)
				clients.Wait()
				v.check("with no decode node left")
				for _, n := range v.nodes[:2] {
					take.back(v, n)
				}
				v.recovered("with the nodes back")
				failed := count.n["refused with 503"] + count.n["refused with 504"]
				v.gentle = true
				v.at(&clients, 20, 100*time.Millisecond)
				v.end(&clients)
				if failed < 40 {
					v.errorf("only %d requests failed without a decode node", failed)
				}
			})
			t.Log(count.n)
		})
	}
}

// Gateways that take nothing for a while, though for less time than it takes to
// give them up, find streams dropped whose tokens no outbox had room for: they go
// on, and no client sees more than a pause.
func TestVirtualFullOutbox(t *testing.T) {
	ds, _ := virtualDevices(t)
	qs, count := inquiries(64), &counts{n: map[string]int{}}
	calmAnswers(t, ds, qs)
	dropped := uint64(0)
	inBubble(t, ds, qs, count, func(v *virtual, o *gateway.Options) {
		v.gentle, v.outbox, v.net.Buffer = true, 1<<10, 256
		v.behave = func(*rand.Rand) manner { return patient }
	}, func(v *virtual) {
		var clients sync.WaitGroup
		for range 16 {
			v.at(&clients, 12, 15*time.Millisecond)
			time.Sleep(time.Duration(5+v.rng.IntN(15)) * time.Millisecond)
			n := v.nodes[v.rng.IntN(2)]
			v.net.Silence(n.addr, true)
			time.Sleep(time.Duration(500+v.rng.IntN(3000)) * time.Millisecond)
			v.net.Silence(n.addr, false)
			v.recovered("with the outboxes empty")
			clients.Wait() // a request is refused when both nodes have told it that they are full
			v.check("with the outboxes empty")
		}
		for _, n := range v.nodes[:2] {
			dropped += n.decode.Counters().DroppedStreams
		}
		v.end(&clients)
	})
	t.Logf("%d streams dropped: %v", dropped, count.n)
	if dropped < 3 {
		t.Errorf("%d streams were dropped for want of room: the outboxes were not full", dropped)
	}
}
