package workers

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-serving/tandem/engine/backend"
)

// ErrStart means that the workers have not started.
var ErrStart = errors.New("workers: not started")

// StartTimeout bounds how long a worker may take to load its part, and EndTimeout how
// long it may take to end before it is killed.
const (
	StartTimeout = 30 * time.Minute
	EndTimeout   = 5 * time.Second
)

// Options of Start.
type Options struct {
	Size    int           // workers, this process included
	Mailbox int           // bytes of a step; see the function Mailbox
	Timeout time.Duration // bound of a wait for another worker

	Command []string              // program and arguments of a worker, which calls Join; its rank is appended
	Start   func(*exec.Cmd) error // starts a worker so that it does not outlive this process; nil: Cmd.Start
	Files   []*os.File            // the workers' Worker.Files
	Log     *os.File              // the workers' standard output and error
}

// Leader is rank 0 with the processes of the other workers. Each has a socket pair
// for messages, as JSON. A worker ends when its socket is closed.
type Leader struct {
	*Group
	file      *os.File
	processes []*process
	lost      chan error // capacity 1
	closing   atomic.Bool
	watch     sync.WaitGroup
}

// process is the process of a worker.
type process struct {
	rank int
	cmd  *exec.Cmd
	conn net.Conn
	to   *json.Encoder
	from *json.Decoder
}

// hello is the first message to a worker.
type hello struct {
	Rank, Ranks, Mailbox, Files int
	Timeout                     time.Duration
}

// reply is a worker's reply to each message.
type reply struct{ Error string }

// Start starts the processes of ranks 1 and above.
func Start(o Options) (*Leader, error) {
	f, err := NewFile(o.Size, o.Mailbox)
	if err != nil {
		return nil, err
	}
	l := &Leader{file: f, lost: make(chan error, 1)}
	if l.Group, err = Open(f, 0, o.Size, o.Mailbox, o.Timeout); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	for r := 1; r < o.Size && err == nil; r++ {
		err = l.start(r, &o)
	}
	if err == nil {
		err = l.AwaitReplies()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%w: %w", ErrStart, err), l.Close())
	}
	return l, nil
}

// start starts one worker and sends it hello.
func (l *Leader) start(rank int, o *Options) error {
	ours, theirs, err := pair()
	if err != nil {
		return err
	}
	defer theirs.Close()
	cmd := exec.Command(o.Command[0], append(o.Command[1:len(o.Command):len(o.Command)], strconv.Itoa(rank))...)
	cmd.Stdout, cmd.Stderr = o.Log, o.Log
	cmd.ExtraFiles = append([]*os.File{theirs, l.file}, o.Files...)
	start := o.Start
	if start == nil {
		start = (*exec.Cmd).Start
	}
	if err := start(cmd); err != nil {
		return errors.Join(err, ours.Close())
	}
	p := &process{rank: rank, cmd: cmd, conn: ours, to: json.NewEncoder(ours), from: json.NewDecoder(ours)}
	l.processes = append(l.processes, p)
	l.watch.Go(func() {
		err := cmd.Wait()
		if l.closing.Load() {
			return
		}
		why := "its process has ended"
		if err != nil {
			why = fmt.Sprintf("%s: %v", why, err)
		}
		l.MarkLost(rank, why)
		select {
		case l.lost <- l.Err():
		default: // another lost worker was reported before
		}
	})
	if err := p.to.Encode(hello{rank, o.Size, o.Mailbox, len(o.Files), o.Timeout}); err != nil {
		return fmt.Errorf("rank %d: %w", rank, l.cause(err)) // it has ended at once
	}
	return nil
}

// pair returns both ends of a connection.
func pair() (ours net.Conn, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("workers: socket pair: %w", err)
	}
	unix.CloseOnExec(fds[0])
	unix.CloseOnExec(fds[1])
	f := os.NewFile(uintptr(fds[0]), "rank")
	defer f.Close() // FileConn has its own
	theirs = os.NewFile(uintptr(fds[1]), "rank")
	if ours, err = net.FileConn(f); err != nil {
		return nil, nil, errors.Join(err, theirs.Close())
	}
	return ours, theirs, nil
}

// Send sends a message to each worker. Each worker answers it.
func (l *Leader) Send(of func(rank int) any) error {
	for _, p := range l.processes {
		if err := p.to.Encode(of(p.rank)); err != nil {
			return fmt.Errorf("rank %d: %w", p.rank, l.cause(err))
		}
	}
	return nil
}

