package metrics

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// rule is one of deploy/prometheus/tandem.rules.yml.
type rule struct {
	Record, Alert, Expr string
	Annotations         map[string]string
}

func load(t *testing.T, path string, into any, decode func([]byte, any) error) {
	t.Helper()
	text, err := os.ReadFile("../../deploy/" + path)
	if err != nil {
		t.Fatal(err)
	}
	if err := decode(text, into); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

var named = regexp.MustCompile(`\b(?:[a-z]+:)?(?:vllm|tandem)[:_][a-z0-9_:]+`)

// Rules and dashboard speak of metrics that exist, and each alert has a case in
// which it fires and one in which it does not; promtool runs them.
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
	var cases struct {
		Tests []struct {
			Name  string
			Rules []struct {
				Alertname string
				Alerts    []any `yaml:"exp_alerts"`
			} `yaml:"alert_rule_test"`
		}
	}
	load(t, "prometheus/tandem_test.yml", &cases, yaml.Unmarshal)
	fires, quiet := map[string]bool{}, map[string]bool{}
	for _, c := range cases.Tests {
		for _, r := range c.Rules {
			fires[r.Alertname] = fires[r.Alertname] || len(r.Alerts) > 0
			quiet[r.Alertname] = quiet[r.Alertname] || len(r.Alerts) == 0
		}
	}
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
			if r.Alert != "" && (!fires[r.Alert] || !quiet[r.Alert] || r.Annotations["summary"] == "" || r.Annotations["action"] == "") {
				t.Errorf("%s lacks a case in which it fires or is quiet, a summary or an action", r.Alert)
			}
		}
	}
	var board struct {
		Panels []struct {
			Type, Title, Description string
			Targets                  []struct{ Expr string }
		}
	}
	load(t, "grafana/tandem.json", &board, json.Unmarshal)
	var rows []string
	for _, p := range board.Panels {
		if p.Type == "row" {
			rows = append(rows, p.Title)
		} else if p.Description == "" || len(p.Targets) == 0 {
			t.Errorf("panel %q lacks a description or a query", p.Title)
		}
		for _, q := range p.Targets {
			check(p.Title, q.Expr)
		}
	}
	if want := []string{"Traffic", "Latency", "Saturation", "Errors and transfer"}; !slices.Equal(rows, want) {
		t.Errorf("rows are %s", strings.Join(rows, ", "))
	}
}
