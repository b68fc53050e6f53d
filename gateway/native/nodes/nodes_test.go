package nodes_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/gateway/native/nodes"
	"github.com/tandem-serving/tandem/gateway/native/nodes/nodestest"
	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/obs/metrics"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

const soon = time.Minute // on a machine that has other things to do

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type bed struct {
	*testing.T
	net   *rpc.Network
	fleet *nodes.Fleet
	stale *metrics.Value
}

func newBed(t *testing.T, change ...func(*nodes.Options)) *bed {
	set := metrics.New(metrics.Gateway, "")
	b := &bed{T: t, net: rpc.NewNetwork(), stale: set.Counter(metrics.GatewayStaleTokens)}
	o := nodes.Options{
		RPC:           rpc.Options{Hello: &nodepb.Hello{NodeId: "gw", Role: "gateway"}, Dial: b.net.Dial, BackoffMin: time.Millisecond, CloseLinger: 10 * time.Millisecond},
		ProbeInterval: 10 * time.Millisecond, Meters: set}
	for _, f := range change {
		f(&o)
	}
	b.fleet = nodes.New(o)
	t.Cleanup(b.fleet.Close)
	return b
}

func (b *bed) start(addr string, o nodestest.Options) *nodestest.Node {
	b.Helper()
	if o.Bundle == nil {
		o.Bundle = &nodepb.Bundle{Model: "m", Fingerprint: 7, VocabSize: 1000}
	}
	n, err := nodestest.Start(b.net, addr, o)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(n.Stop)
	return n
}

// members makes decode nodes of the addresses and waits until so many connect.
func (b *bed) members(connected int, addrs ...string) []*nodes.Node {
	b.Helper()
	var ms []nodes.Member
	for _, a := range addrs {
		ms = append(ms, nodes.Member{ID: a, Role: "decode", RPC: a, Fingerprint: 7, Ready: true})
	}
	b.fleet.SetMembers(ms)
	b.until(func() bool { return b.fleet.Now().Usable(7) == connected })
	return b.fleet.Now().Decode
}

func (b *bed) until(cond func() bool) {
	b.Helper()
	for end := time.Now().Add(soon); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			b.Fatal("condition did not come true")
		}
	}
}

// view returns the fleet's state for a request without a prompt.
func view(s *nodes.Snapshot, model uint64, avoid []*nodes.Node) route.View {
	v := s.View()
	v.Look(nodes.Query{Fingerprint: model, Avoid: avoid})
	return v.View
}

func request(n int) *nodepb.Generate {
	return &nodepb.Generate{RequestId: "r", Attempt: 1, Prompt: []int32{1, 2, 3}, MaxTokens: uint32(n), Sampling: &nodepb.Sampling{Seed: 9}}
}

// collect reads events until each of the choices has ended.
func collect(t *testing.T, in *nodes.Inbox, choices int) map[int32][]nodes.Event {
	t.Helper()
	got := map[int32][]nodes.Event{}
	var last []nodes.Event
	for ended, after := 0, time.After(soon); ended < choices; {
		select {
		case <-in.Ready:
		case <-after:
			t.Fatalf("no end; so far %v", got)
		}
		last = in.Drain(last)
		for _, e := range last {
			got[e.Choice] = append(got[e.Choice], e)
			if e.Kind == nodes.Failed || e.Kind == nodes.Overflow || e.Finish != 0 {
				ended++
			}
		}
	}
	return got
}

func TestTokensInOrder(t *testing.T) {
	b := newBed(t)
	b.start("d1", nodestest.Options{Cached: 2})
	node := b.members(1, "d1")[0]
	in := nodes.NewInbox(1000)
	for i := range int32(5) {
		r := request(20 + int(i))
		r.Sampling.Choice, r.Output = uint32(i), []int32{4, 5}
		if _, err := node.Generate(t.Context(), r, in, i); err != nil {
			t.Fatal(err)
		}
	}
	for choice, events := range collect(t, in, 5) {
		if events[0].Kind != nodes.Accepted || events[0].Cached != 2 {
			t.Fatalf("choice %d begins with %+v", choice, events[0])
		}
		r := request(0)
		r.Sampling.Choice = uint32(choice)
		want := 20 + int(choice) - 2
		if len(events)-1 != want {
			t.Fatalf("choice %d: %d tokens, want %d", choice, len(events)-1, want)
		}
		for i, e := range events[1:] {
			if id := nodestest.Token(r, 5+i, 1000); e.Kind != nodes.Token || e.Token != id || (e.Finish != 0) != (i == want-1) {
				t.Fatalf("choice %d token %d: %+v, want %d", choice, i, e, id)
			}
		}
	}
	if b.stale.Get() != 0 {
		t.Fatalf("%g stale tokens", b.stale.Get())
	}
}

