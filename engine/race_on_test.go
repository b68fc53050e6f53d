//go:build race

package engine

// raceEnabled says that the race detector is in this binary.
const raceEnabled = true
