//go:build linux

package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"

	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// The load that everything is held against: requests of so many random prompt
// tokens, of which all but the last are prefilled elsewhere, and so many of output.
const (
	oRequests    = 7
	oConnections = 4096 // of clients: less than the limit on file descriptors leaves
	oPrompt      = 120
	oOutput      = 10
	oBlocks      = 64  // of each node: what n answers of oLong tokens do not fit in
	oChoices     = 8   // of the request that is to be preempted
	oLong        = 130 // its tokens
	oModel       = "tandem-builtin"
)

// gatewayNode and decodeNodes are places of nodes for cluster.metric.
const gatewayNode = -1

var (
	prefillNodes = []int{0, 1}
	decodeNodes  = []int{2, 3}
)

// want is one value of the metrics: the sum over nodes of what a name's lines with
// the label say.
type want struct {
	nodes []int
	name  string
	label string
	value float64
}

// wrong says which of the values are not as they should be at one moment, and
// notes the others as seen.
func (c *cluster) wrong(all []want) (wrong []string) {
	c.t.Helper()
	texts := map[int]string{}
	for _, w := range all {
		sum := 0.0
		for _, node := range w.nodes {
			if texts[node] == "" {
				texts[node] = c.scrape(node)
			}
			v, found := pick(texts[node], w.name, w.label)
			if !found {
				c.t.Fatalf("node %d exposes no %s{%s}", node, w.name, w.label)
			}
			sum += v
		}
		if math.Abs(sum-w.value) > 1e-6 {
			wrong = append(wrong, fmt.Sprintf("nodes %v say %s{%s} %g, want %g", w.nodes, w.name, w.label, sum, w.value))
		} else if sum != 0 {
			c.saw(w.name, w.nodes)
		}
	}
	return wrong
}

// saw notes that a metric carried its right value on nodes, other than zero. Of
// histograms that is their sum.
func (c *cluster) saw(name string, nodes []int) {
	if c.seen == nil {
		return
	}
	for _, node := range nodes {
		role := "D"
		switch {
		case node == gatewayNode:
			role = "G"
		case slices.Contains(prefillNodes, node):
			role = "P"
		}
		c.seen[strings.TrimSuffix(name, "_sum")+" "+role] = true
	}
}

// hold waits until all values are as they should be; counters may be a moment
// behind the answer.
func (c *cluster) hold(what string, all []want) {
	c.t.Helper()
	for end := time.Now().Add(startBound); ; time.Sleep(20 * time.Millisecond) {
		wrong := c.wrong(all)
		if len(wrong) == 0 {
			return
		}
		if time.Now().After(end) {
			c.t.Errorf("%s: %s", what, strings.Join(wrong, "\n"))
			return
		}
	}
}

