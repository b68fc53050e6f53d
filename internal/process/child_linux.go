package process

import (
	"os/exec"
	"runtime"
	"sync"
	"syscall"
)

// starter is the goroutine that starts child processes. Its thread lasts as long as this process,
// because the kernel sends the signal when the starting thread ends.
var starter = sync.OnceValue(func() chan<- func() {
	work := make(chan func())
	go func() {
		runtime.LockOSThread()
		for f := range work {
			f()
		}
	}()
	return work
})

// StartChild starts cmd in a process group of its own, so that a terminal's signals reach only
// this process. The kernel sends the signal to cmd when this process dies.
func StartChild(cmd *exec.Cmd, signal syscall.Signal) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: signal}
	err := make(chan error)
	starter() <- func() { err <- cmd.Start() }
	return <-err
}
