// Package node is what prefill and decode nodes have in common: they send heartbeats to gateways,
// drain, load adapters, check the prompts of gateways, and map the engine's errors to codes of the
// protocol.
//
// Invariant: a node that drains takes no work, and all its gateways are notified at once.
//
// The package has neither requests nor KV blocks. The role's own lock guards its state.
package node

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

const (
	// statsInterval is the interval of heartbeats while the load does not change.
	statsInterval = 500 * time.Millisecond
	// beatsPerInterval is how many heartbeats a node sends in an interval while its load changes,
	// so that all gateways see the same queues and choose alike (bench/sim).
	beatsPerInterval = 5
)

// Identity is what must agree between nodes that exchange KV.
type Identity struct {
	Model       string // served name
	Fingerprint uint64 // of the weights
	Class       string // numerics class
	Layout      uint64 // hash of the KV layout
	KV          string // the KV layout in words
}

// Engine is what a Base needs of *engine.Engine.
type Engine interface {
	Stats() engine.Stats
	LoadAdapter(name, path string, replace bool) (digest uint64, rank int, err error)
	UnloadAdapter(name string) error
	EachAdapter(f func(name string, digest uint64, rank int))
}

// Options of a Base. All fields but Sending are required.
type Options struct {
	Engine Engine
	Log    *slog.Logger
	Lock   sync.Locker // guards the state of the role, and of the Base

	Stats   func(*nodepb.Stats, scheduler.Stats) // adds to a heartbeat what only the role knows; called with Lock
	Sending func()                               // called before a heartbeat is sent, with Lock
	Running func() int                           // attempts or jobs that have not ended; called with Lock
	End     func()                               // ends them; called without Lock
}

// Base is the common part of a role, which embeds it. Make it with New.
type Base struct {
	Owners sync.WaitGroup // goroutines that own an attempt or a job

	o    Options
	busy chan struct{} // has a value for each adapter that is being loaded or removed

	// Guarded by o.Lock.
	drain    draining
	gateways map[*rpc.Conn]bool // that get heartbeats
	rates    throughput

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
	return &Base{o: o, busy: make(chan struct{}, maxAdapterWork), gateways: map[*rpc.Conn]bool{}}
}

// Register sends heartbeats to a gateway from now on, until Forget.
func (b *Base) Register(c *rpc.Conn) {
	b.o.Lock.Lock()
	defer b.o.Lock.Unlock()
	b.gateways[c] = true
}

// Forget sends no more heartbeats to a gateway. The caller holds the lock.
func (b *Base) Forget(c *rpc.Conn) { delete(b.gateways, c) }

// Frame handles the frames of gateways that all roles take, and logs others.
func (b *Base) Frame(c *rpc.Conn, t rpc.Type, stream uint64, payload []byte) {
	switch t {
	case rpc.FrameDrain:
		if b.asked(payload) {
			b.Heartbeat()
		}
	case rpc.FrameLoadAdapter, rpc.FrameUnloadAdapter:
		b.adapter(c, t, stream, payload)
	default:
		b.o.Log.Debug("frame ignored", "type", t, "peer", c.RemoteAddr())
	}
}

// Heartbeats sends heartbeats to all gateways until ctx ends.
func (b *Base) Heartbeats(ctx context.Context) {
	beat(ctx, b.Stats, func(*nodepb.Stats) { b.Heartbeat() })
}

// Heartbeat sends a heartbeat to all gateways now. An earlier heartbeat never arrives after a later
// one, because gateways keep the last. A lost message is followed by the next. The connection of a
// gateway that reads nothing ends by itself.
func (b *Base) Heartbeat() {
	b.sending.Lock()
	defer b.sending.Unlock()
	m := b.Stats()
	b.o.Lock.Lock()
	if b.o.Sending != nil {
		b.o.Sending()
	}
	gateways := slices.Collect(maps.Keys(b.gateways))
	b.o.Lock.Unlock()
	for _, c := range gateways {
		if err := c.Send(rpc.FrameStats, 0, m); err != nil {
			b.o.Log.Debug("heartbeat not sent", "err", err)
		}
	}
}

// beat calls send with the node's stats until ctx ends: once in each statsInterval, and up to
// beatsPerInterval times while its load changes.
func beat(ctx context.Context, stats func() *nodepb.Stats, send func(*nodepb.Stats)) {
	tick := time.NewTicker(statsInterval / beatsPerInterval)
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
		Draining: b.drain.on, Adapters: b.adapters(),
		PromptTokensPerS: b.rates.prompts, OutputTokensPerS: b.rates.outputs,
	}
	b.o.Stats(m, s)
	return m
}

// Code returns the code of an error of the engine.
func Code(err error) nodepb.Code {
	switch {
	case errors.Is(err, engine.ErrClosed), errors.Is(err, engine.ErrLost), errors.Is(err, engine.ErrDevice):
		return nodepb.Code_CODE_DRAINING
	case errors.Is(err, scheduler.ErrQueueFull):
		return nodepb.Code_CODE_OVERLOADED
	case errors.Is(err, engine.ErrToken), errors.Is(err, scheduler.ErrTooLong), errors.Is(err, engine.ErrConstraint):
		return nodepb.Code_CODE_INVALID
	case errors.Is(err, engine.ErrAdapter), errors.Is(err, engine.ErrGrammar), errors.Is(err, engine.ErrPool): // other nodes may have it
		return nodepb.Code_CODE_MISMATCH
	}
	return nodepb.Code_CODE_INTERNAL
}
