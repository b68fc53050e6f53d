package ranks

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

// ErrStart is behind every failure of ranks to come up.
var ErrStart = errors.New("ranks: they did not come up")

// StartTimeout is how long a rank may take to load its part, EndTimeout how long it
// may take to end before it is killed.
const (
	StartTimeout = 30 * time.Minute
	EndTimeout   = 5 * time.Second
)

// Options of Start.
type Options struct {
	Ranks   int
	Mailbox int           // see the function
	Timeout time.Duration // that ranks wait for each other

	Command []string              // program and arguments of a rank, which calls Join; its number follows
	Start   func(*exec.Cmd) error // starts it so that it does not outlive this process; nil: by itself
	Files   []*os.File            // that ranks have as Member.Files
	Log     *os.File              // what ranks say
}

// Leader is rank 0 with the processes of the others. Messages go over a socket
// pair each, as JSON; a rank whose socket closes ends.
type Leader struct {
	*Group
	file    *os.File
	members []*process
	lost    chan error // capacity 1
	ending  atomic.Bool
	watch   sync.WaitGroup
}

// process is a rank's.
type process struct {
	rank int
	cmd  *exec.Cmd
	conn net.Conn
	to   *json.Encoder
	from *json.Decoder
}

// hello is the first message.
type hello struct {
	Rank, Ranks, Mailbox, Files int
	Timeout                     time.Duration
}

// answer is what a rank says to each message.
type answer struct{ Error string }

// Start starts the processes of ranks 1 and on.
func Start(o Options) (*Leader, error) {
	f, err := NewFile(o.Ranks, o.Mailbox)
	if err != nil {
		return nil, err
	}
	l := &Leader{file: f, lost: make(chan error, 1)}
	if l.Group, err = Open(f, 0, o.Ranks, o.Mailbox, o.Timeout); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	for r := 1; r < o.Ranks && err == nil; r++ {
		err = l.start(r, &o)
	}
	if err == nil {
		err = l.Answers()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%w: %w", ErrStart, err), l.Close())
	}
	return l, nil
}

// start starts one rank and greets it.
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
	l.members = append(l.members, p)
	l.watch.Go(func() {
		err := cmd.Wait()
		if l.ending.Load() {
			return
		}
		why := "its process has ended"
		if err != nil {
			why = fmt.Sprintf("%s: %v", why, err)
		}
		l.Lose(rank, why)
		select {
		case l.lost <- l.Err():
		default: // it has been told of another one
		}
	})
	if err := p.to.Encode(hello{rank, o.Ranks, o.Mailbox, len(o.Files), o.Timeout}); err != nil {
		return fmt.Errorf("rank %d: %w", rank, l.cause(err)) // it has ended at once
	}
	return nil
}

// pair is a connection with both its ends.
func pair() (ours net.Conn, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("ranks: socket pair: %w", err)
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

// Tell sends all ranks a message; each answers it.
func (l *Leader) Tell(of func(rank int) any) error {
	for _, p := range l.members {
		if err := p.to.Encode(of(p.rank)); err != nil {
			return fmt.Errorf("rank %d: %w", p.rank, l.cause(err))
		}
	}
	return nil
}

// Answers waits until all ranks have answered the last message, and returns the
// first refusal.
func (l *Leader) Answers() error {
	for _, p := range l.members {
		var a answer
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

// cause is why a rank's connection failed, if its process has ended.
func (l *Leader) cause(err error) error {
	select {
	case lost := <-l.lost:
		select {
		case l.lost <- lost: // to be heard by who runs steps, too
		default:
		}
		return lost
	case <-time.After(EndTimeout): // the end is noticed a little later than that of the connection
		return err
	}
}

// Processes are the ids of the others' processes, from rank 1 on.
func (l *Leader) Processes() (ids []int) {
	for _, p := range l.members {
		ids = append(ids, p.cmd.Process.Pid)
	}
	return ids
}

// Lost hears once when a rank is lost.
func (l *Leader) Lost() <-chan error { return l.lost }

// Close ends the ranks and waits for their processes, which are killed after
// EndTimeout; at once if one of them is lost.
func (l *Leader) Close() error {
	bound := EndTimeout
	if errors.Is(l.Err(), backend.ErrLost) {
		bound = 0
	}
	l.ending.Store(true)
	l.End()
	var errs []error
	for _, p := range l.members {
		errs = append(errs, p.conn.Close())
	}
	kill := time.AfterFunc(bound, func() {
		for _, p := range l.members {
			_ = p.cmd.Process.Kill() // it may have ended by now
		}
	})
	l.watch.Wait()
	kill.Stop()
	return errors.Join(append(errs, l.Group.Close(), l.file.Close())...)
}

// Member is a rank other than 0, in a process of its own.
type Member struct {
	*Group
	Files []*os.File
	conn  net.Conn
	to    *json.Encoder
	from  *json.Decoder
}

// The files that a rank's process is started with.
const (
	connFile = 3 + iota
	memoryFile
	moreFiles
)

// Join is the first call of a rank's process.
func Join() (*Member, error) {
	control := os.NewFile(connFile, "rank")
	conn, err := net.FileConn(control)
	if err != nil {
		return nil, fmt.Errorf("%w: a rank is started by its node, with --tensor-parallel-size: %w", ErrStart, err)
	}
	control.Close()
	unix.CloseOnExec(memoryFile)
	m := &Member{conn: conn, to: json.NewEncoder(conn), from: json.NewDecoder(conn)}
	var h hello
	if err := m.Hear(&h); err != nil {
		return nil, err
	}
	for i := range h.Files {
		unix.CloseOnExec(moreFiles + i)
		m.Files = append(m.Files, os.NewFile(uintptr(moreFiles+i), "shared"))
	}
	f := os.NewFile(memoryFile, "ranks")
	defer f.Close()
	if m.Group, err = Open(f, h.Rank, h.Ranks, h.Mailbox, h.Timeout); err != nil {
		return nil, m.Answer(err)
	}
	return m, m.Answer(nil)
}

// Hear waits for rank 0's next message.
func (m *Member) Hear(v any) error {
	if err := m.from.Decode(v); err != nil {
		return fmt.Errorf("%w: rank 0: %w", ErrStart, err)
	}
	return nil
}

// Answer says how it went, and returns err, or why it could not be said.
func (m *Member) Answer(err error) error {
	var a answer
	if err != nil {
		a.Error = err.Error()
	}
	return errors.Join(err, m.to.Encode(a))
}

// Watch ends the group for this rank when rank 0's process has ended.
func (m *Member) Watch() {
	go func() {
		_, err := io.Copy(io.Discard, io.MultiReader(m.from.Buffered(), m.conn))
		if err == nil {
			err = io.EOF
		}
		m.Lose(0, fmt.Sprintf("its process has ended: %v", err))
	}()
}
