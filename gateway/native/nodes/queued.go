package nodes

import (
	"sync/atomic"

	"github.com/tandem-serving/tandem/gateway/route"
	"github.com/tandem-serving/tandem/internal/lengths"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
)

// queued counts the prompt tokens of this gateway that a node is to compute, as far as is known.
type queued struct {
	tokens   atomic.Int64
	byLength [lengths.N]atomic.Int64 // of these, as in lengths.Queue
}

// Computes counts tokens of a prompt that the node is to compute.
func (n *Node) Computes(tokens int) { n.queued.add(tokens, tokens) }

// Computed removes them again.
func (n *Node) Computed(tokens int) { n.queued.add(tokens, -tokens) }

// Queued returns how many tokens the node is to compute.
func (n *Node) Queued() int { return int(n.queued.tokens.Load()) }

func (q *queued) add(length, tokens int) {
	q.tokens.Add(int64(tokens))
	for i := lengths.Class(length); i < lengths.N; i++ {
		q.byLength[i].Add(int64(tokens))
	}
}

// sent copies the counts for a routing decision.
func (q *queued) sent(s *route.Sent) {
	s.Queued = int(q.tokens.Load())
	if s.Queued == 0 {
		return
	}
	for i := range q.byLength {
		s.Lengths[i] = int(q.byLength[i].Load())
	}
}

// lengthsOf returns a heartbeat's queue by length.
func lengthsOf(m *nodepb.Stats) (q lengths.Queue) {
	for i := range min(len(q), len(m.QueuedByLength)) {
		q[i] = int(m.QueuedByLength[i])
	}
	return q
}
