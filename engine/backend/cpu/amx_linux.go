//go:build cgo && amd64 && linux

package cpu

import (
	"sync"

	"golang.org/x/sys/unix"
)

// tilesAllowed requests permission from Linux, once, to use AMX's tiles in every thread of
// the process. A thread's tiles take 8 KiB of its context (the kernel's
// Documentation/arch/x86/xstate.rst).
var tilesAllowed = sync.OnceValue(func() bool {
	const requestPermission, tileData = 0x1023, 18 // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
	_, _, errno := unix.RawSyscall(unix.SYS_ARCH_PRCTL, requestPermission, tileData, 0)
	return errno == 0
})
