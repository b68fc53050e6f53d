package cluster

import (
	"log/slog"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// anewEvery is how often at most a node tells everything anew: listeners that
// have missed something ask, each for itself, and one answer serves all.
const anewEvery = time.Second

// News tells gateways what a node's prefix cache holds, so that prompts go where
// their prefix is. Blocks of every KV group are told of, each group's by names of its
// own (kvcache.Hash.In). It is off every token's path: what cannot be sent is dropped, gateways
// notice by the numbers and ask, and the node tells everything in a new epoch.
type News struct {
	open func() (*Publisher, error) // a new stream, whose listeners begin from nothing
	pub  *Publisher
	log  *slog.Logger

	mu   sync.Mutex // of pub's change, and of the two below
	past uint64     // messages that former publishers dropped
	anew time.Time  // when everything was last asked for

	stored  []Stored
	removed []uint64
}

// NewNews makes the engine's OnBlocks.
func NewNews(bus *Bus, model, node string, log *slog.Logger) (*News, error) {
	n := &News{log: log, open: func() (*Publisher, error) {
		return bus.Publisher(model, node, uint64(time.Now().UnixNano()))
	}}
	var err error
	n.pub, err = n.open()
	return n, err
}

// Answer has everything told anew, which all is to begin, when a listener asks.
func (n *News) Answer(bus *Bus, model, node string, all func()) {
	bus.answer(model, node, func() {
		n.mu.Lock()
		soon := time.Since(n.anew) < anewEvery
		if !soon {
			n.anew = time.Now()
		}
		n.mu.Unlock()
		if !soon { // who asks again later is answered then
			all()
		}
	})
}

// Dropped counts messages that were not sent. Any goroutine may call it.
func (n *News) Dropped() uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.past + n.pub.Dropped()
}

// Tell publishes a step's changes, or, behind a gap, all that the cache holds. A message removes before it stores, so
// events are cut where a removal follows a store of the same step.
func (n *News) Tell(events []kvcache.Event, gap bool) {
	if gap {
		// A new epoch makes every listener start over.
		pub, err := n.open()
		if err != nil {
			n.log.Warn("block events stop", "err", err)
			return
		}
		n.pub.Close()
		n.mu.Lock()
		n.past += n.pub.Dropped()
		n.pub = pub
		n.mu.Unlock()
	}
	for _, e := range events {
		hash := uint64(e.Hash.In(e.Group))
		if e.Kind == kvcache.Stored {
			n.stored = append(n.stored, Stored{Hash: hash, Parent: uint64(e.Parent)})
			continue
		}
		if len(n.stored) > 0 {
			n.send()
		}
		n.removed = append(n.removed, hash)
	}
	n.send()
}

// send hands over what has gathered; the publisher encodes it at once.
func (n *News) send() {
	if len(n.stored)+len(n.removed) > 0 {
		n.pub.Publish(n.stored, n.removed)
		n.stored, n.removed = n.stored[:0], n.removed[:0]
	}
}