// AwaitReplies waits until all workers have answered the last message, and returns the
// first error among the answers.
func (l *Leader) AwaitReplies() error {
	for _, p := range l.processes {
		var a reply
		if err := p.conn.SetReadDeadline(time.Now().Add(StartTimeout)); err != nil {
			return err
		}
		if err := p.from.Decode(&a); err != nil {
			return fmt.Errorf("rank %d: %w", p.rank, l.cause(err))
		}
		if a.Error != "" {
			return fmt.Errorf("rank %d: %s", p.rank, a.Error)
		}
	}
	return nil
}

// cause returns why a worker's connection failed: the end of its process, else err.
func (l *Leader) cause(err error) error {
	select {
	case lost := <-l.lost:
		select {
		case l.lost <- lost: // the receiver of Lost needs it, too
		default:
		}
		return lost
	case <-time.After(EndTimeout): // the process ends a little after its connection
		return err
	}
}

// Processes returns the process ids of the other workers, from rank 1 on.
func (l *Leader) Processes() (ids []int) {
	for _, p := range l.processes {
		ids = append(ids, p.cmd.Process.Pid)
	}
	return ids
}

// Lost receives one error when a worker is lost.
func (l *Leader) Lost() <-chan error { return l.lost }

// Close ends the workers and waits for their processes. It kills them after
// EndTimeout, or at once if one of them is lost.
func (l *Leader) Close() error {
	bound := EndTimeout
	if errors.Is(l.Err(), backend.ErrLost) {
		bound = 0
	}
	l.closing.Store(true)
	l.End()
	var errs []error
	for _, p := range l.processes {
		errs = append(errs, p.conn.Close())
	}
	kill := time.AfterFunc(bound, func() {
		for _, p := range l.processes {
			_ = p.cmd.Process.Kill() // it may have ended by now
		}
	})
	l.watch.Wait()
	kill.Stop()
	return errors.Join(append(errs, l.Group.Close(), l.file.Close())...)
}

// Worker is a worker other than rank 0, in a process of its own.
type Worker struct {
	*Group
	Files []*os.File
	conn  net.Conn
	to    *json.Encoder
	from  *json.Decoder
}

// File descriptors that a worker's process starts with.
const (
	connFile = 3 + iota
	memoryFile
	moreFiles
)

// Join is the first call of a worker's process.
func Join() (*Worker, error) {
	control := os.NewFile(connFile, "rank")
	conn, err := net.FileConn(control)
	if err != nil {
		return nil, fmt.Errorf("%w: this command is started by a node with --tensor-parallel-size: %w", ErrStart, err)
	}
	control.Close()
	unix.CloseOnExec(memoryFile)
	m := &Worker{conn: conn, to: json.NewEncoder(conn), from: json.NewDecoder(conn)}
	var h hello
	if err := m.Receive(&h); err != nil {
		return nil, err
	}
	for i := range h.Files {
		unix.CloseOnExec(moreFiles + i)
		m.Files = append(m.Files, os.NewFile(uintptr(moreFiles+i), "shared"))
	}
	f := os.NewFile(memoryFile, "ranks")
	defer f.Close()
	if m.Group, err = Open(f, h.Rank, h.Ranks, h.Mailbox, h.Timeout); err != nil {
		return nil, m.Reply(err)
	}
	return m, m.Reply(nil)
}

// Receive waits for rank 0's next message.
func (m *Worker) Receive(v any) error {
	if err := m.from.Decode(v); err != nil {
		return fmt.Errorf("%w: rank 0: %w", ErrStart, err)
	}
	return nil
}

// Reply replies with err, which may be nil, and returns err joined with a failure to send.
func (m *Worker) Reply(err error) error {
	var a reply
	if err != nil {
		a.Error = err.Error()
	}
	return errors.Join(err, m.to.Encode(a))
}

// Watch starts a goroutine that ends the group for this worker when rank 0's process has ended.
func (m *Worker) Watch() {
	go func() {
		_, err := io.Copy(io.Discard, io.MultiReader(m.from.Buffered(), m.conn))
		if err == nil {
			err = io.EOF
		}
		m.MarkLost(0, fmt.Sprintf("its process has ended: %v", err))
	}()
}
