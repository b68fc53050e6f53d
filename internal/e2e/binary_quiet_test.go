//go:build linux

package e2e

import (
	"strings"
	"syscall"
	"testing"
	"time"
)

// A healthy start and a stop by Ctrl-C look healthy: no warnings, no failures, few lines.
func TestBinaryQuietStartAndStop(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	start := c.stderr.String()
	if n := strings.Count(start, "\n"); n > 20 {
		t.Errorf("the start wrote %d lines:\n%s", n, start)
	}
	time.Sleep(2 * time.Second) // until it is settled
	if err := c.cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	c.waitGone(stopBound)
	for line := range strings.Lines(c.stderr.String()) {
		for _, bad := range []string{"WARNING", "ERROR", "no such file", "cannot be opened", "derivation"} {
			if strings.Contains(line, bad) {
				t.Errorf("%s", line)
			}
		}
	}
	stop := strings.TrimPrefix(c.stderr.String(), start)
	if strings.Contains(stop, "joined the cluster") {
		t.Errorf("a node that stops joins:\n%s", stop)
	}
	for _, want := range []string{"Ctrl-C again ends them at once", "INFO", "stopped\n"} {
		if !strings.Contains(stop, want) {
			t.Errorf("no %q in\n%s", want, stop)
		}
	}
}
