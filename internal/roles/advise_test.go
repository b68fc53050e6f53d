package roles

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// gatewayOf is a server with the routes that tandem advise reads. requests is the JSON of what it
// records.
func gatewayOf(t *testing.T, nodes, requests string) string {
	t.Helper()
	asked := 0
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/debug/nodes":
			fmt.Fprintf(w, `{"ready":true,"nodes":[%s]}`, nodes)
		case "/metrics":
			asked++
			for name, fast := range map[string]int{"time_to_first_token": 0, "inter_token_latency": 40 * asked} {
				fmt.Fprintf(w, "# TYPE vllm:%s_seconds histogram\nvllm:%[1]s_seconds_bucket{le=\"0.2\"} %d\nvllm:%[1]s_seconds_bucket{le=\"0.5\"} %[3]d\nvllm:%[1]s_seconds_bucket{le=\"+Inf\"} %[3]d\nvllm:%[1]s_seconds_sum 1\nvllm:%[1]s_seconds_count %[3]d\n", name, fast, 40*asked)
			}
		case "/admin/record":
			fmt.Fprintf(w, `{"began":false,"block_tokens":64,"requests":[%s]}`, requests)
			requests = ""
		default:
			t.Errorf("path %s", r.URL.Path)
		}
	}))
	t.Cleanup(s.Close)
	return s.URL
}

const oneOfEach = `{"id":"p0","role":"prefill","class":"0000000000000006/c","model":"m","ready":true,"connected":true},{"id":"d1","role":"decode","class":"0000000000000006/c","model":"m","ready":true,"connected":true,"running":3},
	{"id":"d0","role":"decode","class":"0000000000000006/c","model":"m","ready":true,"connected":true},{"id":"d2","role":"decode","model":"m","draining":true}`

// ended is 40 requests; first is when each got its first token.
func ended(first time.Duration) string {
	var list []string
	for i := range 40 {
		list = append(list, fmt.Sprintf(`{"at_ms":%d,"prompt_tokens":500,"output_tokens":20,"end":"answered","first_us":%d,"last_us":%d}`, 100*i, first.Microseconds(), first.Microseconds()+133_000))
	}
	return strings.Join(list, ",")
}

