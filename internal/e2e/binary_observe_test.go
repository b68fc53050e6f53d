//go:build linux

package e2e

import (
	"bufio"
	"compress/gzip"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

// The load that everything is held against: requests of so many random prompt
// tokens, of which all but the last are prefilled elsewhere, and so many of output.
const (
	oRequests = 6
	oPrompt   = 120
	oOutput   = 10
	oBlocks   = 64  // of each node: what n answers of oLong tokens do not fit in
	oChoices  = 8   // of the request that is to be preempted
	oLong     = 130 // its tokens
)

// gatewayNode and decodeNodes are places of nodes for cluster.metric.
const gatewayNode = -1

var (
	prefillNodes = []int{0, 1}
	decodeNodes  = []int{2, 3}
)

// collector is an OTLP collector that keeps what it gets.
type collector struct {
	*httptest.Server
	mu    sync.Mutex
	spans []span
}

// span is one that was received, with what the process said of itself.
type span struct {
	*tracepb.Span
	node string
}

func newCollector(t *testing.T) *collector {
	c := new(collector)
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body := io.Reader(r.Body)
		if r.Header.Get("Content-Encoding") == "gzip" {
			z, err := gzip.NewReader(body)
			if err != nil {
				t.Error(err)
				return
			}
			body = z
		}
		b, err := io.ReadAll(body)
		var data tracepb.TracesData // on the wire the same as the request that carries it
		if err == nil {
			err = proto.Unmarshal(b, &data)
		}
		if err != nil || r.URL.Path != "/v1/traces" {
			t.Errorf("%s: %v", r.URL.Path, err)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, rs := range data.ResourceSpans {
			node := ""
			for _, a := range rs.Resource.Attributes {
				if a.Key == "service.instance.id" {
					node = a.Value.GetStringValue()
				}
			}
			for _, ss := range rs.ScopeSpans {
				for _, s := range ss.Spans {
					c.spans = append(c.spans, span{s, node})
				}
			}
		}
	}))
	t.Cleanup(c.Close)
	return c
}

// trace is the spans of one trace, each under the path of its ancestors' names.
func (c *collector) trace(id string) map[string][]span {
	c.mu.Lock()
	defer c.mu.Unlock()
	by := map[string]span{}
	for _, s := range c.spans {
		by[string(s.SpanId)] = s
	}
	out := map[string][]span{}
	for _, s := range c.spans {
		if hex.EncodeToString(s.TraceId) != id {
			continue
		}
		path := s.Name
		for p, ok := by[string(s.ParentSpanId)]; ok; p, ok = by[string(p.ParentSpanId)] {
			path = p.Name + " > " + path
		}
		out[path] = append(out[path], s)
	}
	return out
}

// attr is an attribute as text; empty where there is none.
func (s span) attr(name string) string {
	for _, a := range s.Attributes {
		if a.Key == name {
			switch v := a.Value; {
			case v.GetArrayValue() != nil:
				return v.GetArrayValue().Values[0].GetStringValue()
			case v.GetStringValue() != "":
				return v.GetStringValue()
			case v.GetDoubleValue() != 0:
				return "double"
			default:
				return strconv.FormatInt(v.GetIntValue(), 10)
			}
		}
	}
	return ""
}

// want is one value of the metrics: the sum over nodes of what a name's lines with
// the label say.
type want struct {
	nodes []int
	name  string
	label string
	value int64
}

// hold waits until all values are as they should be; counters may be a moment
// behind the answer.
func (c *cluster) hold(what string, all []want) {
	c.t.Helper()
	sum := func(w want) (n int64) {
		for _, node := range w.nodes {
			n += c.metric(node, w.name, w.label)
		}
		return n
	}
	for _, w := range all {
		got := sum(w)
		for end := time.Now().Add(10 * time.Second); got != w.value && time.Now().Before(end); got = sum(w) {
			time.Sleep(20 * time.Millisecond)
		}
		if got != w.value {
			c.t.Errorf("%s: nodes %v say %s{%s} %d, want %d", what, w.nodes, w.name, w.label, got, w.value)
		}
	}
}

