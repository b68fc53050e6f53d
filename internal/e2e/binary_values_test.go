//go:build linux

package e2e

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"time"
)

// value is a metric's sum over nodes.
func (c *cluster) value(nodes []int, name, label string) float64 {
	c.t.Helper()
	sum := 0.0
	for _, node := range nodes {
		v, found := pick(c.scrape(node), name, label)
		if !found {
			c.t.Fatalf("node %d exposes no %s{%s}", node, name, label)
		}
		sum += v
	}
	return sum
}

// learnt waits until the gateway has heard how fast the prefill nodes are that
// have computed something, and says how many those are.
func (c *cluster) learnt() (n int) {
	c.t.Helper()
	c.wait(20*time.Second, "the gateway knows the prefill nodes' speed", func() bool {
		n = 0
		for _, node := range prefillNodes {
			if c.metric(node, "tandem:engine_steps_total", "") > 0 {
				n++
			}
		}
		resp, err := http.Get(c.url("/debug/route?prompt=x"))
		if err != nil {
			c.t.Fatal(err)
		}
		defer resp.Body.Close()
		var route struct {
			Nodes []struct {
				Role string
				Rate float64 `json:"tokens_per_s"`
			}
		}
		if err := json.NewDecoder(resp.Body).Decode(&route); err != nil {
			c.t.Fatal(err)
		}
		known := 0
		for _, node := range route.Nodes {
			if node.Role == "prefill" && node.Rate > 0 {
				known++
			}
		}
		return known == n
	})
	return n
}

// holdTimes holds what the histograms of times add up to against each other and
// against what the client waited: the parts of a time are the whole of it, and
// what a client waits for is no shorter than what the gateway does, nor that than
// what nodes do. All requests had the same number of tokens, one after the other.
func (c *cluster) holdTimes(waited float64) {
	c.t.Helper()
	g, p, d := []int{gatewayNode}, prefillNodes, decodeNodes
	sum := func(nodes []int, name string) float64 {
		v := c.value(nodes, name+"_sum", "")
		if v > 0 {
			c.saw(name+"_sum", nodes)
		}
		return v
	}
	const first, e2e, decoding, gap, perToken = "vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds", "vllm:request_decode_time_seconds", "vllm:inter_token_latency_seconds", "vllm:request_time_per_output_token_seconds"
	const queue, prompt, inference, steps = "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds", "vllm:request_inference_time_seconds", "tandem:engine_step_seconds"
	same := func(what string, a, b float64) {
		c.t.Helper()
		if math.Abs(a-b) > 1e-6 || a <= 0 {
			c.t.Errorf("%s: %g s and %g s", what, a, b)
		}
	}
	rising := func(what string, all ...float64) {
		c.t.Helper()
		for i := 1; i < len(all); i++ {
			if all[i-1] <= 0 || all[i] < all[i-1]-1e-6 {
				c.t.Errorf("%s: these do not rise: %v s", what, all)
			}
		}
	}
	for _, at := range [][]int{g, d} {
		same("gaps are the time of decoding", sum(at, gap), sum(at, decoding))
		same("and so are tokens, all but the first", sum(at, perToken)*(oOutput-1), sum(at, decoding))
		rising("a request", sum(at, first), sum(at, first)+sum(at, decoding), sum(at, e2e))
	}
	same("the first token is queue and prompt", sum(d, queue)+sum(d, prompt), sum(d, first))
	same("inference is prompt and decoding", sum(d, prompt)+sum(d, decoding), sum(d, inference))
	same("inference of a job is its prompt", sum(p, prompt), sum(p, inference))
	rising("first tokens: decode node, gateway, client", sum(d, queue), sum(d, first), sum(g, first), waited)
	rising("whole requests: decode node, gateway, client", sum(d, e2e), sum(g, e2e), waited)
	rising("prompts: steps, jobs", sum(p, steps), sum(p, inference))
	rising("tokens: steps, requests", sum(d, steps), sum(d, inference))
}

// holdForetold: of n requests all but the first of each prefill node were
// foretold, and what they waited differs from that by what the metrics say.
func (c *cluster) holdForetold(n, nodes int) {
	c.t.Helper()
	g := []int{gatewayNode}
	const predicted, actual, off = "tandem:gateway_predicted_first_token_seconds", "tandem:gateway_actual_first_token_seconds", "tandem:gateway_first_token_error_seconds"
	told := float64(n - nodes)
	c.hold("first tokens foretold", []want{{g, predicted + "_count", "", told}, {g, actual + "_count", "", told}, {g, off + "_count", "", told}})
	p, a := c.value(g, predicted+"_sum", ""), c.value(g, actual+"_sum", "")
	late, early := c.value(g, off+"_sum", `side="late"`), c.value(g, off+"_sum", `side="early"`)
	if all := c.value(g, "vllm:time_to_first_token_seconds_sum", ""); p <= 0 || a <= 0 || a > all || math.Abs(a-p-(late-early)) > 1e-6 {
		c.t.Errorf("first tokens after %g s of %g s, foretold %g s, late by %g s and early by %g s", a, all, p, late, early)
	}
	for _, name := range []string{predicted, actual, off} {
		c.saw(name+"_sum", g)
	}
}

