// Command checks prints which checks of the deployment have passed, by the results of make
// test-deploy.
//
// A folder has the output of go test -json for each step, in STEP.json. A check passes if each of
// its tests ran and passed. The exit status is 1 if a check failed or one of its tests did not run.
// A check that is skipped is printed with its reason.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// check is one line of the table.
type check struct {
	number int
	what   string
	tests  []string // each a step and the name of a test
	none   string   // why it has no test
}

var all = []check{
	{1, "a control plane builds and is ready", []string{"kube TestKubernetes/Fleet"}, ""},
	{2, "the chart: lint, goldens, the API server's strict validation, Restricted pods", []string{"chart TestChart", "chart TestLint", "kube TestKubernetes/Values"}, ""},
	{3, "wrong values are refused", []string{"chart TestRefusedValues"}, ""},
	{4, "objects of other projects are accepted, spoiled ones refused", []string{"chart TestDefinitions", "kube TestKubernetes/Values"}, ""},
	{5, "a fleet by the chart is ready and answers a chat", []string{"kube TestKubernetes/Fleet"}, ""},
	{6, "rollout restarts of each role under 50 streams fail none", []string{"kube TestKubernetes/Rollout/decode", "kube TestKubernetes/Rollout/prefill", "kube TestKubernetes/Rollout/gateway"}, ""},
	{7, "an autoscaler removes a pod under streams and fails none", []string{"kube TestKubernetes/Autoscaling/down"}, ""},
	{8, "evictions keep the budgets and fail no stream", []string{"kube TestKubernetes/Eviction/api", "kube TestKubernetes/Eviction/drain"}, ""},
	{9, "prompts add prefill pods, answers decode pods; both go again", []string{"kube TestKubernetes/Autoscaling/prompts", "kube TestKubernetes/Autoscaling/answers", "kube TestKubernetes/Autoscaling/down"}, ""},
	{10, "upstreams by k8s: with list and watch; 401 and 403 are logged", []string{"kube TestKubernetes/Discovery"}, ""},
	{11, "gossip by a headless name that is late; gateways are replaced", []string{"kube TestKubernetes/Names"}, ""},
	{12, "the image runs without rights on a read-only root and opens libfabric; two builds are the same", []string{"release TestImage", "release TestTwoBuilds/image"}, ""},
	{13, "the image with CUDA kernels names the GPU", nil, "needs a GPU"},
	{14, "units boot, restart after SIGKILL and by the watchdog, drain", []string{"systemd TestUnits", "systemd TestUnitsBoot"}, ""},
	{15, "no connection of 200 a second is refused while the gateway restarts", []string{"systemd TestUnitsBoot/no-connection-refused-while-restarting", "systemd TestUnitsBoot/socket-activate"}, ""},
	{16, "the deb installs, upgrades, keeps settings and purges clean; the rpm lists its files", []string{"release TestPackages", "systemd TestUnitsBoot/upgrade-keeps-settings", "systemd TestUnitsBoot/nothing-is-left"}, ""},
	{17, "the wheel installs into a fresh environment, and two builds are the same", []string{"release TestWheelInstalls", "release TestReproducible/wheel", "release TestTwoBuilds/whl"}, ""},
	{18, "two builds in two folders have the same bytes", []string{"release TestReproducible", "release TestTwoBuilds"}, ""},
	{19, "the program needs no glibc after 2.17", []string{"release TestCheckGlibc", "release TestOldestGlibc"}, ""},
	{20, "nginx and HAProxy: first event, large bodies, 90 s of silence, restarts of gateways", []string{"binary TestBinaryProxies", "binary TestBinaryProxiesInUse"}, ""},
	{21, "certificates are renewed in a mounted volume under streams", []string{"kube TestKubernetes/Certificates"}, ""},
	{22, "every value of the chart and every option of the units is on a page", []string{"helm TestValues", "systemd TestUnitsPage"}, ""},
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: checks FOLDER")
		os.Exit(2)
	}
	results, err := read(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, "checks:", err)
		os.Exit(1)
	}
	if !print(os.Stdout, all, results) {
		os.Exit(1)
	}
}

// result is how a test ended.
type result struct {
	action string // pass, fail or skip
	reason string // of a skip
}

// read returns the results of a folder by step and test.
func read(dir string) (map[string]result, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		return nil, err
	}
	results := map[string]result{}
	for _, path := range files {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		err = readStep(f, strings.TrimSuffix(filepath.Base(path), ".json"), results)
		f.Close()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
	}
	return results, nil
}

func readStep(r io.Reader, step string, results map[string]result) error {
	last := map[string]string{} // the last line that each test has printed, besides go test's own
	for lines := json.NewDecoder(bufio.NewReader(r)); ; {
		var event struct{ Action, Test, Output string }
		if err := lines.Decode(&event); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		name := step + " " + event.Test
		switch event.Action {
		case "output":
			if text := strings.TrimSpace(event.Output); text != "" && !strings.HasPrefix(text, "---") && !strings.HasPrefix(text, "===") {
				last[name] = text
			}
		case "pass", "fail", "skip":
			results[name] = result{event.Action, last[name]}
		}
	}
}

// print prints the table and reports whether no check has failed.
func print(w io.Writer, checks []check, results map[string]result) (ok bool) {
	ok = true
	for _, c := range checks {
		state, reason := "passed", ""
		if c.none != "" {
			state, reason = "skipped", c.none
		}
		for _, name := range c.tests {
			switch r, ran := results[name]; {
			case !ran:
				state, reason = "FAILED", name+" did not run"
			case r.action == "fail":
				state, reason = "FAILED", name
			case r.action == "skip" && state == "passed":
				state, reason = "skipped", r.reason
			}
		}
		if state == "FAILED" {
			ok = false
		}
		if reason != "" {
			reason = ": " + reason
		}
		fmt.Fprintf(w, "%2d  %-8s %s%s\n", c.number, state, c.what, reason)
	}
	return ok
}
