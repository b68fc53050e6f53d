//go:build deploy && linux

package kube

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const (
	insideVariable = "TANDEM_KUBE_INSIDE" // set in the process with namespaces of its own
	// hostAddress is the address of the machine in the network of its pods.
	hostAddress = "10.77.0.1"
)

// Main runs the tests of m in a process with network, mount, process and IPC namespaces of its own,
// so that no other program has the ports and no process outlives the tests. It returns the exit
// status. The namespaces need root.
func Main(m *testing.M) int {
	if os.Getenv(insideVariable) != "" {
		if err := prepare(); err != nil {
			fmt.Fprintln(os.Stderr, "kube:", err)
			return 1
		}
		return m.Run()
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), insideVariable+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC,
		Pdeathsig:  syscall.SIGKILL,
	}
	err := cmd.Run()
	if errors.Is(err, fs.ErrPermission) {
		fmt.Fprintln(os.Stderr, "kube: network, mount and process namespaces need root")
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		return exit.ExitCode()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "kube:", err)
		return 1
	}
	return 0
}

// prepare fills the namespaces of this process: it makes mounts that other processes do not see,
// and a bridge for the pods.
func prepare() error {
	for _, m := range []struct {
		source, target, kind string
		flags                uintptr
	}{
		{"", "/", "", unix.MS_REC | unix.MS_PRIVATE},
		{"proc", "/proc", "proc", 0},
		{"tmpfs", "/run", "tmpfs", 0}, // ip keeps names of network namespaces there
	} {
		if err := unix.Mount(m.source, m.target, m.kind, m.flags, ""); err != nil {
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	return batch("",
		"link set lo up",
		"link add pods type bridge",
		"addr add "+hostAddress+"/16 dev pods",
		"link set pods up")
}

// batch runs commands of ip in a named network namespace, or in that of this process for "".
func batch(namespace string, commands ...string) error {
	args := []string{"-batch", "-"}
	if namespace != "" {
		args = append([]string{"-n", namespace}, args...)
	}
	cmd := exec.Command("ip", args...)
	cmd.Stdin = strings.NewReader(strings.Join(commands, "\n") + "\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("ip %q: %w: %s", commands, err, out)
	}
	return nil
}
