//go:build !race

package e2e

// raceEnabled says that the race detector is in this binary.
const raceEnabled = false
