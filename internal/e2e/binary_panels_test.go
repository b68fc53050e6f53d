//go:build linux

package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// panels are the dashboard's queries, in order, with its variables filled in.
// The interval of rates is the window.
func panels(t *testing.T, window string) map[string][]string {
	t.Helper()
	text, err := os.ReadFile("../../deploy/grafana/tandem.json")
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &board); err != nil {
		t.Fatal(err)
	}
	out := map[string][]string{}
	for _, p := range board.Panels {
		for _, q := range p.Targets {
			out[p.Title] = append(out[p.Title], strings.NewReplacer("$__rate_interval", window, "$model", ".*").Replace(q.Expr))
		}
	}
	return out
}

// Panels are held within a tenth of what they should show: a rate is
// extrapolated from the first and the last scrape to the ends of its window by at
// most a scrape's interval, of some twenty of them at least. What is to be zero
// has to be zero, and no other series may be there.
const panelSlack = 0.1

// The window of rates in panels is far longer than the test, so that every
// sample is in it; a rate is then what was counted, by this.
const (
	panelWindow  = "10m"
	panelSeconds = 600.0
)

// band is what a value may be.
type band struct{ low, high float64 }

// about is what a panel may show for a value.
func about(v float64) band {
	return band{v - panelSlack*math.Abs(v), v + panelSlack*math.Abs(v)}
}

func (b band) holds(v float64) bool {
	return v >= b.low && v <= b.high || math.IsNaN(b.low) && math.IsNaN(v)
}

// shown is what one query of a panel is to show: the value of each series by its
// labels, "" where there are none.
type shown map[string]band

// seriesName is a series by the values of its labels; of a node's own series, its
// name.
func seriesName(labels map[string]string) string {
	if node := labels["node"]; node != "" {
		return node
	}
	var all []string
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		all = append(all, labels[k])
	}
	return strings.Join(all, " ")
}

// near says why what is shown is not what was wanted; "" where it is.
func (want shown) near(got map[string]float64) string {
	for _, k := range slices.Sorted(maps.Keys(want)) {
		if v, ok := got[k]; !ok {
			return fmt.Sprintf("no %q, want %v", k, want[k])
		} else if !want[k].holds(v) {
			return fmt.Sprintf("%q is %g, want %v", k, v, want[k])
		}
	}
	for k, v := range got {
		if _, ok := want[k]; !ok {
			return fmt.Sprintf("%q is there, with %g", k, v)
		}
	}
	return ""
}

// holdPanels has the panels show what they should, one list of queries each, in
// the dashboard's order.
func (p *prom) holdPanels(all map[string][]shown) {
	p.t.Helper()
	if wrong := p.wrongPanels(30*time.Second, all); len(wrong) > 0 {
		p.t.Errorf("panels: %s", strings.Join(wrong, "\n"))
	}
}

// wrongPanels says what panels do not show within a time.
func (p *prom) wrongPanels(d time.Duration, all map[string][]shown) (wrong []string) {
	p.t.Helper()
	queries, end := panels(p.t, panelWindow), time.Now().Add(d)
	for _, title := range slices.Sorted(maps.Keys(all)) {
		if len(queries[title]) != len(all[title]) {
			p.t.Fatalf("panel %q has %d queries, %d are known", title, len(queries[title]), len(all[title]))
		}
		for i, want := range all[title] {
			for {
				values, labels, err := p.query(queries[title][i])
				if err != nil {
					p.t.Fatal(err)
				}
				got := map[string]float64{}
				for k := range values {
					got[seriesName(labels[k])] = values[k]
				}
				why := want.near(got)
				if why == "" {
					break
				}
				if time.Now().After(end) {
					wrong = append(wrong, fmt.Sprintf("%q, query %d: %s", title, i+1, why))
					break
				}
				time.Sleep(50 * time.Millisecond)
			}
		}
	}
	return wrong
}

