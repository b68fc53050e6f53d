package route

// Report is what a node says of itself in a heartbeat.
type Report struct {
	Running, Waiting, Held int     // requests; Held wait for KV of other nodes
	Queued                 int     // prompt tokens that wait to be computed
	Rate                   float64 // prompt tokens it computes per second; 0: not known
}

// Sent is what a gateway has sent to a node and has not seen done.
type Sent struct {
	Requests int
	Queued   int // prompt tokens that the node is to compute
}

// Merge sets Load, Queued and Rate. A heartbeat is old and knows of all
// gateways, a gateway's own counts are new and know of its own requests: the
// larger of the two counts.
func (s *State) Merge(r *Report, own Sent) {
	s.Load = max(r.Running+r.Waiting+r.Held, own.Requests)
	s.Queued = max(r.Queued, own.Queued)
	s.Rate = r.Rate
}
