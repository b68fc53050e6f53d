//go:build linux

package e2e

import (
	"context"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
)

// notLive are the alerts that fire elsewhere: at a gateway of upstreams or with certificates of some
// days, or in a cluster in virtual time.
func notLive() map[string]string {
	out := maps.Clone(firesVirtually)
	for _, alert := range []string{"TandemNoUpstream", "TandemUpstreamDown"} {
		out[alert] = "TestBinaryUpstreamMeters has it fire"
	}
	out["TandemCertificateExpires"] = "TestBinaryCertificateExpiresSoon has it fire"
	return out
}

// quickened are the rules with windows and patience of seconds, and with latencies
// and rates, which are the machine's, that are too much at once: what is tested is that the real metrics make the real
// expressions true. The thresholds themselves are promtool's to test.
func quickened(t *testing.T) func(string) string {
	return func(rules string) string {
		rules = regexp.MustCompile(`\[[15]m\]`).ReplaceAllString(rules, "[10s]")
		rules = regexp.MustCompile(`(?m)^( +for:) .*$`).ReplaceAllString(rules, "$1 0s")
		for _, latency := range []string{"first_token_seconds:p99_5m > 10", "latency_seconds:p99_5m > 0.5", "> 0.25", "num_preemptions_total[10s])) > 0.5"} {
			short := latency[:strings.LastIndex(latency, " ")] + " 0"
			if strings.Count(rules, latency) != 1 {
				t.Errorf("the rules have %q %d times", latency, strings.Count(rules, latency))
			}
			rules = strings.Replace(rules, latency, short, 1)
		}
		return rules
	}
}

// alertBound is for a machine that has other things to do.
const alertBound = 3 * time.Minute

// fired waits until each of the alerts has been firing at some time.
func (p *prom) fired(what string, alerts ...string) {
	p.t.Helper()
	p.untilIn(alertBound, what, `count by (alertname) (count_over_time(ALERTS{alertstate="firing"}[10m]))`, func(_ []float64, labels []map[string]string) bool {
		have := map[string]bool{}
		for _, l := range labels {
			have[l["alertname"]] = true
		}
		return !slices.ContainsFunc(alerts, func(a string) bool { return !have[a] })
	})
}

// crowdClients is more than run (4) and wait (6) on two decode nodes.
const crowdClients = 24

// crowd sends more than the nodes have room for until stop is called: long prompts that
// fill their KV memory, or short ones that fill their queues, which the gateway would
// not send beyond KV memory.
func (c *cluster) crowd(seed uint64, promptTokens, tokens int) (stop func()) {
	var clients sync.WaitGroup
	ctx, end := context.WithCancel(c.t.Context())
	for i := range crowdClients {
		r := rand.New(rand.NewPCG(seed, uint64(i)))
		clients.Go(func() {
			for ctx.Err() == nil {
				resp, err := c.postFor(ctx, "/v1/completions", map[string]any{"prompt": c.prompt(r, promptTokens), "max_tokens": tokens, "ignore_eos": true})
				if err != nil {
					if ctx.Err() == nil {
						c.t.Error(err)
					}
					return
				}
				_, _ = io.Copy(io.Discard, resp.Body) // refused ones are what this is for
				resp.Body.Close()
				if resp.StatusCode != 200 {
					time.Sleep(20 * time.Millisecond)
				}
			}
		})
	}
	return sync.OnceFunc(func() { end(); clients.Wait() })
}