// ofNodes is a query with a series for each node, read from the node itself.
func (c *cluster) ofNodes(role string, nodes []int, name string) shown {
	c.t.Helper()
	out := map[string]float64{}
	for i, node := range nodes {
		out[fmt.Sprintf("%s-%d", role, i)] = c.value([]int{node}, name, "")
	}
	return show(out)
}

// panelsAfterMore is what panels show that the known load left at zero, after
// prompts that were cached, a client that left and preemptions; in numbers of which
// each was held before, read from the nodes.
func (c *cluster) panelsAfterMore() map[string][]shown {
	g := []int{gatewayNode}
	prompts := c.value(g, "vllm:prompt_tokens_total", "")
	hits := func(nodes []int) float64 {
		return c.value(nodes, "vllm:prefix_cache_hits_total", "") / c.value(nodes, "vllm:prefix_cache_queries_total", "")
	}
	perStep := func(nodes []int) float64 {
		return c.value(nodes, "vllm:iteration_tokens_total_sum", "") / c.value(nodes, "vllm:iteration_tokens_total_count", "")
	}
	remote := c.value(decodeNodes, "tandem:decode_prefills_total", `"remote"`)
	cut := zeros(abortCauses...)
	cut["client_gone"] = about(1 / panelSeconds)
	return map[string][]shown{
		"Prefix cache": {show(map[string]float64{"prefill": hits(prefillNodes), "decode": hits(decodeNodes)}),
			one(c.value(g, "tandem:gateway_predicted_cached_tokens_total", "") / prompts), one(c.value(g, "tandem:gateway_actual_cached_tokens_total", "") / prompts)},
		"Cut requests": {cut},
		"Decode pool: tokens per step, preemptions": {one(perStep(decodeNodes)), rate(c.value(decodeNodes, "vllm:num_preemptions_total", ""))},
		"Prompts computed elsewhere":                {one(remote / (remote + c.value(decodeNodes, "tandem:decode_prefills_total", `"local"`)))},
		"Tokenizer cache: hits":                     {c.cacheHits()},
	}
}

// show is a query's values by label.
func show(values map[string]float64) shown {
	out := shown{}
	for k, v := range values {
		out[k] = about(v)
	}
	return out
}

// one is a query with one series that has no label.
func one(v float64) shown { return show(map[string]float64{"": v}) }

// rates are counts by label as the panels show them.
func rates(counts map[string]float64) shown {
	out := shown{}
	for k, n := range counts {
		out[k] = about(n / panelSeconds)
	}
	return out
}

func rate(n float64) shown { return rates(map[string]float64{"": n}) }

// zeros are series that show nothing.
func zeros(names ...string) shown {
	out := shown{}
	for _, name := range names {
		out[name] = band{}
	}
	return out
}

// quantile is that of a histogram with the label over some nodes, by their own
// buckets.
func (c *cluster) quantile(q float64, nodes []int, name, label string) shown {
	c.t.Helper()
	bounds, counts := []float64{}, map[float64]float64{}
	for _, node := range nodes {
		text := c.scrape(node)
		for line := range strings.Lines(text) {
			series, value, ok := strings.Cut(strings.TrimSpace(line), " ")
			n, labels, _ := strings.Cut(series, "{")
			if !ok || n != name+"_bucket" || !strings.Contains(labels, label) {
				continue
			}
			_, le, _ := strings.Cut(labels, `le="`)
			le, _, _ = strings.Cut(le, `"`)
			bound, err := strconv.ParseFloat(le, 64) // +Inf too
			if err != nil {
				c.t.Fatal(err)
			}
			v, err := strconv.ParseFloat(value, 64)
			if err != nil {
				c.t.Fatal(err)
			}
			if _, there := counts[bound]; !there {
				bounds = append(bounds, bound)
			}
			counts[bound] += v
		}
	}
	slices.Sort(bounds)
	total := counts[math.Inf(1)]
	if total == 0 {
		return one(math.NaN())
	}
	below, start := 0.0, 0.0
	for _, b := range bounds {
		if counts[b] >= q*total && !math.IsInf(b, 1) {
			return one(start + (b-start)*(q*total-below)/(counts[b]-below))
		}
		if !math.IsInf(b, 1) {
			below, start = counts[b], b
		}
	}
	return one(start)
}

