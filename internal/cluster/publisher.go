package cluster

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// Bounds of a publisher.
const (
	// publishQueue bounds the messages that wait to be written. A step makes one or
	// two, so this is some seconds of a stalled server. Further messages are dropped.
	publishQueue = 512
	// publishBeat is how often an idle publisher sends an empty message, so that
	// subscribers notice the loss of its last message too.
	publishBeat = 5 * time.Second
	// republishEvery is the shortest interval at which a node publishes all its blocks again.
	// Every subscriber that missed a message asks for them, and one answer serves all.
	republishEvery = time.Second
)

// Publisher publishes the changes of a node's prefix cache, so that gateways route prompts
// to the node with their prefix. Blocks of every KV group are published, under hashes of their
// group (kvcache.Hash.In). It never delays a token: messages that cannot be sent are dropped,
// gateways notice by the numbers and ask, and the node publishes all blocks in a new epoch.
type Publisher struct {
	bus         *Bus
	model, node string
	queue       chan []byte
	dropped     atomic.Uint64

	mu         sync.Mutex // keeps the queue in the order of epoch and seq
	epoch, seq uint64
	requested  time.Time // when all blocks were last requested

	stored  []Stored // collected by Publish, as removed
	removed []uint64
}

// Publisher opens the stream of a node's events, which ends with the bus. Its epochs are times, so
// that those of a node that restarts increase too.
func (b *Bus) Publisher(model, node string) (*Publisher, error) {
	if node == "" || len(node) > maxNodeID {
		return nil, fmt.Errorf("%w: a node's ID has 1 to %d bytes, %q has %d", ErrBadEvent, maxNodeID, node, len(node))
	}
	p := &Publisher{bus: b, model: model, node: node, epoch: uint64(time.Now().UnixNano()), queue: make(chan []byte, publishQueue)}
	b.loops.Go(p.run)
	return p, nil
}

// Answer calls all, which starts to publish all blocks again, when a subscriber asks for them.
func (p *Publisher) Answer(all func()) {
	p.bus.answer(p.model, p.node, func() {
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

// Publish publishes the changes of a step or, after a gap, all blocks of the cache. It is the
// engine's OnBlocks. It never blocks: a full queue drops messages. Within a message, removals
// precede stores, so that a removal after a store of the same step starts another message.
func (p *Publisher) Publish(events []kvcache.Event, gap bool) {
	if gap {
		p.restart()
	}
	for _, e := range events {
		hash := uint64(e.Hash.In(e.Group))
		if e.Kind == kvcache.Stored {
			p.stored = append(p.stored, Stored{Hash: hash, Parent: uint64(e.Parent)})
			continue
		}
		if len(p.stored) > 0 {
			p.flush()
		}
		p.removed = append(p.removed, hash)
	}
	if len(p.stored)+len(p.removed) > 0 {
		p.flush()
	}
}

// restart begins a new epoch, in which every subscriber starts from an empty cache, and drops the
// messages that wait.
func (p *Publisher) restart() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.epoch, p.seq = max(p.epoch+1, uint64(time.Now().UnixNano())), 0
	for {
		select {
		case <-p.queue:
		default:
			return
		}
	}
}

// flush publishes the collected changes.
func (p *Publisher) flush() {
	p.send(p.stored, p.removed)
	p.stored, p.removed = p.stored[:0], p.removed[:0]
}

// send encodes and queues changes, as several messages if they do not fit one.
func (p *Publisher) send(stored []Stored, removed []uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		p.seq++
		e := BlockEvent{Node: p.node, Epoch: p.epoch, Seq: p.seq}
		n := min(len(removed), MaxEventHashes)
		e.Removed, removed = removed[:n], removed[n:]
		if len(removed) == 0 {
			n := min(len(stored), MaxEventHashes)
			e.Stored, stored = stored[:n], stored[n:]
		}
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

func (p *Publisher) run() {
	beat := time.NewTicker(publishBeat)
	defer beat.Stop()
	quiet := true
	for {
		select {
		case m := <-p.queue:
			quiet = false
			conn := p.bus.conn.Load()
			if conn == nil || conn.Publish(subject(p.model), m) != nil {
				p.dropped.Add(1)
			}
		case <-beat.C:
			if quiet {
				p.send(nil, nil)
			}
			quiet = true
		case <-p.bus.ctx.Done():
			return
		}
	}
}