// afterLoad is what the known load must have left, by role.
func afterLoad(perBlockBytes int64) []want {
	perBlock := float64(perBlockBytes)
	const n, computed, blocks = oRequests, oPrompt - 1, (oPrompt - 1 + 15) / 16
	g, p, d := []int{gatewayNode}, prefillNodes, decodeNodes
	all := []want{
		{g, "vllm:prompt_tokens_total", "", n * oPrompt},
		{g, "vllm:prompt_tokens_cached_total", "", 0},
		{g, "vllm:generation_tokens_total", "", n * oOutput},
		{g, "vllm:request_success_total", `finished_reason="length"`, n},
		{g, "vllm:request_success_total", "", n},
		{g, "vllm:admission_rejections_total", "", 0},
		{g, "vllm:request_params_n_sum", "", n},
		{g, "vllm:request_max_num_generation_tokens_sum", "", n * oOutput},
		{g, "tandem:build_info", `role="gateway"`, 1},
		{p, "tandem:build_info", `role="prefill"`, 2},
		{d, "tandem:build_info", `role="decode"`, 2},
		{g, "tandem:price_dollars_per_hour", "", 3.5},
		{p, "tandem:price_dollars_per_hour", "", 7},
		{g, "tandem:gateway_key_tokens_total", `key="other",of="prompt"`, n * oPrompt},
		{g, "tandem:gateway_key_tokens_total", `key="other",of="cached"`, 0},
		{g, "tandem:gateway_key_tokens_total", `key="other",of="output"`, n * oOutput},
		{d, "tandem:price_dollars_per_hour", "", 7},
		{g, "tandem:http_requests_total", `route="/v1/completions",status="200"`, n},
		{g, "tandem:gateway_requests_in_flight", "", 0},
		{g, "tandem:gateway_attempts_total", "", n},
		{g, "tandem:gateway_attempt_failures_total", "", 0},
		{g, "tandem:gateway_resumes_total", "", 0},
		{g, "tandem:gateway_nodes_lost_total", "", 0},
		{g, "tandem:gateway_stale_tokens_total", "", 0},
		{g, "tandem:gateway_streams_paused_total", "", 0},
		{g, "tandem:gateway_streams_aborted_total", "", 0},
		{g, "tandem:gateway_routes_total", `reason="remote"`, n},
		{g, "tandem:gateway_routes_total", "", 2 * n},
		{g, "tandem:gateway_actual_cached_tokens_total", "", 0},
		{g, "tandem:gateway_predicted_cached_tokens_total", "", 0},
		{g, "tandem:gateway_usable_decode_nodes", "", 2},
		{g, "tandem:gateway_breakers", `state="closed"`, 2},
		{g, "tandem:gateway_breakers", "", 2},
		{g, "tandem:gateway_retry_budget", "", 500},
		{g, "tandem:queue_length", `queue="requests"`, 0},
		{g, "tandem:queue_limit", `queue="requests"`, 8192},
		{g, "tandem:queue_limit", `queue="connections"`, oConnections},
		{g, "tandem:queue_limit", `queue="waiting"`, 4096},
		{g, "tandem:queue_limit", `queue="waiting_tokens"`, 16 << 20},
		{g, "tandem:rpc_connections", "", 4},

		{d, "vllm:prompt_tokens_total", "", n * oPrompt},
		{d, "vllm:prompt_tokens_by_source_total", `source="external_kv_transfer"`, n * computed},
		{d, "vllm:prompt_tokens_by_source_total", `source="local_compute"`, n},
		{d, "vllm:prompt_tokens_by_source_total", "", n * oPrompt},
		{d, "vllm:prompt_tokens_cached_total", "", n * computed},
		{d, "vllm:prompt_tokens_cached_by_source_total", `source="p2p"`, n * computed},
		{d, "vllm:prompt_tokens_cached_by_source_total", `source="device"`, 0},
		{d, "vllm:external_prefix_cache_queries_total", "", n * computed},
		{d, "vllm:external_prefix_cache_hits_total", "", n * computed},
		{d, "vllm:prefix_cache_queries_total", "", n * oPrompt},
		{d, "vllm:prefix_cache_hits_total", "", 0},
		{d, "vllm:generation_tokens_total", "", n * oOutput},
		{d, "vllm:iteration_tokens_total_sum", "", n * oOutput},
		{d, "vllm:request_success_total", `finished_reason="length"`, n},
		{d, "vllm:request_prefill_kv_computed_tokens_sum", "", n},
		{d, "vllm:num_requests_kv_fetch_by_stage", "", 0},
		{d, "vllm:spec_decode_num_drafts_total", "", 0},
		{d, "vllm:spec_decode_num_draft_tokens_total", "", 0},
		{d, "vllm:spec_decode_num_accepted_tokens_total", "", 0},
		{d, "vllm:spec_decode_num_accepted_tokens_per_pos_total", "", 0},
		{d, "tandem:prefill_tokens_computed_total", "", n},
		{d, "tandem:engine_steps_total", "", n * oOutput},
		{d, "vllm:iteration_tokens_total_bucket", `le="1"`, n * oOutput},
		{p, "tandem:engine_steps_total", "", n},
		{d, "tandem:engine_work_total", `of="steps"`, n * oOutput},
		{d, "tandem:engine_work_total", `of="sequences"`, n * oOutput},
		{d, "tandem:engine_work_total", `of="context"`, n * (oOutput*oPrompt + oOutput*(oOutput-1)/2)},
		{d, "tandem:engine_work_total", `of="prompt"`, 0},
		{p, "tandem:engine_work_total", `of="steps"`, n},
		{p, "tandem:engine_work_total", `of="prompt"`, n * computed},
		{d, "tandem:kv_blocks", `state="cached"`, n * ((oPrompt + oOutput - 1) / 16)},
		{p, "tandem:kv_blocks", `state="cached"`, n * (computed / 16)},
		{d, "tandem:decode_prefills_total", `where="remote"`, n},
		{d, "tandem:decode_prefills_total", "", n},
		{d, "tandem:decode_prefill_failures_total", "", 0},
		{d, "tandem:decode_dropped_streams_total", "", 0},
		{d, "tandem:decode_refused_total", "", 0},
		{d, "tandem:kv_transfer_bytes_total", `direction="in"`, n * blocks * perBlock},
		{d, "tandem:kv_transfers_total", `direction="in"`, n},
		{d, "tandem:kv_leases", "", 0},
		{d, "tandem:kv_leases_expired_total", "", 0},
		{d, "tandem:fenced_writes_total", "", 0},
		{d, "tandem:queue_length", "", 0},
		{d, "tandem:queue_limit", `queue="attempts"`, 2 * 1024},
		{d, "tandem:queue_limit", `queue="arriving_blocks"`, 2 * oBlocks / 2},

		{p, "vllm:prompt_tokens_total", "", n * computed},
		{p, "vllm:prompt_tokens_by_source_total", `source="local_compute"`, n * computed},
		{p, "vllm:prompt_tokens_cached_by_source_total", "", 0},
		{p, "vllm:prefix_cache_queries_total", "", n * computed},
		{p, "vllm:generation_tokens_total", "", 0},
		{p, "vllm:request_success_total", "", 0},
		{p, "vllm:iteration_tokens_total_sum", "", n * computed},
		{p, "vllm:request_prefill_kv_computed_tokens_sum", "", n * computed},
		{p, "tandem:prefill_tokens_computed_total", "", n * computed},
		{p, "tandem:prefill_jobs_total", `result="done"`, n},
		{p, "tandem:prefill_jobs_total", "", n},
		{p, "tandem:kv_transfer_bytes_total", `direction="out"`, n * blocks * perBlock},
		{p, "tandem:kv_transfers_total", `direction="out"`, n},
		{d, "tandem:kv_transfer_shared_bytes_total", `direction="in"`, n * blocks * perBlock}, // all are of this host
		{p, "tandem:kv_transfer_shared_bytes_total", `direction="out"`, n * blocks * perBlock},
		{p, "tandem:kv_transfer_retries_total", "", 0},
		{d, "tandem:kv_transfer_first_byte_seconds_count", "", n},
		{d, "tandem:kv_transfer_last_byte_seconds_count", "", n},
		{p, "tandem:kv_transfer_hidden_seconds_count", "", n},
		{p, "tandem:kv_transfer_exposed_seconds_count", "", n},
		{p, "tandem:queue_limit", `queue="prefill_jobs"`, 2 * 1024},
		{p, "tandem:queue_limit", `queue="pushes"`, 2 * 1024},
		{p, "tandem:queue_length", "", 0},
	}
	for _, on := range [][]int{g, d} { // requests as gateways and as decode nodes see them
		all = append(all,
			want{on, "vllm:request_prompt_tokens_sum", "", n * oPrompt},
			want{on, "vllm:request_prompt_tokens_bucket", `le="100"`, 0},
			want{on, "vllm:request_prompt_tokens_bucket", `le="200"`, n},
			want{on, "vllm:request_generation_tokens_sum", "", n * oOutput},
			want{on, "vllm:request_params_max_tokens_sum", "", n * oOutput},
			want{on, "vllm:time_to_first_token_seconds_count", "", n},
			want{on, "vllm:inter_token_latency_seconds_count", "", n * (oOutput - 1)},
			want{on, "vllm:request_time_per_output_token_seconds_count", "", n},
			want{on, "vllm:e2e_request_latency_seconds_count", "", n},
			want{on, "vllm:request_decode_time_seconds_count", "", n})
	}
	for _, on := range [][]int{p, d} { // both kinds of nodes
		all = append(all,
			want{on, "vllm:request_queue_time_seconds_count", "", n},
			want{on, "vllm:request_inference_time_seconds_count", "", n},
			want{on, "vllm:request_prefill_time_seconds_count", "", n},
			want{on, "vllm:request_num_preemptions_count", "", n},
			want{on, "vllm:request_num_preemptions_sum", "", 0},
			want{on, "vllm:num_preemptions_total", "", 0},
			want{on, "vllm:num_requests_running", "", 0},
			want{on, "vllm:num_requests_waiting", "", 0},
			want{on, "vllm:num_requests_waiting_by_reason", "", 0},
			want{on, "vllm:kv_cache_usage_perc", "", 0},
			want{on, "vllm:cache_config_info", `num_gpu_blocks="` + strconv.Itoa(oBlocks) + `"`, 2},
			want{on, "vllm:cache_config_info", `block_size="16"`, 2},
			want{on, "vllm:admission_rejections_total", "", 0},
			want{on, "tandem:kv_blocks", "", 2 * oBlocks},
			want{on, "tandem:kv_blocks", `state="used"`, 0},
			want{on, "tandem:kv_blocks_in_transfer", "", 0},
			want{on, "tandem:kv_transfer_failures_total", "", 0},
			want{on, "tandem:queue_limit", `queue="engine_running"`, 2 * 256},
			want{on, "tandem:queue_limit", `queue="engine_waiting"`, 2 * 1024})
	}
	for _, on := range [][]int{g, p, d} {
		all = append(all,
			want{on, "tandem:rpc_outbox_full_total", "", 0},
			want{on, "tandem:rpc_silent_connections_total", "", 0},
			want{on, "tandem:rpc_refused_connections_total", "", 0},
			want{on, "tandem:rpc_forbidden_frames_total", "", 0},
			want{on, "tandem:accept_errors_total", "", 0},
			want{on, "tandem:trace_spans_total", `result="failed"`, 0})
	}
	return all
}

