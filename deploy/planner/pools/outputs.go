package pools

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"time"

	"github.com/tandem-serving/tandem/bench/report"
	"github.com/tandem-serving/tandem/deploy/planner"
)

// maxUp is the most nodes that tandem up starts.
const maxUp = 64

// outputs writes the plan in the forms that the options ask for.
func (r *run) outputs(out io.Writer) error {
	b := bufio.NewWriter(out)
	switch {
	case r.JSON:
		e := json.NewEncoder(b)
		e.SetIndent("", "  ")
		if err := e.Encode(r.json()); err != nil {
			return err
		}
	case r.Up:
		if n := r.plan.Fleet.Nodes(); n > maxUp {
			return fmt.Errorf("%w: --up: tandem up starts at most %d nodes, and the plan has %d: --helm FILE writes values for Kubernetes", ErrOption, maxUp, n)
		}
		if k := r.profileOf(r.plan.Fleet); k.prefill != nil {
			return fmt.Errorf("%w: --up: tandem up starts nodes on one machine, and the plan has %s and %s: --helm FILE writes values for Kubernetes", ErrOption, k.prefill.Node.Name, k.Node.Name)
		}
		fmt.Fprintln(b, r.upCommand())
	default:
		r.print(b)
		if r.Explain {
			fmt.Fprintln(b, "\nHow the numbers came about")
			for _, line := range r.explanation() {
				fmt.Fprintln(b, "  "+line)
			}
		}
	}
	for _, f := range []struct {
		flag, name string
		write      func(io.Writer) error
	}{{"html", r.HTML, r.page}, {"helm", r.Helm, r.helm}} {
		if f.name == "" {
			continue
		}
		if err := r.file(f.flag, f.name, f.write); err != nil {
			return err
		}
		if !r.JSON && !r.Up {
			fmt.Fprintf(b, "Wrote %s\n", f.name)
		}
	}
	return b.Flush()
}

