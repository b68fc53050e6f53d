package pools

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/bench/sim/profile"
	"github.com/tandem-serving/tandem/deploy/planner"
	"github.com/tandem-serving/tandem/internal/cost"
)

// span formats a latency.
func span(d time.Duration) string {
	switch {
	case d == planner.Failing:
		return "fails"
	case d >= time.Second:
		return fmt.Sprintf("%.2f s", d.Seconds())
	case d >= 100*time.Millisecond:
		return fmt.Sprintf("%.0f ms", d.Seconds()*1e3)
	}
	return fmt.Sprintf("%.1f ms", d.Seconds()*1e3)
}

// count formats a number of things.
func count(n int, one string) string {
	if n == 1 {
		return "1 " + one
	}
	return report.Figure(float64(n)) + " " + one + "s"
}

// profileOf returns the kind of a fleet.
func (r *run) profileOf(f planner.Fleet) kind { return r.profiles[f.Node] }

// estimated reports whether a fleet's figures rest on an estimate.
func (r *run) estimated(f planner.Fleet) bool { return r.profileOf(f).estimated() }

// gpus returns the number of GPUs of a fleet.
func (r *run) gpus(f planner.Fleet) int {
	k := r.profileOf(f)
	return f.Prefill*k.ofPrefill().Node.TP + f.Decode*k.Node.TP
}

// everyProfile returns each profile once.
func (r *run) everyProfile() (list []*profile.Profile) {
	for _, k := range r.profiles {
		for _, p := range k.profiles() {
			if !slices.Contains(list, p) {
				list = append(list, p)
			}
		}
	}
	return list
}

// sizes returns a fleet's numbers of nodes in words.
func (r *run) sizes(f planner.Fleet) string {
	if f.Prefill > 0 {
		return count(f.Prefill, "prefill node") + " and " + count(f.Decode, "decode node")
	}
	return count(f.Decode, "colocated node")
}

// describeFleet returns a fleet in words.
func (r *run) describeFleet(f planner.Fleet) string {
	p := r.profileOf(f)
	if q := p.prefill; q != nil {
		return fmt.Sprintf("%s of %s (%s) and %s of %s (%s), %s each", count(f.Prefill, "prefill node"), q.Node.Name, q.Node.Device, count(f.Decode, "decode node"), p.Node.Name, p.Node.Device, count(p.Node.TP, "GPU"))
	}
	what := ""
	if f.Prefill == 0 {
		what = ", which compute prompts and answers"
	}
	return fmt.Sprintf("%s of %s (%s, %s each)%s", r.sizes(f), p.Node.Name, p.Node.Device, count(p.Node.TP, "GPU"), what)
}

// values returns an outcome's values of the objectives, in words.
func (r *run) values(o *planner.Outcome, limits bool) string {
	var list []string
	for i, g := range r.problem.Objectives {
		text := g.Name() + " " + span(o.Values[i])
		if limits {
			text += " (limit " + span(g.Limit) + ")"
		}
		list = append(list, text)
	}
	return strings.Join(list, ", ")
}

// verdict returns whether an outcome meets the objectives, and which one it does not.
func (r *run) verdict(o *planner.Outcome) string {
	fails := r.problem.Fails(o)
	if len(fails) == 0 {
		return "meets every objective"
	}
	return "fails " + strings.Join(fails, ", ")
}

// basis returns the mark of a row whose figures rest on an estimate.
func (r *run) basis(f planner.Fleet) string {
	if r.estimated(f) {
		return "; " + r.profileOf(f).sources()
	}
	return ""
}

