//go:build deploy && linux

package kube

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestMain(m *testing.M) { os.Exit(Main(m)) }

const (
	chartDir  = "../../helm/tandem"
	namespace = "llm"
	// settleBound is how long the fleet may take to be ready, or to be as it was before.
	settleBound = 3 * time.Minute
)

// TestKubernetes runs the chart's fleet on a cluster. Its parts share the cluster and the fleet, so
// that a part may only be picked together with Fleet: -run 'TestKubernetes/(Fleet|Rollout)'.
func TestKubernetes(t *testing.T) {
	program := os.Getenv("TANDEM_BINARY")
	if program == "" {
		t.Skip("needs TANDEM_BINARY, the program as make build leaves it")
	}
	c := Start(t, Options{
		Nodes: []string{"machine-0", "machine-1", "machine-2"}, Endpoints: time.Second,
		Image: func(reference string) (Image, error) {
			if !strings.HasPrefix(reference, "ghcr.io/tandem-serving/tandem:") {
				return Image{}, fmt.Errorf("no image %s", reference)
			}
			return Image{Root: "/", Program: program}, nil
		},
	})
	t.Logf("the API server was ready after %.1f s", c.Started.Seconds())
	c.Run(t, "kubectl", "create", "namespace", namespace)
	for _, mode := range []string{"enforce", "warn"} {
		c.Run(t, "kubectl", "label", "namespace", namespace, "pod-security.kubernetes.io/"+mode+"=restricted")
	}
	f := &fleet{Cluster: c}
	for _, part := range []struct {
		name string
		run  func(t *testing.T)
	}{
		{"Values", f.testValues},
		{"Fleet", f.testFleet},
		{"Rollout", f.testRollout},
		{"Eviction", f.testEviction},
		{"Certificates", f.testCertificates},
		{"Discovery", f.testDiscovery},
		{"Names", f.testNames},
		{"Autoscaling", f.testAutoscaling}, // the last, because it leaves the pools scaled
	} {
		if !t.Run(part.name, part.run) && part.name == "Fleet" {
			return
		}
	}
}

// fleet is the installed chart.
type fleet struct {
	*Cluster
	want []string // answers of the undisturbed fleet to the questions of load
}

// values are those of the fleet: small drains, so that streams outlive the node that they run on.
const values = `
gateway:
  replicas: 2
  preStopSeconds: 3
  shutdownSeconds: 120
  config: {min-remote-prefill-tokens: 1}
nodes:
  shutdownSeconds: 3
  config: {kv-cache-memory-bytes: 256MiB, threads: 1, max-num-seqs: 64}
`

// upgrade installs or upgrades the release with the values and more, and waits for its rollouts.
func (f *fleet) upgrade(t *testing.T, more ...string) {
	t.Helper()
	f.helm(t, more...)
	for _, d := range []string{"prefill", "decode", "gateway"} {
		f.rolledOut(t, d)
	}
}

// helm installs or upgrades the release with the values and more.
func (f *fleet) helm(t *testing.T, more ...string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(file, []byte(values), 0o644); err != nil {
		t.Fatal(err)
	}
	f.Run(t, "helm", append([]string{"upgrade", "--install", "tandem", chartDir, "--namespace", namespace, "--values", file}, more...)...)
}

// rolledOut waits until a Deployment is as its specification.
func (f *fleet) rolledOut(t *testing.T, name string) {
	t.Helper()
	f.Run(t, "kubectl", "-n", namespace, "rollout", "status", "deployment/tandem-"+name, "--timeout", settleBound.String())
}

// running returns the pods of a component that do not end.
func (f *fleet) running(t *testing.T, component string) []corev1.Pod {
	t.Helper()
	running, _ := f.list(t, component)
	return running
}

// ending returns the pods of a component that end.
func (f *fleet) ending(t *testing.T, component string) []corev1.Pod {
	t.Helper()
	_, ending := f.list(t, component)
	return ending
}

// list returns the pods of a component.
func (f *fleet) list(t *testing.T, component string) (running, ending []corev1.Pod) {
	t.Helper()
	list, err := f.Client.CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=" + component})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range list.Items {
		if p.DeletionTimestamp == nil {
			running = append(running, p)
		} else {
			ending = append(ending, p)
		}
	}
	return running, ending
}

// The chart is installed in a namespace that enforces the Restricted standard; its Job makes the
// certificates, all pods become ready, and a chat through the Service is answered.
func (f *fleet) testFleet(t *testing.T) {
	f.upgrade(t)
	for component, want := range map[string]int{"gateway": 2, "prefill": 1, "decode": 2} {
		if got := len(f.running(t, component)); got != want {
			t.Errorf("%d pods of %s; want %d", got, component, want)
		}
	}
	for _, p := range append(f.running(t, "gateway"), f.running(t, "decode")...) {
		if n := p.Status.ContainerStatuses[0].RestartCount; n != 0 {
			t.Errorf("%s has restarted %d times", p.Name, n)
		}
	}
	f.load(t)
}

// load returns a load through the Service, with answers of the undisturbed fleet. They are learned
// once, because a fleet gives them again in any state.
func (f *fleet) load(t *testing.T) *load {
	t.Helper()
	l := newLoad(f.url(t), 10)
	f.Until(t, settleBound, "the Service has endpoints", func() error { _, err := l.stream(t.Context(), 0, nil); return err })
	if f.want == nil {
		if err := l.learn(t.Context()); err != nil {
			t.Fatal(err)
		}
		f.want = l.want
	}
	l.want = f.want
	return l
}

// url returns the URL of the Service of the gateways.
func (f *fleet) url(t *testing.T) string {
	t.Helper()
	s, err := f.Client.CoreV1().Services(namespace).Get(t.Context(), "tandem", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("http://%s:%d", s.Spec.ClusterIP, s.Spec.Ports[0].Port)
}
