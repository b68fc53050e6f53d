//go:build unix

package bench

import (
	"os"
	"syscall"
)

// ownGroup keeps a terminal's Ctrl-C from a server, which the sweep then drains.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

func interrupt(p *os.Process) error { return p.Signal(syscall.SIGTERM) }

// killGroup kills the server and its child processes.
func killGroup(p *os.Process) error { return syscall.Kill(-p.Pid, syscall.SIGKILL) }
