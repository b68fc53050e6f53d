package decode

import (
	"log/slog"
	"sync"

	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/internal/cluster"
)

// News tells gateways what this node's prefix cache holds, so that they see
// which prompts it need not compute. It speaks of the first KV group alone, the
// one that sees farthest. It is off every token's path: what cannot
// be sent is dropped, and gateways notice by the numbers.
type News struct {
	open func() (*cluster.Publisher, error) // a new stream, whose listeners begin from nothing
	pub  *cluster.Publisher
	log  *slog.Logger

	mu   sync.Mutex // of pub's change, and of past
	past uint64     // messages that former publishers dropped

	stored  []cluster.Stored
	removed []uint64
}

// NewNews makes the engine's OnBlocks; open begins a stream of events with an
// epoch later than the last.
func NewNews(open func() (*cluster.Publisher, error), log *slog.Logger) (*News, error) {
	pub, err := open()
	if err != nil {
		return nil, err
	}
	return &News{open: open, pub: pub, log: log}, nil
}

// Dropped counts messages that were not sent. Any goroutine may call it.
func (n *News) Dropped() uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.past + n.pub.Dropped()
}

// Tell publishes a step's changes. A message removes before it stores, so
// events are cut where a removal follows a store of the same step.
func (n *News) Tell(events []kvcache.Event, gap bool) {
	if gap {
		// Some changes are lost: a new epoch makes every listener start over.
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
		if e.Group != 0 {
			continue // a prefix that the first group has, the others most likely have too
		}
		if e.Kind == kvcache.Stored {
			n.stored = append(n.stored, cluster.Stored{Hash: uint64(e.Hash), Parent: uint64(e.Parent)})
			continue
		}
		if len(n.stored) > 0 {
			n.send()
		}
		n.removed = append(n.removed, uint64(e.Hash))
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
