package cpu

import "golang.org/x/sys/unix"

// adviseHuge is a hint: kernels without huge pages refuse it, to no harm.
func adviseHuge(b []byte) { _ = unix.Madvise(b, unix.MADV_HUGEPAGE) }
