package decode

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sony/gobreaker/v2"

	"github.com/tandem-serving/tandem/internal/rpc"
)

// Bounds of the breakers towards prefill nodes.
const (
	// legFailures in a row open a leg: each may have cost a request PrefillTimeout.
	legFailures = 3
	// legPause is how long an open leg is not tried; then one request tries it. A
	// prefill node that is back is used again within this.
	legPause = time.Second
	// maxLegs bounds the prefill nodes that are remembered.
	maxLegs = 4096
)

// errLeg: a prefill node is passed over, because it has failed again and again.
var errLeg = errors.New("decode: prefill node's breaker is open")

// legs are the breakers of the ways from this node to each prefill node. A way can
// be broken that nobody else sees: the gateway reaches both ends of it.
type legs struct {
	mu sync.Mutex
	by map[string]*gobreaker.CircuitBreaker[struct{}] // by rpc address
}

// do has f ask the node, or returns errLeg.
func (l *legs) do(addr string, f func() error) error {
	_, err := l.leg(addr).Execute(func() (struct{}, error) { return struct{}{}, f() })
	if errors.Is(err, gobreaker.ErrOpenState) || errors.Is(err, gobreaker.ErrTooManyRequests) {
		return fmt.Errorf("%w: %s", errLeg, addr)
	}
	return err
}

// leg finds a node's breaker or makes it.
func (l *legs) leg(addr string) *gobreaker.CircuitBreaker[struct{}] {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.by[addr]
	if b == nil {
		if len(l.by) >= maxLegs { // nodes come and go, and what is known of them is a second old
			clear(l.by)
		}
		b = gobreaker.NewCircuitBreaker[struct{}](gobreaker.Settings{
			Name: addr, Timeout: legPause,
			ReadyToTrip: func(c gobreaker.Counts) bool { return c.ConsecutiveFailures >= legFailures },
			IsExcluded:  func(err error) bool { return err != nil && !broken(err) },
		})
		l.by[addr] = b
	}
	return b
}

// states counts the legs by the state of their breaker.
func (l *legs) states(state string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, b := range l.by {
		if b.State().String() == state {
			n++
		}
	}
	return n
}

// broken says that an error tells of the way to a node: it could not be reached,
// said nothing, went away, or its KV did not arrive. A node that says no, a client
// that leaves, and a want of room here tell nothing.
func broken(err error) bool {
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, rpc.ErrBackoff), errors.Is(err, ErrCancelled), errors.Is(err, ErrDeadline), errors.Is(err, ErrGatewayGone), errors.Is(err, ErrDrained):
		return false
	}
	return errors.Is(err, errReach) || errors.Is(err, errSilent) || errors.Is(err, errGone) || errors.Is(err, errMoved)
}

// PrefillLegs is the number of prefill nodes whose breaker is in the state:
// closed, half-open or open.
func (n *Node) PrefillLegs(state string) int { return n.legs.states(state) }
