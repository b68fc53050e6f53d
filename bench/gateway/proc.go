package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// tick is the unit of the times in /proc/PID/stat, 1/USER_HZ, which is 100 on all Linux systems.
// The kernel scales them to the scheduler's measurement, so that their sum is correct to a tick.
const tick = 10 * time.Millisecond

// child is a process with its descendants.
type child struct {
	cmd  *exec.Cmd
	in   io.Closer // closing it ends the process; nil: a signal does
	log  string
	done chan struct{}
}

// start starts a command whose output goes to a file.
func start(dir, name string, argv ...string) (*child, error) {
	log, err := os.Create(filepath.Join(dir, name+".log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = log, log, dir
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return (&child{cmd: cmd, log: log.Name()}).wait(), nil
}

func (c *child) wait() *child {
	c.done = make(chan struct{})
	go func() {
		_ = c.cmd.Wait() // only its end matters
		close(c.done)
	}()
	return c
}

// startOwn starts this command in another role and returns the line that it prints.
func startOwn(role string, env ...string) (*child, string, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, "", err
	}
	cmd := exec.Command(self, role)
	cmd.Stderr, cmd.Env = os.Stderr, append(os.Environ(), env...)
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, "", err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, "", err
	}
	if err := cmd.Start(); err != nil {
		return nil, "", err
	}
	line := make([]byte, 256)
	n, err := out.Read(line)
	c := (&child{cmd: cmd, in: in}).wait()
	if err != nil {
		c.stop()
		return nil, "", fmt.Errorf("%s: it printed no address: %w", role, err)
	}
	return c, strings.TrimSpace(string(line[:n])), nil
}

// stop ends the process and waits for it.
func (c *child) stop() {
	if c.in != nil {
		c.in.Close()
	} else {
		_ = c.cmd.Process.Signal(syscall.SIGTERM) // it may have ended before
	}
	select {
	case <-c.done:
		return
	case <-time.After(5 * time.Second):
	}
	for _, pid := range c.family() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	<-c.done
}

// ended returns an error with the end of the process's output if it has ended.
func (c *child) ended() error {
	select {
	case <-c.done:
		log, _ := os.ReadFile(c.log)
		return fmt.Errorf("%s ended: %s", c.cmd.Path, log[max(0, len(log)-2000):])
	default:
		return nil
	}
}

// family returns the ids of the process and its descendants.
func (c *child) family() []int {
	pids := []int{c.cmd.Process.Pid}
	for i := 0; i < len(pids); i++ {
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pids[i]))
		for _, t := range tasks {
			data, _ := os.ReadFile(t) // a process that has ended has none
			for f := range strings.FieldsSeq(string(data)) {
				if pid, err := strconv.Atoi(f); err == nil {
					pids = append(pids, pid)
				}
			}
		}
	}
	return pids
}

// cpu returns the CPU time of the family.
func (c *child) cpu() (sum time.Duration, err error) {
	for _, pid := range c.family() {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return 0, err
		}
		// utime and stime are the 12th and 13th fields after the name in parentheses.
		f := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
		for _, at := range []int{11, 12} {
			n, err := strconv.Atoi(f[at])
			if err != nil {
				return 0, err
			}
			sum += time.Duration(n) * tick
		}
	}
	return sum, nil
}

// anonymous returns the family's resident anonymous memory in MB (10⁶ bytes): what the processes
// allocated, without the pages of their files. Pages that processes share count in each.
func (c *child) anonymous() (mb float64, err error) {
	for _, pid := range c.family() {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			return 0, err
		}
		_, rest, ok := strings.Cut(string(data), "RssAnon:")
		var kb float64
		if _, err := fmt.Sscan(rest, &kb); !ok || err != nil {
			return 0, fmt.Errorf("/proc/%d/status has no RssAnon", pid)
		}
		mb += kb * 1024 / 1e6
	}
	return mb, nil
}

// freePort returns a free port.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}
