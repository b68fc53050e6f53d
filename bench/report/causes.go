package report

import (
	"fmt"
	"html"
	"math"
	"strings"
)

// Total is a histogram's sum and count since its node started.
type Total struct{ Sum, Count float64 }

// during returns the increase of a total between a node's first and last sample.
func (n *Node) during(of func(*Sample) Total) Total {
	if len(n.Samples) < 2 {
		return Total{}
	}
	a, b := of(&n.Samples[0]), of(&n.Samples[len(n.Samples)-1])
	return Total{b.Sum - a.Sum, b.Count - a.Count}
}

// prompted returns the prompt tokens that the node computed in that time.
func (n *Node) prompted() float64 {
	return n.during(func(s *Sample) Total { return Total{Sum: s.Prompted} }).Sum
}

// running returns the mean number of requests in the node's steps.
func (n *Node) running() (mean float64) {
	for _, s := range n.Samples {
		mean += s.Running / float64(len(n.Samples))
	}
	return mean
}

// part is a part of the wait for a first token.
type part struct {
	name string
	ms   float64 // mean over all requests
}

// costs is the time of one load at one server, over all of its runs: sums of its nodes'
// own metrics for each completed request.
type costs struct {
	parts               []part  // of the wait for a first token
	step                float64 // milliseconds of a step of the nodes that generate
	running             float64 // requests in one of those
	generated, prompted float64 // tokens in one of those: of answers, and of prompts
	generators, others  int     // nodes that generate, and that compute prompts only
	busiest, prefill    float64 // cores: of the busiest node that generates; of each node that only computes prompts
	cores               float64 // of all processes
}

// Names of parts.
const (
	partTurn    = "waiting for a turn" // at the node that generates or, for its KV, at a prefill node
	partCompute = "computing prompts"
	partExposed = "KV transfers after the prompt is computed"
)

// addRun adds one run.
func (c *costs) addRun(p *Point, runs float64, sums map[string]float64, steps *Total) {
	for i := range p.Nodes {
		n := &p.Nodes[i]
		queue := n.during(func(s *Sample) Total { return s.Queue })
		prompt := n.during(func(s *Sample) Total { return s.Prompt })
		c.cores += n.Cores() / runs
		switch {
		case n.during(func(s *Sample) Total { return s.Steps }).Count == 0: // no engine
		case n.Generated() > 0:
			c.generators++
			c.busiest = max(c.busiest, n.Cores())
			c.running += n.running()
			c.generated += n.Generated()
			c.prompted += n.prompted()
			sums[partTurn] += queue.Sum
			sums[partCompute] += prompt.Sum
			s := n.during(func(s *Sample) Total { return s.Steps })
			steps.Sum, steps.Count = steps.Sum+s.Sum, steps.Count+s.Count
		default:
			c.others++
			c.prefill += n.Cores()
			exposed := n.during(func(s *Sample) Total { return s.Exposed })
			sums[partCompute] += prompt.Sum
			sums[partExposed] += exposed.Sum
			// Both are waits of the node that needs the KV, as is the wait for a grant, which
			// the queue of a prefill node does not include.
			sums[partTurn] -= prompt.Sum + exposed.Sum
		}
	}
}

// costs returns the costs of the runs of a load. ok is false if its nodes have no metrics.
func (r repeated) costs() (c costs, ok bool) {
	sums, steps, completed := map[string]float64{}, Total{}, 0
	for _, p := range r {
		completed += p.Summary.Completed
		c.addRun(p, float64(len(r)), sums, &steps)
	}
	if completed == 0 || steps.Count == 0 {
		return c, false
	}
	for _, name := range []string{partTurn, partCompute, partExposed} {
		c.parts = append(c.parts, part{name, max(0, 1e3*sums[name]/float64(completed))})
	}
	c.step = 1e3 * steps.Sum / steps.Count
	c.generated, c.prompted = c.generated/steps.Count, c.prompted/steps.Count
	c.running /= float64(c.generators)
	if c.others > 0 {
		c.prefill /= float64(c.others)
	}
	c.generators, c.others = c.generators/len(r), c.others/len(r)
	return c, true
}

// differ reports whether a figure of two servers differs clearly, and returns both medians.
func differ(a, b repeated, of func(*Point) float64) (mine, theirs float64, clear bool) {
	mine, low, high := a.figure(of)
	theirs, otherLow, otherHigh := b.figure(of)
	return mine, theirs, (low > otherHigh || high < otherLow) && math.Abs(mine/theirs-1) > leastDifference
}

