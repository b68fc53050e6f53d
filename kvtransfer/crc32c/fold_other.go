//go:build !amd64

package crc32c

var folds = false

func aligned([]byte) bool { return false }

func fold(*[64]byte, *byte, int, uint32, *[4]uint64) {}

func foldCopy(*[64]byte, *byte, *byte, int, uint32, *[4]uint64) {}
