// Package crds finds the definitions of other projects' Kubernetes objects that the chart makes.
package crds

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// files are the files that define the kinds, by kind. They are part of Go modules, which are
// downloaded without their dependencies.
var files = map[string]struct{ module, file string }{
	"ScaledObject": {"github.com/kedacore/keda/v2@v2.21.0", "config/crd/bases/keda.sh_scaledobjects.yaml"},
	"PodMonitor":   {"github.com/prometheus-operator/prometheus-operator@v0.85.0", "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml"},
	"HTTPRoute":    {"sigs.k8s.io/gateway-api@v1.6.3", "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml"},
	"Certificate":  {"github.com/cert-manager/cert-manager@v1.21.2", "deploy/crds/cert-manager.io_certificates.yaml"},
	"Issuer":       {"github.com/cert-manager/cert-manager@v1.21.2", "deploy/crds/cert-manager.io_issuers.yaml"},
}

// Kinds returns the kinds that have a definition.
func Kinds() (kinds []string) {
	for kind := range files {
		kinds = append(kinds, kind)
	}
	return kinds
}

// File returns the file that defines a kind. It downloads the file's module if it is
// missing.
func File(kind string) (string, error) {
	d, ok := files[kind]
	if !ok {
		return "", fmt.Errorf("there is no definition of %s", kind)
	}
	cmd := exec.Command("go", "mod", "download", "-json", d.module)
	cmd.Dir = os.TempDir() // outside of a module
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("go mod download %s: %w: %s", d.module, err, out)
	}
	var module struct{ Dir string }
	if err := json.Unmarshal(out, &module); err != nil {
		return "", err
	}
	return filepath.Join(module.Dir, d.file), nil
}
