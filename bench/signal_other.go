//go:build !unix

package bench

import (
	"os"
	"syscall"
)

func ownGroup() *syscall.SysProcAttr { return nil }

func interrupt(p *os.Process) error { return p.Kill() }

func killGroup(p *os.Process) error { return p.Kill() }