// afterLoad is what the known load must have left, by role.
func afterLoad(perBlock int64) []want {
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
		{g, "tandem:http_requests_total", `route="/v1/completions",status="200"`, n},
		{g, "tandem:gateway_requests_in_flight", "", 0},
		{g, "tandem:gateway_attempts_total", "", n},
		{g, "tandem:gateway_attempt_failures_total", "", 0},
		{g, "tandem:gateway_resumes_total", "", 0},
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
		{g, "tandem:queue_limit", `queue="connections"`, 65536},
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
		{p, "vllm:iteration_tokens_total_sum", "", n * computed},
		{p, "vllm:request_prefill_kv_computed_tokens_sum", "", n * computed},
		{p, "tandem:prefill_tokens_computed_total", "", n * computed},
		{p, "tandem:prefill_jobs_total", `result="done"`, n},
		{p, "tandem:prefill_jobs_total", "", n},
		{p, "tandem:kv_transfer_bytes_total", `direction="out"`, n * blocks * perBlock},
		{p, "tandem:kv_transfers_total", `direction="out"`, n},
		{p, "tandem:kv_transfer_retries_total", "", 0},
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

// prom is a Prometheus that scrapes the cluster.
type prom struct {
	t   *testing.T
	url string
}

// startProm runs Prometheus with the project's rules, scraping often.
func startProm(t *testing.T, c *cluster) *prom {
	t.Helper()
	path, err := exec.LookPath("prometheus")
	if err != nil {
		t.Skip("needs prometheus")
	}
	dir := t.TempDir()
	rules, err := filepath.Abs("../../deploy/prometheus/tandem.rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	config, err := os.ReadFile("../../deploy/prometheus/prometheus.yml")
	if err != nil {
		t.Fatal(err)
	}
	text := strings.NewReplacer("127.0.0.1:8000", "127.0.0.1:"+strconv.Itoa(c.port), "tandem.rules.yml", rules,
		"scrape_interval: 5s", "scrape_interval: 500ms\n  scrape_timeout: 500ms", "evaluation_interval: 5s", "evaluation_interval: 1s", "refresh_interval: 10s", "refresh_interval: 500ms").Replace(string(config))
	file := filepath.Join(dir, "prometheus.yml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p := &prom{t: t, url: "http://127.0.0.1:" + strconv.Itoa(freePorts(t, 1))}
	var out output
	cmd := exec.Command(path, "--config.file="+file, "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+strings.TrimPrefix(p.url, "http://"))
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
		if t.Failed() {
			t.Logf("Prometheus:\n%s", &out)
		}
	})
	return p
}

// query is an instant query's result: one value per series.
func (p *prom) query(expr string) (values []float64, labels []map[string]string, err error) {
	resp, err := http.PostForm(p.url+"/api/v1/query", map[string][]string{"query": {expr}})
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	var a struct {
		Status, Error string
		Data          struct {
			Result []struct {
				Metric map[string]string
				Value  [2]any
			}
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&a); err != nil {
		return nil, nil, err
	}
	if a.Status != "success" {
		return nil, nil, fmt.Errorf("%s: %s", expr, a.Error)
	}
	for _, r := range a.Data.Result {
		v, err := strconv.ParseFloat(r.Value[1].(string), 64)
		if err != nil {
			return nil, nil, err
		}
		values, labels = append(values, v), append(labels, r.Metric)
	}
	return values, labels, nil
}

// until queries until the result is good.
func (p *prom) until(what, expr string, good func(values []float64, labels []map[string]string) bool) {
	p.t.Helper()
	var values []float64
	var labels []map[string]string
	var err error
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if values, labels, err = p.query(expr); err == nil && good(values, labels) {
			return
		}
	}
	p.t.Errorf("%s: %s is %v %v, %v", what, expr, values, labels, err)
}

// sum is good when the values add up to x.
func sum(x float64) func([]float64, []map[string]string) bool {
	return func(values []float64, _ []map[string]string) bool {
		total := 0.0
		for _, v := range values {
			total += v
		}
		return len(values) > 0 && total > x-1e-6 && total < x+1e-6
	}
}

// panels are the dashboard's queries with its variables filled in.
func panels(t *testing.T) map[string][]string {
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
			out[p.Title] = append(out[p.Title], strings.NewReplacer("$__rate_interval", "2m", "$model", ".*").Replace(q.Expr))
		}
	}
	return out
}

