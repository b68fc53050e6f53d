package process

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

// reloadPoll is how often followed files are checked.
const reloadPoll = time.Second

// A Reload is a part of a process that can be reloaded while it runs.
type Reload struct {
	Part  string   // for the log and metrics
	Files []string // files whose change causes a reload, in addition to SIGHUP
	// Load reads and applies the files. On an error it must have changed nothing.
	Load func() error
	// OnLoad is called with the result of each Load; nil: not called.
	OnLoad func(err error)
	// Details returns attributes of the log line of a Load that succeeded; nil: there are none.
	Details func() []any
}

// Follow calls r.Load whenever one of r.Files has changed, and at SIGHUP, until the
// process ends. A failed load is logged once for each change and keeps the previous state.
func (p *Process) Follow(r Reload) {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	p.OnEnd(func() { signal.Stop(hup) })
	terminal := hasTerminal()
	before := stampsOf(r.Files)
	p.Work(func(ctx context.Context) {
		tick := time.NewTicker(reloadPoll)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-hup:
				if terminal && !hasTerminal() {
					p.hangUp()
					return
				}
				before = stampsOf(r.Files)
			case <-tick.C:
				now := stampsOf(r.Files)
				if now == before {
					continue
				}
				before = now
			}
			p.reload(r)
		}
	})
}

func (p *Process) reload(r Reload) {
	err := r.Load()
	if r.OnLoad != nil {
		r.OnLoad(err)
	}
	if err != nil {
		p.Log.Error("reload failed, the previous state is kept", "part", r.Part, "error", err)
		return
	}
	details := []any{"part", r.Part}
	if r.Details != nil {
		details = append(details, r.Details()...)
	}
	p.Log.Info("reloaded", details...)
}

// hasTerminal reports whether the process has a terminal that can hang up. SIGHUP then means
// that it did, not that files have changed.
func hasTerminal() bool {
	f, err := os.OpenFile("/dev/tty", os.O_RDONLY|syscall.O_NOCTTY, 0)
	if err != nil {
		return false
	}
	f.Close()
	return true
}

// hangUp sends SIGTERM to this process.
func (p *Process) hangUp() {
	p.hung.Do(func() { // once for all parts, because a second signal ends the process at once
		p.Log.Info("the terminal was closed")
		if self, err := os.FindProcess(os.Getpid()); err == nil {
			p.Report("signal", self.Signal(syscall.SIGTERM))
		}
	})
}

// stampsOf returns a text that differs when a file has changed. A missing file has no line.
func stampsOf(files []string) string {
	var b strings.Builder
	for _, f := range files {
		if info, err := os.Stat(f); err == nil {
			fmt.Fprintln(&b, f, info.ModTime(), info.Size())
		}
	}
	return b.String()
}
