// Package node is what prefill and decode nodes have in common: they send heartbeats to gateways,
// drain, load adapters, and map the engine's errors to the protocol's codes.
//
// Invariant: a node that drains takes no work, and all its gateways are notified at once.
//
// The package knows neither requests nor KV blocks. The role's own lock guards its state.
package node

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// DefaultStatsInterval is the interval of heartbeats while the load does not change.
const DefaultStatsInterval = 500 * time.Millisecond

// Identity is what must agree between nodes that exchange KV.
type Identity struct {
	Model       string // served name; decode nodes
	Fingerprint uint64 // of the weights
	Class       string // numerics class
	Layout      uint64 // hash of the KV layout
	KV          string // the KV layout in words
}

// Options of a Base. All fields are required.
type Options struct {
	Engine   *engine.Engine
	Log      *slog.Logger
	Interval time.Duration // of heartbeats; five times as often while the load changes
	Lock     sync.Locker   // guards the state of the role, and of the Base

	Gateways func() []*rpc.Conn                   // that get heartbeats; called without Lock
	Stats    func(*nodepb.Stats, scheduler.Stats) // adds to a heartbeat what only the role knows; called with Lock
	Running  func() int                           // attempts or jobs that have not ended; called with Lock
	End      func()                               // ends them; called without Lock
}

// Base is the common part of a role, which embeds it. Make it with New.
type Base struct {
	Owners sync.WaitGroup // goroutines that own an attempt or a job

	o           Options
	adapterWork chan struct{} // capacity maxAdapterWork
	draining
}

// New returns a Base that takes work.
func New(o Options) *Base {
	return &Base{o: o, adapterWork: make(chan struct{}, maxAdapterWork)}
}

// Frame handles the frames of gateways that all roles take, and logs others.
func (b *Base) Frame(c *rpc.Conn, t rpc.Type, stream uint64, payload []byte) {
	switch t {
	case rpc.FrameDrain:
		if b.asked(payload) {
			b.Heartbeat()
		}
	case rpc.FrameLoadAdapter, rpc.FrameUnloadAdapter:
		b.adapterFrame(c, t, stream, payload)
	default:
		b.o.Log.Debug("frame ignored", "type", t, "peer", c.RemoteAddr())
	}
}

// beatsPerInterval is how many heartbeats a node sends in an interval while its load
// changes, so that all gateways see the same queues and choose alike (bench/sim).
const beatsPerInterval = 5

// Heartbeats sends heartbeats to all gateways until ctx ends: once in each interval, and up to
// beatsPerInterval times while the load changes.
func (b *Base) Heartbeats(ctx context.Context) { beat(ctx, b.o.Interval, b.Stats, b.send) }

func beat(ctx context.Context, interval time.Duration, stats func() *nodepb.Stats, send func(*nodepb.Stats)) {
	tick := time.NewTicker(max(1, interval/beatsPerInterval))
	defer tick.Stop()
	var last *nodepb.Stats
	for since := 1; ; since++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if now := stats(); since >= beatsPerInterval || loadChanged(last, now) {
			send(now)
			last, since = now, 0
		}
	}
}

// loadChanged reports whether gateways may route differently because of b.
func loadChanged(a, b *nodepb.Stats) bool {
	return a.GetRunning() != b.GetRunning() || a.GetWaiting() != b.GetWaiting() || a.GetHeld() != b.GetHeld() ||
		a.GetQueuedTokens() != b.GetQueuedTokens() || a.GetDraining() != b.GetDraining()
}

// Heartbeat sends a heartbeat to all gateways now.
func (b *Base) Heartbeat() { b.send(b.Stats()) }

// send sends a heartbeat to gateways. A lost message is followed by the next. The connection of a
// gateway that reads nothing ends by itself.
func (b *Base) send(m *nodepb.Stats) {
	for _, c := range b.o.Gateways() {
		if err := c.Send(rpc.FrameStats, 0, m); err != nil {
			b.o.Log.Debug("heartbeat not sent", "err", err)
		}
	}
}

// Stats returns the heartbeat that is due now.
func (b *Base) Stats() *nodepb.Stats {
	st := b.o.Engine.Stats()
	s, u := st.Scheduler, st.Scheduler.Blocks
	b.o.Lock.Lock()
	defer b.o.Lock.Unlock()
	m := &nodepb.Stats{
		Steps: st.Steps, Running: uint32(s.Running), Waiting: uint32(s.Waiting),
		BlocksTotal: uint32(u.Blocks), BlocksUsed: uint32(u.Blocks - u.Free - u.Cached),
		PrefillTokensPerS: st.PromptRate, QueuedTokens: uint32(s.Pending), StepTokens: uint32(s.StepTokens),
		Draining: b.on, Adapters: b.adapterList(),
	}
	b.o.Stats(m, s)
	return m
}

// Code returns the code of an error of the engine.
func Code(err error) nodepb.Code {
	switch {
	case errors.Is(err, engine.ErrClosed), errors.Is(err, engine.ErrLost):
		return nodepb.Code_CODE_DRAINING
	case errors.Is(err, scheduler.ErrQueueFull):
		return nodepb.Code_CODE_OVERLOADED
	case errors.Is(err, engine.ErrToken), errors.Is(err, scheduler.ErrTooLong):
		return nodepb.Code_CODE_INVALID
	case errors.Is(err, engine.ErrAdapter): // other nodes may have it
		return nodepb.Code_CODE_MISMATCH
	}
	return nodepb.Code_CODE_INTERNAL
}
