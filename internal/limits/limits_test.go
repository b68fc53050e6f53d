package limits

import (
	"testing"
	"time"
)

// Zeros become defaults; what is set stays, bounds that are turned off included.
func TestWithDefaults(t *testing.T) {
	got := Limits{MaxN: 2, ResumeTimeout: -1}.WithDefaults()
	want := Default()
	want.MaxN, want.ResumeTimeout = 2, -1
	if got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got.QueueTimeout != time.Minute || got.MaxPromptTokens != 0 {
		t.Errorf("got %+v", got)
	}
}
