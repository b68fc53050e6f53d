//go:build deploy && linux

package kube

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/deploy/test/crds"
)

// The API server accepts what Helm makes of each set of values, strictly, and finds pods Restricted
// unless the values name the reason. It refuses spoiled objects of other projects.
func (f *fleet) testValues(t *testing.T) {
	for _, kind := range crds.Kinds() {
		file, err := crds.File(kind)
		if err != nil {
			t.Fatal(err)
		}
		f.Run(t, "kubectl", "apply", "--server-side", "-f", file)
	}
	f.Run(t, "kubectl", "wait", "--for=condition=Established", "crd", "--all", "--timeout", settleBound.String())
	f.Run(t, "kubectl", "create", "namespace", "models")
	files, err := filepath.Glob("../testdata/*.values.yaml")
	if err != nil || len(files) < 6 {
		t.Fatalf("%d sets of values, %v", len(files), err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		f.Run(t, "helm", "install", "tandem", chartDir, "--namespace", namespace, "--values", file, "--dry-run=server")
		f.write(t, "rendered.yaml", []byte(f.Run(t, "helm", "template", "tandem", chartDir, "--namespace", namespace, "--values", file)))
		out := f.Run(t, "kubectl", "apply", "--dry-run=server", "--validate=strict", "-f", f.path("rendered.yaml"))
		if broken := strings.Contains(out, "would violate PodSecurity"); broken != strings.Contains(string(text), "# not restricted:") {
			t.Errorf("%s: %s", file, out)
		}
	}
	for _, spoiled := range []string{
		"{apiVersion: keda.sh/v1alpha1, kind: ScaledObject, metadata: {name: a}, spec: {scaleTargetRef: {name: a}, triggers: [{type: cron, metadata: {}}], maxReplicaCount: x}}",
		"{apiVersion: monitoring.coreos.com/v1, kind: PodMonitor, metadata: {name: a}, spec: {selector: {}, podMetricsEndpoint: []}}",
		"{apiVersion: cert-manager.io/v1, kind: Certificate, metadata: {name: a}, spec: {secretName: a, uri: [b]}}",
		"{apiVersion: apps/v1, kind: Deployment, metadata: {name: a}, spec: {replicaz: 1}}",
	} {
		f.write(t, "spoiled.yaml", []byte(spoiled))
		if out, err := f.Try(t, "kubectl", "apply", "--dry-run=server", "--validate=strict", "-f", f.path("spoiled.yaml")); err == nil {
			t.Errorf("accepted: %s\n%s", spoiled, out)
		}
	}
}
