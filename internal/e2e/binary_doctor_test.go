package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// doctor reaches each node of a running cluster, its bundle is written, and explain-log knows every
// line that the processes log.
func TestBinaryDoctorAndExplainLog(t *testing.T) {
	t.Parallel() // it waits for a line of every ten seconds
	c := startCluster(t)
	dir := t.TempDir()
	bundle := filepath.Join(dir, "report.tar.gz")
	out, errOut, err := tandem(t, nil, "doctor", "--json", "--url", c.url(""), "--bundle", bundle)
	var report struct {
		Problems int
		Checks   []struct{ Area, Name, State, Figure string }
	}
	if jsonErr := json.Unmarshal([]byte(out), &report); jsonErr != nil || err != nil || report.Problems != 0 {
		t.Fatalf("%v, %v\n%s%s", err, jsonErr, out, errOut)
	}
	reached := 0
	for _, l := range report.Checks {
		if l.Area == "fleet" && strings.Contains(l.Figure, "answers in") {
			reached++
		}
	}
	if reached != 2 {
		t.Errorf("%d of 2 nodes are reached: %s", reached, out)
	}
	if info, err := os.Stat(bundle); err != nil || info.Size() < 1000 {
		t.Errorf("the bundle: %v", err)
	}
	if _, err := c.complete([]int32{300, 301, 302}, 8); err != nil {
		t.Fatal(err)
	}
	c.wait(30*time.Second, "the line of rates", func() bool { return strings.Contains(c.stderr.String()+c.stdout.String(), "Avg generation throughput") })
	if strings.Contains(c.stderr.String(), "refused a node") {
		t.Errorf("doctor looks like an intruder:\n%s", c.stderr.String())
	}
	log := filepath.Join(dir, "up.log")
	if err := os.WriteFile(log, []byte(c.stderr.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	out, errOut, err = tandem(t, nil, "explain-log", log)
	lines := strings.Count(c.stderr.String(), "\n")
	if err != nil || !strings.Contains(out, " lines, 0 of them explained by their shape alone") || lines < 10 {
		t.Errorf("%v, %s\n%s", err, fmt.Sprint(lines, " lines"), out+errOut)
	}
	if !strings.Contains(out, "Tandem") || !strings.Contains(out, "blocks x ") {
		t.Errorf("no arithmetic:\n%s", out)
	}
}
