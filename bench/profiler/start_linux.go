package profiler

import (
	"bytes"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// ticksPerSecond is the unit of /proc/self/stat.
const ticksPerSecond = 100

// SinceStart returns the time since this process was started, in steps of 10 ms; 0: not known.
func SinceStart() time.Duration {
	data, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return 0
	}
	_, rest, _ := bytes.Cut(data, []byte(") ")) // behind the name, from the third field on
	fields := bytes.Fields(rest)
	var now unix.Timespec
	if len(fields) < 20 || unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) != nil {
		return 0
	}
	ticks, err := strconv.ParseInt(string(fields[19]), 10, 64)
	if err != nil {
		return 0
	}
	return max(0, time.Duration(now.Nano())-time.Duration(ticks)*time.Second/ticksPerSecond)
}
