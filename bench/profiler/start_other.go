//go:build !linux

package profiler

import "time"

// SinceStart returns the time since this process was started; 0: not known.
func SinceStart() time.Duration { return 0 }
