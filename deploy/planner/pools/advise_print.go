package pools

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/deploy/planner"
	"github.com/tandem-serving/tandem/internal/cost"
)

// step is a change of the fleet, and the commands that make it.
type step struct{ Text, Command, Kubernetes string }

// print writes the step.
func (s *step) print(w io.Writer, number string) {
	fmt.Fprintf(w, "  %s%s\n", number, s.Text)
	for _, command := range []string{s.Command, s.Kubernetes} {
		if command != "" {
			fmt.Fprintf(w, "       %s\n", command)
		}
	}
}

// write writes the advice in the form that the options ask for.
func (a *advice) write(w io.Writer) error {
	if a.plan != nil && a.Helm != "" {
		if err := a.file("helm", a.Helm, a.helm); err != nil {
			return err
		}
	}
	if a.JSON {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(a.adviceJSON())
	}
	a.printAdvice(w)
	return nil
}

// printAdvice writes the advice as text, the answer first.
func (a *advice) printAdvice(w io.Writer) {
	list := a.comparison()
	for _, line := range a.headline(list) {
		fmt.Fprintln(w, line)
	}
	section := func(title string) { fmt.Fprintf(w, "\n%s\n", title) }

	section("Predicted and measured")
	a.printComparison(w, list)

	if steps := a.steps(); len(steps) > 0 {
		if len(disagreements(list)) == 0 {
			section("What to change, in this order")
		} else {
			section("What to change, if the prediction were right")
		}
		for i := range steps {
			steps[i].print(w, fmt.Sprintf("%d. ", i+1))
		}
		for _, s := range a.wholes() {
			s.print(w, "")
		}
	}

	section("What the fleet of now does if")
	fmt.Fprintln(w, "  "+legend)
	t := table{a.head("")}
	for i := range a.rows {
		if s := &a.rows[i]; s.why == "" {
			t = append(t, a.cells(&s.Row))
		}
	}
	t.write(w)
	for i := range a.rows {
		for _, line := range a.risk(&a.rows[i]) {
			fmt.Fprintln(w, "  "+line)
		}
	}

	if a.plan != nil {
		section("Cost of the advised fleet")
		for _, line := range a.costLines() {
			fmt.Fprintln(w, "  "+line)
		}
		section("What the figures rest on")
		for _, line := range a.inputs() {
			fmt.Fprintln(w, "  "+line)
		}
	}
	if a.Helm != "" && a.plan != nil {
		fmt.Fprintf(w, "Wrote %s\n", a.Helm)
	}
}

// headline returns the answer in plain words, a paragraph for each string.
func (a *advice) headline(list []compared) (lines []string) {
	now := &a.rows[0]
	if of := disagreements(list); len(of) > 0 {
		c := &of[0]
		lines = append(lines, fmt.Sprintf("Do not act on this advice: the prediction disagrees with the measurement (%s: predicted %s, measured %s), so that the advice rests on nothing. %s",
			c.Name, c.figure(c.Predicted), c.figure(c.Measured), a.calibrate()))
	}
	held := "It " + a.verdict(now.Outcome)
	if now.Meets {
		held += ": " + a.values(now.Outcome, true)
	} else {
		held += ": " + a.failing(now.Outcome) + "; " + planner.Cause(now.Outcome, now.Prefill > 0, a.problem.Fails(now.Outcome)[0])
	}
	lines = append(lines, fmt.Sprintf("The fleet now: %s%s. %s.", a.describeFleet(a.fleet), a.hourly(now.Price), held))
	lines = append(lines, a.savings()...)
	if a.estimated(a.fleet) && a.plan != nil {
		lines = append(lines, a.doubt())
	}
	if !a.problem.Priced() {
		lines = append(lines, fmt.Sprintf("No price is known: give --price-per-hour, the US dollars for an hour of one node (%s), to read savings in dollars.", a.now.Profile.Node.Name))
	}
	return lines
}

// hourly returns the price of an hour in words, or nothing without prices.
func (a *advice) hourly(price float64) string {
	if !a.problem.Priced() {
		return ""
	}
	return fmt.Sprintf(", $%.2f an hour", price)
}