// holdTraffic: what processes have sent to each other is what they have received,
// but for what is on its way.
func (c *cluster) holdTraffic() {
	c.t.Helper()
	all := slices.Concat([]int{gatewayNode}, prefillNodes, decodeNodes)
	for _, name := range []string{"tandem:rpc_frames_total", "tandem:rpc_bytes_total"} {
		in, out := c.value(all, name, `"in"`), c.value(all, name, `"out"`)
		if in > out {
			c.t.Errorf("%s: %g have come and %g been sent after that", name, in, out)
		}
		c.wait(10*time.Second, fmt.Sprintf("%s: %g that were sent have come", name, out), func() bool { return c.value(all, name, `"in"`) >= out })
		c.saw(name, all)
	}
	// A connection is one of each of its ends; the gateway has one to every node.
	if p, d := c.value(prefillNodes, "tandem:rpc_connections", ""), c.value(decodeNodes, "tandem:rpc_connections", ""); p != d || p < 2+1 || p > 2+4 {
		c.t.Errorf("prefill nodes have %g connections, decode nodes %g", p, d)
	}
	c.saw("tandem:rpc_connections", slices.Concat(prefillNodes, decodeNodes))
	// Each token of the load was a frame of its own, beside the node's consent.
	if n := c.value([]int{gatewayNode}, "tandem:rpc_frames_total", `"in"`); n < oRequests*(oOutput+1) {
		c.t.Errorf("the gateway has received %g frames", n)
	}
}

// holdSpans: the collector has as many spans of each process as that says, and
// they last as long as the histograms say.
func (c *cluster) holdSpans(otlp *collector) {
	c.t.Helper()
	for role, nodes := range map[string][]int{"gateway": {gatewayNode}, "prefill": prefillNodes, "decode": decodeNodes} {
		c.wait(20*time.Second, "every span of a "+role+" that was sent has come", func() bool {
			n, _ := otlp.of(role, "")
			return n > 0 && c.value(nodes, "tandem:trace_spans_total", `"sent"`) == float64(n)
		})
		c.saw("tandem:trace_spans_total", nodes)
	}
	for _, s := range []struct {
		role, name string
		nodes      []int
		histograms []string
	}{
		{"decode", "queue", decodeNodes, []string{"vllm:request_queue_time_seconds"}},
		{"decode", "prompt", decodeNodes, []string{"vllm:request_prefill_time_seconds"}},
		{"decode", "tokens", decodeNodes, []string{"vllm:request_decode_time_seconds"}},
		{"prefill", "queue", prefillNodes, []string{"vllm:request_queue_time_seconds"}},
		{"prefill", "prompt", prefillNodes, []string{"vllm:request_prefill_time_seconds"}},
		{"prefill", "KV transfer", prefillNodes, []string{"tandem:kv_transfer_hidden_seconds", "tandem:kv_transfer_exposed_seconds"}},
	} {
		n, lasted := otlp.of(s.role, s.name)
		told := 0.0
		for _, name := range s.histograms {
			told += c.value(s.nodes, name+"_sum", "")
			c.saw(name+"_sum", s.nodes)
		}
		if n != oRequests || math.Abs(told-lasted) > 1e-3 {
			c.t.Errorf("%d spans %s of %s nodes last %g s, %v say %g s", n, s.name, s.role, lasted, s.histograms, told)
		}
	}
}

