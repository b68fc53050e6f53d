package route

import (
	"math"
	"time"

	"github.com/tandem-serving/tandem/internal/lengths"
)

// Report is the part of a node's heartbeat that routing uses.
type Report struct {
	Running, Waiting, Held int           // requests; Held ones wait for KV of other nodes
	Queued                 int           // prompt tokens that wait to be computed
	ShortFirst             bool          // prompts with the least work left are computed first
	Lengths                lengths.Queue // where ShortFirst, Queued by length
	Rate                   float64       // prompt tokens it computes per second; 0: not known
	StepTokens             int           // most tokens of a step; 0: not known
	Memory                 Memory
}

// Sent is the work that a gateway has sent to a node and that is not done.
type Sent struct {
	Requests int
	Queued   int           // prompt tokens that the node is to compute
	Lengths  lengths.Queue // of them, by length
	Blocks   int           // taken by decisions since the heartbeat, less those of requests that ended
}

// Merge sets Load, Queued, Rate and Memory. answer is the expected number of KV blocks of an
// answer. A heartbeat is older and covers all gateways; the gateway's own counts are current and
// cover its own requests. Merge uses the larger of both.
func (s *State) Merge(r *Report, own Sent, answer int) {
	s.Load = Count(max(r.Running+r.Waiting+r.Held, own.Requests))
	s.Queued, s.ShortFirst = Count(max(r.Queued, own.Queued)), r.ShortFirst
	for i, tokens := range own.Lengths {
		s.Lengths[i] = Count(max(r.Lengths[i], tokens))
	}
	s.Rate, s.StepTokens = r.Rate, Count(r.StepTokens)
	s.Memory = r.Memory
	s.Memory.Reserve(own.Blocks, r.Running, r.Waiting+r.Held, answer)
}

// leastBacklog is the number of prompt tokens that may always wait on a node. It is worth some
// steps, so that a slow node, or one of unknown speed, does not run dry between two requests.
const leastBacklog = 2048

// Room returns how many requests a decode node takes in addition to those of other gateways. own is
// the number of the report's requests that are this gateway's. A node takes as many requests as it
// runs at once, and waiting more. A node that cannot run so many, for want of KV blocks, takes
// those that it runs, and waiting more.
func (r *Report) Room(maxRunning, waiting, own int) int {
	if r.Waiting > waiting {
		maxRunning = min(maxRunning, max(1, r.Running))
	}
	others := max(0, r.Running+r.Waiting+r.Held-own)
	return max(0, maxRunning+waiting-others)
}

// Backlog returns how many prompt tokens keep the node busy for so long.
func (r *Report) Backlog(busy time.Duration) int64 {
	return max(leastBacklog, int64(r.Rate*busy.Seconds()))
}

// Count returns n, or the nearest number that a field of State can have.
func Count(n int) int32 { return int32(min(max(n, math.MinInt32), math.MaxInt32)) }
