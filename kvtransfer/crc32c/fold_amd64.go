package crc32c

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

var folds = cpu.X86.HasAVX512F && cpu.X86.HasAVX512VPCLMULQDQ

// aligned reports whether non-temporal stores to b are possible.
func aligned(b []byte) bool { return uintptr(unsafe.Pointer(&b[0]))%64 == 0 }

// fold folds n bytes, a multiple of 256 and at least 512, with the initial state, into 64 bytes of
// the same CRC.
//
//go:noescape
func fold(rest *[64]byte, p *byte, n int, state uint32, k *[4]uint64)

// foldCopy is fold, and copies the bytes to dst, which is aligned to 64, with non-temporal stores.
//
//go:noescape
func foldCopy(rest *[64]byte, dst, p *byte, n int, state uint32, k *[4]uint64)