// latencies are the panels of histograms: three quantiles of what gateways see,
// and those of the pools.
func (c *cluster) latencies() map[string][]shown {
	g := []int{gatewayNode}
	all := map[string][]shown{}
	for title, name := range map[string]string{"Time to first token": "vllm:time_to_first_token_seconds", "Inter-token latency": "vllm:inter_token_latency_seconds",
		"Request latency": "vllm:e2e_request_latency_seconds"} {
		for _, q := range []float64{0.5, 0.95, 0.99} {
			all[title] = append(all[title], c.quantile(q, g, name, ""))
		}
	}
	for title, nodes := range map[string][]int{"Prefill pool: p95 of queue, prompt, step": prefillNodes, "Decode pool: p95 of queue, prompt, step": decodeNodes} {
		for _, name := range []string{"vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds", "tandem:engine_step_seconds"} {
			all[title] = append(all[title], c.quantile(0.95, nodes, name, ""))
		}
	}
	for _, q := range []float64{0.5, 0.95, 0.99} {
		const title = "Time per output token"
		all[title] = append(all[title], c.quantile(q, g, "vllm:request_time_per_output_token_seconds", ""))
	}
	for _, name := range []string{"vllm:request_prompt_tokens", "vllm:request_generation_tokens"} {
		for _, q := range []float64{0.5, 0.95} {
			all["Request sizes"] = append(all["Request sizes"], c.quantile(q, g, name, ""))
		}
	}
	for _, name := range []string{"tandem:kv_transfer_hidden_seconds", "tandem:kv_transfer_exposed_seconds"} {
		all["KV transfer: hidden and exposed time"] = append(all["KV transfer: hidden and exposed time"], c.quantile(0.95, prefillNodes, name, ""))
	}
	for _, name := range []string{"tandem:kv_transfer_first_byte_seconds", "tandem:kv_transfer_last_byte_seconds"} {
		all["KV transfer: hidden and exposed time"] = append(all["KV transfer: hidden and exposed time"], c.quantile(0.95, decodeNodes, name, ""))
	}
	const foretold, off = "First token: predicted and actual", "First token: how far off the prediction was"
	for _, q := range []float64{0.5, 0.95} {
		for _, name := range []string{"tandem:gateway_predicted_first_token_seconds", "tandem:gateway_actual_first_token_seconds"} {
			all[foretold] = append(all[foretold], c.quantile(q, g, name, ""))
		}
	}
	for _, side := range []string{"late", "early"} {
		for _, q := range []float64{0.5, 0.95} {
			all[off] = append(all[off], c.quantile(q, g, "tandem:gateway_first_token_error_seconds", `side="`+side+`"`))
		}
	}
	return all
}

// ofRoles is a query with a series for each role, of what its nodes say.
func (c *cluster) ofRoles(name, label string, may func(float64) band) shown {
	c.t.Helper()
	out := shown{}
	for role, nodes := range map[string][]int{"gateway": {gatewayNode}, "prefill": prefillNodes, "decode": decodeNodes} {
		out[role] = may(c.value(nodes, name, label))
	}
	return out
}

// cacheHits are those of the gateway's cache of messages, as a share.
func (c *cluster) cacheHits() shown {
	c.t.Helper()
	const name = "tandem:tokenizer_cache_lookups_total"
	return one(c.value([]int{gatewayNode}, name, `"hit"`) / c.value([]int{gatewayNode}, name, ""))
}

// waits is how long requests waited in the gateway, by its own buckets.
func (c *cluster) waits() (all []shown) {
	for _, q := range []float64{0.5, 0.95} {
		all = append(all, c.quantile(q, []int{gatewayNode}, "tandem:gateway_queue_time_seconds", ""))
	}
	return all
}