const oParent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// A gateway, two prefill and two decode nodes under a load of which everything is
// known: every metric says what happened, every span was where it should be, and
// every panel of the dashboard shows something.
func TestBinaryObserve(t *testing.T) {
	t.Parallel()
	perBlock := blockBytes(t)
	otlp := newCollector(t)
	c := newCluster(t)
	c.port, c.nPrefill = freePorts(t, 5), 2
	path, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	c.start("env", append([]string{"OTEL_BSP_SCHEDULE_DELAY=100", path, "up", "--port", strconv.Itoa(c.port), "--state-dir", c.state, "--prefill", "2", "--decode", "2", "--otlp-traces-endpoint", otlp.URL,
		"--min-remote-prefill-tokens", "0", "--kv-cache-memory-bytes", strconv.FormatInt(oBlocks*perBlock, 10)}, slow...)...)
	c.waitUp()
	p := startProm(t, c)
	pids := map[string]int{}
	for _, proc := range c.processes() {
		pids[proc.name] = proc.pid
	}
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 1))
	t.Logf("seed %d", seed)
	mark := func(what string) { t.Logf("%6.1f s: %s", time.Since(c.began).Seconds(), what) }

	// Before the load, so that rates see it.
	p.until("targets", `count by (role) (up == 1)`, sum(5))
	traced := c.prompt(r, oPrompt)
	for i := range oRequests {
		prompt := c.prompt(r, oPrompt)
		if i == 0 {
			prompt, c.traceparent = traced, oParent
		}
		if _, err := c.complete(prompt, oOutput); err != nil {
			t.Fatalf("seed %d, request %d: %v", seed, i, err)
		}
		c.traceparent = ""
	}
	mark("loaded")
	c.hold("known load", afterLoad(perBlock))
	mark("held")
	for _, node := range append(append([]int{}, prefillNodes...), decodeNodes...) {
		steps := c.metric(node, "tandem:engine_steps_total", "")
		c.hold("steps", []want{{[]int{node}, "tandem:engine_step_seconds_count", "", steps}, {[]int{node}, "vllm:iteration_tokens_total_count", "", steps}})
	}
	p.until("a transfer's times", `sum(tandem:kv_transfer_hidden_seconds_sum) > 0 and sum(tandem:kv_transfer_exposed_seconds_sum) >= 0 and sum(tandem:kv_transfer_exposed_seconds_sum) < 60`,
		func(values []float64, _ []map[string]string) bool { return len(values) == 1 })
	p.until("tokens", `sum(vllm:generation_tokens_total{role="gateway"})`, sum(oRequests*oOutput))
	p.until("alerts", `ALERTS{alertstate="firing"}`, func(values []float64, _ []map[string]string) bool { return len(values) == 0 })
	p.until("rules", `role:vllm_kv_cache_usage:max and on() vector(1)`, func(values []float64, _ []map[string]string) bool { return len(values) == 2 })
	mark("scraped")
	holdTrace(t, otlp)
	mark("traced")
	c.warmPrompt(r)
	c.chatTwice()
	c.abort(r)
	c.preempt(r)
	mark("aborted and preempted")
	c.killed(r, p, otlp, pids)
	mark("killed")
	for title, queries := range panels(t) {
		for _, q := range queries {
			p.until(title, q, func(values []float64, _ []map[string]string) bool {
				for _, v := range values {
					if v == v { // not NaN
						return true
					}
				}
				return false
			})
		}
	}
}

// holdTrace holds the traced request's spans against what it was.
func holdTrace(t *testing.T, otlp *collector) {
	t.Helper()
	const root = "text_completion tandem-builtin"
	const decode, fetch = root + " > attempt > decode", root + " > attempt > decode > fetch KV"
	const prefill = fetch + " > prefill"
	id := oParent[3:35]
	for end := time.Now().Add(20 * time.Second); len(otlp.trace(id)[prefill+" > KV transfer"]) == 0 || len(otlp.trace(id)[root]) == 0 || len(otlp.trace(id)[decode]) == 0; {
		if time.Now().After(end) {
			t.Fatalf("spans that came: %v", otlp.trace(id))
		}
		time.Sleep(50 * time.Millisecond)
	}
	spans := otlp.trace(id)
	for _, w := range []struct{ path, node, attr, value string }{
		{root, "gateway", "gen_ai.operation.name", "text_completion"},
		{root, "gateway", "gen_ai.provider.name", "tandem"},
		{root, "gateway", "gen_ai.request.model", "tandem-builtin"},
		{root, "gateway", "gen_ai.usage.input_tokens", strconv.Itoa(oPrompt)},
		{root, "gateway", "gen_ai.usage.output_tokens", strconv.Itoa(oOutput)},
		{root, "gateway", "gen_ai.request.max_tokens", strconv.Itoa(oOutput)},
		{root, "gateway", "gen_ai.response.finish_reasons", "length"},
		{root, "gateway", "gen_ai.latency.time_to_first_token", "double"},
		{root, "gateway", "http.response.status_code", "200"},
		{root + " > attempt", "gateway", "tandem.route.prefill_reason", "remote"},
		{root + " > attempt", "gateway", "tandem.attempt", "1"},
		{decode, "decode-", "tandem.finish", "length"},
		{decode, "decode-", "gen_ai.usage.output_tokens", strconv.Itoa(oOutput)},
		{decode + " > queue", "decode-", "", ""},
		{decode + " > prompt", "decode-", "tandem.arrived_tokens", strconv.Itoa(oPrompt - 1)},
		{decode + " > prompt", "decode-", "tandem.computed_tokens", "1"},
		{decode + " > tokens", "decode-", "gen_ai.usage.output_tokens", strconv.Itoa(oOutput)},
		{fetch, "decode-", "tandem.cached_tokens", "0"},
		{prefill, "prefill-", "gen_ai.usage.input_tokens", strconv.Itoa(oPrompt - 1)},
		{prefill + " > queue", "prefill-", "", ""},
		{prefill + " > prompt", "prefill-", "tandem.computed_tokens", strconv.Itoa(oPrompt - 1)},
		{prefill + " > KV transfer", "prefill-", "tandem.kv.bytes", strconv.FormatInt((oPrompt-1+15)/16*blockBytes(t), 10)},
		{prefill + " > KV transfer", "prefill-", "tandem.kv.hidden_seconds", "double"},
	} {
		all := spans[w.path]
		if len(all) != 1 || !strings.HasPrefix(all[0].node, w.node) || w.attr != "" && all[0].attr(w.attr) != w.value {
			t.Errorf("span %s: %d of them, want one of %s* with %s = %s; got %v", w.path, len(all), w.node, w.attr, w.value, all)
			continue
		}
		if s := all[0]; s.EndTimeUnixNano < s.StartTimeUnixNano || s.Status.GetCode() == tracepb.Status_STATUS_CODE_ERROR {
			t.Errorf("span %s ends before it begins, or failed: %v", w.path, s)
		}
	}
	if s := spans[root]; len(s) == 1 && hex.EncodeToString(s[0].ParentSpanId) != oParent[36:52] {
		t.Errorf("the root's parent is %x, the client said %s", s[0].ParentSpanId, oParent)
	}
}

