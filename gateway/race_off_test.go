//go:build !race

package gateway

// raceEnabled reports whether the race detector is in this binary.
const raceEnabled = false