// openStream starts a streamed completion and returns after its first event.
func (c *cluster) openStream(body map[string]any) (*http.Response, *bufio.Reader, error) {
	body["stream"] = true
	resp, err := c.post("/v1/completions", body)
	if err != nil {
		return nil, nil, err
	}
	r := bufio.NewReader(resp.Body)
	if _, err := r.ReadString('\n'); err != nil || resp.StatusCode != 200 {
		resp.Body.Close()
		return nil, nil, fmt.Errorf("%s: %w", resp.Status, err)
	}
	return resp, r, nil
}

const oParent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// addresses are the nodes' names by their addresses for requests.
func (c *cluster) addresses() map[string]string {
	c.t.Helper()
	resp, err := http.Get(c.url("/debug/nodes"))
	if err != nil {
		c.t.Fatal(err)
	}
	defer resp.Body.Close()
	var fleet struct {
		Nodes []struct{ ID, RPC string }
	}
	if err := json.NewDecoder(resp.Body).Decode(&fleet); err != nil {
		c.t.Fatal(err)
	}
	out := map[string]string{}
	for _, n := range fleet.Nodes {
		out[n.RPC] = n.ID
	}
	return out
}

// startObserved starts a gateway, two prefill and two decode nodes that send
// traces, and Prometheus.
func startObserved(t *testing.T, rules func(string) string, args ...string) (*cluster, *prom, *collector) {
	t.Helper()
	otlp := newCollector(t)
	c := newCluster(t)
	c.port, c.nPrefill, c.seen = freePorts(t, 5), 2, map[string]bool{}
	path := binary(t)
	c.start("env", append(append([]string{"OTEL_BSP_SCHEDULE_DELAY=100", path, "up", "--port", strconv.Itoa(c.port), "--state-dir", c.state, "--prefill", "2", "--decode", "2", "--otlp-traces-endpoint", otlp.URL,
		"--price-per-hour", "3.5", "--min-remote-prefill-tokens", "0", "--max-connections", strconv.Itoa(oConnections), "--kv-cache-memory-bytes", strconv.FormatInt(oBlocks*blockBytes(t), 10)}, slow...), args...)...)
	c.waitUp()
	p := startProm(t, c, rules)
	// Before any load, so that rates see all of it.
	p.until("all targets", `vllm:generation_tokens_total`, func(values []float64, _ []map[string]string) bool { return len(values) == 5 && slices.Max(values) == 0 })
	return c, p, otlp
}

