package console

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

// An answer that came at once has no rate in its JSON.
func TestReportWithoutRate(t *testing.T) {
	for _, c := range []struct {
		took time.Duration
		rate bool
	}{{leastSpread - 1, false}, {leastSpread, true}} {
		var out bytes.Buffer
		s := &session{Terminal: Terminal{Out: &out, JSON: true}}
		err := s.report(&Answer{Usage: Usage{Completion: 9}, First: time.Second, Total: time.Second + c.took})
		if err != nil || strings.Contains(out.String(), `"tokens_per_second":`) != c.rate {
			t.Errorf("after %v: %v, %s", c.took, err, out.String())
		}
	}
}
