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

	o        Options
	adapters *rpc.AdapterDesk
	draining rpc.Draining // guarded by o.Lock
	rates    throughput   // guarded by o.Lock

	sending sync.Mutex // keeps heartbeats in the order of their content
}

// throughput is a node's tokens per second.
type throughput struct {
	at             time.Time // of the counts; zero: there are none
	prompt, output uint64    // tokens since the start
	prompts        float64   // prompt tokens per second before at
	outputs        float64
}

// rateInterval is the least time over which throughput is measured.
const rateInterval = time.Second

// update measures the throughput at now, if enough time has passed.
func (t *throughput) update(now time.Time, prompt, output uint64) {
	if d := now.Sub(t.at); t.at.IsZero() {
		t.at, t.prompt, t.output = now, prompt, output
	} else if d >= rateInterval {
		*t = throughput{now, prompt, output, float64(prompt-t.prompt) / d.Seconds(), float64(output-t.output) / d.Seconds()}
	}
}

// New returns a Base that takes work.
func New(o Options) *Base {
	b := &Base{o: o}
	// Gateways learn of a change before its answer arrives on the same connection.
	b.adapters = rpc.NewAdapterDesk(o.Engine, engine.ErrAdapter, b.Heartbeat)
	return b
}

// Frame handles the frames of gateways that all roles take, and logs others.
func (b *Base) Frame(c *rpc.Conn, t rpc.Type, stream uint64, payload []byte) {
	switch t {
	case rpc.FrameDrain:
		if b.draining.Asked(payload, b.o.Lock, b.o.Log, b.o.End) {
			b.Heartbeat()
		}
	case rpc.FrameLoadAdapter, rpc.FrameUnloadAdapter:
		b.adapters.Frame(c, t, stream, payload)
	default:
		b.o.Log.Debug("frame ignored", "type", t, "peer", c.RemoteAddr())
	}
}

// Draining reports whether the node takes no work.
func (b *Base) Draining() bool {
	b.o.Lock.Lock()
	defer b.o.Lock.Unlock()
	return b.draining.On()
}

// DrainingLocked is Draining for a caller that holds the lock.
func (b *Base) DrainingLocked() bool { return b.draining.On() }

// Ended wakes Drain when nothing runs any more. The caller holds the lock.
func (b *Base) Ended() { b.draining.Left(b.o.Running()) }

// StartDrain stops the node from taking work, for good. What runs continues.
func (b *Base) StartDrain() {
	b.o.Lock.Lock()
	b.draining.Leave()
	b.o.Lock.Unlock()
	b.Heartbeat()
}

// Drain stops the node from taking work and returns when nothing runs any more. When ctx ends, it
// ends what still runs.
func (b *Base) Drain(ctx context.Context) {
	b.StartDrain()
	b.draining.Wait(ctx, b.o.Lock, b.o.Running, b.o.End)
	b.Owners.Wait()
}

// Heartbeats sends heartbeats to all gateways until ctx ends.
func (b *Base) Heartbeats(ctx context.Context) {
	rpc.Beat(ctx, b.o.Interval, b.Stats, func(*nodepb.Stats) { b.Heartbeat() })
}

// Heartbeat sends a heartbeat to all gateways now. An earlier heartbeat never arrives after a later
// one, because gateways keep the last.
func (b *Base) Heartbeat() {
	b.sending.Lock()
	defer b.sending.Unlock()
	rpc.SendStats(b.o.Gateways(), b.Stats(), b.o.Log)
}

// Stats returns the heartbeat that is due now.
func (b *Base) Stats() *nodepb.Stats {
	st := b.o.Engine.Stats()
	s, u := st.Scheduler, st.Scheduler.Blocks
	b.o.Lock.Lock()
	defer b.o.Lock.Unlock()
	b.rates.update(time.Now(), st.PromptComputed, st.Generated)
	m := &nodepb.Stats{
		Steps: st.Steps, Running: uint32(s.Running), Waiting: uint32(s.Waiting),
		BlocksTotal: uint32(u.Blocks), BlocksUsed: uint32(u.Blocks - u.Free - u.Cached),
		PrefillTokensPerS: st.PromptRate, QueuedTokens: uint32(s.Pending), StepTokens: uint32(s.StepTokens),
		Draining: b.draining.On(), Adapters: b.adapters.List(),
		PromptTokensPerS: b.rates.prompts, OutputTokensPerS: b.rates.outputs,
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
