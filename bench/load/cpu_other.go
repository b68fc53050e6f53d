//go:build !unix

package load

import "time"

// CPUTime returns 0: it is not available on this system.
func CPUTime() time.Duration { return 0 }