// causes returns, for one load of two servers, the reasons that their nodes' metrics give if
// one is clearly ahead. It returns nothing if neither is or the nodes have no metrics.
func causes(a, b repeated) (lines []string) {
	mine, known := a.costs()
	theirs, alike := b.costs()
	if !known || !alike {
		return nil
	}
	nameA, nameB := a[0].Server, b[0].Server
	for _, f := range []struct {
		key, what string
		why       func(a, b *costs, behind bool) string
	}{{"ttft", "first token", firstTokenCause}, {"tpot", "time per output token", tokenCause}} {
		for _, percent := range []float64{50, 99} {
			x, y, clear := differ(a, b, func(p *Point) float64 { return p.Summary.quantile(f.key, percent) })
			if !clear {
				continue
			}
			word := "ahead"
			if x > y {
				word = "behind"
			}
			name := map[float64]string{50: "median", 99: "P99"}[percent]
			lines = append(lines, fmt.Sprintf("%s, %s: %s is %s of %s, %s %.3g ms against %.3g ms. %s", a[0].Load(), f.what, nameA, word, nameB, name, x, y,
				f.why(&mine, &theirs, x > y)))
			break // the other percentile has the same parts
		}
	}
	return lines
}

// firstTokenCause names the part of the wait that contributes most to the difference.
func firstTokenCause(a, b *costs, behind bool) string {
	var all []string
	most, by := "", 0.0
	for i := range a.parts {
		x, y := a.parts[i].ms, b.parts[i].ms
		all = append(all, fmt.Sprintf("%s %.3g against %.3g ms", a.parts[i].name, x, y))
		d := x - y
		if !behind {
			d = -d
		}
		if d > by {
			most, by = a.parts[i].name, d
		}
	}
	text := "Of a request's mean wait: " + strings.Join(all, ", ") + ". "
	if most == "" {
		return text + "None of these explains the difference: it comes from the few requests that wait long, or from the network between nodes and client."
	}
	text += fmt.Sprintf("The main cause is %s, %.3g ms of it", most, by)
	switch {
	case most == partTurn && behind && a.others > 0:
		text += fmt.Sprintf(": %s the prompts that %s in addition to their answers, and short prompts wait behind long ones although it is busy only %.0f %% of the time", oneNode(a.others, "prefill node has", "prefill nodes have"),
			oneNode(b.generators, "node computes", "nodes compute"), 100*a.prefill)
	case most == partTurn && !behind && a.others > 0:
		text += fmt.Sprintf(": no prompt waits for steps that are full of other requests' tokens (%.3g requests in each)", b.running)
	}
	return text + "."
}

// oneNode formats a number of nodes.
func oneNode(n int, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, more)
}

// tokenCause names what the steps that generate tokens contain.
func tokenCause(a, b *costs, behind bool) string {
	text := fmt.Sprintf("A step of the nodes that generate takes %.3g ms against %.3g ms and carries %.3g tokens of answers against %.3g and %.3g of prompts against %.3g; the busiest of them has its core busy for %.0f %% against %.0f %%. ",
		a.step, b.step, a.generated, b.generated, a.prompted, b.prompted, 100*a.busiest, 100*b.busiest)
	answers, prompts := a.generated-b.generated, a.prompted-b.prompted
	if !behind {
		answers, prompts = -answers, -prompts
	}
	more, less := "more", "on fewer nodes"
	if !behind {
		more, less = "fewer", "on more nodes"
	}
	switch {
	case prompts > 0 && prompts >= answers:
		return text + fmt.Sprintf("The cause is chunks of other requests' prompts: %s in each step.", more)
	case answers > 0:
		return text + fmt.Sprintf("The cause is the number of answers in each step: %s, because they are %s (%d against %d).", more, less, a.generators, b.generators)
	}
	return text + "Neither explains the difference: it comes from the few steps that last long, or from the processor that all processes share " + fmt.Sprintf("(%.2f cores of it against %.2f).", a.cores, b.cores)
}

// writeCauses writes why the first server is ahead of the others or behind them.
func writeCauses(b *strings.Builder, mine, others []repeated) {
	var lines []string
	for _, r := range mine {
		if q := sameLoad(others, r); q != nil {
			lines = append(lines, causes(r, q)...)
		}
	}
	if len(lines) == 0 {
		return
	}
	b.WriteString("<p>Causes, by the nodes' own metrics of these runs:</p>\n<ul>")
	for _, l := range lines {
		fmt.Fprintf(b, "<li>%s</li>", html.EscapeString(l))
	}
	b.WriteString("</ul>\n")
}
