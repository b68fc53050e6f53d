package process

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// reloadPoll is how often followed files are looked at.
const reloadPoll = time.Second

// A Reload is a part of a process that can be read anew while it runs.
type Reload struct {
	Part  string   // for the log and metrics
	Files []string // a change of one of these is reason enough; else only SIGHUP is
	// Load reads and takes them. On an error nothing may have changed.
	Load func() error
	// Told hears how each Load went; nil: nobody.
	Told func(err error)
}

// Follow calls r.Load whenever one of r.Files has changed, and at SIGHUP, until the
// process ends. What does not load is logged once for each change, and what was
// there before stays.
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
	if r.Told != nil {
		r.Told(err)
	}
	if err != nil {
		p.Log.Error("not reloaded, what was there stays", "part", r.Part, "error", err)
		return
	}
	p.Log.Info("reloaded", "part", r.Part)
}

// hasTerminal says whether the process has a terminal that can hang up: SIGHUP
// then says that it did, and not that something has changed.
func hasTerminal() bool {
	f, err := os.OpenFile("/dev/tty", os.O_RDONLY|syscall.O_NOCTTY, 0)
	if err != nil {
		return false
	}
	f.Close()
	return true
}

// hangUp ends the process as SIGTERM does.
func (p *Process) hangUp() {
	p.hung.Do(func() { // each part hears of it, and a second signal would be one
		p.Log.Info("the terminal is gone")
		if self, err := os.FindProcess(os.Getpid()); err == nil {
			p.Report("signal", self.Signal(syscall.SIGTERM))
		}
	})
}

// stampsOf is what a change of files shows in. A file that is missing has one, too.
func stampsOf(files []string) (s [maxFollowed]stamp) {
	for i, f := range files[:min(len(files), maxFollowed)] {
		if info, err := os.Stat(f); err == nil {
			s[i] = stamp{info.ModTime(), info.Size()}
		}
	}
	return s
}

// maxFollowed is how many files a part has at most.
const maxFollowed = 8

type stamp struct {
	at   time.Time
	size int64
}
