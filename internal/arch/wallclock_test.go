package arch

import (
	"regexp"
	"strings"
	"testing"
)

// wallClock lists the files of the product that read the wall clock as a number, and
// why a jump of that clock does no harm there. Durations and deadlines keep
// time.Time, whose comparisons use the monotonic clock.
var wallClock = map[string]string{
	"gateway/native/surface.go":     "the created field of answers",
	"gateway/native/render.go":      "the same",
	"gateway/native/vectors.go":     "the same",
	"gateway/native/models.go":      "the created field of a model",
	"deploy/release/binary.go":      "the commit's time, for the manual page",
	"deploy/release/image.go":       "the commit's time, for the files of an image",
	"internal/cluster/identity.go":  "of two processes at one address the later start is listed; after a jump back that is the process before, until gossip finds it dead",
	"internal/cluster/publisher.go": "the epoch of a node's block events: those of a node that starts again after a jump back look late, and routing falls back to hashing for it",
	"internal/roles/reload.go":      "the metric of a certificate's end, which comes from the certificate",
	"internal/roles/metrics.go":     "the time at which vLLM's LoRA metric was updated",
}

var readsWallClock = regexp.MustCompile(`\.Unix(Nano|Milli|Micro)?\(\)`)

// A jump of the wall clock delays or ends nothing: no other file turns the time into a
// number, which has lost the monotonic clock.
func TestWallClock(t *testing.T) {
	met := map[string]bool{}
	for _, f := range goFiles(t) {
		if strings.HasSuffix(f.path, "_test.go") || strings.HasPrefix(f.path, "bench/") || strings.HasPrefix(f.path, "internal/arch/") {
			continue
		}
		if line := readsWallClock.Find(f.text); line != nil {
			met[f.path] = true
			if wallClock[f.path] == "" {
				t.Errorf("%s calls %s: compare values of time.Time, or name the file in wallClock", f.path, line)
			}
		}
	}
	for path := range wallClock {
		if !met[path] {
			t.Errorf("%s no longer reads the wall clock as a number", path)
		}
	}
}