// expiries are the ends of the certificate that all processes share.
func expiries(t *testing.T, state string) (all []want) {
	t.Helper()
	held, err := tlsconf.Inspect(filepath.Join(state, "certs", "local"))
	if err != nil {
		t.Fatal(err)
	}
	until := float64(held[len(held)-1].NotAfter.Unix())
	for _, nodes := range [][]int{{gatewayNode}, prefillNodes, decodeNodes} {
		all = append(all, want{nodes, "tandem:certificate_expiry_timestamp_seconds", `certificate="cluster"`, until * float64(len(nodes))},
			want{nodes, "tandem:certificate_expiry_timestamp_seconds", `certificate="clients"`, 0})
	}
	return all
}

// pids are the nodes' processes by name.
func (c *cluster) pids() map[string]int {
	c.t.Helper()
	out := map[string]int{}
	for _, p := range c.processes() {
		out[p.name] = p.pid
	}
	return out
}

// A gateway, two prefill and two decode nodes under a load of which everything is
// known: every metric says what happened, every span was where it should be with
// the right attributes, and every panel of the dashboard shows the right values.
func TestBinaryObserve(t *testing.T) {
	t.Parallel()
	perBlock := blockBytes(t)
	c, p, otlp := startObserved(t, nil)
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 1))
	t.Logf("seed %d", seed)
	mark := func(what string) { t.Logf("%6.1f s: %s", time.Since(c.began).Seconds(), what) }

	mark("up")
	waited := 0.0 // by the client, in seconds
	first := c.sendTraced(c.prompt(r, oPrompt))
	waited += first.seconds
	nodes := c.learnt()
	for i := range oRequests - 1 {
		began := time.Now()
		if _, err := c.complete(c.prompt(r, oPrompt), oOutput); err != nil {
			t.Fatalf("seed %d, request %d: %v", seed, i+1, err)
		}
		waited += time.Since(began).Seconds()
		nodes = c.learnt()
	}
	mark("loaded")
	c.hold("known load", afterLoad(perBlock))
	c.hold("certificates", expiries(t, c.state))
	c.holdTimes(waited)
	c.holdForetold(oRequests, nodes)
	c.holdTraffic()
	mark("held")
	first.holdTrace(c, otlp)
	c.holdSpans(otlp)
	mark("traced")
	p.until("tokens", `sum(vllm:generation_tokens_total{role="gateway"})`, sum(oRequests*oOutput))
	p.holdPanels(c.panelsAfterLoad(perBlock))
	p.until("alerts", `ALERTS{alertstate="firing"}`, func(values []float64, _ []map[string]string) bool { return len(values) == 0 })
	mark("shown")
	c.warmPrompt(r)
	c.chatTwice(otlp)
	c.abort(r)
	c.preempt(r)
	mark("aborted and preempted")
	p.holdPanels(c.panelsAfterMore())
	c.loseSpans(r, p, otlp)
	c.waiting(r, p)
	c.moving(r, p)
	c.running(r)
	mark("waited and moved")
	c.killed(r, p, otlp, c.pids())
	mark("killed")
	failed := zeros(failureCodes...)
	failed["connection"] = about(1 / panelSeconds)
	p.holdPanels(map[string][]shown{"Failed attempts": {failed, rate(1), zeros("silence", "stall")}})
	c.holdSeen()
}

