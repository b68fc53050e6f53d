//go:build unix

package load

import (
	"syscall"
	"time"
)

// CPUTime returns the time that this process has used in user and system mode.
func CPUTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
