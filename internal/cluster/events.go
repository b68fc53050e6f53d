package cluster

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

// Bounds of the messages that wait for a subscriber; NATS drops further ones.
const (
	subscribeMessages = 16384
	subscribeBytes    = 64 << 20
)

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
