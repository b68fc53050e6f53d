package cluster

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

// Bounds of block events.
const (
	// publishQueue bounds the messages that wait to be written. A step makes one or
	// two, so this is some seconds of a stalled server. Further messages are dropped.
	publishQueue = 512
	// publishBeat is how often an idle publisher sends an empty message, so that
	// subscribers notice the loss of its last message too.
	publishBeat = 5 * time.Second
	// Bounds of the messages that wait for a subscriber; NATS drops further ones.
	subscribeMessages = 16384
	subscribeBytes    = 64 << 20
)

// Publisher numbers and sends one node's block events.
type Publisher struct {
	bus     *Bus
	subject string
	node    string
	epoch   uint64
	ctx     context.Context // ends with Close, or with the bus
	cancel  context.CancelFunc
	queue   chan []byte
	dropped atomic.Uint64

	mu  sync.Mutex // keeps the queue in the order of seq
	seq uint64
}

// Publisher opens the stream of a node's events. Each epoch of a node must be greater than
// the one before, such as the time at which the cache started, in nanoseconds.
func (b *Bus) Publisher(model, node string, epoch uint64) (*Publisher, error) {
	if node == "" || len(node) > maxNodeID {
		return nil, fmt.Errorf("%w: a node's ID has 1 to %d bytes, %q has %d", ErrBadEvent, maxNodeID, node, len(node))
	}
	p := &Publisher{bus: b, subject: subject(model), node: node, epoch: epoch, queue: make(chan []byte, publishQueue)}
	p.ctx, p.cancel = context.WithCancel(b.ctx)
	b.loops.Go(p.run)
	return p, nil
}

// Publish queues changes and never blocks: a full queue drops them, which subscribers
// detect by the numbers. Removed blocks were removed before Stored were stored.
func (p *Publisher) Publish(stored []Stored, removed []uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		e := BlockEvent{Node: p.node, Epoch: p.epoch}
		if len(removed) > 0 {
			n := min(len(removed), MaxEventHashes)
			e.Removed, removed = removed[:n], removed[n:]
		}
		if len(removed) == 0 {
			n := min(len(stored), MaxEventHashes)
			e.Stored, stored = stored[:n], stored[n:]
		}
		p.seq++
		e.Seq = p.seq
		select {
		case p.queue <- e.encode():
		default:
			p.dropped.Add(1)
		}
		if len(stored)+len(removed) == 0 {
			return
		}
	}
}

// Dropped returns the number of messages that were not sent: queue full, or no server.
func (p *Publisher) Dropped() uint64 { return p.dropped.Load() }

// Close ends the publisher and drops queued messages.
func (p *Publisher) Close() { p.cancel() }

func (p *Publisher) run() {
	beat := time.NewTicker(publishBeat)
	defer beat.Stop()
	quiet := true
	for {
		select {
		case m := <-p.queue:
			quiet = false
			conn := p.bus.conn.Load()
			if conn == nil || conn.Publish(p.subject, m) != nil {
				p.dropped.Add(1)
			}
		case <-beat.C:
			if quiet {
				p.Publish(nil, nil)
			}
			quiet = true
		case <-p.ctx.Done():
			return
		}
	}
}

// Subscriber handles a model's block events. Calls come one at a time, on a goroutine of
// the bus, and must not block for long, because messages are lost then.
type Subscriber interface {
	// Blocks handles the next changes of a node's prefix cache.
	Blocks(e BlockEvent)
	// Forget drops the events of a node, which are no longer valid. Its later events
	// start from an empty cache.
	Forget(node, why string)
}

// askEvery is the shortest interval at which a subscriber asks a node for all blocks of
// its cache.
const askEvery = 2 * time.Second

// Subscription is a Subscriber's place on a bus.
type Subscription struct {
	bus     *Bus
	subject string
	handle  func([]byte) // one message
	asks    string       // subject of requests to the nodes
	to      Subscriber
	bad     atomic.Uint64

	mu    sync.Mutex // serializes calls of to
	seen  tracker
	asked map[string]time.Time // when nodes were asked for all their blocks
	sub   *nats.Subscription   // nil: not connected; guarded by bus.mu
	done  bool
}

// Subscribe subscribes to all nodes of a model, now and after every reconnection.
func (b *Bus) Subscribe(model string, to Subscriber) *Subscription {
	s := &Subscription{bus: b, subject: subject(model), asks: askSubject(model), to: to, seen: tracker{}, asked: map[string]time.Time{}}
	s.handle = s.onMessage
	b.add(s)
	return s
}

// answer calls f, on a goroutine of the bus, when a subscriber asks for all blocks of a
// node's cache.
func (b *Bus) answer(model, node string, f func()) {
	b.add(&Subscription{bus: b, subject: askSubject(model), handle: func(m []byte) {
		if string(m) == node {
			f()
		}
	}})
}

func (b *Bus) add(s *Subscription) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.subs[s] = struct{}{}
	if conn := b.conn.Load(); conn != nil {
		s.subscribe(conn)
	}
}

// subscribe moves s to conn; the caller holds bus.mu. A connection that fails here is
// replaced, and s moves to the new one.
func (s *Subscription) subscribe(conn *nats.Conn) {
	sub, err := conn.Subscribe(s.subject, func(m *nats.Msg) { s.handle(m.Data) })
	if err == nil {
		err = sub.SetPendingLimits(subscribeMessages, subscribeBytes)
	}
	if err != nil {
		s.bus.o.Log.Warn("subscribing to block events failed", "error", err)
		conn.Close()
		return
	}
	s.sub = sub
}

func (s *Subscription) onMessage(b []byte) {
	e, err := decodeEvent(b)
	if err != nil {
		s.bad.Add(1)
		s.bus.o.Log.Debug("block event ignored", "error", err)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.done {
		return
	}
	v, why := s.seen.see(e)
	if v == ignore {
		return
	}
	if v == forgetAndApply {
		s.to.Forget(e.Node, why)
	}
	s.to.Blocks(e)
	if !s.seen[e.Node].whole {
		s.ask(e.Node)
	}
}

// ask asks a node to publish all its blocks again. If the request or a part of the answer
// is lost, the node's next message causes another request. The caller holds mu.
func (s *Subscription) ask(node string) {
	conn := s.bus.conn.Load()
	if conn == nil || time.Since(s.asked[node]) < askEvery {
		return
	}
	s.asked[node] = time.Now()
	if err := conn.Publish(s.asks, []byte(node)); err != nil {
		s.bus.o.Log.Debug("asking a node for its blocks failed", "node", node, "error", err)
	}
}

// Drop removes a node that has left.
func (s *Subscription) Drop(node string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.seen[node]; ok {
		delete(s.seen, node)
		delete(s.asked, node)
		s.to.Forget(node, "it has left")
	}
}

// forget drops the events of all nodes, which are asked for their blocks once a server is
// connected.
func (s *Subscription) forget(why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for node := range s.seen {
		s.to.Forget(node, why)
	}
	clear(s.seen)
	clear(s.asked)
}

// Malformed returns the number of messages that were no block events.
func (s *Subscription) Malformed() uint64 { return s.bad.Load() }

// Close ends the calls of the Subscriber; none runs after it returns. The Subscriber must
// not call it.
func (s *Subscription) Close() {
	s.bus.mu.Lock()
	delete(s.bus.subs, s)
	if s.sub != nil {
		// It fails only if the connection has ended, and the subscription with it.
		_ = s.sub.Unsubscribe()
	}
	s.bus.mu.Unlock()
	s.mu.Lock()
	s.done = true
	s.mu.Unlock()
}