// warmPrompt sends prompts twice until the gateway has heard of what the node
// caches: the second time it knows beforehand what the node then says.
func (c *cluster) warmPrompt(r *rand.Rand) {
	c.t.Helper()
	const cached = (oPrompt - 1) / 16 * 16
	g := []int{gatewayNode}
	for try := 1; ; try++ {
		prompt := c.prompt(r, oPrompt)
		if _, err := c.complete(prompt, 1); err != nil {
			c.t.Fatal(err)
		}
		time.Sleep(50 * time.Millisecond) // the news travel beside the tokens
		predicted, actual := c.metric(gatewayNode, "tandem:gateway_predicted_cached_tokens_total", ""), c.metric(gatewayNode, "tandem:gateway_actual_cached_tokens_total", "")
		hits := c.metric(2, "vllm:prefix_cache_hits_total", "") + c.metric(3, "vllm:prefix_cache_hits_total", "")
		if _, err := c.complete(prompt, 1); err != nil {
			c.t.Fatal(err)
		}
		c.hold("a warm prompt", []want{
			{g, "tandem:gateway_actual_cached_tokens_total", "", actual + cached},
			{decodeNodes, "vllm:prefix_cache_hits_total", "", hits + cached},
			{decodeNodes, "vllm:prompt_tokens_cached_by_source_total", `source="device"`, hits + cached},
			{g, "vllm:prompt_tokens_cached_total", "", actual + cached},
		})
		switch got := c.metric(gatewayNode, "tandem:gateway_predicted_cached_tokens_total", "") - predicted; {
		case got == cached:
			c.hold("a known prompt", []want{{decodeNodes, "tandem:decode_prefills_total", `where="local"`, int64(try)}})
			return
		case got != 0 || try == 100:
			c.t.Fatalf("the gateway expected %d cached tokens, want %d after %d prompts", got, cached, try)
		}
	}
}

// chatTwice has the second request find the first one's message tokenized.
func (c *cluster) chatTwice() {
	c.t.Helper()
	hits := c.metric(gatewayNode, "tandem:tokenizer_cache_lookups_total", `result="hit"`)
	for range 2 {
		resp, err := c.post("/v1/chat/completions", map[string]any{"max_tokens": 1,
			"messages": []map[string]string{{"role": "user", "content": strings.Repeat("What is prefill, and what is decode? ", 4)}}})
		if err != nil {
			c.t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != 200 {
			c.t.Fatal(resp.Status)
		}
	}
	if got := c.metric(gatewayNode, "tandem:tokenizer_cache_lookups_total", `result="hit"`); got <= hits || c.metric(gatewayNode, "tandem:tokenizer_cache_bytes", "") == 0 {
		c.t.Errorf("the second chat found %d messages", got-hits)
	}
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
	c.hold("preemptions", []want{{decodeNodes, "vllm:request_num_preemptions_sum", "", n}, {[]int{gatewayNode}, "vllm:request_params_n_bucket", `le="5"`, c.metric(gatewayNode, "vllm:request_params_n_count", "") - 1}})
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
