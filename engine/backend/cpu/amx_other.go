//go:build cgo && !(amd64 && linux)

package cpu

// tilesAllowed: other systems are not asked for AMX.
func tilesAllowed() bool { return false }
