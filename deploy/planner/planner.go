// Package planner chooses the numbers of prefill and decode nodes for a load.
//
// Formulas bound the numbers from below (formula.go), so that few fleets are left. A simulator,
// which the caller supplies, decides among them: first on a part of the load, then on the whole of
// it. The chosen fleet meets every objective, and no fleet with one node fewer that was simulated
// does. Its neighbours, the load at which it fails, and the loss of a node are simulated, too.
//
// Invariant: equal problems give equal plans. The simulated requests are at most Problem.Budget.
//
// The package is pure. It reads no profiles or traces, and knows no routing: the simulator does.
package planner

import (
	"cmp"
	"errors"
	"fmt"
	"time"
)

// ErrProblem means that no plan can be made of the input. Its text has the value and the remedy.
var ErrProblem = errors.New("planner: bad problem")

// Node is a kind of node.
type Node struct {
	Name     string
	GPUs     int     // that compute one model
	Price    float64 // per hour in US dollars; 0: not known
	KVTokens int     // of its KV memory
	Error    float64 // likely relative error of the step times; 0: measured

	// Chunk returns the seconds of a step that computes so many prompt tokens after so many others.
	Chunk func(tokens, start int) float64
	// Coefficients of a step that decodes, in seconds.
	Fixed, PerSeq, PerCtx float64
	Mixed                 float64 // share of the shorter kind of work that a step with both kinds takes
	Alone                 float64 // seconds of a step that decodes one short sequence
	// Latency is the seconds of a request in addition to its steps, without waiting.
	Latency float64

	// Prefill is the kind of the prefill nodes, if that is another one. Its fleets have pools.
	Prefill *Node
}

// prefill returns the kind of the prefill nodes.
func (n *Node) prefill() *Node { return cmp.Or(n.Prefill, n) }

// computing returns the kinds of the nodes that may compute a prompt.
func (n *Node) computing() []*Node {
	if n.Prefill == nil {
		return []*Node{n}
	}
	return []*Node{n.Prefill, n}
}

// likelyError returns the larger error of the kind's nodes.
func (n *Node) likelyError() float64 { return max(n.Error, n.prefill().Error) }

// Request is a request of the load.
type Request struct {
	At             time.Duration
	Prompt, Output int // tokens
	Cached         int // tokens of the prompt that earlier prompts also begin with
}

// Settings are the settings of a fleet's nodes and gateways.
type Settings struct {
	BatchedTokens int // of a step
	MaxSeqs       int // requests that a node runs at once
	MinRemote     int // uncached tokens from which on a prompt is computed by a prefill node
}

// Fleet is the numbers of nodes of a kind, and their settings.
type Fleet struct {
	Node            int // index in Problem.Nodes
	Prefill, Decode int // without prefill nodes the decode nodes are colocated
	Settings
}

// Nodes returns the number of nodes.
func (f Fleet) Nodes() int { return f.Prefill + f.Decode }

// Size returns the fleet's numbers as --fleet of tandem sim takes them, such as 6P2D.
func (f Fleet) Size() string {
	if f.Prefill == 0 {
		return fmt.Sprintf("%dD", f.Decode)
	}
	return fmt.Sprintf("%dP%dD", f.Prefill, f.Decode)
}

// Loss is the role of a node that dies in a simulation and starts again.
type Loss uint8

// Losses.
const (
	NoLoss Loss = iota
	LosePrefill
	LoseDecode
)

// Case is one simulation.
type Case struct {
	Fleet
	Part     bool    // of the load, instead of the whole
	Load     float64 // factor on the load
	Slow     float64 // factor on the duration of steps
	Unshared float64 // share of the requests whose prompts have nothing in common with others
	Loss     Loss
}

// Quantiles are the 50th, 90th and 99th percentile.
type Quantiles struct{ P50, P90, P99 time.Duration }

// Outcome is the result of a simulation. In percentiles, a request that failed counts as the
// longest time.
type Outcome struct {
	Values                  []time.Duration // of each objective
	Goodput                 float64         // share of requests that meet every limit
	Failed                  int
	TTFT, TPOT, ITL         Quantiles
	PrefillBusy, DecodeBusy float64 // share of the time
	DecodeKV                float64 // share of KV memory in use on the fullest decode node, at most
	Waited                  int     // requests that waited in a gateway
	Resumed, Preempted      int
	Cached                  float64 // share of prompt tokens that the computing nodes had cached
	Local                   float64 // share of prompts that decode nodes computed
	Input, Output           float64 // tokens per second
	RequestRate             float64 // per second
	Points, Coefficients    int     // parts of steps whose duration the profile's points, or its coefficients, have
}

// Failing is the value of a percentile that failed requests reach.
const Failing = time.Duration(1<<63 - 1)

// Metric is a latency of a request, or between its tokens.
type Metric string

// Metrics.
const (
	TTFT Metric = "ttft" // time to the first token
	TPOT Metric = "tpot" // mean time per further token of a request
	ITL  Metric = "itl"  // times between tokens, of all requests together
	E2EL Metric = "e2el" // time to the last token
)

// Objective is an upper limit of a metric's percentile.
type Objective struct {
	Metric     Metric
	Percentile float64 // 0 to 100
	Limit      time.Duration
}

// Name returns the metric and percentile, such as TTFT p90.
func (o Objective) Name() string { return fmt.Sprintf("%s p%g", o.Metric.Title(), o.Percentile) }

// Title returns the metric's name in capitals.
func (m Metric) Title() string {
	if m == E2EL {
		return "latency"
	}
	return map[Metric]string{TTFT: "TTFT", TPOT: "TPOT", ITL: "ITL"}[m]
}

// Problem is the input of a plan.
type Problem struct {
	Nodes      []Node
	Requests   []Request // in order of arrival
	Objectives []Objective
	Goodput    float64 // share of requests that have to meet every limit; 0: only percentiles count

	Settings  []Settings // the first one counts until nodes are found, then the best is taken
	Colocated bool       // also consider nodes that do both
	Disjoint  bool       // also consider pools
	MaxNodes  int        // of a fleet
	Spare     int        // nodes that are added to each pool
	Plots     bool       // also simulate what only plots show
	Brief     bool       // simulate no neighbours, growth, losses and slower steps
	Budget    int        // simulated requests
	Whole     int        // requests of the whole load that is simulated
	PartOf    int        // requests of the part

	// Simulate runs cases, in any order, and returns their outcomes.
	Simulate func([]Case) ([]Outcome, error)
}

// Meets reports whether an outcome meets every objective.
func (p *Problem) Meets(o *Outcome) bool { return p.Margin(o) >= 0 }

// Margin returns how far an outcome is from the objective that it is closest to fail, as a share of
// the limit. It is negative if one fails.
func (p *Problem) Margin(o *Outcome) float64 {
	least := 1.0
	for i, g := range p.Objectives {
		least = min(least, 1-float64(o.Values[i])/float64(g.Limit))
	}
	if p.Goodput > 0 {
		least = min(least, o.Goodput-p.Goodput)
	}
	return least
}

// Fails returns the names of the objectives that an outcome fails.
func (p *Problem) Fails(o *Outcome) (names []string) {
	for i, g := range p.Objectives {
		if o.Values[i] > g.Limit {
			names = append(names, g.Name())
		}
	}
	if o.Goodput < p.Goodput {
		names = append(names, "goodput")
	}
	return names
}