// loseSpans has the collector take nothing until a prompt was computed elsewhere:
// what it has refused is every span of the requests, and what processes say they
// could not send, and what the dashboard shows.
func (c *cluster) loseSpans(r *rand.Rand, p *prom, otlp *collector) {
	c.t.Helper()
	const prefills = "tandem:decode_prefills_total"
	c.traceparent = strings.Replace(oParent, "0af7", "4efb", 1)
	defer func() { c.traceparent = "" }()
	otlp.refuse.Store(true)
	remote, all := c.value(decodeNodes, prefills, `"remote"`), c.value(decodeNodes, prefills, "")
	n, there := 0.0, 0.0
	for ; there == 0; n++ {
		if n == 50 {
			c.t.Fatal("no prompt was computed elsewhere")
		}
		if _, err := c.complete(c.prompt(r, oPrompt), oOutput); err != nil {
			c.t.Fatal(err)
		}
		c.wait(20*time.Second, "its prefill has been counted", func() bool { return c.value(decodeNodes, prefills, "") == all+n+1 })
		there = c.value(decodeNodes, prefills, `"remote"`) - remote
	}
	roles := map[string][]int{"gateway": {gatewayNode}, "prefill": prefillNodes, "decode": decodeNodes}
	for role, want := range map[string]float64{"gateway": 2 * n, "decode": 4*n + there, "prefill": 4 * there} {
		c.wait(20*time.Second, fmt.Sprintf("%g spans of a %s are lost", want, role), func() bool {
			_, of := otlp.lost(role, c.traceparent[3:35])
			return of == want
		})
	}
	otlp.refuse.Store(false)
	every, lost := slices.Concat([]int{gatewayNode}, prefillNodes, decodeNodes), 0.0
	for role, nodes := range roles {
		n := 0.0
		c.wait(20*time.Second, "a "+role+" says so", func() bool {
			n, _ = otlp.lost(role, "")
			return c.value(nodes, "tandem:trace_spans_total", `"failed"`) == n
		})
		lost += n
	}
	others := func(nodes []int, name string) shown { return rate(c.value(nodes, name, "")) }
	p.holdPanels(map[string][]shown{"Dropped events and frames": {others(every[1:], "tandem:block_events_dropped_total"), others(every, "tandem:rpc_outbox_full_total"),
		others(every, "tandem:rpc_silent_connections_total"), rate(lost)}})
}

// freeze stops processes, or has them go on.
func (c *cluster) freeze(pids map[string]int, role string, s syscall.Signal) {
	c.t.Helper()
	for name, pid := range pids {
		if strings.HasPrefix(name, role) {
			if err := syscall.Kill(pid, s); err != nil {
				c.t.Fatal(err)
			}
		}
	}
}

// Prompts that fill half of the blocks that may be arriving at a node, so that
// three of them on one wait for each other.
const (
	oWaiting  = 3
	oBig      = 16*16 + 1
	oBigBlock = 16
)

// ask sends big prompts and returns what will say how that went.
func (c *cluster) ask(r *rand.Rand, n int) <-chan error {
	done := make(chan error, n)
	for range n {
		prompt := c.prompt(r, oBig)
		go func() {
			_, err := c.complete(prompt, 2)
			done <- err
		}()
	}
	return done
}

// answered waits for the answers.
func (c *cluster) answered(done <-chan error) {
	c.t.Helper()
	for range cap(done) {
		if err := <-done; err != nil {
			c.t.Fatal(err)
		}
	}
}

// seenWithin polls until all values are right at one moment.
func (c *cluster) seenWithin(d time.Duration, all []want) (wrong []string) {
	c.t.Helper()
	for end := time.Now().Add(d); ; time.Sleep(5 * time.Millisecond) {
		if wrong = c.wrong(all); len(wrong) == 0 || time.Now().After(end) {
			return wrong
		}
	}
}

// waiting has requests wait where their number is known: for prefill nodes that
// are stopped, and then for grants of decode nodes that are. A process that is
// stopped for long is given up, which on a busy machine may come first: then once
// more.
func (c *cluster) waiting(r *rand.Rand, prometheus *prom) {
	c.t.Helper()
	g, p, d := []int{gatewayNode}, prefillNodes, decodeNodes
	pids := c.pids()
	var wrong []string
	for range 20 {
		c.freeze(pids, "prefill-", syscall.SIGSTOP)
		done := c.ask(r, oWaiting)
		wrong = c.seenWithin(3*time.Second, []want{
			{g, "tandem:gateway_requests_in_flight", "", oWaiting},
			{g, "tandem:queue_length", `queue="requests"`, oWaiting},
			{d, "vllm:num_requests_waiting", "", oWaiting},
			{d, "vllm:num_requests_waiting_by_reason", `"deferred"`, oWaiting},
			{d, "vllm:num_requests_waiting_by_reason", `"capacity"`, 0},
			{d, "vllm:num_requests_kv_fetch_by_stage", `"waiting_to_start"`, oWaiting},
			{d, "vllm:num_requests_kv_fetch_by_stage", "", oWaiting},
			{d, "vllm:num_requests_running", "", 0},
			{d, "tandem:queue_length", `"engine_waiting"`, oWaiting},
			{d, "tandem:queue_length", `"attempts"`, oWaiting},
		})
		if len(wrong) == 0 {
			wrong = prometheus.wrongPanels(2*time.Second, map[string][]shown{
				"Requests in flight":               {show(map[string]float64{"gateway": oWaiting})},
				"Decode pool: running and waiting": {one(0), show(map[string]float64{"capacity": 0, "deferred": oWaiting})},
			})
		}
		c.freeze(pids, "decode-", syscall.SIGSTOP)
		c.freeze(pids, "prefill-", syscall.SIGCONT)
		if len(wrong) == 0 {
			wrong = c.seenWithin(2*time.Second, []want{
				{p, "vllm:num_requests_waiting", "", oWaiting},
				{p, "vllm:num_requests_waiting_by_reason", `"deferred"`, oWaiting},
			})
		}
		if len(wrong) == 0 {
			wrong = prometheus.wrongPanels(2*time.Second, map[string][]shown{
				"Prefill pool: running and waiting": {one(0), show(map[string]float64{"capacity": 0, "deferred": oWaiting})},
			})
		}
		c.freeze(pids, "decode-", syscall.SIGCONT)
		c.answered(done)
		if len(wrong) == 0 {
			return
		}
	}
	c.t.Errorf("requests that wait: %s", strings.Join(wrong, "\n"))
}