// A token of another attempt is not delivered; one at another position ends the
// attempt on both sides.
func TestAttemptAndPositionChecks(t *testing.T) {
	b := newBed(t)
	var broken atomic.Int32
	n := b.start("d1", nodestest.Options{Garble: func(tok rpc.Token) rpc.Token {
		switch broken.Load() {
		case 1:
			if tok.Position == 6 {
				tok.Attempt++
			}
		case 2:
			if tok.Position == 6 {
				tok.Position = 7
			}
		case 3:
			if tok.Position == 6 {
				tok.Position = 5
			}
		}
		return tok
	}})
	node := b.members(1, "d1")[0]
	for mode := int32(1); mode <= 3; mode++ {
		broken.Store(mode)
		in := nodes.NewInbox(1000)
		if _, err := node.Generate(t.Context(), request(10), in, 0); err != nil {
			t.Fatal(err)
		}
		// In mode 1 position 6 is missing, so that position 7 is out of order.
		events := collect(t, in, 1)[0]
		last := events[len(events)-1]
		if last.Kind != nodes.Failed || !errors.Is(last.Err, nodes.ErrPosition) {
			t.Fatalf("mode %d: %+v", mode, last)
		}
		if len(events) != 1+3+1 { // accepted, positions 3 to 5, failed
			t.Fatalf("mode %d: %d events", mode, len(events))
		}
		if err := n.Wait(soon, func() bool { return n.Running() == 0 }); err != nil {
			t.Fatal(err)
		}
	}
	if b.stale.Get() == 0 {
		t.Fatal("no token of a foreign attempt was counted")
	}
}

func TestCancelStopsEventsAndNode(t *testing.T) {
	b := newBed(t)
	gate := make(chan struct{})
	n := b.start("d1", nodestest.Options{Gate: gate})
	node := b.members(1, "d1")[0]
	in := nodes.NewInbox(10)
	s, err := node.Generate(t.Context(), request(100), in, 0)
	if err != nil {
		t.Fatal(err)
	}
	gate <- struct{}{}
	b.until(func() bool { return len(in.Drain(nil)) > 0 })
	s.Cancel("test")
	s.Cancel("again")
	if err := n.Wait(soon, func() bool { return n.Cancelled() == 1 && n.Running() == 0 }); err != nil {
		t.Fatal(err)
	}
	in.Drain(nil)
	time.Sleep(5 * time.Millisecond)
	if left := in.Drain(nil); len(left) != 0 {
		t.Fatalf("after Cancel: %+v", left)
	}
}

func TestOverflowCancels(t *testing.T) {
	b := newBed(t)
	n := b.start("d1", nodestest.Options{})
	node := b.members(1, "d1")[0]
	in := nodes.NewInbox(50)
	if _, err := node.Generate(t.Context(), request(1<<20), in, 0); err != nil {
		t.Fatal(err)
	}
	if err := n.Wait(soon, func() bool { return n.Cancelled() == 1 }); err != nil {
		t.Fatal(err)
	}
	events := collect(t, in, 1)[0]
	tokens := 0
	for _, e := range events {
		if e.Kind == nodes.Token {
			tokens++
		}
	}
	if tokens != 50 || events[len(events)-1].Kind != nodes.Overflow {
		t.Fatalf("%d tokens, then %+v", tokens, events[len(events)-1])
	}
}

