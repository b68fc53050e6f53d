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
	"bufio"
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
	err  error         // after done
	last string        // line of output, after done
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
	for _, p := range o.Processes {
		c, err := start(o.Binary, p, out)
		if err != nil {
			failed = fmt.Errorf("%w: %s: %w", ErrStart, p.Name, err)
			break
		}
		children = append(children, c)
	}
	var gone sync.WaitGroup
	first := make(chan error, len(o.Processes)) // why a process ended before Started returned
	for _, c := range children {
		gone.Go(func() {
			<-c.done
			if ctx.Err() == nil {
				o.Logger.Error("node has ended; the others continue", "node", c.Name, "pid", c.cmd.Process.Pid, "status", c.cmd.ProcessState.String())
				first <- fmt.Errorf("%w: %s ended: %s: %s", ErrStart, c.Name, c.cmd.ProcessState, c.last)
			}
		})
	}
	allGone := make(chan struct{})
	go func() { gone.Wait(); close(allGone) }()

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

// start runs one process with its output prefixed.
func start(binary string, p Process, out *lines) (*child, error) {
	cmd := exec.Command(binary, p.Args...)
	cmd.Env = append(os.Environ(), p.Env...)
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	cmd.Stdout, cmd.Stderr = w, w
	err = process.StartChild(cmd, syscall.SIGTERM)
	w.Close()
	if err != nil {
		r.Close()
		return nil, err
	}
	c := &child{Process: p, cmd: cmd, done: make(chan struct{})}
	copied := make(chan string, 1) // the last line
	go func() {
		defer r.Close()
		copied <- out.copy(p.Name, r)
	}()
	go func() {
		c.err = cmd.Wait()
		// Its output ends with it, unless a process that it started holds the pipe.
		select {
		case c.last = <-copied:
		case <-time.After(time.Second):
		}
		close(c.done)
	}()
	return c, nil
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

// lines writes whole lines of several processes to one writer.
type lines struct {
	mu sync.Mutex
	w  io.Writer
}

// copy prefixes each line of r with name. It returns the last line.
func (l *lines) copy(name string, r io.Reader) (last string) {
	br := bufio.NewReaderSize(r, maxLine)
	for {
		line, err := br.ReadSlice('\n')
		if len(line) > 0 {
			if line[len(line)-1] == '\n' {
				line = line[:len(line)-1]
			}
			l.mu.Lock()
			fmt.Fprintf(l.w, "%-10s | %s\n", name, line)
			l.mu.Unlock()
			last = string(line)
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return last
		}
	}
}