// summary returns the choice in plain words, a paragraph for each string.
func (r *run) summary() (lines []string) {
	p := r.plan
	f := p.Fleet
	choice := "Plan: " + r.describeFleet(f) + ", " + count(r.gpus(f), "GPU") + " in all"
	if r.problem.Priced() {
		choice += fmt.Sprintf(", $%.2f an hour", p.Price)
	}
	if !p.Meets {
		lines = append(lines, fmt.Sprintf("No fleet that was simulated meets every objective. The best one: %s: %s.", r.describeFleet(f), r.verdict(p.Outcome)),
			"Allow more nodes (--max-nodes), use faster ones, or relax the objective.")
	} else {
		lines = append(lines, choice+".")
		met := fmt.Sprintf("It meets every objective for %s: %s.", r.describeLoad(), r.values(p.Outcome, true))
		if p.Needed != f {
			met += fmt.Sprintf(" %s would be enough; each pool has %s to spare.", p.Needed.Size(), count(r.Spare, "node"))
		}
		lines = append(lines, met)
	}
	good := fmt.Sprintf("%.1f %% of the requests are within every limit (goodput).", 100*p.Outcome.Goodput)
	if p.Floor.Infeasible > 0 {
		good += fmt.Sprintf(" %.2f %% never can be on such nodes: computing their prompts alone takes longer than the limit. More nodes do not change that, faster ones do.", 100*p.Floor.Infeasible)
	}
	lines = append(lines, good)
	if p.Meets && len(p.Growth) > 1 {
		lines = append(lines, r.cliff())
	}
	if p.Meets {
		for i := range p.Neighbours {
			if n := &p.Neighbours[i]; n.Nodes() < f.Nodes() && !n.Meets {
				lines = append(lines, fmt.Sprintf("With %s (%s) the fleet fails: %s; %s.", n.Name, n.Size(), r.failing(n.Outcome), planner.Cause(n.Outcome, n.Prefill > 0, r.problem.Fails(n.Outcome)[0])))
			}
		}
	}
	if s := r.whole[len(r.whole)-1].At; s < shortLoad {
		text := fmt.Sprintf("The simulated load takes %.3g s. A fleet that cannot keep up may fail later only, so that the load may grow less than this", s.Seconds())
		if budget := wholeShare * p.Demand.Rate * shortLoad.Seconds(); budget <= maxBudget {
			text += fmt.Sprintf(": give a load of a minute, with --budget %.0f or more", max(float64(r.Budget), math.Ceil(budget)))
		}
		lines = append(lines, text+".")
	}
	if r.estimated(f) {
		lines = append(lines, r.doubt())
	}
	if !p.Finished {
		lines = append(lines, fmt.Sprintf("The budget of %s simulated requests ended the search early: --budget %d completes it.", report.Figure(float64(r.Budget)), 2*r.Budget))
	}
	return lines
}

// failing returns the values that fail.
func (r *run) failing(o *planner.Outcome) string {
	var list []string
	for i, g := range r.problem.Objectives {
		if o.Values[i] > g.Limit {
			list = append(list, g.Name()+" "+span(o.Values[i]))
		}
	}
	if o.Goodput < r.Goodput {
		list = append(list, fmt.Sprintf("goodput %.1f %% (at least %g %%)", 100*o.Goodput, 100*r.Goodput))
	}
	return strings.Join(list, ", ")
}

// shortLoad is the time that a simulated load should take.
const shortLoad = time.Minute

// near is the factor on the load below which a fleet that fails has too little room for an ordinary
// day.
const near = 1.15

// cliff returns how much the load may grow, and what fails then.
func (r *run) cliff() string {
	p := r.plan
	if math.IsInf(p.Fails, 1) {
		return fmt.Sprintf("The load may grow to %.3g times this pace and more.", p.Holds)
	}
	text := fmt.Sprintf("The load may grow by %.0f %%. At %.2f times this pace the fleet fails", 100*(p.Holds-1), p.Fails)
	if p.Holds < 1.01 {
		text = fmt.Sprintf("The load may not grow: at %.2f times this pace the fleet fails", p.Fails)
	}
	if len(p.Breaks) > 0 {
		text += fmt.Sprintf(": %s first, because %s", p.Breaks[0].Objective, p.Breaks[0].Cause)
	}
	if p.Fails < near {
		text += ". That is near: --growth 1.3 plans with room"
	}
	return text + "."
}

