// Package offspring starts processes that do not outlive this one: the kernel sends
// them a signal when it dies, however it dies, in time for nobody to be orphaned.
//
// Invariant: the thread that starts them lasts as long as this process. The kernel
// sends the signal when the starting thread ends.
//
// The package waits for nobody and stops nobody.
package offspring

import (
	"os/exec"
	"runtime"
	"sync"
	"syscall"
)

// pins is the one goroutine that starts processes; it begins with the first.
var pins = sync.OnceValue(func() chan<- func() {
	work := make(chan func())
	go func() {
		runtime.LockOSThread()
		for f := range work {
			f()
		}
	}()
	return work
})

// Start starts cmd in a process group of its own, so that a terminal's signals
// are this process's alone to pass on. It gets the signal should this one die.
func Start(cmd *exec.Cmd, signal syscall.Signal) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: signal}
	err := make(chan error)
	pins() <- func() { err <- cmd.Start() }
	return <-err
}