// Alerts of a real cluster that is overloaded, cut off and killed node by node:
// each fires, and none before anything has happened.
//
// This test is one of the longest. Go starts the parallel test that is declared last first, and the
// order of declaration is the one of the files' names: the name of this file is a late one, so that
// no cores are idle while only this test is left.
func TestBinaryAlerts(t *testing.T) {
	t.Parallel()
	c, p, _ := startObserved(t, quickened(t), "--max-num-seqs", "4", "--max-num-queued-reqs", "6")
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 1))
	t.Logf("seed %d", seed)
	mark := func(what string) { t.Logf("%6.1f s: %s", time.Since(c.began).Seconds(), what) }
	pids := c.pids()

	p.until("all is quiet", `ALERTS or vector(0)`, func(values []float64, labels []map[string]string) bool {
		return len(values) == 1 && labels[0]["alertname"] == ""
	})
	for range 3 {
		if _, err := c.complete(c.prompt(r, oPrompt), oOutput); err != nil {
			t.Fatal(err)
		}
	}
	live := []string{"TandemSlowFirstToken", "TandemSlowTokens", "TandemExposedTransfers"}
	p.fired("latencies", live...)
	mark("slow")

	memory, queues := []string{"TandemKVCacheFull", "TandemPreemptions"}, []string{"TandemQueueFull", "TandemRequestsRefused", "TandemErrors"}
	full := slices.Concat(memory, queues)
	stop := c.crowd(seed, 240, 400) // longer answers than the gateway expects
	defer stop()
	p.fired("too much to keep", memory...)
	stop()
	stop = c.crowd(seed, 8, 40)
	defer stop()
	p.fired("too much to do", queues...)
	stop()
	c.holdRefusals(p)
	mark("full")

	lost := []string{"TandemTransfersFail", "TandemPrefillFallback"}
	c.loseTransfers(r, pids)
	p.fired("transfers that fail", lost...)
	c.holdLosses(p)
	mark("transfers lost")

	gone := []string{"TandemNodeDown", "TandemBreakerOpen", "TandemNoDecodeNode"}
	if err := syscall.Kill(pids["decode-0"], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	p.fired("a node that is gone", "TandemNodeDown", "TandemBreakerOpen")
	c.hold("dials to it", []want{{[]int{gatewayNode}, "tandem:gateway_usable_decode_nodes", "", 1}})
	if n := c.value([]int{gatewayNode}, "tandem:rpc_dial_errors_total", ""); n < 3 {
		t.Errorf("a breaker is open after %g failed dials", n)
	}
	maybe := band{0, 1} // a breaker that is open tries now and then
	p.holdPanels(map[string][]shown{"Decode nodes as gateways see them": {{"closed": about(1), "half-open": maybe, "open": maybe}, one(1)}})
	c.freeze(pids, "decode-1", syscall.SIGSTOP)
	p.fired("no node that answers", gone...)
	c.freeze(pids, "decode-1", syscall.SIGCONT)
	mark("no decode node")

	if err := syscall.Kill(pids["gateway"], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	p.fired("news that nobody hears", "TandemBlockEventsDropped")
	for _, nodes := range [][]int{prefillNodes, decodeNodes[1:]} {
		c.wait(20*time.Second, "each node has dropped news", func() bool {
			return !slices.ContainsFunc(nodes, func(node int) bool { return c.value([]int{node}, "tandem:block_events_dropped_total", "") < 1 })
		})
		c.saw("tandem:block_events_dropped_total", nodes)
	}
	some, any := band{(1 - panelSlack) * 2 / panelSeconds, math.Inf(1)}, shown{"": band{0, math.Inf(1)}}
	p.holdPanels(map[string][]shown{"Dropped events and frames": {{"": some}, any, any, any}})
	mark("no gateway")
	c.holdSeen()
	holdLive(t, slices.Concat(live, full, lost, gone, []string{"TandemBlockEventsDropped"}))
}

// holdLive has every alert of the rules be among those that have fired, or among
// those that do elsewhere.
func holdLive(t *testing.T, fired []string) {
	t.Helper()
	text, err := os.ReadFile("../../deploy/prometheus/tandem.rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	var rules struct {
		Groups []struct{ Rules []struct{ Alert string } }
	}
	if err := yaml.Unmarshal(text, &rules); err != nil {
		t.Fatal(err)
	}
	rest := notLive()
	elsewhere := notLive()
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			if r.Alert != "" && slices.Contains(fired, r.Alert) == (elsewhere[r.Alert] != "") {
				t.Errorf("the alert %s: fired %v, and why it cannot be: %q", r.Alert, slices.Contains(fired, r.Alert), elsewhere[r.Alert])
			}
			delete(rest, r.Alert)
		}
	}
	if len(rest) > 0 {
		t.Errorf("there are no alerts %v", rest)
	}
}