// The load of a gateway is recorded, its nodes are the fleet, and what it measured is beside the
// prediction.
func TestAdviseCommand(t *testing.T) {
	trace := filepath.Join(t.TempDir(), "t.jsonl")
	url := gatewayOf(t, oneOfEach, ended(27*time.Millisecond))
	status, out, errOut := tandem("advise", "--url", url, "--profile", "h100:llama-8b", "--for", "1ms", "--out", trace, "--max-nodes", "4", "--budget", "2000", "--what-if", "load=1.5")
	if status != 0 || !strings.Contains(errOut, "40 requests recorded\n") {
		t.Fatalf("status %d\n%s%s", status, out, errOut)
	}
	for _, want := range []string{
		"1 prefill node and 2 decode nodes of h100:llama-8b", "TTFT p50", "27.0 ms", "7.00 ms", "within  the bucket of the histogram is 0.00 ms to 200 ms", "1 node of the fleet is not ready or drained", "whether these are the same model is not known",
		"/admin/drain/d0\n", "load × 1.5", "The simulated caches begin empty",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if status, out, errOut := tandem("advise", "--url", url, "--profile", "h100:llama-8b", "--trace", trace, "--max-nodes", "4", "--budget", "2000"); status != 0 || errOut != "" ||
		!strings.Contains(out, "Nothing was measured") || !strings.Contains(out, "leave out --trace") || !strings.Contains(out, "1 node of the fleet is not ready or drained") || !strings.Contains(out, "To repeat: tandem advise --url "+url) {
		t.Errorf("status %d\n%s%s", status, out, errOut)
	}
	secret := strings.Replace(url, "//", "//u:p@", 1)
	if status, out, errOut := tandem("advise", "--url", secret, "--profile", "h100:llama-8b", "--trace", trace, "--max-nodes", "4", "--budget", "2000"); status != 0 || strings.Contains(out+errOut, "u:p@") {
		t.Errorf("status %d, or a password in\n%s%s", status, out, errOut)
	}
}

// A gateway that ends after the load was recorded does not make the recording void: the fleet is
// that of the beginning.
func TestAdviseGatewayEnds(t *testing.T) {
	gateway, err := url.Parse(gatewayOf(t, oneOfEach, ended(27*time.Millisecond)))
	if err != nil {
		t.Fatal(err)
	}
	forward, recorded := httputil.NewSingleHostReverseProxy(gateway), false
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if recorded {
			http.Error(w, "gone", http.StatusBadGateway)
			return
		}
		recorded = r.URL.Path == "/admin/record"
		forward.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	status, out, errOut := tandem("advise", "--url", s.URL, "--profile", "h100:llama-8b", "--for", "1ms", "--max-nodes", "4", "--budget", "2000")
	for _, want := range []string{
		"The fleet now: 1 prefill node and 2 decode nodes", "Nothing was measured, so that the advice rests on the profile alone.\n",
		"What the gateway measured is not known: the server refused: 502 Bad Gateway", "The prediction is for the fleet at the beginning of the recording, because that at its end is not known: ",
	} {
		if status != 0 || !strings.Contains(out, want) {
			t.Errorf("status %d, no %q in\n%s%s", status, want, out, errOut)
		}
	}
}

// An older gateway sends no times of requests: its histogram counts. A disagreement is the first
// sentence, and no failure.
func TestAdviseOlderGateway(t *testing.T) {
	url := gatewayOf(t, oneOfEach, strings.ReplaceAll(ended(0), `"last_us":133000`, `"x":0`))
	status, out, errOut := tandem("advise", "--url", url, "--profile", "h100:llama-8b", "--for", "1ms", "--max-nodes", "4", "--budget", "2000")
	if status != 0 || !strings.HasPrefix(out, "Do not act on this advice: ") || !strings.Contains(out, "350 ms") || strings.Contains(out, "TPOT p50  ") {
		t.Errorf("status %d\n%s%s", status, out, errOut)
	}
}

// A wrong setting ends with status 2 and one line without names of packages, before anything is
// recorded.
func TestAdviseRefuses(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		name = filepath.Join(dir, name)
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	unsorted := write("unsorted", `{"timestamp": 5, "input_length": 6, "output_length": 5}`+"\n"+`{"timestamp": 0, "input_length": 6, "output_length": 5}`+"\n")
	empty := write("empty", "")
	long := write("long", strings.Repeat(`{"timestamp": 0, "input_length": 2000000, "output_length": 5}`+"\n", 30)+`{"timestamp": 9, "input_length": 6, "output_length": 5}`+"\n")
	_, out, _ := tandem("sim", "--profile", "h100:llama-8b", "--print-profile")
	other := write("other.yaml", strings.Replace(out, "name: llama-8b,", `name: llama-8b, fingerprint: "0x0000000000000005",`, 1))
	measured := write("measured.yaml", strings.Replace(out, "source: estimate", "source: measured", 1))
	known := gatewayOf(t, oneOfEach, "")
	several := gatewayOf(t, oneOfEach+`,{"id":"d3","role":"decode","model":"n","ready":true,"connected":true}`, "")
	none := gatewayOf(t, `{"id":"p0","role":"prefill","model":"m","ready":true,"connected":true}`, "")
	p := []string{"--profile", "h100:llama-8b"}
	for want, args := range map[string][]string{
		"--profile is missing":                                   nil,
		"no GPU is called":                                       {"--profile", "h1:llama-8b"},
		"sort the lines by time":                                 append(p, "--trace", unsorted, "--fleet", "1P1D"),
		"there is no request":                                    append(p, "--trace", empty, "--fleet", "1P1D"),
		"add --drop-too-long":                                    append(p, "--trace", long, "--fleet", "1P1D"),
		"--trace: stat /none.jsonl: no such file":                append(p, "--trace", "/none.jsonl"), // before the gateway is asked
		"write such as 6P2D":                                     append(p, "--trace", empty, "--fleet", "many"),
		"raise the limit":                                        append(p, "--tpot", "p90=1ms"),
		"the fleet serves m with weights 0x0000000000000006":     {"--profile", other, "--url", known},
		"add --compare-estimates":                                {"--profile", measured, "--what-if", "gpu=h200:llama-8b"},
		"the nodes serve 2 models":                               append(p, "--url", several),
		"no decode node of":                                      append(p, "--url", none),
		"--what-if x: write one of":                              append(p, "--what-if", "x"),
		"--from reads counters while the load is recorded":       append(p, "--trace", empty, "--from", "fleet"),
		"give at least 9 readings":                               append(p, "--from", "fleet", "--for", "17s"),
		"the gateway names no metrics of nodes":                  append(p, "--from", "fleet", "--every", "10ms", "--url", gatewayOf(t, oneOfEach, "")),
		"--from :::secretless: give a node's metrics":            append(p, "--from", "u:p@:::secretless", "--every", "10ms", "--url", gatewayOf(t, oneOfEach, "")),
		"leave --from out to take the step times of --profile":   append(p, "--from", "127.0.0.1:1", "--every", "10ms", "--url", gatewayOf(t, oneOfEach, "")),
		"--min-remote-prefill-tokens -1: want 0 to 1048576":      append(p, "--min-remote-prefill-tokens", "16,-1"),
		"its folder does not exist":                              append(p, "--out", "/nowhere/t.jsonl", "--url", gatewayOf(t, oneOfEach, "")),
		"start a cluster with `tandem up`":                       append(p, "--url", "http://u:p@127.0.0.1:1"),
		"is not a gateway's address":                             append(p, "--url", "http://u:p@127.0.0.1:1?x"),
		"10ms or more apart":                                     append(p, "--from", "fleet", "--every", "1ms"),
		"no request for the gateway's own nodes ended in 1ms":    append(p, "--url", gatewayOf(t, oneOfEach, ""), "--for", "1ms"),
		"only one can be the price of a node: leave one":         append(p, "--price-per-hour", "2", "--capex", "5"),
		"--max-requests 0: give 1 to":                            append(p, "--max-requests", "0"),
		"--growth 0: want 0.001":                                 append(p, "--growth", "0"),
		"the load has 3 requests, too few for percentiles: give": append(p, "--fleet", "1D", "--trace", write("few", strings.Repeat(`{"timestamp": 0, "input_length": 6, "output_length": 5}`+"\n", 2)+`{"timestamp": 9, "input_length": 6, "output_length": 5}`+"\n")),
	} {
		if !slices.Contains(args, "--for") { // a mistake must not take the default
			args = append(args, "--for", "2s")
		}
		status, out, errOut := tandem(append([]string{"advise"}, args...)...)
		lines := strings.Split(strings.TrimSpace(errOut), "\n")
		last := lines[len(lines)-1]
		wantStatus := 2
		if strings.Contains(want, "tandem up") {
			wantStatus = 1
		}
		if status != wantStatus || out != "" || !strings.HasPrefix(last, "tandem advise: ") || !strings.Contains(last, want) {
			t.Errorf("%q: status %d\n%s%s", want, status, out, errOut)
		}
		for _, name := range []string{"profile: ", "sim: ", "fleet: bad", "simulate: ", "pools: ", "planner: ", "u:p@"} {
			if strings.Contains(strings.TrimPrefix(last, "tandem advise: "), name) {
				t.Errorf("%q names a package or a password: %s", want, last)
			}
		}
	}
}
