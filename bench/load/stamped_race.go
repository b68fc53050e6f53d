//go:build linux && (amd64 || arm64) && race

package load

import "syscall"

// acquire tells the race detector what it knows of every read: what was done
// before these bytes were sent happened before now.
func acquire(fd uintptr) { _, _ = syscall.Read(int(fd), nil) } // of nothing, so that it cannot fail for want of bytes
