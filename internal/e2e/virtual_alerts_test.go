//go:build linux

package e2e

import (
	"fmt"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-serving/tandem/decode"
	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/gateway"
)

// Alerts and panels about what real processes cannot be made to do on time: what the
// processes of a cluster in virtual time exposed before and after is put into
// Prometheus' rules and the dashboard's queries as time series, by promtool.

// watched is what the tests of metrics have seen.
type watched struct {
	metrics map[string]bool // "metric role"
	alerts  liveAlerts
}

// liveAlerts are alerts that are to fire, panels that are to show something, and the
// series that make them.
type liveAlerts struct {
	names  []string
	cases  []string // of promtool's tests
	panels []string // likewise, of what the dashboard is to show
	queues []string // that it is to show, with their roles
}

// samples are all series of all processes, as Prometheus labels them.
func (m *meterBed) samples() map[string]float64 {
	m.t.Helper()
	synctest.Wait()
	out := map[string]float64{}
	addSamples(m.t, out, "gw", "gateway", string(m.meters.Append(nil)))
	for _, n := range m.nodes {
		addSamples(m.t, out, n.addr, map[byte]string{'p': "prefill", 'd': "decode"}[n.addr[0]], string(n.meters.Set.Append(nil)))
	}
	return out
}

// addSamples adds what a process exposes.
func addSamples(t *testing.T, out map[string]float64, node, role, text string) {
	t.Helper()
	for line := range strings.Lines(text) {
		series, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		name, labels, _ := strings.Cut(series, "{")
		if !ok || name == "tandem:build_info" || !strings.HasPrefix(name, "tandem:") && !strings.HasPrefix(name, "vllm:") {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			t.Fatal(err)
		}
		if labels = strings.TrimSuffix(labels, "}"); labels != "" {
			labels += ","
		}
		out[fmt.Sprintf("%s{%sinstance=%q,job=\"tandem\",node=%q,role=%q}", name, labels, node, node, role)] = v
	}
}

// ruleCase begins a test of promtool with five minutes of what was at the start and
// then ten of what is now, of the series that are wanted.
func ruleCase(b *strings.Builder, what string, base, now map[string]float64, wanted func(name, labels string) bool) {
	fmt.Fprintf(b, "- name: %q\n  interval: 15s\n  input_series:\n", what)
	for _, series := range slices.Sorted(maps.Keys(now)) {
		if name, labels, _ := strings.Cut(series, "{"); wanted(name, labels) {
			fmt.Fprintf(b, "  - series: '%s'\n    values: '%gx20 %gx40'\n", series, base[series], now[series])
		}
	}
	fmt.Fprintf(b, "  promql_expr_test:\n")
}

// fires notes that what has happened since the start is to make an alert fire.
func (m *meterBed) fires(alert string) {
	m.t.Helper()
	m.alerts.fires(alert, m.base, m.samples())
}

func (l *liveAlerts) fires(alert string, base, now map[string]float64) {
	var b strings.Builder
	ruleCase(&b, alert, base, now, func(name, _ string) bool { return !strings.HasSuffix(name, "_bucket") })
	for at, fires := range map[string]int{"4m": 0, "9m": 1} {
		if alert == "TandemEngineStuck" && at == "4m" {
			continue // what stands still stood still then
		}
		fmt.Fprintf(&b, "  - expr: 'count(ALERTS{alertname=\"%s\",alertstate=\"firing\"}) > bool 0 or vector(0)'\n    eval_time: %s\n    exp_samples: [{labels: '{}', value: %d}]\n", alert, at, fires)
	}
	l.names = append(l.names, alert)
	l.cases = append(l.cases, b.String())
}

// shows notes what a query of a panel is to show of it: the sum of its series, in
// things counted where it is a rate, and which of them, by their labels, are not zero.
func (m *meterBed) shows(panel string, query int, want float64, labels ...string) {
	m.t.Helper()
	m.alerts.shows(m.t, m.base, m.samples(), panel, query, want, labels...)
}

func (l *liveAlerts) shows(t *testing.T, base, now map[string]float64, panel string, query int, want float64, labels ...string) {
	t.Helper()
	if want <= 0 || math.IsNaN(want) {
		t.Errorf("panel %q, query %d: nothing is to be seen there: %g", panel, query, want)
	}
	if len(labels) == 0 {
		labels = []string{"{}"}
	}
	var b strings.Builder
	expr, of := panelCase(t, &b, base, now, panel, query)
	fmt.Fprintf(&b, panelExpr, fmt.Sprintf("abs(sum(%s) * %g - %g) <= bool %g", expr, of, want, exact*want), "{labels: '{}', value: 1}")
	for i, name := range labels {
		labels[i] = "{labels: '" + name + "', value: 1}"
	}
	fmt.Fprintf(&b, panelExpr, fmt.Sprintf("((%s) > 0) * 0 + 1", expr), strings.Join(labels, ", "))
	l.panels = append(l.panels, b.String())
}

const (
	panelExpr = "  - expr: '%s'\n    eval_time: 10m\n    exp_samples: [%s]\n"
	// ruleWindow is that of rates: the first sample is in it wherever Prometheus has a
	// window begin, and nothing is extrapolated.
	ruleWindow = "10m1ms"
	exact      = 1e-5 // of a value: what of the window is too long
)

// panelCase begins a test of promtool of a panel's query, which is in things counted
// where it is a rate and multiplied.
func panelCase(t *testing.T, b *strings.Builder, base, now map[string]float64, panel string, query int) (expr string, of float64) {
	t.Helper()
	expr, of = panels(t, ruleWindow)[panel][query], 1
	if strings.Contains(expr, "rate(") && !strings.Contains(expr, ") / ") {
		of = panelSeconds
	}
	ruleCase(b, fmt.Sprintf("%s %d", panel, query), base, now, func(name, _ string) bool { return strings.Contains(expr, name) })
	return expr, of
}

