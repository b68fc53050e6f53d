//go:build !asan

package cpu

import "golang.org/x/sys/unix"

// hotBytes is the size of the mappings that hot parts share. Memory that no part touches is not
// taken.
const hotBytes = 32 << 20

func mapBytes(n int) ([]byte, error) {
	return unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
}

func unmapBytes(b []byte) error { return unix.Munmap(b) }

// dropBytes frees the memory of a part of a mapping, which has whole pages of its own. Its content
// is lost.
func dropBytes(b []byte) { _ = unix.Madvise(b, unix.MADV_DONTNEED) }
