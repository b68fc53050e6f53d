package process

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

const (
	// superviseInterval is how often the state is reported, or a third of systemd's watchdog time
	// where that is shorter.
	superviseInterval = time.Second
	// startExtension is the time that each report while starting requests from systemd, because
	// loading weights may take long.
	startExtension = 30 * time.Second
)

// probes are the checks behind /readyz and /livez. Each returns nil, or what is wrong.
type probes struct{ ready, alive func() error }

// Watch gives the process its checks: ready as /readyz answers, and alive, which fails when the
// process should be restarted. A nil alive always succeeds. Under systemd the unit becomes ready
// when ready first succeeds. The watchdog is fed while alive succeeds and neither check hangs.
func (p *Process) Watch(ready, alive func() error) { p.probes.Store(&probes{ready, alive}) }

// supervise reports the state to systemd until the process ends, as sd_notify(3) describes. It does
// nothing without NOTIFY_SOCKET, which systemd sets for units of Type=notify.
func (p *Process) supervise() {
	if os.Getenv("NOTIFY_SOCKET") == "" {
		return
	}
	interval := superviseInterval
	// The error is a WATCHDOG_USEC that is no number, which systemd does not set.
	if d, err := daemon.SdWatchdogEnabled(false); err == nil && d > 0 {
		interval = min(interval, d/3)
	}
	p.Work(func(ctx context.Context) {
		r := reporter{send: func(state string) {
			if _, err := daemon.SdNotify(false, state); err != nil {
				p.Log.Debug("systemd: notify", "err", err)
			}
		}}
		tick := time.NewTicker(interval)
		defer tick.Stop()
		for {
			r.report(p.probes.Load(), p.loading.Load(), p.Ctx.Err() != nil)
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	})
}

// Loading sets what the state is while the process starts, such as how much of the weights is read.
func (p *Process) Loading(state string) { p.loading.Store(&state) }

// reporter turns the process's state into notifications. One goroutine owns it.
type reporter struct {
	send     func(state string)
	ready    bool // READY=1 was sent
	stopping bool // STOPPING=1 was sent
	status   string
}

// report sends one notification. checks is nil before Watch, and loading before Loading.
func (r *reporter) report(checks *probes, loading *string, ending bool) {
	var lines []string
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	status, err := "starting", error(nil)
	if loading != nil {
		status = *loading
	}
	if checks != nil {
		if err = checks.ready(); err == nil {
			status = "serving"
		} else {
			status = "not ready: " + err.Error()
		}
	}
	switch {
	case ending:
		status = "draining"
		if !r.stopping {
			r.stopping = true
			add(daemon.SdNotifyStopping)
		}
	case r.ready:
	case checks != nil && err == nil:
		r.ready = true
		add(daemon.SdNotifyReady)
	default:
		add("EXTEND_TIMEOUT_USEC=%d", startExtension.Microseconds())
	}
	if checks == nil || checks.alive == nil {
		add(daemon.SdNotifyWatchdog)
	} else if err := checks.alive(); err == nil {
		add(daemon.SdNotifyWatchdog)
	} else {
		status = "not alive: " + err.Error()
	}
	if status = strings.ReplaceAll(status, "\n", " "); status != r.status {
		r.status = status
		add("STATUS=%s", status)
	}
	r.send(strings.Join(lines, "\n"))
}

// Responsive returns a check for Watch and for /livez: ping, such as a call that a loop answers,
// must return within limit. At most one ping runs at a time, and it may run longer than the check
// that started it.
func Responsive(limit time.Duration, now func() time.Time, ping func()) func() error {
	var mu sync.Mutex
	var since time.Time // when the ping that runs began; zero: none runs
	return func() error {
		mu.Lock()
		defer mu.Unlock()
		if since.IsZero() {
			since = now()
			go func() {
				ping()
				mu.Lock()
				defer mu.Unlock()
				since = time.Time{}
			}()
			return nil
		}
		if late := now().Sub(since); late > limit {
			return fmt.Errorf("the loop has not answered for %v", late.Round(time.Second))
		}
		return nil
	}
}
