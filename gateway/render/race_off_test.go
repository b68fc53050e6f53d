//go:build !race

package render

import "time"

// mostTime is the most CPU time that a part of a hostile request takes.
const mostTime = time.Second
