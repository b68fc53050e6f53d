package exchange

import (
	"sync"

	"github.com/tandem-serving/tandem/gateway/auth"
)

// running lists the requests that Abort can end: those that were prepared and have not ended. They
// link each other, so that a request allocates nothing for it.
type running struct {
	mu    sync.Mutex
	first *Exchange
}

func (l *running) add(x *Exchange) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if x.nextRunning = l.first; l.first != nil {
		l.first.prevRunning = x
	}
	l.first, x.listed = x, true
}

func (l *running) remove(x *Exchange) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !x.listed {
		return
	}
	if x.nextRunning != nil {
		x.nextRunning.prevRunning = x.prevRunning
	}
	if x.prevRunning != nil {
		x.prevRunning.nextRunning = x.nextRunning
	} else {
		l.first = x.nextRunning
	}
	x.nextRunning, x.prevRunning, x.listed = nil, nil, false
}

// Abort ends the requests for which match returns true, and returns their ids. key is that of the
// client, or nil. Requests that wait for room end with an error. The backend decides about others.
func (s *Service) Abort(match func(id string, key *auth.Key) bool) (ids []string) {
	l := &s.running
	l.mu.Lock()
	defer l.mu.Unlock()
	for x := l.first; x != nil; x = x.nextRunning {
		if id := string(x.ID); match(id, x.key) && !x.aborted.Swap(true) {
			if ids = append(ids, id); x.abort != nil {
				close(x.abort)
			}
			x.b.ClientGone()
		}
	}
	return ids
}

// Aborted reports whether Abort has ended the request.
func (x *Exchange) Aborted() bool { return x.aborted.Load() }

// abortion returns a channel that Abort closes.
func (x *Exchange) abortion() <-chan struct{} {
	l := &x.S.running
	l.mu.Lock()
	defer l.mu.Unlock()
	x.abort = make(chan struct{})
	if x.aborted.Load() {
		close(x.abort)
	}
	return x.abort
}
