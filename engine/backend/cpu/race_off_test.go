//go:build !race

package cpu

// raceEnabled reports whether the race detector is in this binary.
const raceEnabled = false
