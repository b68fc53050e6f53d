//go:build !linux

package launch

import (
	"os/exec"
	"syscall"
)

// sysProcAttr gives a node a process group of its own.
func sysProcAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

func startPinned(cmd *exec.Cmd) error { return cmd.Start() }
