//go:build deploy && linux

package kube

import (
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"testing"
)

// streams is how many streams run while the fleet changes.
const streams = 50

// disturb runs change under streams, of which none may fail or be altered, and no process may
// outlive its grace.
func (f *fleet) disturb(t *testing.T, l *load, change func()) {
	t.Helper()
	f.Killed()
	l.failures = nil
	stop := l.start(t.Context(), streams)
	f.Until(t, settleBound, "all streams run", func() error {
		if n := l.running.Load(); n < streams {
			return fmt.Errorf("%d run", n)
		}
		return nil
	})
	change()
	ended := stop()
	t.Logf("%d streams ended, %d failed", ended, len(l.failures))
	for i, failure := range l.failures {
		if i < 10 {
			t.Error(failure)
		}
	}
	if killed := f.Killed(); len(killed) > 0 {
		t.Errorf("SIGKILL at the end of the grace: %q", killed)
	}
}

// A rollout restart of each Deployment under streams fails and alters none. Streams of decode nodes
// outlast the nodes' drain, and so move.
func (f *fleet) testRollout(t *testing.T) {
	l := f.load(t)
	for _, name := range []string{"decode", "prefill", "gateway"} {
		t.Run(name, func(t *testing.T) {
			before := f.metric(t, "gateway", "tandem:gateway_resumes_total")
			f.disturb(t, l, func() {
				f.Run(t, "kubectl", "-n", namespace, "rollout", "restart", "deployment/tandem-"+name)
				f.rolledOut(t, name)
			})
			if after := f.metric(t, "gateway", "tandem:gateway_resumes_total"); name == "decode" && after == before {
				t.Error("no stream has moved: the rollout met none in the middle")
			} else {
				t.Logf("%.0f streams have moved", after-before)
			}
		})
	}
}

// metric returns the sum of a metric over the pods of a component.
func (f *fleet) metric(t *testing.T, component, name string) (sum float64) {
	t.Helper()
	for _, p := range f.running(t, component) {
		var port int32
		for _, at := range p.Spec.Containers[0].Ports {
			if at.Name == "http" {
				port = at.ContainerPort
			}
		}
		resp, err := http.Get(fmt.Sprintf("http://%s:%d/metrics", p.Status.PodIP, port))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, _ := io.ReadAll(resp.Body)
		for _, m := range regexp.MustCompile(`(?m)^`+regexp.QuoteMeta(name)+`(?:\{.*\})? (\S+)$`).FindAllSubmatch(text, -1) {
			v, err := strconv.ParseFloat(string(m[1]), 64)
			if err != nil {
				t.Fatal(err)
			}
			sum += v
		}
	}
	return sum
}
