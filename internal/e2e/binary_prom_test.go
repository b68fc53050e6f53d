//go:build linux

package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// prom is a Prometheus that scrapes the cluster.
type prom struct {
	t   *testing.T
	url string
}

// startProm runs Prometheus with the project's rules, changed if change is not nil,
// scraping often.
func startProm(t *testing.T, c *cluster, change func(string) string) *prom {
	t.Helper()
	path, err := exec.LookPath("prometheus")
	if err != nil {
		t.Skip("needs prometheus")
	}
	dir := t.TempDir()
	rules, err := filepath.Abs("../../deploy/prometheus/tandem.rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		text, err := os.ReadFile(rules)
		if err != nil {
			t.Fatal(err)
		}
		rules = filepath.Join(dir, "changed.rules.yml")
		if err := os.WriteFile(rules, []byte(change(string(text))), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	config, err := os.ReadFile("../../deploy/prometheus/prometheus.yml")
	if err != nil {
		t.Fatal(err)
	}
	text := strings.NewReplacer("127.0.0.1:8000", "127.0.0.1:"+strconv.Itoa(c.port), "tandem.rules.yml", rules,
		"scrape_interval: 5s", "scrape_interval: 500ms\n  scrape_timeout: 500ms", "evaluation_interval: 5s", "evaluation_interval: 1s", "refresh_interval: 10s", "refresh_interval: 500ms").Replace(string(config))
	file := filepath.Join(dir, "prometheus.yml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p := &prom{t: t, url: "http://127.0.0.1:" + strconv.Itoa(freePorts(t, 1))}
	var out output
	cmd := exec.Command(path, "--config.file="+file, "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+strings.TrimPrefix(p.url, "http://"))
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
		if t.Failed() {
			t.Logf("Prometheus:\n%s", &out)
		}
	})
	return p
}

// query is an instant query's result: one value per series.
func (p *prom) query(expr string) (values []float64, labels []map[string]string, err error) {
	resp, err := http.PostForm(p.url+"/api/v1/query", map[string][]string{"query": {expr}})
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	var a struct {
		Status, Error string
		Data          struct {
			Result []struct {
				Metric map[string]string
				Value  [2]any
			}
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&a); err != nil {
		return nil, nil, err
	}
	if a.Status != "success" {
		return nil, nil, fmt.Errorf("%s: %s", expr, a.Error)
	}
	for _, r := range a.Data.Result {
		v, err := strconv.ParseFloat(r.Value[1].(string), 64)
		if err != nil {
			return nil, nil, err
		}
		values, labels = append(values, v), append(labels, r.Metric)
	}
	return values, labels, nil
}

// until queries until the result is good.
func (p *prom) until(what, expr string, good func(values []float64, labels []map[string]string) bool) {
	p.t.Helper()
	p.untilIn(30*time.Second, what, expr, good)
}

func (p *prom) untilIn(bound time.Duration, what, expr string, good func(values []float64, labels []map[string]string) bool) {
	p.t.Helper()
	var values []float64
	var labels []map[string]string
	var err error
	for end := time.Now().Add(bound); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if values, labels, err = p.query(expr); err == nil && good(values, labels) {
			return
		}
	}
	p.t.Errorf("%s: %s is %v %v, %v", what, expr, values, labels, err)
}

// sum is good when the values add up to x.
func sum(x float64) func([]float64, []map[string]string) bool {
	return func(values []float64, _ []map[string]string) bool {
		total := 0.0
		for _, v := range values {
			total += v
		}
		return len(values) > 0 && total > x-1e-6 && total < x+1e-6
	}
}