// doubt returns what the error of an estimate means for the plan.
func (r *run) doubt() string {
	p := r.plan
	text := fmt.Sprintf("All figures rest on an estimate of the step times, which may be wrong by %.0f %%.", 100*r.profileOf(p.Fleet).likelyError())
	switch {
	case p.Slow == 0 || !p.Meets:
	case math.IsInf(p.TooSlow, 1):
		text += fmt.Sprintf(" The plan holds even if steps take %.2f times as long.", p.Slow)
	case p.Slow < 1.01:
		text += fmt.Sprintf(" The plan fails if steps take %.2f times as long.", p.TooSlow)
	default:
		text += fmt.Sprintf(" The plan holds while steps take at most %.2f times as long; at %.2f times it fails.", p.Slow, p.TooSlow)
	}
	if p.Safe != nil {
		text += fmt.Sprintf(" A fleet that holds at %.2f times has %s", p.Safe.Slow, r.sizes(p.Safe.Fleet))
		if r.problem.Priced() {
			text += fmt.Sprintf(", $%.2f an hour", p.Safe.Price)
		}
		text += "."
	}
	return text + " Measure such a node before you buy."
}

// describeLoad returns the load in words.
func (r *run) describeLoad() string {
	d := &r.plan.Demand
	return fmt.Sprintf("%s requests a second (prompts of %s tokens and answers of %s on average)", report.Figure(round(d.Rate)), report.Figure(math.Round(d.Prompt)), report.Figure(math.Round(d.Output)))
}

// round rounds to three significant digits.
func round(v float64) float64 {
	if v == 0 {
		return 0
	}
	unit := math.Pow(10, math.Floor(math.Log10(math.Abs(v)))-2)
	return math.Round(v/unit) * unit
}

// table is rows of cells.
type table [][]string

// write writes the table with columns of equal width. The last column is aligned to the left.
func (t table) write(w io.Writer) {
	var widths []int
	for _, row := range t {
		for i, c := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], len([]rune(c)))
		}
	}
	for _, row := range t {
		var b strings.Builder
		for i, c := range row {
			fill := strings.Repeat(" ", widths[i]-len([]rune(c)))
			switch {
			case i == 0:
				b.WriteString("  " + c + fill)
			case i == len(row)-1:
				b.WriteString("  " + c)
			default:
				b.WriteString("  " + fill + c)
			}
		}
		fmt.Fprintln(w, strings.TrimRight(b.String(), " "))
	}
}

// head is the head of a table of fleets.
func (r *run) head(first string) []string {
	price := "$/hour"
	if !r.problem.Priced() {
		price = "GPUs"
	}
	return []string{first, "fleet", price, "TTFT p50", "p90", "p99", "TPOT p90", "ITL p99", "goodput", "prefill", "decode", "KV", ""}
}

// cells returns a row of a table of fleets.
func (r *run) cells(row *planner.Row) []string {
	price := fmt.Sprintf("%.2f", row.Price)
	if !r.problem.Priced() {
		price = fmt.Sprint(r.gpus(row.Fleet))
	}
	prefill := "-"
	if row.Prefill > 0 {
		prefill = fmt.Sprintf("%.0f %%", 100*row.PrefillBusy)
	}
	o := row.Outcome
	size := row.Size()
	k := r.profileOf(row.Fleet)
	chosen := k.prefill != nil && row.Node == r.plan.Fleet.Node // two names make long rows, and the plan has them
	if len(r.profiles) > 1 && !chosen {
		size += " " + k.title()
	}
	return []string{
		row.Name, size, price, span(o.TTFT.P50), span(o.TTFT.P90), span(o.TTFT.P99), span(o.TPOT.P90), span(o.ITL.P99), fmt.Sprintf("%.1f %%", 100*o.Goodput),
		prefill, fmt.Sprintf("%.0f %%", 100*o.DecodeBusy), fmt.Sprintf("%.0f %%", 100*o.DecodeKV), r.verdict(o) + r.basis(row.Fleet),
	}
}

