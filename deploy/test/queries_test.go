package test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	"sigs.k8s.io/yaml"
)

// trigger is a trigger of a ScaledObject.
type trigger struct {
	Metadata struct{ Query, Threshold, ActivationThreshold, IgnoreNullValues string }
}

// triggers returns the triggers of a case's ScaledObjects, by name.
func triggers(t *testing.T, objects []object) map[string][]trigger {
	t.Helper()
	all := map[string][]trigger{}
	for i := range objects {
		if objects[i].Kind != "ScaledObject" {
			continue
		}
		var o struct{ Spec struct{ Triggers []trigger } }
		if err := yaml.Unmarshal(objects[i].text, &o); err != nil {
			t.Fatal(err)
		}
		all[objects[i].Name] = o.Spec.Triggers
	}
	return all
}

// sample is a series with its value.
type sample struct{ series, value string }

// fleet has series of this fleet's pools, of another fleet, and of another namespace.
func fleet(metric, labels string, here ...sample) (all []sample) {
	for _, s := range here {
		all = append(all, sample{fmt.Sprintf(`%s{namespace=%q, fleet=%q, job="tandem", %s%s}`, metric, namespace, release, labels, s.series), s.value})
	}
	return append(all,
		sample{fmt.Sprintf(`%s{namespace=%q, fleet="other", job="tandem", %spool="prefill"}`, metric, namespace, labels), "100"},
		sample{fmt.Sprintf(`%s{namespace="elsewhere", fleet=%q, job="tandem", %spool="decode"}`, metric, release, labels), "100"})
}

