//go:build unix

package bench

import (
	"os"
	"syscall"
)

// ownGroup keeps a terminal's Ctrl-C from a server, which the sweep then drains.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

func interrupt(p *os.Process) error { return p.Signal(syscall.SIGTERM) }

// killGroup ends the server and what it started.
func killGroup(p *os.Process) error { return syscall.Kill(-p.Pid, syscall.SIGKILL) }
