//go:build race

package engine

// raceEnabled reports whether the race detector is in this binary.
const raceEnabled = true