// promtool evaluates queries over series that are constant, and compares the results; "" is none.
func promtool(t *testing.T, tests []queryTest) {
	t.Helper()
	if _, err := exec.LookPath("promtool"); err != nil {
		t.Skip("needs promtool, of Debian's prometheus")
	}
	type object = map[string]any
	var groups []object
	for _, c := range tests {
		var series, want []object
		for _, s := range c.series {
			series = append(series, object{"series": s.series, "values": s.value + "x20"})
		}
		if c.want != "" {
			want = []object{{"labels": c.labels, "value": yamlNumber(c.want)}}
		}
		groups = append(groups, object{"name": c.name, "interval": "15s", "input_series": series,
			"promql_expr_test": []object{{"expr": c.query, "eval_time": "3m", "exp_samples": want}}})
	}
	text, err := yaml.Marshal(object{"evaluation_interval": "15s", "tests": groups})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "queries.yml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("promtool", "test", "rules", file).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

type queryTest struct {
	name, query  string
	series       []sample
	want, labels string
}

func yamlNumber(s string) any {
	var v any
	_ = yaml.Unmarshal([]byte(s), &v) // the tests' own numbers
	return v
}

// The queries of ScaledObjects sum the load of the pool's nodes alone. Without data they have no
// result, so that nothing is removed; for a pool that may have no node it is 0.
func TestQueries(t *testing.T) {
	_, texts := cases(t)
	scaled := triggers(t, rendered(t, texts["autoscaled"]))
	prefill, decode := scaled["tandem-prefill"], scaled["tandem-decode"]
	if len(prefill) != 1 || len(decode) != 2 {
		t.Fatalf("%d and %d triggers", len(prefill), len(decode))
	}
	for name, all := range scaled {
		for _, tr := range all {
			if tr.Metadata.IgnoreNullValues != "false" || tr.Metadata.Threshold == "" {
				t.Errorf("%s: %+v", name, tr)
			}
		}
	}
	if prefill[0].Metadata.Threshold != "1" || decode[0].Metadata.Threshold != "0.7" || decode[1].Metadata.ActivationThreshold != "0" {
		t.Errorf("thresholds of %+v, %+v", prefill, decode)
	}
	queue := fleet("tandem:prefill_queue_seconds", "", sample{`pool="prefill", node="a"`, "1.5"}, sample{`pool="prefill", node="b"`, "2.5"}, sample{`pool="decode", node="c"`, "9"})
	load := fleet("tandem:decode_pressure", "", sample{`pool="decode", node="c"`, "0.25"}, sample{`pool="decode", node="d"`, "0.5"})
	waiting := slices.Concat(
		fleet("tandem:queue_length", `role="gateway", queue="waiting", `, sample{`node="g"`, "3"}, sample{`node="h"`, "2"}),
		fleet("tandem:queue_length", `role="gateway", queue="waiting_tokens", `, sample{`node="g"`, "7000"}))
	promtool(t, []queryTest{
		{name: "prefill", query: prefill[0].Metadata.Query, series: queue, want: "4", labels: "{}"},
		{name: "prefill without data", query: prefill[0].Metadata.Query, series: load},
		{name: "decode", query: decode[0].Metadata.Query, series: load, want: "0.75", labels: "{}"},
		{name: "decode without nodes", query: decode[0].Metadata.Query, series: queue, want: "0", labels: "{}"},
		{name: "waiting", query: decode[1].Metadata.Query, series: waiting, want: "5", labels: "{}"},
		{name: "waiting without data", query: decode[1].Metadata.Query, series: load, want: "0", labels: "{}"},
	})
}

// The rules of prometheus-adapter have the metrics that HorizontalPodAutoscalers ask for.
func TestAdapterRules(t *testing.T) {
	text, err := os.ReadFile("../prometheus/adapter.yml")
	if err != nil {
		t.Fatal(err)
	}
	var rules struct {
		ExternalRules []struct {
			SeriesQuery, MetricsQuery string
			Name                      struct{ As string }
		}
	}
	if err := yaml.UnmarshalStrict([]byte(strings.ReplaceAll(string(text), "    resources: {overrides: {namespace: {resource: namespace}}}\n", "")), &rules); err != nil {
		t.Fatal(err)
	}
	_, texts := cases(t)
	objects := rendered(t, texts["gpus"])
	var tests []queryTest
	for i := range objects {
		h, ok := objects[i].typed.(*autoscalingv2.HorizontalPodAutoscaler)
		if !ok {
			continue
		}
		metric := h.Spec.Metrics[0].External.Metric
		j := slices.IndexFunc(rules.ExternalRules, func(r struct {
			SeriesQuery, MetricsQuery string
			Name                      struct{ As string }
		}) bool {
			return r.Name.As == metric.Name
		})
		if j < 0 {
			t.Errorf("no rule has %s", metric.Name)
			continue
		}
		rule := rules.ExternalRules[j]
		series := regexp.MustCompile(`__name__="([^"]+)"`).FindStringSubmatch(rule.SeriesQuery)[1]
		matchers := fmt.Sprintf("namespace=%q", namespace)
		for key, value := range metric.Selector.MatchLabels {
			matchers += fmt.Sprintf(",%s=%q", key, value)
		}
		pool := metric.Selector.MatchLabels["pool"]
		tests = append(tests, queryTest{
			name:   h.Name,
			query:  strings.NewReplacer("<<.Series>>", series, "<<.LabelMatchers>>", matchers, "<<.GroupBy>>", "namespace").Replace(rule.MetricsQuery),
			series: fleet(series, "", sample{fmt.Sprintf("pool=%q, node=\"a\"", pool), "1.5"}, sample{fmt.Sprintf("pool=%q, node=\"b\"", pool), "2"}, sample{`pool="other"`, "50"}),
			want:   "3.5", labels: fmt.Sprintf("{namespace=%q}", namespace),
		})
	}
	if len(tests) != 2 {
		t.Fatalf("%d autoscalers", len(tests))
	}
	promtool(t, tests)
}

// Each metric of a query is one of the program.
func TestMetricsExist(t *testing.T) {
	page, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, metric := range []string{"tandem:prefill_queue_seconds", "tandem:decode_pressure", "tandem:queue_length"} {
		if !strings.Contains(string(page), "| `"+metric+"` |") {
			t.Errorf("no metric %s", metric)
		}
	}
}
