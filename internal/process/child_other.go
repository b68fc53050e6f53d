//go:build !linux

package process

import (
	"os/exec"
	"syscall"
)

// StartChild starts cmd in a process group of its own. Only Linux sends it the signal when this
// process dies.
func StartChild(cmd *exec.Cmd, _ syscall.Signal) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd.Start()
}
