package workers

import (
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// newMemory returns a file of zeroed memory that other processes can map.
func newMemory(name string, bytes int64) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("workers: memory file: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if err := f.Truncate(bytes); err != nil {
		f.Close()
		return nil, fmt.Errorf("workers: memory file of %d bytes: %w", bytes, err)
	}
	return f, nil
}

// Map maps a part of shared memory. at is a multiple of the page size.
func Map(f *os.File, at int64, bytes int) ([]byte, error) {
	b, err := unix.Mmap(int(f.Fd()), at, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("workers: mapping %d bytes of shared memory at %d: %w", bytes, at, err)
	}
	return b, nil
}

func unmap(b []byte) error { return unix.Munmap(b) }

// Operations of the futex call, on memory that processes share.
const (
	futexWait = 0
	futexWake = 1
)

// sleep returns when w is woken, when its value is not value, or after d.
func sleep(w *atomic.Uint32, value uint32, d time.Duration) {
	ts := syscall.NsecToTimespec(int64(d))
	// The caller checks w again, so that the result does not matter.
	_, _, _ = syscall.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(w)), futexWait, uintptr(value), uintptr(unsafe.Pointer(&ts)), 0, 0)
}

// wake wakes all processes that sleep on w.
func wake(w *atomic.Uint32) {
	_, _, _ = syscall.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(w)), futexWake, 1<<30, 0, 0, 0)
}