// holdRefusals: what decode nodes have refused for want of room is what the gateway
// was refused, and what the dashboard shows.
func (c *cluster) holdRefusals(p *prom) {
	c.t.Helper()
	g, d := []int{gatewayNode}, decodeNodes
	c.wait(alertBound, "nothing runs any more", func() bool {
		return len(c.wrong([]want{{g, "tandem:gateway_requests_in_flight", "", 0}, {d, "tandem:queue_length", "", 0}})) == 0
	})
	n := c.value(g, "tandem:gateway_attempt_failures_total", `"overloaded"`)
	if n == 0 {
		c.t.Error("nothing was refused")
	}
	// A client that left may not have waited to hear that it was refused.
	told := c.value(d, "vllm:admission_rejections_total", "")
	if told < n || told > n+crowdClients {
		c.t.Errorf("decode nodes say that they refused %g, the gateway was refused %g", told, n)
	}
	c.saw("vllm:admission_rejections_total", d)
	refused := c.value(prefillNodes, "vllm:admission_rejections_total", "")
	shed := map[string]float64{}
	for _, limit := range refusalLimits {
		shed[limit] = c.value(g, "tandem:gateway_refused_total", `"`+limit+`"`)
	}
	p.holdPanels(map[string][]shown{"Refused": {rates(map[string]float64{"gateway": 0, "decode": told, "prefill": refused})}, "Refused by gateways": {rates(shed)},
		"Gateway queue: time waited": c.waits()})
}

// loseTransfers stops the prefill nodes in the middle of a transfer until a
// decode node has given it up and computes the prompt itself.
func (c *cluster) loseTransfers(r *rand.Rand, pids map[string]int) {
	c.t.Helper()
	d := decodeNodes
	failures, local := c.value(d, "tandem:kv_transfer_failures_total", `"in"`), c.value(d, "tandem:decode_prefills_total", `"local"`)
	for range 50 {
		done := c.ask(r, 1)
		for len(done) == 0 && c.value(d, "tandem:kv_leases", "") == 0 {
			continue // until the decode node has granted its blocks
		}
		c.freeze(pids, "prefill-", syscall.SIGSTOP)
		c.answered(done)
		c.freeze(pids, "prefill-", syscall.SIGCONT)
		if c.value(d, "tandem:decode_prefills_total", `"local"`) == local+1 && c.value(d, "tandem:kv_transfer_failures_total", `"in"`) > failures {
			return
		}
		local = c.value(d, "tandem:decode_prefills_total", `"local"`)
	}
	c.t.Error("no transfer was caught in the middle")
}

// holdLosses has the dashboard show what nodes say that went wrong.
func (c *cluster) holdLosses(p *prom) {
	c.t.Helper()
	d := decodeNodes
	failed := map[string]float64{"in": 0, "out": 0}
	for _, way := range []string{"in", "out"} {
		failed[way] = c.value(slices.Concat(prefillNodes, d), "tandem:kv_transfer_failures_total", `"`+way+`"`)
	}
	fenced := map[string]float64{}
	for _, kind := range []string{"stale", "duplicate", "corrupt"} {
		fenced[kind] = c.value(d, "tandem:fenced_writes_total", `"`+kind+`"`)
	}
	p.holdPanels(map[string][]shown{"KV transfer: failures": {rates(failed), rate(c.value(d, "tandem:kv_leases_expired_total", "")), rates(fenced),
		rate(c.value(d, "tandem:decode_prefill_failures_total", ""))}})
}
