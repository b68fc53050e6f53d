package cli

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-serving/tandem/internal/tlsconf"
)

// Certificates are listed, and renewed by name, by role and by the time that is left, with the
// hosts that they had.
func TestCertificates(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "certs")
	ca := func(want int, args ...string) (out, errOut string) {
		t.Helper()
		var o, e bytes.Buffer
		if got := Tools().Main("1", append([]string{"ca"}, args...), nil, &o, &e); got != want {
			t.Fatalf("ca %q: status %d, %s", args, got, &e)
		}
		return o.String(), e.String()
	}
	ca(0, dir, "gateway/gw1", "node/d1", "--host", "d1.example,10.0.0.1")
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join(dir, name, tlsconf.NodeCertFile))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	gateway, node := read("gw1"), read("d1")
	if out, _ := ca(0, "renew", dir, "--within", "720h"); out != "" {
		t.Errorf("nothing is due: %s", out)
	}
	if out, _ := ca(0, "renew", dir, "node/d1"); out != filepath.Join(dir, "d1")+"\n" || read("d1") == node || read("gw1") != gateway {
		t.Errorf("one is renewed: %s", out)
	}
	if out, _ := ca(0, "renew", dir); strings.Count(out, "\n") != 2 || read("gw1") == gateway {
		t.Errorf("all are renewed: %s", out)
	}
	if _, errOut := ca(2, "renew", dir, "d7"); !strings.Contains(errOut, `no certificate of "d7"`) {
		t.Errorf("an unknown name: %s", errOut)
	}
	out, _ := ca(0, "list", dir)
	for _, want := range []string{"authority", "d1.example,10.0.0.1", time.Now().Add(tlsconf.NodeLifetime).UTC().Format(time.DateOnly), "364", "valid"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in %s", want, out)
		}
	}
	out, _ = ca(0, "list", dir, "--json")
	for line := range strings.Lines(out) {
		var row struct {
			Role string
			Days int
		}
		if err := json.Unmarshal([]byte(line), &row); err != nil || row.Role == "" || row.Days < 364 {
			t.Errorf("%s: %v", line, err)
		}
	}
	ca(2, "list")
	ca(1, "list", t.TempDir())
	ca(1, "renew", filepath.Join(dir, "d1"))
}