// A node's refusals arrive as its own words; its death ends every stream once,
// and a new process at the same address serves again.
func TestRefusalDeathAndReturn(t *testing.T) {
	b := newBed(t)
	b.start("d2", nodestest.Options{Refuse: func(*nodepb.Generate) (nodepb.Code, string) { return nodepb.Code_CODE_OVERLOADED, "full" }})
	gate := make(chan struct{})
	n := b.start("d1", nodestest.Options{Gate: gate})
	ns := b.members(2, "d1", "d2")
	in := nodes.NewInbox(10)
	if _, err := ns[1].Generate(t.Context(), request(5), in, 3); err != nil {
		t.Fatal(err)
	}
	var code *nodes.CodeError
	if e := collect(t, in, 1)[3][0]; !errors.As(e.Err, &code) || code.Code != nodepb.Code_CODE_OVERLOADED || code.Message != "full" {
		t.Fatalf("%+v", e)
	}
	for i := range int32(8) {
		if _, err := ns[0].Generate(t.Context(), request(5), in, i); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.Wait(soon, func() bool { return n.Running() == 8 }); err != nil {
		t.Fatal(err)
	}
	n.Stop()
	for choice, events := range collect(t, in, 8) {
		if e := events[len(events)-1]; !errors.Is(e.Err, nodes.ErrLost) {
			t.Fatalf("choice %d ended with %+v", choice, e)
		}
	}
	b.until(func() bool { return b.fleet.Now().Usable(7) == 1 })
	_, err := ns[0].Generate(t.Context(), request(5), in, 0)
	if !errors.Is(err, nodes.ErrNode) {
		t.Fatalf("attempt on a dead node: %v", err)
	}
	// The breaker opens, and then the node that is connected is used, although it
	// is one to avoid: there is always a candidate.
	b.until(func() bool {
		v := view(b.fleet.Now(), 7, []*nodes.Node{ns[1]})
		return !v.Decode[0].Usable && v.Decode[1].Usable
	})
	if v := view(b.fleet.Now(), 7, ns); v.Decode[0].Usable || !v.Decode[1].Usable {
		t.Fatalf("with both avoided: %+v", v.Decode)
	}
	b.start("d1", nodestest.Options{})
	b.until(func() bool { return b.fleet.Now().Usable(7) == 2 })
	if _, err := ns[0].Generate(t.Context(), request(5), in, 0); err != nil {
		t.Fatal(err)
	}
	collect(t, in, 1)
}

func TestViewFollowsMembersAndStats(t *testing.T) {
	b := newBed(t)
	n := b.start("d1", nodestest.Options{})
	b.start("d2", nodestest.Options{})
	b.members(2, "d1", "d2")
	state := func(i int) string {
		s := view(b.fleet.Now(), 7, nil).Decode[i]
		return fmt.Sprint(s.Usable, s.Load)
	}
	if err := n.Wait(soon, func() bool { return n.Connected() == 1 }); err != nil {
		t.Fatal(err)
	}
	n.Send(rpc.FrameStats, &nodepb.Stats{Running: 3, Waiting: 2, Held: 1})
	b.until(func() bool { return state(0) == "true 6" && state(1) == "true 0" })
	n.Send(rpc.FrameStats, &nodepb.Stats{Running: 3, Waiting: 2, Held: 1, QueuedTokens: 70, PromptTokensPerS: 8, OutputTokensPerS: 9})
	b.until(func() bool {
		s := b.fleet.Now().Decode[0].View()
		return s.Connected && s.Running == 3 && s.QueuedTokens == 70 && s.PromptTokensPerS == 8 && s.OutputTokensPerS == 9
	})
	n.Send(rpc.FrameStats, &nodepb.Stats{Draining: true})
	b.until(func() bool { return state(0) == "false 0" && b.fleet.Now().Usable(7) == 1 })
	b.fleet.SetMembers([]nodes.Member{
		{Role: "decode", RPC: "d2", Fingerprint: 8, Ready: true},
		{Role: "prefill", RPC: "p1", Fingerprint: 7, Ready: true},
		{Role: "prefill", RPC: "p2", Fingerprint: 7},
		{Role: "gateway", RPC: "g", Ready: true}})
	s := b.fleet.Now()
	if v := view(s, 7, nil); len(v.Decode) != 1 || v.Decode[0].Usable || len(v.Prefill) != 2 || !v.Prefill[0].Usable || v.Prefill[1].Usable {
		t.Fatalf("%+v", v)
	}
	said := b.start("d3", nodestest.Options{Hello: &nodepb.Hello{NodeId: "d3", Fingerprint: 9}})
	b.fleet.SetMembers([]nodes.Member{{Role: "decode", RPC: said.Addr, Ready: true}})
	b.until(func() bool { return b.fleet.Now().Usable(9) == 1 && b.fleet.Now().Usable(8) == 0 })
	if v := view(s, 8, nil); !v.Decode[0].Usable || view(s, 7, nil).Decode[0].Usable {
		t.Fatalf("%+v", v)
	}
}

func TestBundle(t *testing.T) {
	b := newBed(t)
	want := &nodepb.Bundle{Model: "x", Fingerprint: 1, TokenizerJson: []byte("{}"), ChatTemplate: "t"}
	b.start("d1", nodestest.Options{Bundle: want})
	node := b.members(1, "d1")[0]
	got, err := node.Bundle(t.Context())
	if err != nil || !proto.Equal(got, want) {
		t.Fatalf("%v, %v", got, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := node.Bundle(ctx); err == nil {
		t.Fatal("a bundle after the caller has gone")
	}
}

// Random starts, cancels and kills: every stream that was not cancelled gets
// exactly one last event, and none after it.
func TestRandomLives(t *testing.T) {
	for seed := range uint64(8) {
		r := rand.New(rand.NewPCG(seed, 8))
		b := newBed(t)
		ns := map[string]*nodestest.Node{}
		for _, a := range []string{"a", "b", "c"} {
			ns[a] = b.start(a, nodestest.Options{})
		}
		fleet := b.members(3, "a", "b", "c")
		in := nodes.NewInbox(100)
		streams, ends, cancelled := map[int32]*nodes.Stream{}, map[int32]int{}, map[int32]bool{}
		drain := func() {
			for _, e := range in.Drain(nil) {
				if ends[e.Choice] > 0 {
					t.Fatalf("seed %d: choice %d: %+v after its end", seed, e.Choice, e)
				}
				if e.Kind == nodes.Failed || e.Kind == nodes.Overflow || e.Finish != 0 {
					ends[e.Choice]++
				}
			}
		}
		for i := range int32(150) {
			s, err := fleet[r.IntN(3)].Generate(t.Context(), request(1+r.IntN(40)), in, i)
			if err == nil {
				streams[i] = s
			}
			switch r.IntN(12) {
			case 0:
				for c, s := range streams { // any one
					drain()
					s.Cancel("test")
					cancelled[c] = ends[c] == 0
					break
				}
			case 1:
				a := []string{"a", "b", "c"}[r.IntN(3)]
				ns[a].Stop()
				ns[a] = b.start(a, nodestest.Options{})
			case 2:
				drain()
			}
		}
		b.until(func() bool {
			drain()
			for c := range streams {
				if ends[c] == 0 && !cancelled[c] {
					return false
				}
			}
			return true
		})
		b.fleet.Close()
		for _, n := range ns {
			n.Stop()
		}
	}
}

// lines are the lines of a log.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

// Write implements io.Writer.
func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) has(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.text.String(), text)
}

// The end of a node that has drained is no warning. That of other nodes, and of a draining node with
// streams, is one.
func TestEndOfDrainedNode(t *testing.T) {
	for _, c := range []struct {
		name             string
		draining, stream bool
		want             string
	}{
		{"drained", true, false, `level=INFO msg="drained node has closed its connection" node=d1`},
		{"serving", false, false, `level=WARN msg="node's connection lost" node=d1`},
		{"draining with a stream", true, true, `level=WARN msg="node's connection lost" node=d1`},
	} {
		t.Run(c.name, func(t *testing.T) {
			log := new(lines)
			b := newBed(t, func(o *nodes.Options) { o.Log = slog.New(slog.NewTextHandler(log, nil)) })
			gate := make(chan struct{})
			defer close(gate)
			d := b.start("d1", nodestest.Options{Gate: gate})
			node := b.members(1, "d1")[0]
			if c.stream {
				if _, err := node.Generate(t.Context(), request(5), nodes.NewInbox(10), 0); err != nil {
					t.Fatal(err)
				}
				b.until(func() bool { return d.Running() == 1 })
			}
			b.fleet.SetMembers([]nodes.Member{{ID: "d1", Role: "decode", RPC: "d1", Fingerprint: 7, Ready: !c.draining, Draining: c.draining}})
			d.Stop()
			b.until(func() bool { return log.has(c.want) })
		})
	}
}