// file writes a file.
func (r *run) file(flag, name string, write func(io.Writer) error) error {
	f, err := os.Create(name)
	if err != nil {
		return fmt.Errorf("%w: --%s: %w", ErrOption, flag, err)
	}
	b := bufio.NewWriter(f)
	if err := errors.Join(write(b), b.Flush(), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

// upCommand returns the command that starts the fleet on one machine.
func (r *run) upCommand() string {
	f := r.plan.Fleet
	p := r.profileOf(f)
	text := fmt.Sprintf("tandem up --prefill %d --decode %d --model MODEL --max-num-batched-tokens %d --max-num-seqs %d", f.Prefill, f.Decode, f.BatchedTokens, f.MaxSeqs)
	if f.Prefill > 0 {
		text += fmt.Sprintf(" --min-remote-prefill-tokens %d", f.MinRemote)
	}
	if p.Node.TP > 1 {
		text += fmt.Sprintf(" --tensor-parallel-size %d", p.Node.TP)
	}
	return text
}

// helm writes values of the chart.
func (r *run) helm(w io.Writer) error {
	f := r.plan.Fleet
	p := r.profileOf(f)
	var b strings.Builder
	fmt.Fprintf(&b, "# Values of deploy/helm/tandem for %s, as planned by\n#   %s\n# Step times: %s. Add the model: `models`, and its key as nodes.model (docs/kubernetes.md).\n",
		r.sizes(f), strings.ReplaceAll(cmp.Or(r.Command, "tandem advise"), "\n", " "), p.sources())
	if q := p.prefill; q != nil {
		fmt.Fprintf(&b, "# Prefill nodes are %s, decode nodes %s: select their machines by pools.prefill.nodeSelector and pools.decode.nodeSelector.\n", q.Node.Device, p.Node.Device)
	}
	fmt.Fprintf(&b, "gateway:\n  replicas: %d\n", r.Gateways)
	if f.Prefill > 0 {
		fmt.Fprintf(&b, "  config:\n    min-remote-prefill-tokens: %d\n", f.MinRemote)
	}
	fmt.Fprintf(&b, "nodes:\n  config:\n    max-num-batched-tokens: %d\n    max-num-seqs: %d\n", f.BatchedTokens, f.MaxSeqs)
	if p.Node.Price > 0 && p.prefill == nil {
		fmt.Fprintf(&b, "    price-per-hour: %.4g\n", p.Node.Price)
	}
	if p.Node.TP > 1 {
		fmt.Fprintf(&b, "    tensor-parallel-size: %d\n  shm: 16Gi\n", p.Node.TP)
	}
	if gpu(p.Node.Device) {
		fmt.Fprintf(&b, "  gpus: %d\n", p.Node.TP)
	}
	b.WriteString("pools:\n  prefill:\n")
	if f.Prefill > 0 {
		fmt.Fprintf(&b, "    replicas: %d\n", f.Prefill)
	} else {
		b.WriteString("    enabled: false\n")
	}
	fmt.Fprintf(&b, "  decode:\n    replicas: %d\n", f.Decode)
	_, err := io.WriteString(w, b.String())
	return err
}

// gpu reports whether a profile's device is a GPU.
func gpu(device string) bool {
	for _, maker := range []string{"NVIDIA", "AMD Instinct"} {
		if strings.HasPrefix(device, maker) {
			return true
		}
	}
	return false
}

// milliseconds returns a latency as JSON has it; nil: the requests of the percentile failed.
func milliseconds(d time.Duration) any {
	if d == planner.Failing {
		return nil
	}
	return d.Seconds() * 1e3
}

// json returns the plan as one object.
func (r *run) json() report.Object {
	p := r.plan
	objectives := []report.Object{}
	for i, g := range r.problem.Objectives {
		objectives = append(objectives, report.Object{{Key: "metric", Value: g.Metric}, {Key: "percentile", Value: g.Percentile}, {Key: "limit_ms", Value: milliseconds(g.Limit)}, {Key: "value_ms", Value: milliseconds(p.Outcome.Values[i])}})
	}
	chosen := r.chosen()
	chosen.Name = "chosen"
	rows := func(list []planner.Row) []report.Object {
		objects := []report.Object{}
		for i := range list {
			objects = append(objects, r.jsonRow(&list[i]))
		}
		return objects
	}
	breaks := []report.Object{}
	for _, b := range p.Breaks {
		breaks = append(breaks, report.Object{{Key: "objective", Value: b.Objective}, {Key: "load", Value: b.Load}, {Key: "cause", Value: b.Cause}})
	}
	node := r.profileOf(p.Fleet)
	o := report.Object{
		{Key: "fleet", Value: r.jsonRow(&chosen)}, {Key: "meets_objectives", Value: p.Meets}, {Key: "objectives", Value: objectives}, {Key: "goodput_share", Value: r.Goodput},
		{Key: "settings", Value: report.Object{{Key: "max_num_batched_tokens", Value: p.Fleet.BatchedTokens}, {Key: "max_num_seqs", Value: p.Fleet.MaxSeqs}, {Key: "min_remote_prefill_tokens", Value: p.Fleet.MinRemote}, {Key: "tensor_parallel_size", Value: node.Node.TP}}},
		{Key: "step_times_source", Value: node.Step.Source}, {Key: "step_times_error", Value: node.likelyError()},
		{Key: "infeasible_share", Value: p.Floor.Infeasible}, {Key: "infeasible_share_without_caches", Value: p.Floor.Cold},
		{Key: "neighbours", Value: rows(p.Neighbours)}, {Key: "growth", Value: rows(p.Growth)}, {Key: "holds_at_load", Value: p.Holds}, {Key: "fails_at_load", Value: finite(p.Fails)}, {Key: "breaks", Value: breaks},
		{Key: "losses", Value: rows(p.Losses)}, {Key: "slower", Value: rows(p.Slower)}, {Key: "holds_at_step_time", Value: p.Slow}, {Key: "fails_at_step_time", Value: finite(p.TooSlow)},
	}
	if p.Safe != nil {
		o = append(o, report.Field{Key: "safe_fleet", Value: r.jsonRow(p.Safe)})
	}
	others := []report.Object{}
	for i := range p.Alternatives {
		a := &p.Alternatives[i]
		object := report.Object{{Key: "profile", Value: r.profiles[a.Node].title()}, {Key: "pools", Value: a.Pools}, {Key: "least_nodes", Value: a.Least}, {Key: "reason", Value: a.Reason}}
		if a.Outcome != nil {
			object = append(object, report.Field{Key: "fleet", Value: r.jsonRow(&a.Row)})
		}
		others = append(others, object)
	}
	o = append(o, report.Field{Key: "alternatives", Value: others})
	if node.unpriced() == "" {
		c := r.fleetCost(p.Fleet, p.Outcome)
		o = append(o, report.Field{Key: "cost", Value: report.Object{
			{Key: "per_hour", Value: c.Hourly()}, {Key: "per_month", Value: c.Monthly()}, {Key: "per_million_tokens", Value: c.Blended()}, {Key: "per_million_prompt_tokens", Value: c.Input()}, {Key: "per_million_answer_tokens", Value: c.Output()},
			{Key: "per_million_tokens_on_answers", Value: c.AllOnOutput()}, {Key: "per_million_good_tokens", Value: c.GoodTokens()}, {Key: "per_million_cached_tokens", Value: c.CachedInput()}, {Key: "per_thousand_requests", Value: c.PerThousandRequests()},
		}})
	}
	return append(o, report.Field{Key: "simulated_requests", Value: p.Spent}, report.Field{Key: "budget", Value: r.Budget}, report.Field{Key: "finished", Value: p.Finished}, report.Field{Key: "seed", Value: r.Seed}, report.Field{Key: "command", Value: r.Command})
}

// finite returns a number as JSON has it; nil: it is infinite, or none.
func finite(v float64) any {
	if math.IsInf(v, 0) || math.IsNaN(v) {
		return nil
	}
	return v
}

// jsonRow returns a simulated fleet.
func (r *run) jsonRow(row *planner.Row) report.Object {
	p := r.profileOf(row.Fleet)
	three := func(q planner.Quantiles) []any {
		return []any{milliseconds(q.P50), milliseconds(q.P90), milliseconds(q.P99)}
	}
	return report.Object{
		{Key: "name", Value: row.Name}, {Key: "fleet", Value: row.Size()}, {Key: "prefill", Value: row.Prefill}, {Key: "decode", Value: row.Decode}, {Key: "profile", Value: p.title()}, {Key: "gpus", Value: r.gpus(row.Fleet)},
		{Key: "price_per_hour", Value: p.hourly(row.Fleet) * (1 + r.Overhead)}, {Key: "load", Value: row.Load}, {Key: "step_time", Value: row.Slow}, {Key: "meets_objectives", Value: row.Meets}, {Key: "estimate", Value: r.estimated(row.Fleet)}, {Key: "error", Value: p.likelyError()},
		{Key: "ttft_ms", Value: three(row.TTFT)}, {Key: "tpot_ms", Value: three(row.TPOT)}, {Key: "itl_ms", Value: three(row.ITL)}, {Key: "goodput", Value: row.Goodput}, {Key: "failed", Value: row.Failed},
		{Key: "prefill_busy", Value: row.PrefillBusy}, {Key: "decode_busy", Value: row.DecodeBusy}, {Key: "kv_usage_max", Value: row.DecodeKV}, {Key: "prefix_cache_hit_rate", Value: row.Cached}, {Key: "local_prefill_share", Value: row.Local},
		{Key: "input_tokens_per_second", Value: row.Input}, {Key: "output_tokens_per_second", Value: row.Output},
	}
}

// explanation returns the derivation of each number, a line for each.
func (r *run) explanation() (lines []string) {
	p := r.plan
	d, f := &p.Demand, p.Fleet
	n := &r.problem.Nodes[f.Node]
	source := r.profileOf(f).sources()
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	add("Rate: %s / %.0f s = %.3g requests a second (load)", count(d.Requests, "request"), d.Span, d.Rate)
	add("Prompt: %.3g s of steps of at most %d tokens on average, with every shared beginning cached (%.0f %% of tokens) and an idle node (step times: %s)", d.Service, f.BatchedTokens, 100*d.Cached, source)
	add("Work of prompts: %.3g requests a second · %.3g s = %.3g seconds a second, %.3g without caches, and %.3g if prompts share steps as well as they can. So at least %s compute prompts; at %.0f %% of their time %d",
		d.Rate, d.Service, d.Work, d.ColdWork, d.LeastWork, count(p.Bounds.Prefill, "node"), 100*planner.GuessBusy, p.Bounds.GuessPrefill)
	k := max(1, f.Prefill)
	if f.Prefill == 0 {
		k = f.Decode
	}
	if wait := d.Wait(k); !math.IsInf(wait, 0) {
		add("Wait for %s: %.3g s on average, if requests came at random (M/G/k; squared coefficient of variation of prompts %.3g). Bursts make it longer: the backlog of the load reaches %.3g s", count(k, "node"), wait, d.Variation, p.Backlog)
	}
	add("Context: a decoded token attends to %.0f tokens on average (the mean over tokens, not over requests)", d.Context)
	s := d.Decoding(n, f.Decode)
	if !math.IsInf(s.ITL, 0) {
		add("Decode: %.3g requests a second · %.0f tokens / %s = %.3g tokens a second for a node. A step takes %.3g ms + %.3g µs a request + %.3g ns a token of context, so %.3g ms between tokens, %.3g requests at once and %.0f %% of KV memory (step times: %s)",
			d.Rate, d.Output, count(f.Decode, "node"), d.Rate*d.Output/float64(f.Decode), 1e3*n.Fixed, 1e6*n.PerSeq, 1e9*n.PerCtx, 1e3*s.ITL, s.Batch, 100*s.KV, source)
	}
	add("Most tokens of a node, with any number of requests: 1 / (%.3g µs + %.3g ns · %.0f) = %.0f a second. So at least %s decode, and %d to keep half of the KV memory and a fifth of the limit free", 1e6*n.PerSeq, 1e9*n.PerCtx, d.Context, 1/(n.PerSeq+n.PerCtx*d.Context), count(p.Bounds.Decode, "node"), p.Bounds.GuessDecode)
	if limit := r.limitOf(planner.TTFT); limit > 0 {
		add("Floor: the first token of %.2f %% of the requests is later than %v on an idle node, %.2f %% without caches. The longest prompt within the limit has %s tokens", 100*p.Floor.Infeasible, limit, 100*p.Floor.Cold, report.Figure(float64(p.Floor.Longest)))
	}
	add("Choice: the simulator decided among fleets near those bounds, first on %s, then on %s", count(len(r.part), "request"), count(len(r.whole), "request"))
	if c := r.fleetCost(f, p.Outcome); c.Hourly() > 0 {
		k := r.profileOf(f)
		nodes := fmt.Sprintf("%d · $%s", f.Nodes(), dollars(k.Node.Price))
		if k.prefill != nil {
			nodes = fmt.Sprintf("(%d · $%s + %d · $%s)", f.Prefill, dollars(k.prefill.Node.Price), f.Decode, dollars(k.Node.Price))
		}
		add("Price: %s · (1 + %g) = $%.2f an hour; / (%.0f + %.0f tokens a second) / 3600 · 10⁶ = $%s for a million tokens", nodes, r.Overhead, c.Hourly(), c.In, c.Out, dollars(c.Blended()))
		if c.Pools() {
			add("Price by pool: $%.2f / %.0f / 3600 · 10⁶ = $%s for a million prompt tokens, $%.2f / %.0f / 3600 · 10⁶ = $%s for a million answer tokens", c.Prefill*(1+r.Overhead), c.In, dollars(c.Input()), c.Decode*(1+r.Overhead), c.Out, dollars(c.Output()))
		}
		add("Price of a cached prompt token: that of a prompt token · %.3g, the time to read its KV / the time to compute it", c.ReadCost)
	}
	return lines
}
