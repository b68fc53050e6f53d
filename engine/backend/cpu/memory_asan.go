//go:build asan

package cpu

// #include <stdlib.h>
// #include <string.h>
import "C"

import (
	"errors"
	"unsafe"
)

// Under the address sanitizer memory is allocated by C, which guards both ends of
// each allocation to the byte. Mappings have no guards.

const hotBytes = 0 // each part has guards of its own

func mapBytes(n int) ([]byte, error) {
	var p unsafe.Pointer
	if C.posix_memalign(&p, 4096, C.size_t(n)) != 0 {
		return nil, errors.New("out of memory")
	}
	C.memset(p, 0, C.size_t(n))
	return unsafe.Slice((*byte)(p), n), nil
}

func unmapBytes(b []byte) error {
	C.free(unsafe.Pointer(&b[0]))
	return nil
}

// dropBytes keeps the memory, which C owns. Its content stays.
func dropBytes([]byte) {}
