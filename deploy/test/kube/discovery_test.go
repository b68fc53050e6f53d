//go:build deploy && linux

package kube

import (
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A gateway alone watches the Service of the fleet's gateways with a Role of list and watch on
// endpoint slices. It logs 401 for a token that is not valid and recovers with the next one, and
// logs 403 without its Role.
func (f *fleet) testDiscovery(t *testing.T) {
	const front = "front"
	f.Run(t, "kubectl", "create", "namespace", front)
	f.SpoilTokens(true)
	f.Run(t, "helm", "install", "front", chartDir, "--namespace", front, "--set", "nodes.enabled=false", "--set", "gateway.replicas=1",
		"--set", "gateway.upstreams={k8s:"+namespace+"/tandem:http}", "--set", "gateway.preStopSeconds=0", "--set", "gateway.shutdownSeconds=5")
	role := f.Run(t, "kubectl", "-n", namespace, "get", "role", "front-tandem-front-upstreams", "-o", "jsonpath={.rules}")
	if role != `[{"apiGroups":["discovery.k8s.io"],"resources":["endpointslices"],"verbs":["list","watch"]}]` {
		t.Errorf("the Role has %s", role)
	}
	f.logs(t, front, "answers 401")
	f.SpoilTokens(false)
	f.Run(t, "kubectl", "-n", front, "rollout", "status", "deployment/front-tandem-gateway", "--timeout", settleBound.String())

	s, err := f.Client.CoreV1().Services(front).Get(t.Context(), "front-tandem", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	l := newLoad(fmt.Sprintf("http://%s:%d", s.Spec.ClusterIP, s.Spec.Ports[0].Port), 3)
	l.host = "front-tandem." + front
	f.Until(t, settleBound, "the Service has endpoints", func() error { _, err := l.stream(t.Context(), 0, nil); return err })
	if err := l.learn(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The upstreams are replaced while streams run: each ends within its own drain.
	f.Killed()
	stop := l.start(t.Context(), 10)
	f.Run(t, "kubectl", "-n", namespace, "rollout", "restart", "deployment/tandem-gateway")
	f.rolledOut(t, "gateway")
	t.Logf("%d streams ended", stop())
	f.unharmed(t, l)

	f.Run(t, "kubectl", "-n", namespace, "delete", "rolebinding", "front-tandem-front-upstreams")
	f.Run(t, "kubectl", "-n", front, "delete", "pod", "--all", "--wait=false")
	f.logs(t, front, "answers 403")
	f.Run(t, "helm", "uninstall", "front", "--namespace", front)
	f.Run(t, "kubectl", "delete", "namespace", front, "--timeout", settleBound.String())
}

// logs waits until a pod of a namespace has written a text.
func (f *fleet) logs(t *testing.T, namespace, text string) {
	t.Helper()
	f.Until(t, settleBound, "a log has "+text, func() error {
		all := f.Logs(namespace)
		if !strings.Contains(all, text) {
			return fmt.Errorf("they have %s", all)
		}
		return nil
	})
}

// The fleet forms again by the headless Service although no name is known when its processes start,
// and nodes find gateways that have other addresses than before.
func (f *fleet) testNames(t *testing.T) {
	l := f.load(t)
	f.Run(t, "kubectl", "-n", namespace, "scale", "deployment", "--all", "--replicas=0")
	for _, component := range []string{"gateway", "prefill", "decode"} {
		f.Until(t, settleBound, "no pod of "+component, func() error {
			if running, ending := f.list(t, component); len(running)+len(ending) > 0 {
				return fmt.Errorf("%d run, %d end", len(running), len(ending))
			}
			return nil
		})
	}
	f.Names(false)
	for name, n := range map[string]int{"gateway": 2, "prefill": 1, "decode": 2} {
		f.Run(t, "kubectl", "-n", namespace, "scale", "deployment/tandem-"+name, fmt.Sprintf("--replicas=%d", n))
	}
	f.logs(t, namespace, "no member to join yet")
	f.Names(true)
	for _, name := range []string{"gateway", "prefill", "decode"} {
		f.rolledOut(t, name)
	}
	f.answers(t, l)

	before := f.running(t, "gateway")
	f.Run(t, "kubectl", "-n", namespace, "delete", "pod", "--selector", "app.kubernetes.io/component=gateway", "--grace-period=0", "--force")
	f.rolledOut(t, "gateway")
	if killed := f.Killed(); len(killed) != len(before) {
		t.Errorf("SIGKILL for %q; want the %d gateways of before", killed, len(before))
	}
	for _, p := range f.running(t, "gateway") {
		for _, old := range before {
			if p.Status.PodIP == old.Status.PodIP {
				t.Errorf("%s has the address of %s", p.Name, old.Name)
			}
		}
	}
	f.answers(t, l)
}

// answers waits until the Service answers, and compares.
func (f *fleet) answers(t *testing.T, l *load) {
	t.Helper()
	f.Until(t, settleBound, "the Service answers", func() error { _, err := l.stream(t.Context(), 0, nil); return err })
	l.failures = nil
	for i := range l.want {
		l.one(t.Context(), i)
	}
	f.unharmed(t, l)
}
