package cluster

import (
	"log/slog"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// republishEvery is the shortest interval at which a node publishes all its blocks again.
// Every subscriber that missed a message asks for them, and one answer serves all.
const republishEvery = time.Second

// EventPublisher publishes the changes of a node's prefix cache, so that gateways route prompts
// to the node with their prefix. Blocks of every KV group are published, under hashes of their
// group (kvcache.Hash.In). It never delays a token: messages that cannot be sent are dropped,
// gateways notice by the numbers and ask, and the node publishes all blocks in a new epoch.
type EventPublisher struct {
	open func() (*Publisher, error) // a new epoch, which subscribers start from an empty cache
	pub  *Publisher
	log  *slog.Logger

	mu        sync.Mutex // guards the change of pub, and the two below
	past      uint64     // messages that former publishers dropped
	requested time.Time  // when all blocks were last requested

	stored  []Stored
	removed []uint64
}

// NewEventPublisher returns the publisher of a node's events; its Publish is the engine's
// OnBlocks.
func NewEventPublisher(bus *Bus, model, node string, log *slog.Logger) (*EventPublisher, error) {
	p := &EventPublisher{log: log, open: func() (*Publisher, error) {
		return bus.Publisher(model, node, uint64(time.Now().UnixNano()))
	}}
	var err error
	p.pub, err = p.open()
	return p, err
}

// Answer calls all, which starts to publish all blocks again, when a subscriber asks for them.
func (p *EventPublisher) Answer(bus *Bus, model, node string, all func()) {
	bus.answer(model, node, func() {
		p.mu.Lock()
		soon := time.Since(p.requested) < republishEvery
		if !soon {
			p.requested = time.Now()
		}
		p.mu.Unlock()
		if !soon { // a subscriber that asks again later is answered then
			all()
		}
	})
}

// Dropped returns the number of messages that were not sent. Any goroutine may call it.
func (p *EventPublisher) Dropped() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.past + p.pub.Dropped()
}

// Publish publishes the changes of a step or, after a gap, all blocks of the cache. Within a
// message, removals precede stores, so that a removal after a store of the same step starts
// another message.
func (p *EventPublisher) Publish(events []kvcache.Event, gap bool) {
	if gap {
		// In a new epoch, every subscriber starts from an empty cache.
		pub, err := p.open()
		if err != nil {
			p.log.Warn("block events stop", "err", err)
			return
		}
		p.pub.Close()
		p.mu.Lock()
		p.past += p.pub.Dropped()
		p.pub = pub
		p.mu.Unlock()
	}
	for _, e := range events {
		hash := uint64(e.Hash.In(e.Group))
		if e.Kind == kvcache.Stored {
			p.stored = append(p.stored, Stored{Hash: hash, Parent: uint64(e.Parent)})
			continue
		}
		if len(p.stored) > 0 {
			p.send()
		}
		p.removed = append(p.removed, hash)
	}
	p.send()
}

// send publishes the collected changes; the publisher encodes them at once.
func (p *EventPublisher) send() {
	if len(p.stored)+len(p.removed) > 0 {
		p.pub.Publish(p.stored, p.removed)
		p.stored, p.removed = p.stored[:0], p.removed[:0]
	}
}
