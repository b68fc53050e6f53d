package roles

import (
	"sync/atomic"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/internal/cluster"
)

// blockPublisher publishes the events of a node's prefix cache once the bus is there.
type blockPublisher struct {
	atomic.Pointer[cluster.Publisher]
}

// publish is the engine's OnBlocks.
func (b *blockPublisher) publish(events []kvcache.Event, gap bool) {
	if p := b.Load(); p != nil {
		p.Publish(events, gap)
	}
}

// start starts publishing, and answers gateways that ask for all blocks.
func (b *blockPublisher) start(n *node, bus *cluster.Bus) error {
	p, err := bus.Publisher(n.Bundle.ModelName, n.id)
	if err != nil {
		return err
	}
	b.Store(p)
	p.Answer(n.eng.PublishBlocks)
	n.meters.BlockEvents(p.Dropped)
	return nil
}
