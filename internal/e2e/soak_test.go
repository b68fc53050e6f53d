package e2e

import (
	"os"
	"strconv"
	"testing"
	"time"
)

// A soak's length and seed come from the environment, so that parts of it can be
// run and a run repeated: TANDEM_SOAK_MINUTES is for how long the mixed load
// lasts, TANDEM_SOAK_SEED where it begins to draw.

// soakMinutes is how long the mixed load lasts: seconds without TANDEM_SOAK.
func soakMinutes(t *testing.T) time.Duration {
	t.Helper()
	if os.Getenv("TANDEM_SOAK") == "" {
		return 4 * time.Second
	}
	text := os.Getenv("TANDEM_SOAK_MINUTES")
	if text == "" {
		return time.Hour
	}
	minutes, err := strconv.ParseFloat(text, 64)
	if err != nil || minutes <= 0 {
		t.Fatalf("TANDEM_SOAK_MINUTES=%s: want a number of minutes", text)
	}
	return time.Duration(minutes * float64(time.Minute))
}

// soakSeed is TANDEM_SOAK_SEED, or the one given.
func soakSeed(t *testing.T, otherwise uint64) uint64 {
	t.Helper()
	text := os.Getenv("TANDEM_SOAK_SEED")
	if text == "" {
		return otherwise
	}
	seed, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("TANDEM_SOAK_SEED=%s: %v", text, err)
	}
	return seed
}
