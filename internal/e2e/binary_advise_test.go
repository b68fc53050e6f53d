//go:build linux

package e2e

import (
	"bytes"
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// adviseProfile is a profile of a node of the built-in model. Its times are those of some machine.
const adviseProfile = `version: 1
node: {name: here, device: a CPU, tp: 1, price_per_hour: 1}
model: {name: builtin, layers: 4, kv_bytes_per_token: 1024}
memory: {blocks: 32768, block_tokens: 16}
step:
  source: measured
  decode: {fixed: 4.4e-5, per_ctx_token: 1.2e-7, per_seq: 6.5e-5}
  prefill: {floor: 8.4e-4, fixed: 0, per_token: 5.5e-5, per_token_ctx: 5.3e-8}
  mixed: {gamma: 1}
  overhead: {between_steps: 2e-6, emit: 1e-6}
transfer: {setup: 6.7e-5, bytes_per_second: 6.6e8, per_layer: true, checksum: true}
gateway: {per_request: 1.8e-4, per_token: 2e-5, heartbeat: 0.1, report_delay: 0.02}
start: {process: 0.4, load: 0.1, warm: 0}
`

// recordCalls matches the metric of answered calls of /admin/record.
var recordCalls = regexp.MustCompile(`tandem:http_requests_total\{[^}]*route="/admin/record"[^}]*\} [1-9]`)

// Advice about a fleet that runs has its nodes, its load until an interrupt ends the recording, and
// the latencies that the gateway's metrics have. Status 0, whether or not the prediction agrees.
func TestBinaryAdvise(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.port = freePorts(t, 4)
	c.startUp("--prefill", "1", "--decode", "2")
	profile := filepath.Join(t.TempDir(), "here.yaml")
	if err := os.WriteFile(profile, []byte(adviseProfile), 0o600); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	var errOut output
	advise := exec.Command(binary(t), "advise", "--url", c.url(""), "--profile", profile, "--for", "10m", "--max-nodes", "4", "--budget", "2000", "--json")
	advise.Stdout, advise.Stderr = &out, &errOut
	advise.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := advise.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- advise.Wait() }()
	c.wait(startBound, "the load is recorded", func() bool { return strings.Contains(errOut.String(), "Recording the load of ") })
	// The first reading starts the recording. A request that it does not have began before.
	c.wait(startBound, "the recording has begun", func() bool { return recordCalls.MatchString(c.scrape(gatewayNode)) })
	const requests, tokens = 24, 6
	r := rand.New(rand.NewPCG(1, 2))
	for range requests {
		if _, err := c.complete(c.prompt(r, 40), tokens); err != nil {
			t.Fatal(err)
		}
	}
	// The gateway records a request, and counts it, when it ends, which may be after its answer.
	c.hold("no request is in flight", []want{{[]int{gatewayNode}, "tandem:gateway_requests_in_flight", "", 0}})
	if err := advise.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Fatalf("%v\n%s%s", err, &out, errOut.String())
		}
	case <-time.After(stopBound):
		_ = advise.Process.Kill()
		t.Fatalf("no advice: %s", errOut.String())
	}
	var got struct {
		Agrees     *bool
		Comparison []struct {
			Name                string
			Predicted, Measured float64
			Low                 float64 `json:"measured_low"`
			High                float64 `json:"measured_high"`
		}
		Now struct{ Fleet string }
		Up  string
	}
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	if got.Agrees == nil || got.Now.Fleet != "1P2D" || !strings.HasPrefix(got.Up, "tandem up ") || !strings.Contains(errOut.String(), "24 requests recorded") {
		t.Errorf("%s%s", &out, errOut.String())
	}
	rows, rates := map[string]bool{}, map[string]float64{}
	quantiles := map[string]float64{"p50": .5, "p90": .9, "p99": .99}
	for _, row := range got.Comparison {
		rows[row.Name] = true
		metric, name, _ := strings.Cut(row.Name, " ")
		q, latency := quantiles[name]
		switch {
		case metric == "ITL":
			if want := c.quantile(q, []int{gatewayNode}, "vllm:inter_token_latency_seconds", "")[""]; !want.holds(row.Measured / 1e3) {
				t.Errorf("%s: %g ms, the metrics have %+v s", row.Name, row.Measured, want)
			}
		case metric == "TTFT": // exact, so that the histogram's bucket has it
			below := c.value([]int{gatewayNode}, "vllm:time_to_first_token_seconds_count", "")
			if row.Measured <= 0 || row.Low != row.Measured || below != requests {
				t.Errorf("%+v, %g first tokens", row, below)
			}
			mean := 1e3 * c.value([]int{gatewayNode}, "vllm:time_to_first_token_seconds_sum", "") / requests
			if name == "p50" && row.Measured > 2.2*mean || name == "p99" && row.Measured < .99*mean-.1 {
				t.Errorf("%s is %g ms, with a mean of %g ms", row.Name, row.Measured, mean)
			}
		case metric == "prompt" || metric == "answer":
			rates[metric] = row.Measured
		case row.Measured <= 0 || !latency:
			t.Errorf("%+v", row)
		}
	}
	for _, want := range []string{"TTFT p50", "TTFT p99", "TPOT p90", "ITL p50", "prompt tokens/s", "answer tokens/s"} {
		if !rows[want] {
			t.Errorf("no row %s in\n%s", want, &out)
		}
	}
	ratio := c.value([]int{gatewayNode}, "vllm:prompt_tokens_total", "") / c.value([]int{gatewayNode}, "vllm:generation_tokens_total", "")
	if math.Abs(rates["prompt"]/rates["answer"]-ratio) > 1e-6*ratio {
		t.Errorf("rates %v, the metrics have %g prompt tokens for each answer token", rates, ratio)
	}
	c.signal(syscall.SIGTERM)
	c.waitGone(time.Minute)
}