// foretold is what the gateway says of a prompt: how many tokens it has, and how many
// of them some decode node caches.
func (c *cluster) foretold(text string) (tokens, cached int) {
	c.t.Helper()
	resp, err := http.Get(c.url("/debug/route?prompt=" + url.QueryEscape(text)))
	if err != nil {
		c.t.Fatal(err)
	}
	defer resp.Body.Close()
	var route struct {
		Tokens int `json:"prompt_tokens"`
		Nodes  []struct {
			Role   string
			Cached int `json:"cached_tokens"`
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&route); err != nil || route.Tokens == 0 {
		c.t.Fatalf("/debug/route says %s, %+v: %v", resp.Status, route, err)
	}
	for _, node := range route.Nodes {
		if node.Role == "decode" {
			cached = max(cached, node.Cached)
		}
	}
	return route.Tokens, cached
}

// warmPrompt sends a prompt, and again when the gateway has heard what the node caches
// of it: it knows beforehand what the node then says. Where a node has just been slow,
// the other one is predicted to be faster without the cache; then another prompt is tried.
func (c *cluster) warmPrompt(r *rand.Rand) {
	c.t.Helper()
	const tries = 20
	for range tries {
		if c.warmedPrompt(r) {
			return
		}
	}
	c.t.Errorf("of %d prompts no one went to the node that caches it", tries)
}

// warmedPrompt tries one prompt, and says whether it went to the node that caches it.
func (c *cluster) warmedPrompt(r *rand.Rand) bool {
	c.t.Helper()
	const cached = (oPrompt - 1) / 16 * 16
	var text strings.Builder
	for n := 0; n < oPrompt; n, _ = c.foretold(text.String()) {
		text.WriteByte(byte('a' + r.IntN(26)))
	}
	prompt := text.String()
	if _, err := c.completeAny(prompt, oPrompt, 1); err != nil {
		c.t.Fatal(err)
	}
	c.wait(10*time.Second, "the gateway knows what is cached", func() bool {
		_, n := c.foretold(prompt)
		return n == cached
	})
	g := []int{gatewayNode}
	warm := []want{
		{g, "tandem:gateway_predicted_cached_tokens_total", "", cached},
		{g, "tandem:gateway_actual_cached_tokens_total", "", cached},
		{decodeNodes, "vllm:prefix_cache_hits_total", "", cached},
		{decodeNodes, "vllm:prompt_tokens_cached_by_source_total", `source="device"`, cached},
		{g, "vllm:prompt_tokens_cached_total", "", cached},
		{decodeNodes, "tandem:decode_prefills_total", `where="local"`, 1},
	}
	for i, w := range warm {
		warm[i].value += c.value(w.nodes, w.name, w.label)
	}
	if _, err := c.completeAny(prompt, oPrompt, 1); err != nil {
		c.t.Fatal(err)
	}
	if last := warm[len(warm)-1]; c.value(last.nodes, last.name, last.label) != last.value {
		return false
	}
	c.hold("a warm prompt", warm)
	return true
}

// chatTwice has the second request find the first one's message tokenized: each
// looks it up once. Each has a span that says what the client was told.
func (c *cluster) chatTwice(otlp *collector) {
	c.t.Helper()
	g := []int{gatewayNode}
	text := strings.Repeat("What is prefill, and what is decode? ", 4)
	hits, misses := c.value(g, "tandem:tokenizer_cache_lookups_total", `"hit"`), c.value(g, "tandem:tokenizer_cache_lookups_total", `"miss"`)
	answers := map[string]answer{}
	for range 2 {
		resp, err := c.post("/v1/chat/completions", map[string]any{"max_tokens": 1,
			"messages": []map[string]string{{"role": "user", "content": text}}})
		if err != nil {
			c.t.Fatal(err)
		}
		var a struct {
			ID string
			answer
		}
		err = json.NewDecoder(resp.Body).Decode(&a)
		resp.Body.Close()
		if resp.StatusCode != 200 || err != nil || a.Usage.Completion != 1 {
			c.t.Fatalf("%s, %v: %+v", resp.Status, err, a)
		}
		answers[a.ID] = a.answer
	}
	var spans []span
	c.wait(20*time.Second, "the spans of chats", func() bool { spans = otlp.named("chat " + oModel); return len(spans) == len(answers) })
	for _, s := range spans {
		told := answers[s.attr("gen_ai.response.id")]
		if s.attr("gen_ai.operation.name") != "chat" || s.attr("url.path") != "/v1/chat/completions" || s.attr("http.response.status_code") != "200" ||
			s.attr("gen_ai.usage.input_tokens") != strconv.Itoa(told.Usage.Prompt) || s.attr("gen_ai.usage.output_tokens") != "1" {
			c.t.Errorf("the client was told %+v, the span says %v", told, s.Attributes)
		}
	}
	c.hold("a chat's message, twice", []want{{g, "tandem:tokenizer_cache_lookups_total", `"hit"`, hits + 1}, {g, "tandem:tokenizer_cache_lookups_total", `"miss"`, misses + 1}})
	// Its text, four bytes for each token, and what a map's entry takes.
	if bytes := c.value(g, "tandem:tokenizer_cache_bytes", ""); bytes < float64(len(text)) || bytes > float64(5*len(text)+1024) {
		c.t.Errorf("the cache of messages takes %g bytes with one of %d", bytes, len(text))
	}
	c.saw("tandem:tokenizer_cache_bytes", g)
}

// abort leaves a stream after its first event.
func (c *cluster) abort(r *rand.Rand) {
	c.t.Helper()
	resp, _, err := c.openStream(map[string]any{"prompt": c.prompt(r, 20), "max_tokens": 900, "ignore_eos": true})
	if err != nil {
		c.t.Fatal(err)
	}
	resp.Body.Close()
	c.hold("a client that left", []want{
		{[]int{gatewayNode}, "vllm:request_success_total", `finished_reason="abort"`, 1},
		{[]int{gatewayNode}, "tandem:gateway_streams_aborted_total", `cause="client_gone"`, 1},
		{decodeNodes, "vllm:request_success_total", `finished_reason="abort"`, 1},
		{decodeNodes, "vllm:num_requests_running", "", 0},
		{[]int{gatewayNode}, "tandem:gateway_requests_in_flight", "", 0},
	})
}

// preempt asks for more tokens at once than a node has blocks for.
func (c *cluster) preempt(r *rand.Rand) {
	c.t.Helper()
	resp, err := c.post("/v1/completions", map[string]any{"prompt": c.prompt(r, 20), "n": oChoices, "max_tokens": oLong, "ignore_eos": true, "temperature": 1})
	if err != nil {
		c.t.Fatal(err)
	}
	defer resp.Body.Close()
	var a answer
	if err := json.NewDecoder(resp.Body).Decode(&a); err != nil || a.Usage.Completion != oChoices*oLong {
		c.t.Fatalf("%s, %v: %+v", resp.Status, err, a.Usage)
	}
	n := int64(0)
	for _, node := range decodeNodes {
		n += c.metric(node, "vllm:num_preemptions_total", "")
	}
	if n == 0 {
		c.t.Errorf("%d answers of %d tokens fit in %d blocks", oChoices, oLong, oBlocks)
	}
	c.hold("preemptions", []want{{decodeNodes, "vllm:request_num_preemptions_sum", "", float64(n)}, {decodeNodes, "vllm:num_preemptions_total", "", float64(n)}, {[]int{gatewayNode}, "vllm:request_params_n_bucket", `le="5"`, float64(c.metric(gatewayNode, "vllm:request_params_n_count", "") - 1)}})
}

// caught starts a stream and stops the decode node that has it, while it runs.
// It returns that node's place, and what will have read the stream's rest.
func (c *cluster) caught(r *rand.Rand, pids map[string]int, tokens int) (node int, rest <-chan string) {
	c.t.Helper()
	for range 10 {
		resp, body, err := c.openStream(map[string]any{"prompt": c.prompt(r, 60), "max_tokens": tokens, "ignore_eos": true, "temperature": 0, "stream_options": map[string]any{"include_usage": true}})
		if err != nil {
			c.t.Fatal(err)
		}
		read := make(chan string, 1)
		go func() {
			defer resp.Body.Close()
			text, err := io.ReadAll(body)
			if err != nil {
				text = append(text, err.Error()...)
			}
			read <- string(text)
		}()
		for _, node := range decodeNodes {
			if c.metric(node, "vllm:num_requests_running", "") == 0 {
				continue
			}
			pid := pids[fmt.Sprintf("decode-%d", node-decodeNodes[0])]
			if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
				c.t.Fatal(err)
			}
			select {
			case <-read: // it was at its end: another one
				if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
					c.t.Fatal(err)
				}
			case <-time.After(300 * time.Millisecond):
				return node, read
			}
		}
	}
	c.t.Fatal("no stream lasted until its node was found")
	return 0, nil
}