// chosen returns the row of the chosen fleet.
func (r *run) chosen() planner.Row {
	p := r.plan
	return planner.Row{Name: "→ chosen", Case: planner.Case{Fleet: p.Fleet, Load: 1, Slow: 1}, Outcome: p.Outcome, Meets: p.Meets, Price: p.Price}
}

// legend explains the columns of a table of fleets.
const legend = "prefill, decode: share of the time in which nodes compute; KV: memory in use on the fullest decode node; fails: requests that are refused or end too late"

// lossText returns what is simulated about the loss of a node.
func (r *run) lossText() string {
	return fmt.Sprintf("after two fifths of the load, and is ready again %v later (its streams resume on other nodes)", r.profileOf(r.plan.Fleet).Start.Total().Round(time.Second))
}

// print writes the plan.
func (r *run) print(w io.Writer) {
	p := r.plan
	for _, line := range r.summary() {
		fmt.Fprintln(w, line)
	}
	section := func(title string) { fmt.Fprintf(w, "\n%s\n", title) }

	section("Settings of its nodes and gateways")
	for _, line := range r.settingLines() {
		fmt.Fprintln(w, "  "+line)
	}

	section("The fleet and its neighbours")
	fmt.Fprintln(w, "  "+legend)
	chosen := r.chosen()
	t := table{r.head(""), r.cells(&chosen)}
	for i := range p.Neighbours {
		t = append(t, r.cells(&p.Neighbours[i]))
	}
	t.write(w)

	section("Other kinds of fleets")
	for _, line := range r.others() {
		fmt.Fprintln(w, "  "+line)
	}
	if len(p.Growth) > 1 {
		section("If the load grows (factor on the pace)")
		t = table{r.head("")}
		for i := range p.Growth {
			t = append(t, r.cells(&p.Growth[i]))
		}
		t.write(w)
		for _, b := range p.Breaks {
			fmt.Fprintf(w, "  %s fails from %.2f times this pace on: %s.\n", b.Objective, b.Load, b.Cause)
		}
	}
	if len(p.Losses) > 0 {
		section("If a node dies " + r.lossText())
		t = table{r.head("")}
		for i := range p.Losses {
			t = append(t, r.cells(&p.Losses[i]))
		}
		t.write(w)
	}
	if len(p.Slower) > 0 {
		section("If steps take longer than in the profile (factor)")
		t = table{r.head("")}
		for i := range p.Slower {
			t = append(t, r.cells(&p.Slower[i]))
		}
		if p.Safe != nil {
			safe := *p.Safe
			safe.Name = fmt.Sprintf("%.3g, a fleet for it", safe.Slow)
			t = append(t, r.cells(&safe))
		}
		t.write(w)
	}
	section("Cost")
	for _, line := range r.costLines() {
		fmt.Fprintln(w, "  "+line)
	}
	section("What the figures rest on")
	for _, line := range r.inputs() {
		fmt.Fprintln(w, "  "+line)
	}
}

// settingLines returns the settings of the chosen fleet.
func (r *run) settingLines() []string {
	f := r.plan.Fleet
	lines := []string{fmt.Sprintf("--max-num-batched-tokens %d, --max-num-seqs %d", f.BatchedTokens, f.MaxSeqs)}
	if f.Prefill > 0 {
		lines = append(lines, fmt.Sprintf("--min-remote-prefill-tokens %d, at the gateway; decode nodes compute %.0f %% of the prompts themselves, where that is faster", f.MinRemote, 100*r.plan.Outcome.Local))
	}
	if n := r.profileOf(f).Node.TP; n > 1 {
		lines = append(lines, fmt.Sprintf("--tensor-parallel-size %d", n))
	}
	return lines
}