// prefillBreakers are those of decode nodes, of which none is to be open.
func (c *cluster) prefillBreakers() shown {
	asked := c.value(decodeNodes, "tandem:decode_prefill_breakers", `"closed"`)
	if asked < 1 || asked > float64(len(decodeNodes)*len(prefillNodes)) {
		c.t.Errorf("%g breakers towards prefill nodes are closed", asked)
	}
	return show(map[string]float64{"closed": asked, "half-open": 0, "open": 0})
}

// codes are all values of labels whose series are there from the start.
var (
	failureCodes = []string{"connection", "overloaded", "draining", "mismatch", "invalid", "timeout", "internal", "other"}
	abortCauses  = []string{"upstream", "client_gone", "slow_client", "deadline", "shutdown", "aborted"}
	allRoles     = []string{"gateway", "prefill", "decode"}

	refusalLimits = []string{"queue", "late", "evicted", "timeout", "concurrency", "tokens", "address", "body_memory", "connections", "grammars"}
)

// blocksKept are the full blocks of so many tokens whose KV was computed.
func blocksKept(tokens int) float64 { return float64(tokens / 16) }

// panelsAfterLoad is what every panel shows of the known load.
func (c *cluster) panelsAfterLoad(perBlock int64) map[string][]shown {
	const n, computed, blocks = float64(oRequests), oPrompt - 1, (oPrompt - 1 + 15) / 16
	kept := n * blocksKept(oPrompt+oOutput-1) // the last token's KV is never computed
	sent := n * blocksKept(computed)
	homes := map[string]float64{}
	for _, reason := range []string{"prefix", "load", "cached", "remote"} {
		if v := c.metric(gatewayNode, "tandem:gateway_routes_total", `reason="`+reason+`"`); v > 0 {
			homes[reason] = float64(v)
		}
	}
	all := c.latencies()
	maps.Copy(all, map[string][]shown{
		"Requests by finish reason":               {rates(map[string]float64{"length": n, "stop": 0, "abort": 0, "error": 0})},
		"Tokens":                                  {rate(n * oPrompt), rate(n * oOutput)},
		"Requests in flight":                      {zeros("gateway")},
		"HTTP answers by status":                  {{"200": band{n / panelSeconds, math.Inf(1)}}},
		"Routing decisions":                       {rates(homes), zeros("")},
		"Prompt tokens by source":                 {rates(map[string]float64{"external_kv_transfer": n * computed, "local_compute": n, "local_cache_hit": 0})},
		"Prefill pool: running and waiting":       {zeros(""), zeros("capacity", "deferred")},
		"Decode pool: running and waiting":        {zeros(""), zeros("capacity", "deferred")},
		"Prefill pool: KV cache usage":            {zeros("prefill-0", "prefill-1")},
		"Decode pool: KV cache usage":             {zeros("decode-0", "decode-1")},
		"Prefill pool: seconds of queued prompts": {zeros("prefill-0", "prefill-1")},
		"Cost: US dollars an hour":                {show(map[string]float64{"gateway": 3.5, "prefill": 7, "decode": 7})},
		"Cost: US dollars for a million tokens": {
			one(17.5 / (n * (oPrompt + oOutput) / panelSeconds) / 3600 * 1e6), one(7 / (n * oPrompt / panelSeconds) / 3600 * 1e6), one(7 / (n * oOutput / panelSeconds) / 3600 * 1e6),
		},
		"Cost: US dollars an hour by API key":        {show(map[string]float64{"other": 17.5})},
		"Decode pool: pressure":                      {zeros("decode-0", "decode-1")},
		"Prefill pool: KV blocks":                    {show(map[string]float64{"free": 2*oBlocks - sent, "cached": sent, "used": 0, "pinned": 0})},
		"Decode pool: KV blocks":                     {show(map[string]float64{"free": 2*oBlocks - kept, "cached": kept, "used": 0, "pinned": 0})},
		"Prefill pool: tokens per step, preemptions": {one(computed), zeros("")},
		"Decode pool: tokens per step, preemptions":  {one(1), zeros("")},
		"Queues against their bounds":                {c.queuesAtRest()},
		"Prefix cache":                               {zeros("prefill", "decode"), zeros(""), zeros("")},
		"Failed attempts":                            {zeros(failureCodes...), zeros(""), zeros("silence", "stall")},
		"Cut requests":                               {zeros(abortCauses...)},
		"Decode nodes as gateways see them":          {show(map[string]float64{"closed": 2, "half-open": 0, "open": 0}), one(2)},
		"KV transfer: bytes":                         {rates(map[string]float64{"in": n * blocks * float64(perBlock), "out": n * blocks * float64(perBlock)})},
		"KV transfer: failures":                      {zeros("in", "out"), zeros(""), zeros("stale", "duplicate", "corrupt"), zeros("")},
		"Prompts computed elsewhere":                 {one(1)},
		"Refused":                                    {zeros(allRoles...)},
		"Dropped events and frames":                  {zeros(""), zeros(""), zeros(""), zeros("")},
		"Gateway queue: requests":                    {zeros("gateway")},
		"Gateway queue: time waited":                 c.waits(),
		"Refused by gateways":                        {zeros(refusalLimits...)},
		"Prefill nodes as decode nodes see them":     {c.prefillBreakers()},
		"Speculation: drafts accepted":               {one(c.value(decodeNodes, "vllm:spec_decode_num_accepted_tokens_total", "") / c.value(decodeNodes, "vllm:spec_decode_num_draft_tokens_total", ""))},
		"Gateway files not reloaded":                 {zeros("certificates", "config"), zeros("")},
		"Tokenizer cache: hits":                      {c.cacheHits()},
		"Upstreams: requests in flight":              {zeros("serve", "prefill", "decode")},
		"Upstreams as gateways see them":             {{}, zeros("closed", "half-open", "open")},
		"KV in transfer":                             {zeros("in", "out"), zeros("waiting_to_start", "in_progress", "completed_waiting"), zeros("granted", "arriving", "quarantined")},
		"Slow clients: memory":                       {zeros("gateway")},
		"Slow clients: pauses and late tokens":       {zeros(""), zeros("")},
		"Retry budget":                               {one(500)},
		"Prefill jobs":                               {rates(map[string]float64{"done": n, "cancelled": 0, "failed": 0, "refused": 0})},
		"Decode nodes: refused and dropped":          {zeros(""), zeros("")},
		"Connections between nodes":                  {c.ofRoles("tandem:rpc_connections", "", about)},
		"Connections that failed":                    {zeros(""), zeros(""), zeros(""), zeros("")},
		"Traffic between nodes": {c.ofRoles("tandem:rpc_bytes_total", `"out"`, func(bytes float64) band {
			// Much of it is older than the first scrape; a frame or more for each request is not.
			return band{16 * n / panelSeconds, 2 * bytes / panelSeconds}
		})},
		"KV transfer: through shared memory": {one(c.value(decodeNodes, "tandem:kv_transfer_shared_bytes_total", `"in"`) / (n * blocks * float64(perBlock))),
			one(c.value(decodeNodes, "tandem:kv_transfer_rdma_bytes_total", `"in"`) / (n * blocks * float64(perBlock)))},
	})
	for title := range panels(c.t, panelWindow) {
		if all[title] == nil {
			c.t.Errorf("nobody has said what the panel %q is to show", title)
		}
	}
	return all
}

// boundedQueues are those of the dashboard, with whose they are.
var boundedQueues = []string{"requests gateway", "connections gateway", "waiting gateway", "waiting_tokens gateway", "body_bytes gateway", "engine_waiting prefill", "engine_running prefill",
	"engine_waiting decode", "engine_running decode", "arriving_blocks decode", "attempts decode", "prefill_jobs prefill", "pushes prefill"}

// queuesAtRest are the queues as parts of their bounds when nothing runs: only
// connections are open.
func (c *cluster) queuesAtRest() shown {
	out := zeros(boundedQueues...)
	out["connections gateway"] = band{1.0 / oConnections, 1e-3} // those who ask
	return out
}