// killed kills the decode node of a stream, which goes on on the other one.
func (c *cluster) killed(r *rand.Rand, p *prom, otlp *collector, pids map[string]int) {
	c.t.Helper()
	const tokens = 900
	c.traceparent = strings.Replace(oParent, "0af7", "1bf8", 1)
	node, read := c.caught(r, pids, tokens)
	at, other := fmt.Sprintf("decode-%d", node-decodeNodes[0]), decodeNodes[0]+decodeNodes[1]-node
	if err := syscall.Kill(pids[at], syscall.SIGKILL); err != nil {
		c.t.Fatal(err)
	}
	if rest := <-read; !strings.Contains(rest, `"completion_tokens":`+strconv.Itoa(tokens)) {
		c.t.Fatalf("the stream of the killed node did not end well: %s", rest[max(0, len(rest)-300):])
	}
	g := []int{gatewayNode}
	c.hold("a killed node", []want{
		{g, "tandem:gateway_resumes_total", "", 1},
		{g, "tandem:gateway_attempt_failures_total", `code="connection"`, 1},
		{g, "vllm:request_success_total", `finished_reason="error"`, 0},
		{g, "tandem:gateway_usable_decode_nodes", "", 1},
		{[]int{other}, "vllm:request_success_total", `finished_reason="error"`, 0},
	})
	p.until("a node that is down", "up == 0", func(_ []float64, labels []map[string]string) bool {
		return len(labels) == 1 && labels[0]["node"] == at && labels[0]["role"] == "decode"
	})
	p.until("its alert", `ALERTS{alertname="TandemNodeDown"}`, func(_ []float64, labels []map[string]string) bool {
		return len(labels) == 1 && labels[0]["node"] == at && labels[0]["severity"] == "warning"
	})
	const attempt = "text_completion tandem-builtin > attempt"
	second := func(s span) bool { return s.attr("tandem.attempt") == "2" }
	var spans map[string][]span
	c.wait(20*time.Second, "the spans of the stream that moved", func() bool {
		spans = otlp.trace(c.traceparent[3:35])
		return slices.ContainsFunc(spans[attempt], second) && len(spans[attempt+" > decode"]) > 0
	})
	resumed := spans[attempt][slices.IndexFunc(spans[attempt], second)]
	failed := spans[attempt][slices.IndexFunc(spans[attempt], func(s span) bool { return string(s.ParentSpanId) == string(resumed.ParentSpanId) && !second(s) })]
	if failed.attr("error.type") != "connection" || failed.Status.GetCode() != tracepb.Status_STATUS_CODE_ERROR || resumed.attr("tandem.resumed_tokens") == "0" {
		c.t.Errorf("attempts are %v and %v", failed, resumed)
	}
	if !slices.ContainsFunc(spans[attempt+" > decode"], func(s span) bool { return string(s.ParentSpanId) == string(resumed.SpanId) }) {
		c.t.Errorf("the second attempt has no span of the node that remains: %v", spans)
	}
}
