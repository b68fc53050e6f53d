//go:build deploy && linux

package kube

import (
	"fmt"
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
	least := int64(streams)
	if len(l.want) == 0 { // most wait for their prompts
		least = 1
	}
	f.Until(t, settleBound, "streams run", func() error {
		if n := l.running.Load(); n < least {
			return fmt.Errorf("%d run", n)
		}
		return nil
	})
	change()
	t.Logf("%d streams ended", stop())
	f.unharmed(t, l)
}

// unharmed waits for the end of pods, and fails the test if a stream has failed or a process has
// outlived its grace.
func (f *fleet) unharmed(t *testing.T, l *load) {
	t.Helper()
	f.Until(t, settleBound, "no pod ends", func() error {
		for _, component := range []string{"gateway", "prefill", "decode"} {
			if n := len(f.ending(t, component)); n > 0 {
				return fmt.Errorf("%d of %s", n, component)
			}
		}
		return nil
	})
	if n := len(l.failures); n > 0 {
		t.Errorf("%d streams failed", n)
	}
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
// outlast the nodes' drain, and so move. Prompts of prefill nodes differ, so that the nodes have a
// queue of them when they end.
func (f *fleet) testRollout(t *testing.T) {
	answers, prompts := f.load(t), newLoad(f.url(t), 0)
	prompts.words, prompts.tokens = 400, 100
	for _, name := range []string{"decode", "prefill", "gateway"} {
		t.Run(name, func(t *testing.T) {
			l := answers
			if name == "prefill" {
				l = prompts
			}
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
		v, err := scrape(t.Context(), &p, name)
		if err != nil {
			t.Fatal(err)
		}
		sum += v
	}
	return sum
}
