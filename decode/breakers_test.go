package decode

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/internal/breaker"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// A prefill node that says nothing costs a few requests their patience and then
// none but a probe a second; once it answers it is asked again, within a second.
func TestSilentLegIsPassedOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, nil)
		defer b.close()
		var talks atomic.Bool
		bad := b.peer("bad", func(c *rpc.Conn, stream uint64, p *nodepb.Prefill) {
			if talks.Load() {
				asks(c, stream, p)
			}
		})
		bad.grant = b.delivers("good").grant
		asked := func() int { n, _, _ := bad.seen(); return n }
		salt := 0
		ask := func() time.Duration {
			began := time.Now()
			salt++
			b.want(b.gw.ask(generate(40, salt, 3, "bad", "good")), 3, length)
			return time.Since(began)
		}
		const patience, prompt = 4 * time.Second, 100 * time.Millisecond
		for i := range breakerFailures {
			if took := ask(); took < patience {
				t.Errorf("request %d took %v: the silent node was not waited for", i, took)
			}
		}
		if n := b.n.PrefillBreakers("open"); n != 1 {
			t.Errorf("%d legs are open", n)
		}
		for range 20 {
			if took := ask(); took > prompt {
				t.Errorf("with the leg open a request took %v", took)
			}
		}
		if n := b.n.Counters().PrefillFailures; n != breakerFailures || asked() != breakerFailures {
			t.Errorf("%d failures, asked %d times", n, asked())
		}
		time.Sleep(breakerPause)
		probe := b.gw.ask(generate(40, 1000, 3, "bad", "good"))
		time.Sleep(prompt)
		if n := b.n.PrefillBreakers("half-open"); n != 1 {
			t.Errorf("%d legs are half open", n)
		}
		if took := ask(); took > prompt {
			t.Errorf("beside a probe a request took %v", took)
		}
		b.want(probe, 3, length)
		talks.Store(true)
		time.Sleep(breakerPause)
		before := asked()
		if took := ask(); took > prompt || asked() != before+1 {
			t.Errorf("the node that answers again was asked %d times, in %v", asked()-before, took)
		}
		if n := b.n.PrefillBreakers("closed"); n != 2 {
			t.Errorf("%d legs are closed", n)
		}
	})
}

// A node that says no is no broken leg, however often; the legs are bounded.
func TestLegs(t *testing.T) {
	n := &Node{breakers: prefillBreakers{by: map[string]*breaker.Breaker{}}}
	l := &n.breakers
	for range 10 * breakerFailures {
		for _, err := range []error{errPrefill, errNoRoom, errMismatch, ErrCancelled, fmt.Errorf("%w: %w", errReach, rpc.ErrBackoff)} {
			if got := l.do("no", func() error { return err }); !errors.Is(got, err) {
				t.Fatalf("%v became %v", err, got)
			}
		}
	}
	if n.PrefillBreakers("closed") != 1 {
		t.Error("a node that says no has opened its leg")
	}
	for i := range maxBreakers + 10 {
		_ = l.do(fmt.Sprint(i), func() error { return errSilent })
	}
	if legs := n.PrefillBreakers("closed"); legs > maxBreakers {
		t.Errorf("%d legs", legs)
	}
}

// Each error that speaks of the way to a node opens its leg after breakerFailures, alone.
func TestErrorsThatBreakALeg(t *testing.T) {
	for _, cause := range []error{errReach, errSilent, errGone, errMoved} {
		n := &Node{breakers: prefillBreakers{by: map[string]*breaker.Breaker{}}}
		l := &n.breakers
		for range breakerFailures {
			_ = l.do("bad", func() error { return fmt.Errorf("%w: a reason", cause) })
		}
		if n.PrefillBreakers("open") != 1 {
			t.Errorf("%d times %q: the leg is not open", breakerFailures, cause)
		}
	}
}
