package route

import "github.com/tandem-serving/tandem/internal/lengths"

// Report is what a node says of itself in a heartbeat.
type Report struct {
	Running, Waiting, Held int           // requests; Held wait for KV of other nodes
	Queued                 int           // prompt tokens that wait to be computed
	ShortFirst             bool          // prompts with the least work left are computed first
	Lengths                lengths.Queue // where ShortFirst, Queued by length
	Rate                   float64       // prompt tokens it computes per second; 0: not known
	StepTokens             int           // most tokens of a step; 0: not known
	Memory                 Memory
}

// Sent is what a gateway has sent to a node and has not seen done.
type Sent struct {
	Requests int
	Queued   int           // prompt tokens that the node is to compute
	Lengths  lengths.Queue // of them, by length
	Blocks   int           // that decisions since the heartbeat took; negative: that ended requests gave back
}

// Merge sets Load, Queued, Rate and Memory. answer is the KV blocks that an answer
// of the model is expected to take. A heartbeat is old and knows of all
// gateways, a gateway's own counts are new and know of its own requests: the
// larger of the two counts.
func (s *State) Merge(r *Report, own Sent, answer int) {
	s.Load = max(r.Running+r.Waiting+r.Held, own.Requests)
	s.Queued, s.ShortFirst, s.Lengths = max(r.Queued, own.Queued), r.ShortFirst, r.Lengths
	for i, tokens := range own.Lengths {
		s.Lengths[i] = max(s.Lengths[i], tokens)
	}
	s.Rate, s.StepTokens = r.Rate, r.StepTokens
	if s.Memory = r.Memory; s.Memory.Total > 0 {
		s.Memory.Growing(r, answer)
		s.Memory.Reserved += own.Blocks
	}
}
