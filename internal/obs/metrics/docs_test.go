package metrics

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write docs/metrics.md")

// absent are vLLM's metrics that are not exposed, and why.
var absent = []struct{ names, why string }{
	{"vllm:corrupted_requests", "logits are not searched for NaNs, nor does vLLM by default"},
	{"vllm:engine_sleep_state, vllm:sleep_mode_*", "engines do not sleep"},
	{"vllm:watermark_requests", "no watermarks in text"},
	{"vllm:mm_cache_queries, vllm:mm_cache_hits", "text only"},
	{"vllm:kv_block_lifetime_seconds, vllm:kv_block_idle_before_evict_seconds, vllm:kv_block_reuse_gap_seconds", "sampled and off by default in vLLM; the block pool here has no clock"},
	{"vllm:nixl_*, vllm:mooncake_*, vllm:hf3fs_*, vllm:hisparse_*, vllm:umbp_*", "of vLLM's own connectors; tandem:kv_transfer_* are those of ours"},
	{"vllm:kv_offload_*, vllm:simple_kv_offload_*", "KV is not offloaded"},
	{"vllm:estimated_flops_per_gpu_total, vllm:estimated_*_bytes_per_gpu_total", "nothing is estimated"},
	{"vllm:diffusion_*, vllm:rl_*, vllm:websocket_*, vllm:tool_call_parser_invocations_total", "no such feature, or not counted"},
	{"http_requests_total, http_request_duration_seconds", "of vLLM's web framework; tandem:http_requests_total, vllm:e2e_request_latency_seconds"},
	{"*_created", "gauges that Python's client library adds"},
}

const docsHead = `# Metrics

Every process serves metrics in Prometheus' text format at ` + "`/metrics`" + `: gateways on their main
port or on ` + "`--admin-listen`" + `, nodes on ` + "`--http-port`" + `.

- Names that begin with ` + "`vllm:`" + ` have vLLM's meaning, labels (` + "`model_name`, and `engine`, which" + `
  is always 0) and buckets, so that its dashboards and autoscaling triggers work.
- Names that begin with ` + "`tandem:`" + ` are Tandem's.
- The usual ` + "`process_*` and `go_*`" + ` exist, too.

All series exist from the start, and no label takes its values from requests.

Roles: G gateway, P prefill, D decode. ` + "`tandem serve`" + ` has those of G and D, and counts each request
once.

[deploy](../deploy/README.md) has a dashboard and alerts. This page is made from the table in the
code: ` + "`go test -run TestDocs ./internal/obs/metrics -update`" + ` writes it.

| metric | type | roles | labels | meaning |
|---|---|---|---|---|
`

// docs is docs/metrics.md.
func docs() string {
	kinds := map[Kind]string{KindCounter: "counter", KindGauge: "gauge", KindHistogram: "histogram", KindInfo: "info"}
	var b strings.Builder
	b.WriteString(docsHead)
	for i := range Rows {
		r := &Rows[i]
		roles := ""
		for at, letter := range "GPD" {
			if r.Roles&(1<<at) != 0 {
				roles += string(letter)
			}
		}
		var labels []string
		for _, l := range r.Labels {
			s := l.Name
			if len(l.Values) > 0 && l.Name != "status" {
				s += " = " + strings.Join(l.Values, ", ")
			}
			labels = append(labels, s)
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s |\n", r.Name, kinds[r.Kind], roles, strings.Join(labels, "; "), r.Help)
	}
	b.WriteString("\n## Buckets\n\n| bounds | of |\n|---|---|\n")
	var order []string
	of := map[string][]string{}
	for i := range Rows {
		if r := &Rows[i]; r.Kind == KindHistogram {
			bounds := strings.Trim(strings.ReplaceAll(fmt.Sprint(r.Buckets), " ", ", "), "[]")
			if of[bounds] == nil {
				order = append(order, bounds)
			}
			of[bounds] = append(of[bounds], "`"+r.Name+"`")
		}
	}
	for _, bounds := range order {
		fmt.Fprintf(&b, "| %s | %s |\n", bounds, strings.Join(of[bounds], ", "))
	}
	b.WriteString("\n## vLLM metrics that are missing\n\n| metric | why |\n|---|---|\n")
	for _, a := range absent {
		fmt.Fprintf(&b, "| `%s` | %s |\n", strings.ReplaceAll(a.names, ", ", "`, `"), a.why)
	}
	return b.String()
}

func TestDocs(t *testing.T) {
	const path = "../../../docs/metrics.md"
	if *update {
		if err := os.WriteFile(path, []byte(docs()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != docs() {
		t.Error("docs/metrics.md is not what the table says; `go test -run TestDocs ./internal/obs/metrics -update` writes it")
	}
	for i := range Rows {
		for _, a := range absent {
			for _, name := range strings.Split(a.names, ", ") {
				if strings.TrimSuffix(Rows[i].Name, "_total") == name {
					t.Errorf("%s is said to be missing, and is there", name)
				}
			}
		}
	}
}
