package report

import "time"

// Sample is a node's metrics at one time.
type Sample struct {
	At        time.Time
	Fill      float64 // share of its KV blocks in use
	Tokens    float64 // generated since it started
	CPU       float64 // seconds since it started
	Prompted  float64 // prompt tokens computed since it started
	Running   float64 // requests in its steps
	Queue     Total   // seconds of requests' waits for their first step
	Prompt    Total   // seconds from there to the prompt's end
	Exposed   Total   // seconds of KV transfers after the prompt's end
	Steps     Total   // seconds of the engine's steps
	HasFill   bool    // Fill is known
	Generates bool    // Tokens is known
}

// Node is one process of the server with its samples of a run.
type Node struct {
	Name    string
	Samples []Sample
}

// Cores returns the CPU cores that the node used on average; 0: unknown.
func (n *Node) Cores() float64 {
	if len(n.Samples) < 2 {
		return 0
	}
	a, b := n.Samples[0], n.Samples[len(n.Samples)-1]
	return (b.CPU - a.CPU) / b.At.Sub(a.At).Seconds()
}

// PeakFill returns the largest share of KV blocks in use.
func (n *Node) PeakFill() (most float64) {
	for _, s := range n.Samples {
		most = max(most, s.Fill)
	}
	return most
}

// Generated returns the tokens that the node generated between its first and last sample.
func (n *Node) Generated() float64 {
	if len(n.Samples) < 2 {
		return 0
	}
	return n.Samples[len(n.Samples)-1].Tokens - n.Samples[0].Tokens
}

// rates returns a node's tokens per second and its fill, halfway between each two samples.
// Intervals without tokens are left out.
func (n *Node) rates() (at []time.Time, fill, tokens []float64) {
	for i := 1; i < len(n.Samples); i++ {
		a, b := n.Samples[i-1], n.Samples[i]
		d := b.At.Sub(a.At)
		if !a.HasFill || !b.Generates || b.Tokens <= a.Tokens || d <= 0 {
			continue
		}
		at = append(at, a.At.Add(d/2))
		fill = append(fill, 100*(a.Fill+b.Fill)/2)
		tokens = append(tokens, (b.Tokens-a.Tokens)/d.Seconds())
	}
	return at, fill, tokens
}

// fillSeries returns a point for each interval of each node: its throughput and its fill.
func fillSeries(p *Point) series {
	s := series{name: p.Name(), dots: true}
	for i := range p.Nodes {
		_, fill, tokens := p.Nodes[i].rates()
		s.x, s.y = append(s.x, fill...), append(s.y, tokens...)
	}
	return s
}

// fillTimeline returns the fill over time of the generating node that got fullest.
func fillTimeline(p *Point) series {
	s := series{name: p.Name()}
	best := -1
	for i := range p.Nodes {
		if n := &p.Nodes[i]; n.Generated() > 0 && len(n.Samples) > 0 && n.Samples[0].HasFill && (best < 0 || n.PeakFill() > p.Nodes[best].PeakFill()) {
			best = i
		}
	}
	if best < 0 {
		return s
	}
	for _, x := range p.Nodes[best].Samples {
		if at := x.At.Sub(p.Start).Seconds(); at >= 0 {
			s.x, s.y = append(s.x, at), append(s.y, 100*x.Fill)
		}
	}
	return s
}
