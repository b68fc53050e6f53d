package roles

import (
	"sync/atomic"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/internal/cluster"
)

// blockNews is what a node tells of its prefix cache, from when it can.
type blockNews struct{ atomic.Pointer[cluster.News] }

// tell is the engine's OnBlocks.
func (b *blockNews) tell(events []kvcache.Event, gap bool) {
	if n := b.Load(); n != nil {
		n.Tell(events, gap)
	}
}

// begin starts to tell, and answers who asks for everything.
func (b *blockNews) begin(n *node, bus *cluster.Bus) error {
	news, err := cluster.NewNews(bus, n.Bundle.ModelName, n.Name, n.Log)
	if err != nil {
		return err
	}
	b.Store(news)
	news.Answer(bus, n.Bundle.ModelName, n.Name, n.eng.PublishBlocks)
	n.meters.News(news.Dropped)
	return nil
}
