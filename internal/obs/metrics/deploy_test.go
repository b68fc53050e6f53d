package metrics

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
)

// rule is one of deploy/prometheus/tandem.rules.yml.
type rule struct {
	Record, Alert, Expr string
	For                 time.Duration
	Annotations         map[string]string
}

func load(t *testing.T, path string, into any, decode func([]byte, any) error) {
	t.Helper()
	text, err := os.ReadFile("../../../deploy/" + path)
	if err != nil {
		t.Fatal(err)
	}
	if err := decode(text, into); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

var named = regexp.MustCompile(`\b(?:[a-z]+:)?(?:vllm|tandem)[:_][a-z0-9_:]+`)

// fleets are the cases of promtool's tests in which something is asked about an
// alert: how long they have run, and whether it is to fire.
type fleets []struct {
	Name  string
	Rules []struct {
		Eval      time.Duration `yaml:"eval_time"`
		Alertname string
		Alerts    []any `yaml:"exp_alerts"`
	} `yaml:"alert_rule_test"`
}

// says is what a case of the name has to say about an alert: whether it fires at
// the end, and, where it fires after some time, that it is quiet an evaluation
// before that.
func (f fleets) says(t *testing.T, r *rule, name string, fires bool) {
	t.Helper()
	for _, c := range f {
		if c.Name != name || len(c.Rules) == 0 {
			continue
		}
		last := c.Rules[len(c.Rules)-1]
		if last.Alertname != r.Alert || (len(last.Alerts) > 0) != fires || last.Eval < r.For {
			t.Errorf("%q does not end with %s, firing %v, after more than %v", name, r.Alert, fires, r.For)
		}
		if first := c.Rules[0]; strings.Contains(name, "before its time") && r.For > 0 && (len(first.Alerts) > 0 || first.Eval != r.For-15*time.Second) {
			t.Errorf("%q does not say that it is quiet 15 s before %v", name, r.For)
		}
		return
	}
	t.Errorf("there is no case %q", name)
}

// Rules and dashboard speak of metrics that exist, and each alert has a case in
// which it fires and one in which it does not, also at its threshold; promtool runs
// them.
func TestDeployNamesMetrics(t *testing.T) {
	known := map[string]bool{}
	for i := range Rows {
		known[Rows[i].Name] = true
		if Rows[i].Kind == KindHistogram {
			for _, s := range []string{"_bucket", "_sum", "_count"} {
				known[Rows[i].Name+s] = true
			}
		}
	}
	var rules struct {
		Groups []struct{ Rules []rule }
	}
	load(t, "prometheus/tandem.rules.yml", &rules, yaml.Unmarshal)
	var cases struct{ Tests fleets }
	load(t, "prometheus/tandem_test.yml", &cases, yaml.Unmarshal)
	check := func(where, expr string) {
		for _, name := range named.FindAllString(expr, -1) {
			if !known[name] {
				t.Errorf("%s speaks of %s, which nobody exposes", where, name)
			}
		}
	}
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			if r.Record != "" {
				known[r.Record] = true
			}
		}
	}
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			check(r.Record+r.Alert, r.Expr)
			check(r.Alert, r.Annotations["action"])
			if r.Alert == "" {
				continue
			}
			if r.Annotations["summary"] == "" || r.Annotations["action"] == "" {
				t.Errorf("%s lacks a summary or an action", r.Alert)
			}
			cases.Tests.says(t, &r, r.Alert+" fires", true)
			cases.Tests.says(t, &r, r.Alert+" stays quiet", false)
			cases.Tests.says(t, &r, r.Alert+" is quiet at its threshold", false)
			cases.Tests.says(t, &r, r.Alert+" fires just beyond its threshold, and not before its time", true)
		}
	}
	var board struct {
		Panels []struct {
			Type, Title, Description string
			Targets                  []struct{ Expr string }
		}
	}
	load(t, "grafana/tandem.json", &board, json.Unmarshal)
	var rows, exprs []string
	for _, p := range board.Panels {
		if p.Type == "row" {
			rows = append(rows, p.Title)
		} else if p.Description == "" || len(p.Targets) == 0 {
			t.Errorf("panel %q lacks a description or a query", p.Title)
		}
		for _, q := range p.Targets {
			check(p.Title, q.Expr)
			exprs = append(exprs, named.FindAllString(q.Expr, -1)...)
		}
	}
	if want := []string{"Traffic", "Latency", "Saturation", "Errors and transfer"}; !slices.Equal(rows, want) {
		t.Errorf("rows are %s", strings.Join(rows, ", "))
	}
	holdShown(t, exprs)
}