// others returns the alternatives that were not chosen, a line for each.
func (r *run) others() (lines []string) {
	p := r.plan
	for i := range p.Alternatives {
		a := &p.Alternatives[i]
		shape := "colocated nodes"
		if a.Pools {
			shape = "prefill and decode nodes"
		}
		name := fmt.Sprintf("%s of %s", shape, r.profiles[a.Node].title())
		switch {
		case a.Outcome == nil:
			lines = append(lines, fmt.Sprintf("%s: %s", name, a.Reason))
		case a.Fleet != p.Needed:
			price := ""
			if r.problem.Priced() {
				price = fmt.Sprintf(", $%.2f an hour", a.Price)
			}
			lines = append(lines, fmt.Sprintf("%s: %s%s %s: %s; goodput %.1f %%, ITL p99 %s%s", name, a.Size(), price, r.verdict(a.Outcome), r.values(a.Outcome, false), 100*a.Goodput, span(a.ITL.P99), r.basis(a.Fleet)))
		}
	}
	if len(lines) == 0 {
		lines = []string{"none was considered"}
	}
	if without := slices.IndexFunc(r.profiles, func(k kind) bool { return k.unpriced() != "" }); without >= 0 && len(r.profiles) > 1 {
		lines = append(lines, fmt.Sprintf("Fleets were compared by their GPUs, because no price of %s is known: give --price-per-hour", r.profiles[without].unpriced()))
	}
	return lines
}

// fleetCost returns the price of a fleet and what it serves.
func (r *run) fleetCost(f planner.Fleet, o *planner.Outcome) cost.Fleet {
	p := r.profileOf(f)
	d := &r.plan.Demand
	read := 0.0
	if d.Service > 0 && d.Prompt > 0 {
		// A cached token's KV is read once, at the speed at which decoding reads it.
		read = p.ofPrefill().Step.Decode.PerCtx / (r.plan.Demand.ColdWork / d.Rate / d.Prompt)
	}
	return cost.Fleet{
		Prefill: float64(f.Prefill) * p.ofPrefill().Node.Price, Decode: float64(f.Decode) * p.Node.Price, Overhead: r.Overhead,
		In: o.Input, Out: o.Output, Cached: o.Cached * o.Input, ReadCost: read, Requests: o.RequestRate, Good: o.Goodput,
	}
}

// costLines returns the prices of the chosen fleet, or how to give one.
func (r *run) costLines() (lines []string) {
	p := r.plan
	node := r.profileOf(p.Fleet)
	if without := node.unpriced(); without != "" {
		return []string{fmt.Sprintf("No price is known: give --price-per-hour, the US dollars for an hour of one node (%s).", without)}
	}
	c := r.fleetCost(p.Fleet, p.Outcome)
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	overhead := ""
	if r.Overhead > 0 {
		overhead = fmt.Sprintf(" and %g %% of it for overhead", round(100*r.Overhead))
	}
	nodes := fmt.Sprintf("%s at $%s an hour", count(p.Fleet.Nodes(), "node"), dollars(node.Node.Price))
	if q := node.prefill; q != nil {
		nodes = fmt.Sprintf("%s at $%s and %s at $%s an hour", count(p.Fleet.Prefill, "prefill node"), dollars(q.Node.Price), count(p.Fleet.Decode, "decode node"), dollars(node.Node.Price))
	}
	add("%s%s: $%.2f an hour, $%s a month", nodes, overhead, c.Hourly(), report.Figure(math.Round(c.Monthly())))
	add("a million tokens: $%s of prompts and answers together, $%s of answers if prompts are free, $%s of those within every limit%s",
		dollars(c.Blended()), dollars(c.AllOnOutput()), dollars(c.GoodTokens()), r.basis(p.Fleet))
	if c.Pools() {
		add("by pool: $%s for a million prompt tokens (prefill nodes, $%.2f an hour), $%s for a million answer tokens (decode nodes, $%.2f an hour)%s",
			dollars(c.Input()), c.Prefill*(1+c.Overhead), dollars(c.Output()), c.Decode*(1+c.Overhead), r.basis(p.Fleet))
	}
	add("a million cached prompt tokens: $%s (%.1f %% of prompt tokens were cached); a thousand requests: $%s%s", dollars(c.CachedInput()), 100*p.Outcome.Cached, dollars(c.PerThousandRequests()), r.basis(p.Fleet))
	for _, t := range r.tenants {
		if len(r.tenants) > 1 {
			add("%s: $%.2f an hour (%s prompt and %s answer tokens a second)%s", t.name, 3600*c.Of(t.inPerSec, t.outPerSec), report.Figure(round(t.inPerSec)), report.Figure(round(t.outPerSec)), r.basis(p.Fleet))
		}
	}
	if p.Needed != p.Fleet {
		add("%s to spare: $%.2f an hour of it", count(p.Fleet.Nodes()-p.Needed.Nodes(), "node"), (node.hourly(p.Fleet)-node.hourly(p.Needed))*(1+r.Overhead))
	}
	if r.APIInput+r.APIOutput > 0 {
		tokens := c.BreakEven(r.APIInput, r.APIOutput)
		now := (c.In + c.Out) * 3600 * cost.HoursPerMonth
		add("next to an API at $%s and $%s for a million prompt and answer tokens: the fleet is cheaper from %s million tokens a month on; this load has %s million%s",
			dollars(r.APIInput), dollars(r.APIOutput), report.Figure(round(tokens/1e6)), report.Figure(round(now/1e6)), r.basis(p.Fleet))
	}
	return lines
}

