package simulate

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"runtime/debug"
	"time"

	"github.com/tandem-serving/tandem/bench/load"
	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/bench/sim/fleet"
	"github.com/tandem-serving/tandem/bench/sim/profile"
)

// PrintProfile writes the profile that the options select, as a file that --profile reads.
func PrintProfile(o *Options, w io.Writer) error {
	r := &run{Options: o}
	if err := r.readProfile(); err != nil {
		return err
	}
	return r.profile.Write(w)
}

// Run runs the simulation and writes the report to out.
func Run(o *Options, out io.Writer) error {
	r := &run{Options: o}
	if err := r.prepare(); err != nil {
		return err
	}
	defer r.boundGarbage()()
	result, err := fleet.Run(r.trace, r.fleet)
	if err != nil {
		if errors.Is(err, fleet.ErrOptions) || errors.Is(err, fleet.ErrStuck) {
			return wrap(err)
		}
		return err
	}
	s := r.summarize(result)
	compared, err := r.compare(r.json(result, s))
	if err != nil {
		return err
	}
	b := bufio.NewWriter(out)
	r.print(b, result, s)
	if len(compared) > 0 {
		fmt.Fprintf(b, "\nNext to %s\n", r.Compare)
		printCompared(b, compared)
	}
	if err := b.Flush(); err != nil {
		return err
	}
	if r.Save || r.Detailed {
		name := cmp.Or(r.File, cmp.Or(r.Label, "sim")+"-"+r.Fleet+".json")
		data, err := json.Marshal(r.json(result, s))
		if err != nil {
			return err
		}
		if err := os.WriteFile(name, append(data, '\n'), 0o644); err != nil {
			return fmt.Errorf("%w: --result-filename: %w", ErrOption, err)
		}
		fmt.Fprintf(out, "Wrote %s\n", name)
	}
	if r.HTML == "" {
		return nil
	}
	f, err := os.Create(r.HTML)
	if err != nil {
		return fmt.Errorf("%w: --html: %w", ErrOption, err)
	}
	b = bufio.NewWriter(f)
	if err := errors.Join(r.page(b, result, s, compared), b.Flush(), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", r.HTML, err)
	}
	fmt.Fprintf(out, "Wrote %s\n", r.HTML)
	return nil
}

const (
	// blockBytes is about what a KV block takes in the pool of a simulated node.
	blockBytes = 75
	// mostGarbage is about how much garbage may be left before it is collected, next to many pools.
	mostGarbage = 256 << 20
)

// boundGarbage makes the garbage collector run more often than after the heap has doubled, if the
// pools of the nodes are most of the heap, because a doubled heap of pools is gigabytes of garbage.
// It returns a function that ends this.
func (r *run) boundGarbage() (end func()) {
	prefill, decode := r.fleet.Prefill, r.fleet.Decode
	blocks := (prefill + decode) * r.fleet.Blocks
	if k := r.fleet.PrefillKind; k != nil {
		blocks = prefill*k.Blocks + decode*r.fleet.Blocks
	}
	percent := 100 * mostGarbage / max(1, blocks*blockBytes)
	old := debug.SetGCPercent(100)
	if percent = max(5, percent); old < 0 || percent >= old {
		percent = old
	}
	debug.SetGCPercent(percent)
	return func() { debug.SetGCPercent(old) }
}

// Record returns what the clients of a simulated fleet measured, as bench serve records it.
// The times between tokens are there with Options.KeepGaps of the fleet.
func Record(result *fleet.Result) *load.Record {
	rec := &load.Record{Duration: result.Span, Outcomes: make([]load.Outcome, len(result.Requests))}
	for i := range result.Requests {
		q := &result.Requests[i]
		rec.Outcomes[i] = load.Outcome{
			Scheduled: q.At, Ready: q.At, Sent: q.At, First: q.First, Last: q.Last, ITL: q.Gaps,
			Prompt: q.Prompt, Output: q.Received(), Chunks: q.Received(), Err: q.Err,
		}
	}
	return rec
}

// summarize computes the figures with the definitions of bench serve.
func (r *run) summarize(result *fleet.Result) *report.Summary {
	return report.Summarize(Record(result), report.Options{Metrics: r.Metrics, Percentiles: r.Percentiles, Goodput: r.goals, RequestRate: r.rate},
		func(i int) int { return result.Requests[i].Prompt }, func(i int) int { return result.Requests[i].Received() })
}

// nodes returns the number of nodes at the start.
func (r *run) nodes() int { return r.fleet.Prefill + r.fleet.Decode }

