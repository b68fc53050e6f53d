//go:build linux && (amd64 || arm64) && race

package load

import "syscall"

// acquire makes the race detector order the sends of these bytes before this read, as it
// does for every read.
func acquire(fd uintptr) { _, _ = syscall.Read(int(fd), nil) } // of zero bytes, so that it cannot fail for lack of data
