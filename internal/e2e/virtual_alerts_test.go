//go:build linux

package e2e

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
)

// Alerts about what real processes cannot be made to do on time: what the processes
// of a cluster in virtual time exposed before and after is put into Prometheus' rules
// as time series, by promtool.

// watched is what the tests of metrics have seen.
type watched struct {
	metrics map[string]bool // "metric role"
	alerts  liveAlerts
}

// liveAlerts are alerts that are to fire, and the series that make them.
type liveAlerts struct {
	names []string
	cases []string // of promtool's tests
}

// samples are all series of all processes, as Prometheus labels them.
func (m *meterBed) samples() map[string]float64 {
	m.t.Helper()
	synctest.Wait()
	out := map[string]float64{}
	add := func(node, role, text string) {
		for line := range strings.Lines(text) {
			series, value, ok := strings.Cut(strings.TrimSpace(line), " ")
			name, labels, _ := strings.Cut(series, "{")
			if !ok || name == "tandem:build_info" || !strings.HasPrefix(name, "tandem:") && !strings.HasPrefix(name, "vllm:") {
				continue
			}
			v, err := strconv.ParseFloat(value, 64)
			m.must(err)
			if labels = strings.TrimSuffix(labels, "}"); labels != "" {
				labels += ","
			}
			out[fmt.Sprintf("%s{%sinstance=%q,job=\"tandem\",node=%q,role=%q}", name, labels, node, node, role)] = v
		}
	}
	add("gw", "gateway", string(m.meters.Append(nil)))
	for _, n := range m.nodes {
		add(n.addr, map[byte]string{'p': "prefill", 'd': "decode"}[n.addr[0]], string(n.meters.Set.Append(nil)))
	}
	return out
}

// fires notes that what has happened since the start is to make an alert fire. Five
// minutes of what was at the start come first, then ten of what is now.
func (m *meterBed) fires(alert string) {
	m.t.Helper()
	now := m.samples()
	var b strings.Builder
	fmt.Fprintf(&b, "- name: %s\n  interval: 15s\n  input_series:\n", alert)
	for _, series := range slices.Sorted(maps.Keys(now)) {
		if !strings.Contains(series, "_bucket{") {
			fmt.Fprintf(&b, "  - series: '%s'\n    values: '%gx20 %gx40'\n", series, m.base[series], now[series])
		}
	}
	fmt.Fprintf(&b, "  promql_expr_test:\n")
	for at, fires := range map[string]int{"4m": 0, "9m": 1} {
		if alert == "TandemEngineStuck" && at == "4m" {
			continue // what stands still stood still then
		}
		fmt.Fprintf(&b, "  - expr: 'count(ALERTS{alertname=\"%s\",alertstate=\"firing\"}) > bool 0 or vector(0)'\n    eval_time: %s\n    exp_samples: [{labels: '{}', value: %d}]\n", alert, at, fires)
	}
	m.alerts.names = append(m.alerts.names, alert)
	m.alerts.cases = append(m.alerts.cases, b.String())
}

// hold runs the rules.
func (l *liveAlerts) hold(t *testing.T) {
	t.Helper()
	path, err := exec.LookPath("promtool")
	if err != nil {
		t.Log("without promtool nobody has seen alerts fire")
		return
	}
	rules, err := filepath.Abs("../../deploy/prometheus/tandem.rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "live_test.yml")
	text := "rule_files: [" + rules + "]\nevaluation_interval: 15s\ntests:\n" + strings.Join(l.cases, "")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(path, "test", "rules", file).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	for _, alert := range l.names {
		if firesVirtually[alert] == "" {
			t.Errorf("%s is not among the alerts that fire here", alert)
		}
	}
	for alert := range firesVirtually {
		if !slices.Contains(l.names, alert) {
			t.Errorf("%s has not fired", alert)
		}
	}
}

// firesVirtually are the alerts that fire here, and why not with real processes.
var firesVirtually = map[string]string{
	"TandemEngineStuck":      "takes a device that hangs",
	"TandemCorruptKV":        "takes pages that change on their way",
	"TandemStreamsDropped":   "an outbox and the sockets behind it hold some hundred thousand tokens",
	"TandemRetryBudgetEmpty": "takes 500 refusals faster than 50 a second, which a busy machine need not manage",
	"TandemGatewayRefuses":   "nodes that are there refuse before their gateway's queue of thousands is full",
	"TandemFileNotTaken":     "the gateway of tandem up has no file of its own",
}
