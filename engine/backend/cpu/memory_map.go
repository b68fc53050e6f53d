//go:build !asan

package cpu

import "golang.org/x/sys/unix"

func mapBytes(n int) ([]byte, error) {
	return unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
}

func unmapBytes(b []byte) error { return unix.Munmap(b) }
