//go:build cgo && !(amd64 && linux)

package cpu

// tilesAllowed returns false: AMX is supported only on Linux.
func tilesAllowed() bool { return false }
