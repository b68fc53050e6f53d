//go:build cgo && linux

package cuda

import (
	"errors"
	"strings"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
)

// A device is opened with the best code for its compute capability, or else with PTX. The error of a
// device without code names its capability.
func TestCode(t *testing.T) {
	if dev := openGPU(t, Options{Limits: benchLimits}); dev.info.twin == 0 {
		dev.Close()
		t.Skip("only the twin has any capability")
	} else {
		dev.Close()
	}
	for capability, want := range map[string]string{"80": "machine code", "86": "machine code", "89": "machine code", "90": "machine code", "91": "PTX", "100": "PTX", "121": "PTX", "75": "", "0": ""} {
		t.Setenv("TANDEM_TWIN_CAPABILITY", capability)
		d, err := Probe(libraryPath, 0)
		switch {
		case want == "":
			name := map[string]string{"75": "7.5", "0": "0.0"}[capability]
			if !errors.Is(err, backend.ErrNoDevice) || !strings.Contains(err.Error(), "no code for compute capability "+name+", only for 8.0, 8.9, 9.0") {
				t.Errorf("capability %s: %v", capability, err)
			}
		case err != nil || d.PTX != (want == "PTX"):
			t.Errorf("capability %s: %+v, %v; want %s", capability, d, err, want)
		}
	}
}