// basis returns the sources of the step times.
func (r *run) basis() string {
	if r.prefill == nil || r.prefill.Basis() == r.profile.Basis() {
		return r.profile.Basis()
	}
	return fmt.Sprintf("%s for prefill nodes, %s for decode nodes", r.prefill.Basis(), r.profile.Basis())
}

// uses returns how the durations of decoding and of prompts were found.
func (r *run) uses() (decode, prefill profile.Uses) {
	decode, prefill = r.times.Decode, r.times.Prefill
	if t := r.prefillTimes; t != nil {
		decode, prefill = decode.Add(t.Decode), prefill.Add(t.Prefill)
	}
	return decode, prefill
}

// hourly returns the price of an hour of the fleet in US dollars; 0: it is not known.
func (r *run) hourly() float64 {
	price, other := r.profile.Node.Price, r.profile.Node.Price
	if r.prefill != nil {
		other = r.prefill.Node.Price
	}
	if price == 0 || other == 0 {
		return 0
	}
	return float64(r.fleet.Decode)*price + float64(r.fleet.Prefill)*other
}

// describe returns the inputs of the run, a line for each.
func (r *run) describe() []string {
	p := r.profile
	decode, prefill := r.uses()
	load := fmt.Sprintf("%d requests of %s", len(r.trace), r.Trace)
	if r.Load != "" {
		load = fmt.Sprintf("%d requests drawn by %s with seed %d", len(r.trace), r.Load, r.Seed)
	}
	if r.Speedup != 1 {
		load += fmt.Sprintf(", at %g times the pace", r.Speedup)
	}
	lines := []string{
		fmt.Sprintf("Fleet: %s of %s (%s), %d blocks of %d tokens each; gateways: %d, policy %s", r.Fleet, p.Node.Name, p.Node.Device, p.Memory.Blocks, p.Memory.BlockTokens, max(1, r.Gateways), r.Policy),
		"Load: " + load,
		fmt.Sprintf("Step times: %s. Decoding: %v. Prompts: %v", r.basis(), decode, prefill),
	}
	if q := r.prefill; q != nil {
		lines[0] = fmt.Sprintf("Fleet: %d prefill nodes of %s (%s) and %d decode nodes of %s (%s), with %d and %d tokens of KV memory each; gateways: %d, policy %s",
			r.fleet.Prefill, q.Node.Name, q.Node.Device, r.fleet.Decode, p.Node.Name, p.Node.Device, q.Memory.Blocks*q.Memory.BlockTokens, p.Memory.Blocks*p.Memory.BlockTokens, max(1, r.Gateways), r.Policy)
	}
	if p.Step.Source == profile.Estimate || r.prefill != nil && r.prefill.Step.Source == profile.Estimate {
		lines = append(lines, "Every figure below rests on an estimate: measure such a node before you buy one")
	}
	for _, e := range r.fleet.Events {
		lines = append(lines, "Event: "+e.String())
	}
	return lines
}

// print writes the report.
func (r *run) print(w io.Writer, result *fleet.Result, s *report.Summary) {
	for _, line := range r.describe() {
		fmt.Fprintln(w, line)
	}
	for _, line := range failures(result) {
		fmt.Fprintln(w, line)
	}
	s.Print(w, nil, nil)
	fmt.Fprintf(w, "\nFleet over time (step times: %s)\n", r.basis())
	r.printRows(w, result)
	fmt.Fprintln(w)
	for _, line := range r.totals(result, s) {
		fmt.Fprintln(w, line)
	}
}

// failures counts the requests that ended with each error, in the order of the first.
func failures(result *fleet.Result) (lines []string) {
	var texts []string
	counts := map[string]int{}
	for i := range result.Requests {
		err := result.Requests[i].Err
		if err == nil {
			continue
		}
		text := err.Error()
		if errors.Is(err, fleet.ErrTooLong) {
			text = fleet.ErrTooLong.Error() + ": give nodes more KV memory, a longer --max-model-len or a larger --max-prompt-tokens"
		}
		if counts[text] == 0 {
			texts = append(texts, text)
		}
		counts[text]++
	}
	for _, text := range texts {
		lines = append(lines, fmt.Sprintf("Failed requests: %d: %s", counts[text], text))
	}
	return lines
}

