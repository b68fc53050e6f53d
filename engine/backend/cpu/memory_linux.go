package cpu

import "golang.org/x/sys/unix"

// adviseHuge requests huge pages. Kernels without huge pages refuse, which is harmless.
func adviseHuge(b []byte) { _ = unix.Madvise(b, unix.MADV_HUGEPAGE) }
