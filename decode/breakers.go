package decode

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/internal/breaker"
	"github.com/tandem-serving/tandem/internal/rpc"
)

// Bounds of the breakers of prefill nodes.
const (
	// breakerFailures in a row open a breaker, because each may have cost a request PrefillTimeout.
	breakerFailures = 3
	// breakerPause is how long an open breaker refuses requests. Then one request is let through,
	// so that a prefill node that is back is used again within this time.
	breakerPause = time.Second
	// maxBreakers bounds the prefill nodes that are remembered.
	maxBreakers = 4096
)

// errOpen reports that a prefill node is skipped, because it has failed too often.
var errOpen = errors.New("decode: prefill node's breaker is open")

// prefillBreakers are the breakers of the connections from this node to each prefill node. A
// connection may fail that only this node sees: the gateway reaches both of its ends.
type prefillBreakers struct {
	mu sync.Mutex
	by map[string]*breaker.Breaker // by rpc address
}

// do calls f, which asks the node, or returns errOpen.
func (p *prefillBreakers) do(addr string, f func() error) error {
	err := p.breaker(addr).Do(f)
	if breaker.Refused(err) {
		return fmt.Errorf("%w: %s", errOpen, addr)
	}
	return err
}

// breaker returns a node's breaker, and makes it if there is none.
func (p *prefillBreakers) breaker(addr string) *breaker.Breaker {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := p.by[addr]
	if b == nil {
		if len(p.by) >= maxBreakers { // their state is a second old at most
			clear(p.by)
		}
		b = breaker.New(breaker.Options{
			Failures: breakerFailures, Pause: breakerPause, Ignore: func(err error) bool { return err != nil && !broken(err) },
		})
		p.by[addr] = b
	}
	return b
}

// broken reports whether an error is evidence against the connection to a node: the node could not
// be reached, sent nothing, disconnected, or its KV did not arrive. A refusal by the node, a client
// that leaves, and a lack of room on this node are not.
func broken(err error) bool {
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, rpc.ErrBackoff), errors.Is(err, ErrCancelled), errors.Is(err, ErrDeadline), errors.Is(err, ErrGatewayGone), errors.Is(err, ErrDrained):
		return false
	}
	return errors.Is(err, errReach) || errors.Is(err, errSilent) || errors.Is(err, errGone) || errors.Is(err, errMoved)
}

// PrefillBreakers returns the number of prefill nodes whose breaker is in the state: closed,
// half-open or open.
func (n *Node) PrefillBreakers(state string) (count int) {
	n.breakers.mu.Lock()
	defer n.breakers.mu.Unlock()
	for _, b := range n.breakers.by {
		if b.State() == state {
			count++
		}
	}
	return count
}