// savings returns what the cheapest fleet that meets the objectives saves, or costs.
func (a *advice) savings() (lines []string) {
	if a.noPlan != nil {
		return []string{"There is no better fleet to advise: " + strings.TrimPrefix(a.noPlan.Error(), ErrOption.Error()+": ") + "."}
	}
	p, now := a.plan, &a.rows[0]
	less := now.Price - p.Price
	difference := fmt.Sprintf("%s instead of %s", count(p.Fleet.Nodes(), "node"), report.Figure(float64(a.fleet.Nodes())))
	monthly := ""
	if a.problem.Priced() {
		monthly = fmt.Sprintf(", $%s a month", report.Figure(math.Round(math.Abs(less)*cost.HoursPerMonth)))
	}
	switch {
	case !p.Meets:
		return []string{fmt.Sprintf("No fleet of at most %s that was simulated meets every objective. The best one: %s: %s. Allow more nodes (--max-nodes), use faster ones, or relax the objective.",
			count(a.problem.MaxNodes, "node"), a.describeFleet(p.Fleet), a.verdict(p.Outcome))}
	case p.Fleet == a.fleet:
		lines = append(lines, fmt.Sprintf("Keep it: no fleet that was simulated costs less and holds %s.", a.grown()))
	case less > 0 && now.Meets:
		lines = append(lines, fmt.Sprintf("Savings: %s would be enough for %s (%s): %s less%s.", a.sizes(p.Fleet), a.grown(), difference, plural(a.fleet.Nodes()-p.Fleet.Nodes()), monthly))
	case less > 0:
		lines = append(lines, fmt.Sprintf("Another fleet holds %s and costs less: %s (%s): %s less%s.", a.grown(), a.sizes(p.Fleet), difference, plural(a.fleet.Nodes()-p.Fleet.Nodes()), monthly))
	case less == 0:
		lines = append(lines, fmt.Sprintf("No cheaper fleet holds %s. At the same price, %s does.", a.grown(), a.sizes(p.Fleet)))
	default:
		lines = append(lines, fmt.Sprintf("Needed to hold %s: %s (%s): %s more%s.", a.grown(), a.sizes(p.Fleet), difference, plural(p.Fleet.Nodes()-a.fleet.Nodes()), monthly))
	}
	if p.Fleet != a.fleet {
		lines = append(lines, fmt.Sprintf("With that fleet, at %s: %s.", a.grown(), a.values(p.Outcome, true)))
	}
	if len(p.Growth) > 1 {
		lines = append(lines, a.room())
	}
	if load := a.whole[len(a.whole)-1].At; load < shortLoad {
		lines = append(lines, fmt.Sprintf("The load takes %.3g s, in which a fleet that falls behind may not show it: record for minutes before you act.", load.Seconds()*a.Growth))
	}
	switch {
	case a.estimated(p.Fleet): // doubt has it
	case math.IsInf(p.TooSlow, 1):
		lines = append(lines, fmt.Sprintf("Confidence: the advice holds even if steps take %.2f times as long as predicted.", p.Slow))
	case p.Slow > 0:
		lines = append(lines, fmt.Sprintf("Confidence: the advice holds while steps take at most %.2f times as long as predicted.", p.Slow))
	}
	return lines
}

// grown returns the load that the advised fleet has to hold, in words.
func (a *advice) grown() string {
	if a.Growth == 1 {
		return "this load"
	}
	return fmt.Sprintf("%g times this load", a.Growth)
}

// room returns how much load the advised fleet holds, and what fails beyond it.
func (a *advice) room() string {
	p := a.plan
	holds := p.Holds * a.Growth
	if math.IsInf(p.Fails, 1) {
		return fmt.Sprintf("It holds %.2f times this load and more.", holds)
	}
	text := fmt.Sprintf("It holds %.2f times this load, and fails at %.2f times", holds, p.Fails*a.Growth)
	if len(p.Breaks) > 0 {
		text += fmt.Sprintf(": %s first, because %s", p.Breaks[0].Objective, p.Breaks[0].Cause)
	}
	return text + "."
}

// plural returns a number of nodes in words, without its sign.
func plural(n int) string {
	if n < 0 {
		n = -n
	}
	return count(n, "node")
}

// calibrate returns how to make the prediction agree.
func (a *advice) calibrate() string {
	settings := "give --max-num-batched-tokens, --max-num-seqs and --min-remote-prefill-tokens as the fleet has them"
	if a.now.Calibrated {
		return "The step times were fitted to the fleet's counters, so: " + settings + ", and record for longer, because the simulated caches begin empty."
	}
	return "Fit the step times to the fleet's counters with --from NODE:PORT, or measure a node with tandem profile; " + settings + "; and record for longer, because the simulated caches begin empty."
}

// figure formats a value of the comparison.
func (c *compared) figure(v float64) string {
	switch {
	case math.IsInf(v, 1) && !c.Rate:
		return "fails"
	case c.Rate:
		return report.Figure(round(v))
	case v < .01:
		return fmt.Sprintf("%.2f ms", 1e3*v)
	}
	return span(time.Duration(v * float64(time.Second)))
}