// dollars formats a price with three significant digits.
func dollars(v float64) string {
	if v == 0 {
		return "0"
	}
	digits := max(0, 2-int(math.Floor(math.Log10(math.Abs(v)))))
	return fmt.Sprintf("%.*f", digits, v)
}

// inputs returns what the plan was made of, a line for each.
func (r *run) inputs() (lines []string) {
	p := r.plan
	d := &p.Demand
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	load := cmp.Or(r.source, r.Trace)
	if load == "" {
		load = strings.Join(r.Loads, " + ") + fmt.Sprintf(", seed %d", r.Seed)
	}
	if r.Growth != 1 {
		load += fmt.Sprintf(", at %g times its pace", r.Growth)
	}
	add("Load: %s: %s in %v, %s", load, count(len(r.trace), "request"), r.trace[len(r.trace)-1].At.Round(time.Second), r.describeLoad())
	if r.dropped > 0 {
		add("Left out: %s of more tokens than a node can serve", count(r.dropped, "request"))
	}
	add("%.0f %% of prompt tokens repeat the beginning of an earlier prompt; an unlimited cache would have them. Simulated caches had %.0f %%", 100*d.Cached, 100*p.Outcome.Cached)
	if len(r.whole) < len(r.trace) {
		add("Simulated: %s, from %d windows that are evenly spread over the load; --budget %d simulates all", count(len(r.whole), "request"), windowsOf, wholeShare*len(r.trace))
	}
	if n := r.problem.MaxNodes; n < r.MaxNodes {
		add("Fleets of at most %s were simulated, because larger ones do not fit in memory", count(n, "node"))
	}
	if r.sliced && p.Fleet.Nodes() > sliceNodes {
		prefill, decode, share := r.slice(p.Fleet)
		add("Fleets of more than %d nodes were simulated as slices: the chosen one as %s with %.3g %% of the requests. A node that dies is a larger part of a slice", sliceNodes, planner.Fleet{Prefill: prefill, Decode: decode}.Size(), 100*share)
	}
	for _, q := range r.everyProfile() {
		text := fmt.Sprintf("Step times of %s: %s", q.Node.Name, q.Basis())
		if q.Node.Price > 0 {
			text += fmt.Sprintf("; $%s an hour", dollars(q.Node.Price))
		}
		lines = append(lines, text)
	}
	if o := p.Outcome; o.Points+o.Coefficients > 0 {
		add("%.0f %% of the simulated steps were interpolated between points of the profile, the others follow its coefficients", 100*float64(o.Points)/float64(o.Points+o.Coefficients))
	}
	add("Simulated requests: %s of a budget of %s. KV blocks of %d tokens were simulated, seed %d", report.Figure(float64(p.Spent)), report.Figure(float64(r.Budget)), r.block, r.Seed)
	if r.Command != "" {
		lines = append(lines, "To repeat: "+r.Command)
	}
	return lines
}
