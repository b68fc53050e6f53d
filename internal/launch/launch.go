// Package launch runs a small cluster on one machine: one process per node, with their
// output interleaved.
//
// Invariant: Run returns only when every process it started has ended. Each is
// in a process group of its own, so that a terminal's Ctrl-C reaches only this
// process, which then stops them in order. On Linux the kernel stops them as
// well if this process is killed.
//
// The package does not restart processes and does not know what they do: supervision, and
// clusters of several machines, are for systemd or Kubernetes.
package launch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/tandem-serving/tandem/internal/process"
)

// Process is one node to run.
type Process struct {
	Name string // prefix of its output lines
	Args []string
	Env  []string // added to this process's environment
}

// Options configure Run.
type Options struct {
	Binary    string
	Processes []Process // started in order; the first is stopped before the others
	Out       io.Writer // their output, each line prefixed
	Logger    *slog.Logger
	// Grace is how long a process may take to stop after SIGTERM before it is
	// killed. It should exceed the nodes' own shutdown timeout.
	Grace time.Duration
	// Started is called once all processes run; it may wait for readiness. Its error
	// stops all processes.
	Started func(ctx context.Context) error
}

// ErrStart is wrapped by every failure to start.
var ErrStart = errors.New("launch: the cluster did not start")

// ErrGone is returned when every process has ended by itself.
var ErrGone = errors.New("launch: every node has ended")

// maxLine bounds one line of a node's output; longer ones are split.
const maxLine = 64 << 10

// child is a running process.
type child struct {
	Process
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended and its output is written

	to   *lines
	part []byte // of a line of output that has not ended
	last string // line of output, after done
}

// Run starts the processes and returns when all have ended: because ctx ended,
// because Started failed, or by themselves. When kill fires, it ends them at once.
func Run(ctx context.Context, o Options, kill <-chan struct{}) error {
	asked := ctx
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	out := &lines{w: o.Out}
	var children []*child
	var failed error
	first := make(chan error, len(o.Processes)) // why a process ended before Started returned
	for _, p := range o.Processes {
		c, err := start(o.Binary, p, out, func(c *child) {
			if ctx.Err() == nil {
				o.Logger.Error("node has ended; the others continue", "node", c.Name, "pid", c.cmd.Process.Pid, "status", c.cmd.ProcessState.String())
				first <- fmt.Errorf("%w: %s ended: %s: %s", ErrStart, c.Name, c.cmd.ProcessState, c.last)
			}
		})
		if err != nil {
			failed = fmt.Errorf("%w: %s: %w", ErrStart, p.Name, err)
			break
		}
		children = append(children, c)
	}
	allGone := make(chan struct{})
	go func() {
		defer close(allGone)
		for _, c := range children {
			<-c.done
		}
	}()
	if failed == nil {
		failed = up(ctx, o.Started, first)
	}
	if failed == nil {
		select {
		case <-ctx.Done():
		case <-allGone:
			if ctx.Err() == nil {
				failed = ErrGone
			}
		}
	}
	cancel()
	if asked.Err() != nil {
		o.Logger.Info("stopping: the gateway drains, then the nodes; Ctrl-C again ends them at once")
	}
	stop(children, o, kill)
	<-allGone
	if asked.Err() != nil {
		o.Logger.Info("stopped")
	}
	return failed
}

// up waits for Started, or for the first process that ends before it returns.
func up(ctx context.Context, started func(context.Context) error, first <-chan error) error {
	if started == nil {
		return nil
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ready := make(chan error, 1)
	go func() { ready <- started(ctx) }()
	select {
	case err := <-ready:
		if err != nil && context.Cause(ctx) == nil {
			return err
		}
		return nil
	case err := <-first:
		cancel(err)
		<-ready
		return err
	}
}

// start runs one process with its output prefixed, and calls ended when it has ended.
func start(binary string, p Process, to *lines, ended func(*child)) (*child, error) {
	c := &child{Process: p, to: to, cmd: exec.Command(binary, p.Args...), done: make(chan struct{})}
	c.cmd.Env = append(os.Environ(), p.Env...)
	c.cmd.Stdout, c.cmd.Stderr = c, c
	c.cmd.WaitDelay = time.Second // its output ends with it, unless a process that it started holds the pipe
	if err := process.StartChild(c.cmd, syscall.SIGTERM); err != nil {
		return nil, err
	}
	go func() {
		defer close(c.done)
		_ = c.cmd.Wait() // cmd.ProcessState has the status
		if len(c.part) > 0 {
			c.line(c.part)
		}
		ended(c)
	}()
	return c, nil
}

// Write prefixes each line of output with the name of the process.
func (c *child) Write(p []byte) (int, error) {
	c.part = append(c.part, p...)
	for {
		n, end := bytes.IndexByte(c.part, '\n'), 1
		if n < 0 && len(c.part) < maxLine {
			return len(p), nil
		}
		if n < 0 || n > maxLine {
			n, end = maxLine, 0
		}
		c.line(c.part[:n])
		c.part = c.part[n+end:]
	}
}

func (c *child) line(text []byte) {
	c.to.mu.Lock()
	defer c.to.mu.Unlock()
	fmt.Fprintf(c.to.w, "%-10s | %s\n", c.Name, text)
	c.last = string(text)
}

// lines is the writer that the lines of several processes go to.
type lines struct {
	mu sync.Mutex
	w  io.Writer
}

// stop sends SIGTERM to the first child and, when it has ended, to the others together. It
// sends SIGKILL to the children that are left after the grace, which is for all, or at kill.
func stop(children []*child, o Options, kill <-chan struct{}) {
	deadline := time.NewTimer(o.Grace)
	defer deadline.Stop()
	for i, c := range children {
		switch i {
		case 0:
			send(c, syscall.SIGTERM)
		case 1:
			for _, rest := range children[1:] {
				send(rest, syscall.SIGTERM)
			}
		}
		select {
		case <-c.done:
			continue
		case <-kill:
		case <-deadline.C:
			o.Logger.Error("node did not stop in time and is killed", "node", c.Name, "grace", o.Grace)
		}
		for _, left := range children[i:] {
			send(left, syscall.SIGKILL)
		}
		return
	}
}

func send(c *child, s syscall.Signal) {
	select {
	case <-c.done:
	default:
		// An error means that it has just ended.
		_ = c.cmd.Process.Signal(s)
	}
}