// printComparison writes the comparison, and what it means.
func (a *advice) printComparison(w io.Writer, list []compared) {
	defer func() {
		for _, note := range a.now.Notes {
			fmt.Fprintln(w, "  "+note)
		}
	}()
	m := a.now.Measured
	if m == nil {
		remedy := ""
		if a.now.Load == nil {
			remedy = ": leave out --trace to record the load of a gateway and compare"
		}
		fmt.Fprintf(w, "  Nothing was measured, so that the advice rests on the profile alone%s.\n", remedy)
		return
	}
	t := table{{"", "predicted", "measured", "error", ""}}
	for i := range list {
		c := &list[i]
		note := ""
		if c.Low < c.Up {
			upper := c.figure(c.Up)
			if math.IsInf(c.Up, 1) || c.Up >= planner.Failing.Seconds() {
				upper = "more"
			}
			note = fmt.Sprintf("the bucket of the histogram is %s to %s", c.figure(c.Low), upper)
		}
		if c.Disagrees() {
			note = strings.TrimPrefix(note+"; disagrees", "; ")
		}
		e := "-"
		if c.Low < c.Up && c.Sure() == 0 {
			e = "within"
		} else if v := c.Error(); !math.IsInf(v, 0) && !math.IsNaN(v) {
			e = fmt.Sprintf("%+.0f %%", math.Round(100*v)+0) // without the sign of -0
		}
		t = append(t, []string{c.Name, c.figure(c.Predicted), c.figure(c.Measured), e, note})
	}
	t.write(w)
	of := disagreements(list)
	switch {
	case len(list) == 0:
		fmt.Fprintln(w, "  No request was answered while the load was recorded: there is nothing to compare.")
	case len(of) > 0:
		var names []string
		for i := range of {
			names = append(names, of[i].Name)
		}
		fmt.Fprintf(w, "  Disagreement: %s. The simulated fleet is not the one that runs, or other programs take the time of its machines.\n", strings.Join(names, ", "))
	default:
		fmt.Fprintf(w, "  No p50, p90 or rate is off by more than %.0f %% for sure: the advice rests on a prediction that agrees with the measurement.\n", 100*mostError)
	}
	if m.Requests < fewCounts {
		fmt.Fprintf(w, "  %s %s recorded: percentiles of so few are chance. Record for longer before you act.\n", count(m.Requests, "request"), was(m.Requests))
	}
}

func was(n int) string {
	if n == 1 {
		return "was"
	}
	return "were"
}

// risk returns what a change of the fleet or of its load means, a line for each.
func (a *advice) risk(s *scenario) (lines []string) {
	switch {
	case s.why != "":
		return []string{fmt.Sprintf("%s: %s.", s.Name, s.why)}
	case s.Name == "now":
		return nil
	}
	if s.assumes != "" {
		lines = append(lines, s.assumes)
	}
	if s.takes > 0 {
		if load := a.whole[len(a.whole)-1].At; s.takes > load {
			lines = append(lines, fmt.Sprintf("%s: it takes %v, and the load %v: only its beginning was simulated.", s.Name, s.takes.Round(time.Second), load.Round(time.Second)))
		}
	}
	if fails := a.problem.Fails(s.Outcome); len(fails) > 0 {
		lines = append(lines, fmt.Sprintf("%s: the fleet fails %s, because %s.", s.Name, strings.Join(fails, ", "), planner.Cause(s.Outcome, s.Prefill > 0, fails[0])))
	}
	switch p := s.replan; {
	case !s.sought || p == nil && s.Meets:
	case p == nil || !p.Meets:
		lines = append(lines, fmt.Sprintf("%s: no fleet of at most %s that was simulated meets every objective.", s.Name, count(a.problem.MaxNodes, "node")))
	default:
		price := ""
		if n := a.profileOf(p.Fleet).Node.Price; n > 0 {
			price = fmt.Sprintf(", $%.2f an hour", a.priceOf(p.Fleet))
		}
		load := "it"
		if s.Node > 0 {
			load = a.grown()
		}
		lines = append(lines, fmt.Sprintf("%s: %s of %s would hold %s%s%s.", s.Name, a.sizes(p.Fleet), a.profileOf(p.Fleet).Node.Name, load, price, a.basis(p.Fleet)))
	}
	return lines
}

