package main

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"runtime"
	"syscall"
	"time"
)

// clockTick is the unit of /proc/stat, fixed for programs.
const clockTick = 10 * time.Millisecond

// use is the use of the machine up to a moment.
type use struct {
	at   time.Time
	busy time.Duration // of all processors since boot; 0: unknown
	ours time.Duration // of this process and of its children that have ended
}

func machineUse() use {
	u := use{at: time.Now()}
	for _, who := range []int{syscall.RUSAGE_SELF, syscall.RUSAGE_CHILDREN} {
		var r syscall.Rusage
		if syscall.Getrusage(who, &r) == nil {
			u.ours += time.Duration(r.Utime.Nano() + r.Stime.Nano())
		}
	}
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return u
	}
	line, _ := bufio.NewReader(bytes.NewReader(b)).ReadString('\n')
	var user, nice, system, idle, wait, irq, soft, steal int64
	if _, err := fmt.Sscanf(line, "cpu %d %d %d %d %d %d %d %d", &user, &nice, &system, &idle, &wait, &irq, &soft, &steal); err == nil {
		u.busy = time.Duration(user+nice+system+irq+soft+steal) * clockTick
	}
	return u
}

// othersAfter waits, and returns others.
func (u use) othersAfter(d time.Duration) float64 {
	time.Sleep(d)
	return u.others()
}

// others returns the share of the machine, from 0 to 1, that other processes and the hypervisor
// have used since u.
func (u use) others() float64 {
	now := machineUse()
	if now.busy == 0 {
		return 0
	}
	theirs := now.busy - u.busy - (now.ours - u.ours)
	return max(0, theirs.Seconds()/now.at.Sub(u.at).Seconds()/float64(runtime.NumCPU()))
}