// unshown are the metrics that no panel shows, and where what they say is seen.
var unshown = map[string]string{
	"tandem:accept_errors_total":                         "the log; raise the limit on file descriptors",
	"tandem:gateway_evicted_connections_total":           "queue_length and queue_limit of connections",
	"tandem:build_info":                                  "a fact",
	"tandem:certificate_expiry_timestamp_seconds":        "a date; an alert and the log warn from 30 days before",
	"vllm:cache_config_info":                             "a fact",
	"vllm:lora_requests_info":                            "names that come and go, for routers that look for an adapter",
	"vllm:external_prefix_cache_queries_total":           "Prompt tokens by source has what came of them",
	"vllm:external_prefix_cache_hits_total":              "Prompt tokens by source",
	"vllm:prompt_tokens_cached_total":                    "Prompt tokens by source",
	"vllm:prompt_tokens_cached_by_source_total":          "Prompt tokens by source",
	"vllm:spec_decode_num_drafts_total":                  "Speculation has the tokens",
	"vllm:spec_decode_num_accepted_tokens_per_pos_total": "Speculation has their sum",
	"vllm:request_max_num_generation_tokens":             "Request sizes; differs for several choices only",
	"vllm:request_params_n":                              "what clients ask for, for a closer look",
	"vllm:request_params_max_tokens":                     "what clients ask for, for a closer look",
	"vllm:request_inference_time_seconds":                "prompt and decoding, which the latency panels have",
	"vllm:request_decode_time_seconds":                   "Time per output token",
	"vllm:request_num_preemptions":                       "tokens per step, preemptions",
	"vllm:request_prefill_kv_computed_tokens":            "Prompt tokens by source",
	"tandem:prefill_tokens_computed_total":               "tokens per step",
	"tandem:engine_steps_total":                          "the p95 of a step; an alert watches that there are any",
	"tandem:engine_work_total":                           "tokens per step; tandem profile --from reads it",
	"tandem:desired_nodes":                               "for autoscalers; docs/planner.md",
	"tandem:engine_work_seconds_total":                   "as tandem:engine_work_total",
	"tandem:kv_transfers_total":                          "KV transfer: bytes",
	"tandem:kv_transfer_pieces_total":                    "KV transfer: bytes",
	"tandem:gateway_attempts_total":                      "Routing decisions: one of each kind for an attempt",
	"tandem:gateway_class_changes_total":                 "Failed attempts: resumed; a line of the log names each",
	"tandem:grammar_masks_total":                         "steps, and the time of a step; for a closer look at constrained requests",
	"tandem:grammar_steps_total":                         "for a closer look at constrained requests, as the next",
	"tandem:grammar_sat_out_total":                       "the time between tokens of constrained requests",
	"tandem:grammar_ended_total":                         "errors of requests",
	"tandem:grammars":                                    "bounded by their memory",
	"tandem:grammar_cache_bytes":                         "bounded",
	"tandem:grammar_waiting":                             "tandem:grammar_sat_out_total",
	"tandem:gateway_grammars_total":                      "responses by status; for a closer look at refused grammars",
	"tandem:gateway_grammars_waiting":                    "refusals by limit",
	"tandem:gateway_grammar_cache_bytes":                 "bounded",
	"tandem:tokenizer_cache_bytes":                       "bounded; its hits are shown",
	"tandem:rpc_frames_total":                            "Traffic between nodes",
}

// holdShown has every metric be on a panel or be one of which is said why not.
func holdShown(t *testing.T, names []string) {
	t.Helper()
	shown := map[string]bool{"vllm:num_requests_waiting": true} // by its reasons
	for _, n := range names {
		for _, s := range []string{"_bucket", "_sum", "_count"} {
			shown[strings.TrimSuffix(n, s)] = true
		}
		shown[n] = true
	}
	for i := range Rows {
		if name := Rows[i].Name; shown[name] == (unshown[name] != "") {
			t.Errorf("%s: shown %v, and why not: %q", name, shown[name], unshown[name])
		}
	}
}
