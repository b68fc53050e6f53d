//go:build !linux

// Package offspring starts processes; only Linux ends them with this one.
package offspring

import (
	"os/exec"
	"syscall"
)

// Start starts cmd in a process group of its own.
func Start(cmd *exec.Cmd, _ syscall.Signal) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd.Start()
}