// totals returns the fleet's counters, a line for each.
func (r *run) totals(result *fleet.Result, s *report.Summary) []string {
	percent := func(part, of int) float64 { return 100 * float64(part) / float64(max(1, of)) }
	lines := []string{
		fmt.Sprintf("Nodes worked %.0f %% (prefill) and %.0f %% (decode) of the time; %.1f %% of prompt tokens were cached; %.1f %% of prompts were computed by decode nodes",
			100*result.PrefillBusy, 100*result.DecodeBusy, 100*result.Reuse, percent(result.Local, len(result.Requests))),
		fmt.Sprintf("Requests that waited in a gateway: %d; preemptions: %d; grants that waited for KV memory: %d, that timed out: %d", result.Waited, result.Preemptions, result.GrantsDeferred, result.GrantTimeouts),
	}
	if len(r.fleet.Events) > 0 || result.Cancelled > 0 {
		lines = append(lines, fmt.Sprintf("Nodes that died: %d, started: %d, were drained: %d. Streams that resumed: %d; requests that were tried again: %d, that were cancelled: %d",
			result.Killed, result.Started, result.Drained, result.Resumed, result.Retried, result.Cancelled))
	}
	for _, e := range r.fleet.Events {
		if e.At > result.Span {
			lines = append(lines, fmt.Sprintf("Not reached: %v; the run ended at %v", e, result.Span.Round(time.Millisecond)))
		}
	}
	if hourly := r.hourly(); hourly > 0 {
		line := fmt.Sprintf("Cost: %d nodes at $%.2f an hour: $%.2f an hour", r.nodes(), r.profile.Node.Price, hourly)
		if r.prefill != nil {
			line = fmt.Sprintf("Cost: %d prefill nodes at $%.2f and %d decode nodes at $%.2f an hour: $%.2f an hour", r.fleet.Prefill, r.prefill.Node.Price, r.fleet.Decode, r.profile.Node.Price, hourly)
		}
		if s.Completed > 0 {
			line += fmt.Sprintf(", $%.4f for a million tokens of prompts and answers", perMillion(hourly, s))
		}
		lines = append(lines, line+fmt.Sprintf(" (step times: %s)", r.basis()))
	}
	if r.hourly() == 0 && r.Price != 0 {
		lines = append(lines, "No price is known: give --price-per-hour, the US dollars for an hour of one node, or write node.price_per_hour in the profile")
	}
	return append(lines, fmt.Sprintf("Checks: %d schedulers and queues of nodes are consistent. Output hash %#016x", result.Checks, result.Digest()))
}

// perMillion returns the price of a million tokens of prompts and answers.
func perMillion(hourly float64, s *report.Summary) float64 {
	return hourly / (float64(s.Input+s.Output) / s.Duration.Seconds()) / 3600 * 1e6
}

// rows is the number of rows of the printed table.
const rows = 12

// window returns the mean of samples, and the largest of their KV fill and queues.
func window(samples []fleet.Sample) fleet.Sample {
	w := fleet.Sample{At: samples[0].At}
	n := float64(len(samples))
	for i := range samples {
		s := &samples[i]
		w.Waiting, w.WaitingTokens = max(w.Waiting, s.Waiting), max(w.WaitingTokens, s.WaitingTokens)
		for _, u := range []struct{ sum, of *fleet.Usage }{{&w.Prefill, &s.Prefill}, {&w.Decode, &s.Decode}} {
			u.sum.Up = u.of.Up
			u.sum.Busy += u.of.Busy / n
			u.sum.KV += u.of.KV / n
			u.sum.Running, u.sum.Waiting, u.sum.Queued = max(u.sum.Running, u.of.Running), max(u.sum.Waiting, u.of.Waiting), max(u.sum.Queued, u.of.Queued)
			u.sum.MaxKV = max(u.sum.MaxKV, u.of.MaxKV)
		}
	}
	return w
}

// printRows prints the state of the fleet over time: means of use, and the largest queues.
func (r *run) printRows(w io.Writer, result *fleet.Result) {
	samples := result.Samples
	if len(samples) > 1 {
		samples = samples[1:] // the first one is of the start
	}
	fmt.Fprintf(w, "%9s %7s | %8s %5s %6s %9s %5s | %8s %5s %6s %6s %5s %6s\n", "from s", "queue",
		"prefill:", "busy", "wait", "tokens", "KV", "decode:", "busy", "run", "wait", "KV", "KV max")
	each := (len(samples) + rows - 1) / rows
	for i := 0; i < len(samples); i += each {
		s := window(samples[i:min(len(samples), i+each)])
		p, d := &s.Prefill, &s.Decode
		fmt.Fprintf(w, "%9.1f %7d | %8d %4.0f%% %6d %9d %4.0f%% | %8d %4.0f%% %6d %6d %4.0f%% %5.0f%%\n", s.At.Seconds(), s.Waiting,
			p.Up, 100*p.Busy, p.Waiting, p.Queued, 100*p.KV, d.Up, 100*d.Busy, d.Running, d.Waiting, 100*d.KV, 100*d.MaxKV)
	}
}