// steps returns the changes from the present fleet to the advised one: nodes are added first and
// removed last, so that the fleet is never smaller than both.
func (a *advice) steps() (list []step) {
	if a.plan == nil || !a.plan.Meets || a.plan.Fleet == a.fleet {
		return nil
	}
	now, next := a.fleet, a.plan.Fleet
	type pool struct {
		role      string
		now, next int
		names     []string
	}
	both := []pool{{"prefill", now.Prefill, next.Prefill, a.now.Prefills}, {"decode", now.Decode, next.Decode, a.now.Decodes}}
	for _, p := range both {
		if n := p.next - p.now; n > 0 {
			list = append(list, step{
				Text:    fmt.Sprintf("Start %s, with the flags of the others:", count(n, p.role+" node")),
				Command: fmt.Sprintf("tandem %s --join GATEWAY:7946 --tls-dir DIR --model MODEL", p.role), Kubernetes: helmSet(fmt.Sprintf("pools.%s.replicas=%d", p.role, p.next)),
			})
		}
	}
	for _, f := range []struct {
		text, flag, key string
		now, next       int
		of              bool
	}{
		{"Start the nodes again, one after the other, with:", "--max-num-batched-tokens", "nodes.config.max-num-batched-tokens", now.BatchedTokens, next.BatchedTokens, true},
		{"Start the gateways again, one after the other, with:", "--min-remote-prefill-tokens", "gateway.config.min-remote-prefill-tokens", now.MinRemote, next.MinRemote, next.Prefill > 0},
	} {
		if f.of && f.now != f.next {
			list = append(list, step{f.text, fmt.Sprintf("%s %d", f.flag, f.next), helmSet(fmt.Sprintf("%s=%d", f.key, f.next))})
		}
	}
	for _, p := range both {
		n := p.now - p.next
		if n <= 0 {
			continue
		}
		s := step{Text: fmt.Sprintf("Stop %s by SIGTERM, which drains a node before it ends.", count(n, p.role+" node")), Kubernetes: helmSet(fmt.Sprintf("pools.%s.replicas=%d", p.role, p.next))}
		if p.next == 0 {
			s.Kubernetes = helmSet(fmt.Sprintf("pools.%s.enabled=false", p.role))
		}
		if len(p.names) >= n && a.now.URL != "" {
			s.Text = fmt.Sprintf("Drain %s, the idlest now, and stop what was drained by SIGTERM if the latencies stay good. DELETE in place of POST cancels a drain:", count(n, p.role+" node"))
			var commands []string
			for _, name := range p.names[:n] {
				commands = append(commands, a.drain(name))
			}
			s.Command = strings.Join(commands, "; ")
		}
		list = append(list, s)
	}
	return list
}

// drain returns the command that drains a node. Names are from the network, and are escaped for the
// shell, too.
func (a *advice) drain(name string) string {
	key := ""
	if a.now.Keyed {
		key = `-H "Authorization: Bearer $TANDEM_API_KEY" `
	}
	return fmt.Sprintf("curl -X POST %s%s/admin/drain/%s", key, a.now.URL, strings.NewReplacer("&", "%26", "$", "%24").Replace(url.PathEscape(name)))
}

// helmSet returns the command that changes one value of a release of the chart.
func helmSet(value string) string {
	return onKubernetes + "helm upgrade tandem deploy/helm/tandem --reuse-values --set " + value
}

const onKubernetes = "On Kubernetes: "

// wholes returns commands that start the whole advised fleet.
func (a *advice) wholes() (list []step) {
	if a.plan.Fleet.Nodes() <= maxUp {
		list = append(list, step{Text: "The whole fleet on one machine:", Command: a.upCommand()})
	}
	if a.Helm == "" {
		list = append(list, step{Text: "The whole fleet as values of the Helm chart: add to this command", Command: "--helm values.yaml"})
	}
	return list
}