// showsEach notes what each series of a query is to show, by its labels, and that
// there are no others.
func (m *meterBed) showsEach(panel string, query int, want map[string]float64) {
	m.t.Helper()
	var b strings.Builder
	expr, of := panelCase(m.t, &b, m.base, m.samples(), panel, query)
	var all []string
	sum := 0.0
	for labels, v := range want {
		sum += v
		all = append(all, fmt.Sprintf("{labels: '%s', value: %g}", labels, v))
	}
	if sum == 0 {
		m.errorf("panel %q, query %d: nothing is to be seen there", panel, query)
	}
	fmt.Fprintf(&b, panelExpr, fmt.Sprintf("round((%s) * %g, 0.01)", expr, of), strings.Join(all, ", "))
	m.alerts.panels = append(m.alerts.panels, b.String())
}

// meteredAlerts has what alerts are about happen, where no other test does.
func meteredAlerts(t *testing.T, ds []*engine.Loaded, seen *watched) {
	var still gate
	stands := func(m *meterBed) { m.measured.step = func(string) { still.pass() } }
	metered(t, ds, seen, "a full queue", func(m *meterBed, o *gateway.Options) {
		stands(m)
		o.Limits.NodeBacklog, o.Limits.MaxQueuedRequests, o.Limits.QueueTimeout = 1, 5, time.Hour
	}, func(m *meterBed) {
		still.close()
		answers := m.crowd(60, 40, 2)
		time.Sleep(time.Second)
		refused := m.value('G', "tandem:gateway_refused_total", `"queue"`)
		m.fires("TandemGatewayRefuses")
		still.open()
		told := 0
		for _, a := range answers() {
			if a.status == 429 {
				told++
			}
		}
		m.is('G', "tandem:gateway_refused_total", `"queue"`, float64(told))
		m.shows("Refused by gateways", 0, float64(told), `{limit="queue"}`)
		if refused == 0 {
			m.errorf("nobody was refused")
		}
	})
	metered(t, ds, seen, "no retries left", func(m *meterBed, o *gateway.Options) {
		stands(m)
		o.Limits.NodeBacklog, o.Limits.NodeBacklogTime, o.Limits.RetriesPerSecond = 1000, -1, 1
		m.measured.decode = func(o *decode.Options) { o.MaxRequests = 1 }
	}, func(m *meterBed) {
		still.close()
		answers := m.crowd(60, 40, 2)
		for range 2000 {
			if m.value('G', "tandem:gateway_retry_budget", "") < 1 {
				break
			}
			time.Sleep(time.Millisecond)
		}
		m.fires("TandemRetryBudgetEmpty")
		still.open()
		answers()
	})
	metered(t, ds, seen, "a device that hangs", func(m *meterBed, o *gateway.Options) {
		stands(m)
		o.StallTimeout = -1
	}, func(m *meterBed) {
		answers := m.crowd(4, 40, 100)
		for m.value('G', "vllm:generation_tokens_total", "") < 8 {
			time.Sleep(time.Millisecond)
		}
		still.close()
		time.Sleep(time.Second)
		m.base = m.samples() // from here on nothing moves
		m.fires("TandemEngineStuck")
		still.open()
		m.well(answers()...)
	})
}

// fills notes how full the panel of queues is to show one: of each role that has it
// the node's that has most of it in its bound.
func (m *meterBed) fills(queue string, want map[string]float64) {
	m.t.Helper()
	const panel, precision = "Queues against their bounds", 1e9
	var b strings.Builder
	ruleCase(&b, panel+": "+queue, m.base, m.samples(), func(name, labels string) bool {
		return strings.HasPrefix(name, "tandem:queue_") && strings.Contains(labels, fmt.Sprintf("queue=%q", queue))
	})
	var all []string
	for role, share := range want {
		if share < 0 || share > 1 {
			m.errorf("queue %s of %s: %g of its bound", queue, role, share)
		}
		all = append(all, fmt.Sprintf("{labels: '{queue=%q, role=%q}', value: %g}", queue, role, math.Round(share*precision)))
	}
	fmt.Fprintf(&b, "  - expr: 'round((%s) * %g)'\n    eval_time: 10m\n    exp_samples: [%s]\n", panels(m.t, panelWindow)[panel][0], precision, strings.Join(all, ", "))
	m.alerts.panels = append(m.alerts.panels, b.String())
	for role, share := range want {
		if share > 0 {
			m.alerts.queues = append(m.alerts.queues, queue+" "+role)
		}
	}
}

// hold runs the rules, and wants the alerts to be those that fire here.
func (l *liveAlerts) hold(t *testing.T) {
	t.Helper()
	l.run(t)
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
	for _, queue := range boundedQueues {
		if !slices.Contains(l.queues, queue) {
			t.Errorf("nobody has seen how full the queue %s is", queue)
		}
	}
}

// run has promtool look at what was noted; the dashboard's queries need no rules.
func (l *liveAlerts) run(t *testing.T) {
	t.Helper()
	path, err := exec.LookPath("promtool")
	if err != nil {
		t.Log("without promtool nobody has seen alerts fire, or panels")
		return
	}
	rules, err := filepath.Abs("../../deploy/prometheus/tandem.rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"test", "rules"}
	for of, cases := range map[string][]string{rules: l.cases, "": l.panels} {
		if len(cases) == 0 {
			continue
		}
		file := filepath.Join(t.TempDir(), "live_test.yml")
		text := "rule_files: [" + of + "]\nevaluation_interval: 15s\ntests:\n" + strings.Join(cases, "")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, file)
	}
	if out, err := exec.Command(path, args...).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
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
