package launch

import (
	"os/exec"
	"runtime"
	"syscall"
)

// sysProcAttr gives a node a process group of its own, and a SIGTERM should
// this process die without stopping it.
func sysProcAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
}

// pins takes the one goroutine that starts processes: the kernel sends
// Pdeathsig when the starting thread ends, so that thread must be one that
// lasts as long as this process.
var pins = make(chan func())

func init() { go pinned() }

func pinned() {
	runtime.LockOSThread()
	for f := range pins {
		f()
	}
}

func startPinned(cmd *exec.Cmd) error {
	err := make(chan error)
	pins <- func() { err <- cmd.Start() }
	return <-err
}