// moving stops the nodes in the middle of a transfer, where what is pinned is
// known: first with its blocks granted, then with them computed and on their way.
func (c *cluster) moving(r *rand.Rand, prometheus *prom) {
	c.t.Helper()
	p, d := prefillNodes, decodeNodes
	pids := c.pids()
	var wrong []string
	for range 50 {
		done := c.ask(r, 1)
		for len(done) == 0 && c.value(d, "vllm:num_requests_kv_fetch_by_stage", `"in_progress"`) == 0 {
			continue // until the decode node has granted its blocks
		}
		c.freeze(pids, "prefill-", syscall.SIGSTOP)
		time.Sleep(20 * time.Millisecond) // what they had sent arrives
		wrong = c.wrong([]want{
			{d, "vllm:num_requests_kv_fetch_by_stage", `"in_progress"`, 1},
			{d, "tandem:kv_leases", "", 1},
			{d, "tandem:kv_blocks_in_transfer", `"in"`, oBigBlock},
			{d, "tandem:queue_length", `"arriving_blocks"`, oBigBlock},
			{d, "vllm:kv_cache_usage_perc", "", float64(oBigBlock) / oBlocks},
			{d, "tandem:kv_blocks", `"used"`, oBigBlock},
			{d, "tandem:kv_blocks", `"pinned"`, 0},
		})
		if len(wrong) == 0 {
			wrong = prometheus.wrongPanels(2*time.Second, map[string][]shown{"Decode pool: KV cache usage": {c.ofNodes("decode", d, "vllm:kv_cache_usage_perc")}})
		}
		if len(wrong) == 0 {
			c.freeze(pids, "decode-", syscall.SIGSTOP)
			c.freeze(pids, "prefill-", syscall.SIGCONT)
			wrong = c.seenWithin(2*time.Second, []want{
				{p, "tandem:queue_length", `"pushes"`, 1},
				{p, "tandem:kv_blocks_in_transfer", `"out"`, oBigBlock},
				{p, "vllm:kv_cache_usage_perc", "", float64(oBigBlock) / oBlocks},
			})
			if len(wrong) == 0 {
				wrong = prometheus.wrongPanels(2*time.Second, map[string][]shown{"Prefill pool: KV cache usage": {c.ofNodes("prefill", p, "vllm:kv_cache_usage_perc")}})
			}
			c.freeze(pids, "decode-", syscall.SIGCONT)
		}
		c.freeze(pids, "prefill-", syscall.SIGCONT)
		c.answered(done)
		if len(wrong) == 0 {
			return
		}
	}
	c.t.Errorf("a transfer in the middle: %s", strings.Join(wrong, "\n"))
}

// running looks at nodes while they compute one prompt and decode one answer.
func (c *cluster) running(r *rand.Rand) {
	c.t.Helper()
	for _, role := range []struct {
		nodes          []int
		prompt, tokens int
	}{{prefillNodes, oBig, 1}, {decodeNodes, 20, 200}} {
		var wrong []string
		for try := 0; try == 0 || try < 50 && len(wrong) > 0; try++ {
			done := make(chan error, 1)
			prompt := c.prompt(r, role.prompt)
			go func() {
				_, err := c.complete(prompt, role.tokens)
				done <- err
			}()
			for {
				wrong = c.wrong([]want{{role.nodes, "vllm:num_requests_running", "", 1}, {role.nodes, "tandem:queue_length", `"engine_running"`, 1}})
				if len(wrong) == 0 || len(done) > 0 {
					break
				}
			}
			c.answered(done)
		}
		if len(wrong) > 0 {
			c.t.Errorf("one that runs: %s", strings.Join(wrong, "\n"))
		}
	}
}

// holdSeen is that for what the cluster saw.
func (c *cluster) holdSeen() {
	c.t.Helper()
	holdSeen(c.t, c.seen)
}