// json returns the JSON of bench serve with the fleet's counters and timeline. Virtual time starts
// at the epoch.
func (r *run) json(result *fleet.Result, s *report.Summary) report.Object {
	p := r.profile
	start := time.Unix(0, 0).UTC()
	o := s.Result(&report.Head{
		Date: start, Start: start, Backend: "tandem-sim", Label: r.Label, Model: p.Model.Name, NumPrompts: len(r.trace), Burstiness: 1,
		Metadata: report.Object{
			{Key: "simulated", Value: true}, {Key: "fleet", Value: r.Fleet}, {Key: "policy", Value: r.Policy}, {Key: "gateways", Value: r.fleet.Gateways},
			{Key: "profile", Value: p.Node.Name}, {Key: "step_times_source", Value: p.Step.Source}, {Key: "step_times_error", Value: p.Step.Error},
		},
	}, r.Detailed)
	uses := func(u profile.Uses) report.Object {
		return report.Object{{Key: "points", Value: u.Points}, {Key: "coefficients", Value: u.Coefficients}}
	}
	decode, prefill := r.uses()
	events := []string{}
	for _, e := range r.fleet.Events {
		events = append(events, e.String())
	}
	o = append(o, report.Object{
		{Key: "step_times_decode", Value: uses(decode)}, {Key: "step_times_prefill", Value: uses(prefill)},
		{Key: "prefill_busy", Value: result.PrefillBusy}, {Key: "decode_busy", Value: result.DecodeBusy}, {Key: "prefix_cache_hit_rate", Value: result.Reuse},
		{Key: "prompts_computed_by_decode_nodes", Value: result.Local}, {Key: "waited_in_gateway", Value: result.Waited}, {Key: "preemptions", Value: result.Preemptions},
		{Key: "grants_deferred", Value: result.GrantsDeferred}, {Key: "grant_timeouts", Value: result.GrantTimeouts},
		{Key: "events", Value: events}, {Key: "nodes_killed", Value: result.Killed}, {Key: "nodes_started", Value: result.Started}, {Key: "nodes_drained", Value: result.Drained},
		{Key: "resumed", Value: result.Resumed}, {Key: "retried", Value: result.Retried}, {Key: "cancelled", Value: result.Cancelled},
		{Key: "checks", Value: result.Checks}, {Key: "output_hash", Value: fmt.Sprintf("%#016x", result.Digest())},
	}...)
	if q := r.prefill; q != nil {
		o = append(o, report.Field{Key: "prefill_profile", Value: q.Node.Name}, report.Field{Key: "prefill_step_times_source", Value: q.Step.Source}, report.Field{Key: "prefill_step_times_error", Value: q.Step.Error})
	}
	if hourly := r.hourly(); hourly > 0 && s.Completed > 0 {
		o = append(o, report.Field{Key: "price_per_hour", Value: hourly}, report.Field{Key: "price_per_million_tokens", Value: perMillion(hourly, s)})
	}
	return append(o, report.Field{Key: "timeline", Value: timeline(result)})
}

// timeline returns the samples as lists of equal length.
func timeline(result *fleet.Result) report.Object {
	list := func(of func(*fleet.Sample) float64) []float64 {
		v := make([]float64, len(result.Samples))
		for i := range v {
			v[i] = of(&result.Samples[i])
		}
		return v
	}
	o := report.Object{
		{Key: "seconds", Value: list(func(s *fleet.Sample) float64 { return s.At.Seconds() })},
		{Key: "queue_requests", Value: list(func(s *fleet.Sample) float64 { return float64(s.Waiting) })},
		{Key: "queue_tokens", Value: list(func(s *fleet.Sample) float64 { return float64(s.WaitingTokens) })},
	}
	for _, role := range roles {
		for _, c := range usages {
			o = append(o, report.Field{Key: role.name + "_" + c.key, Value: list(func(s *fleet.Sample) float64 { return c.of(role.of(s)) })})
		}
	}
	return o
}

// roles are the roles of nodes.
var roles = []struct {
	name string
	of   func(*fleet.Sample) *fleet.Usage
}{
	{"prefill", func(s *fleet.Sample) *fleet.Usage { return &s.Prefill }},
	{"decode", func(s *fleet.Sample) *fleet.Usage { return &s.Decode }},
}

