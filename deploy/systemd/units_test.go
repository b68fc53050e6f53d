package systemd

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// exposure is how much of the system a unit may reach, by `systemd-analyze security`, in tenths.
var exposure = map[string]string{
	"tandem-gateway.service":  "20",
	"tandem-prefill@.service": "45", // devices and locked memory
	"tandem-decode@.service":  "45",
}

// systemd reads the units without complaint, and they are as closed as the table demands.
func TestUnits(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("needs systemd-analyze, of Debian's systemd")
	}
	units, err := filepath.Glob("*.service")
	if err != nil || len(units) != len(exposure) {
		t.Fatalf("units %q, %v; want those of the table", units, err)
	}
	for _, unit := range append(units, "tandem-gateway.socket", "tandem.target") {
		out, _ := exec.Command(analyze, "verify", "--man=no", unit).CombinedOutput() // the status counts the missing program
		for line := range strings.Lines(string(out)) {
			if !strings.Contains(line, "/usr/bin/tandem is not executable") {
				t.Errorf("verify %s: %s", unit, line)
			}
		}
		if most, ok := exposure[unit]; ok {
			if out, err := exec.Command(analyze, "security", "--offline=true", "--threshold="+most, unit).CombinedOutput(); err != nil {
				t.Errorf("security %s: %v\n%s", unit, err, out)
			}
		}
	}
}