// adviceJSON returns the advice as one object.
func (a *advice) adviceJSON() report.Object {
	list := a.comparison()
	figures := []report.Object{}
	for i := range list {
		c := &list[i]
		value, unit := func(v float64) any { return finite(1e3 * v) }, "ms"
		if c.Rate {
			value, unit = finite, "tokens/s"
		}
		up := c.Up
		if up >= planner.Failing.Seconds() {
			up = math.Inf(1)
		}
		figures = append(figures, report.Object{{Key: "name", Value: c.Name}, {Key: "unit", Value: unit}, {Key: "predicted", Value: value(c.Predicted)}, {Key: "measured", Value: value(c.Measured)},
			{Key: "measured_low", Value: value(c.Low)}, {Key: "measured_high", Value: value(up)}, {Key: "error", Value: finite(c.Error())}, {Key: "disagrees", Value: c.Disagrees()}})
	}
	var agrees any
	if len(list) > 0 {
		agrees = len(disagreements(list)) == 0
	}
	now := a.asNow(&a.rows[0])
	rows := []report.Object{}
	for i := range a.rows[1:] {
		s := &a.rows[i+1]
		o := report.Object{{Key: "name", Value: s.Name}, {Key: "not_simulated", Value: s.why}}
		if s.why == "" {
			row := a.asNow(s)
			o = a.jsonRow(&row)
		}
		if p := s.replan; p != nil && p.Meets {
			o = append(o, report.Field{Key: "needed", Value: report.Object{{Key: "fleet", Value: p.Fleet.Size()}, {Key: "profile", Value: a.profileOf(p.Fleet).Node.Name}, {Key: "price_per_hour", Value: a.dollarsOf(p.Fleet)}}})
		}
		rows = append(rows, o)
	}
	o := report.Object{
		{Key: "agrees", Value: agrees}, {Key: "comparison", Value: figures}, {Key: "notes", Value: nonNil(a.now.Notes)}, {Key: "summary", Value: a.headline(list)},
		{Key: "now", Value: a.jsonRow(&now)}, {Key: "what_if", Value: rows},
	}
	if a.noPlan != nil {
		return append(o, report.Field{Key: "no_plan", Value: strings.TrimPrefix(a.noPlan.Error(), ErrOption.Error()+": ")})
	}
	steps := []report.Object{}
	for _, s := range a.steps() {
		steps = append(steps, report.Object{{Key: "text", Value: s.Text}, {Key: "command", Value: s.Command}, {Key: "kubernetes", Value: strings.TrimPrefix(s.Kubernetes, onKubernetes)}})
	}
	saved := any(nil)
	if a.problem.Priced() {
		saved = (now.Price - a.plan.Price) * cost.HoursPerMonth
	}
	o = append(o, report.Field{Key: "saved_nodes", Value: a.fleet.Nodes() - a.plan.Fleet.Nodes()}, report.Field{Key: "saved_per_month", Value: saved}, report.Field{Key: "steps", Value: steps})
	if a.plan.Fleet.Nodes() <= maxUp {
		o = append(o, report.Field{Key: "up", Value: a.upCommand()})
	}
	return append(o, report.Field{Key: "plan", Value: a.json()})
}

// asNow returns the row of a scenario with its factor on the load of now.
func (a *advice) asNow(s *scenario) planner.Row {
	row := s.Row
	row.Load = math.Round(1e6*s.Load*a.Growth) / 1e6
	return row
}

// dollarsOf returns the price of an hour of a fleet; nil: it is not known.
func (a *advice) dollarsOf(f planner.Fleet) any {
	k := a.profileOf(f)
	if k.unpriced() != "" {
		return nil
	}
	return k.hourly(f) * (1 + a.Overhead)
}

// nonNil returns a list that JSON has as one, even if it is empty.
func nonNil(list []string) []string { return append([]string{}, list...) }

// Exact returns the percentiles of durations; the failed requests are the slowest ones.
func Exact(durations []time.Duration, failed int) (k [3]Known) {
	if len(durations) == 0 {
		return k
	}
	slices.Sort(durations)
	n := len(durations) + failed
	for i, share := range []float64{.5, .9, .99} {
		k[i] = Exactly(planner.Failing)
		if at := min(n-1, int(share*float64(n))); at < len(durations) {
			k[i] = Exactly(durations[at])
		}
	}
	return k
}

// ModelOf returns an error if a profile is of another model than nodes of a numerics class, or a
// note if that cannot be known.
func ModelOf(p *profile.Profile, class, served string) (note string, err error) {
	weights, kernels, _ := strings.Cut(class, "/")
	of := strings.TrimPrefix(p.Model.Fingerprint, "0x")
	switch {
	case class == "" || weights == "":
		return "", nil
	case of == "":
		return fmt.Sprintf("The profile is of %s, and the fleet serves %s: whether these are the same model is not known.", describeModel(&p.Model), served), nil
	case strings.TrimLeft(of, "0") != strings.TrimLeft(weights, "0"):
		return "", fmt.Errorf("%w: the profile %s is of model %s, and the fleet serves %s with weights 0x%s: give a profile of that model, which tandem profile measures", ErrOption, p.Node.Name, describeModel(&p.Model), served, weights)
	}
	if _, other, _ := strings.Cut(p.Model.Class, "/"); p.Model.Class != "" && other != kernels {
		return fmt.Sprintf("The profile was measured with other kernels (%s) than the fleet has (%s).", other, kernels), nil
	}
	return "", nil
}