// usages are the figures of a role over time.
var usages = []struct {
	key string
	of  func(*fleet.Usage) float64
}{
	{"nodes", func(u *fleet.Usage) float64 { return float64(u.Up) }},
	{"busy", func(u *fleet.Usage) float64 { return u.Busy }},
	{"running", func(u *fleet.Usage) float64 { return float64(u.Running) }},
	{"waiting", func(u *fleet.Usage) float64 { return float64(u.Waiting) }},
	{"queued_tokens", func(u *fleet.Usage) float64 { return float64(u.Queued) }},
	{"kv_usage", func(u *fleet.Usage) float64 { return u.KV }},
	{"kv_usage_max", func(u *fleet.Usage) float64 { return u.MaxKV }},
}

// page writes the HTML page.
func (r *run) page(w io.Writer, result *fleet.Result, s *report.Summary, compared []figure) error {
	const x = "s of virtual time"
	var at []float64
	samples := result.Samples
	if len(samples) > 1 {
		samples = samples[1:] // the first one is of the start
	}
	for i := range samples {
		at = append(at, samples[i].At.Seconds())
	}
	basis := "Step times: " + r.basis() + "."
	chart := func(title, y, note string) report.Chart {
		return report.Chart{Title: title, X: x, Y: y, Note: note + basis}
	}
	line := func(c *report.Chart, name string, of func(*fleet.Sample) float64) {
		l := report.Line{Name: name, X: at}
		for i := range samples {
			l.Y = append(l.Y, of(&samples[i]))
		}
		c.Lines = append(c.Lines, l)
	}
	busy := chart("How much of the time nodes compute", "% of the time", "A decode node with one stream is always busy: KV memory and queues show earlier whether there are enough nodes. ")
	kv := chart("KV memory in use", "% of blocks", "Prefix caches that can be evicted do not count. ")
	queue := chart("Requests that wait", "requests", "")
	tokens := chart("Prompt tokens that wait to be computed", "tokens", "")
	up := chart("Nodes that are up", "nodes", "Drained nodes count. ")
	line(&queue, "in gateways", func(s *fleet.Sample) float64 { return float64(s.Waiting) })
	line(&tokens, "in gateways", func(s *fleet.Sample) float64 { return float64(s.WaitingTokens) })
	for _, role := range roles {
		if role.name == "prefill" && len(result.Samples) > 0 && result.Samples[0].Prefill.Up == 0 {
			continue
		}
		line(&busy, role.name, func(s *fleet.Sample) float64 { return 100 * role.of(s).Busy })
		line(&kv, role.name+", mean", func(s *fleet.Sample) float64 { return 100 * role.of(s).KV })
		line(&kv, role.name+", fullest node", func(s *fleet.Sample) float64 { return 100 * role.of(s).MaxKV })
		line(&queue, "on "+role.name+" nodes", func(s *fleet.Sample) float64 { return float64(role.of(s).Waiting) })
		line(&tokens, "on "+role.name+" nodes", func(s *fleet.Sample) float64 { return float64(role.of(s).Queued) })
		line(&up, role.name, func(s *fleet.Sample) float64 { return float64(role.of(s).Up) })
	}
	charts := []report.Chart{busy, kv, queue, tokens}
	if len(r.fleet.Events) > 0 {
		charts = append(charts, up)
	}
	rate := r.rate
	if span := r.trace[len(r.trace)-1].At.Seconds() / r.Speedup; math.IsInf(rate, 1) && span > 0 {
		rate = math.Round(1000*float64(len(r.trace))/span) / 1000
	}
	facts := append(r.describe(), failures(result)...)
	facts = append(facts, r.totals(result, s)...)
	for _, f := range compared {
		facts = append(facts, fmt.Sprintf("Next to %s: %s predicted %s, measured %s, error %s", r.Compare, f.name, report.Figure(f.predicted), report.Figure(f.measured), f.off()))
	}
	if r.Command != "" {
		facts = append(facts, "To repeat: "+r.Command)
	}
	return report.WriteRun(w, "Simulated fleet "+r.Fleet, r.sentence(s), facts,
		report.Point{Server: r.Fleet + ", " + r.basis(), Rate: rate, Summary: s}, charts)
}

// sentence summarizes the run.
func (r *run) sentence(s *report.Summary) string {
	text := fmt.Sprintf("%d of %d requests were served, %s output tokens a second.", s.Completed, s.Completed+s.Failed, report.Figure(s.Throughput()))
	if s.Completed > 0 {
		text += fmt.Sprintf(" Half of them had their first token within %s ms, and half of all tokens came within %s ms after the one before.",
			report.Figure(s.Stats["ttft"].Median), report.Figure(s.Stats["itl"].Median))
	}
	if len(r.goals) > 0 {
		text += fmt.Sprintf(" %.1f %% met every objective.", 100*float64(s.Good)/float64(max(1, s.Completed+s.Failed)))
	}
	return text + " Step times: " + r.basis() + "."
}
