package admit

import (
	"container/list"
	"errors"
	"fmt"
	"math"
	"slices"
)

// ErrBroken reports a violation that Check found.
var ErrBroken = errors.New("admit: invariant violated")

// Check verifies that the queue's sums are those of its requests, that every flow with requests is
// in its class's heap in order and not behind the class's virtual time, that requests of one size
// are in order of arrival, and that the limits hold.
func (q *Queue) Check() error {
	nItems, nTokens := 0, 0
	for n, c := range q.classes {
		if n > 0 && q.classes[n-1].priority >= c.priority {
			return fmt.Errorf("%w: priority %d before %d", ErrBroken, q.classes[n-1].priority, c.priority)
		}
		items, tokens, err := c.check()
		if err != nil {
			return err
		}
		nItems, nTokens = nItems+items, nTokens+tokens
	}
	switch {
	case nItems != q.nItems || nTokens != q.nTokens:
		return fmt.Errorf("%w: %d requests with %d tokens are counted as %d with %d", ErrBroken, nItems, nTokens, q.nItems, q.nTokens)
	case nItems > 1 && (nItems > q.limits.Requests || nTokens > q.limits.Tokens):
		return fmt.Errorf("%w: %d requests with %d tokens wait, %d with %d may", ErrBroken, nItems, nTokens, q.limits.Requests, q.limits.Tokens)
	case nItems == 0 && (len(q.classes) > 0 || !q.pace.since.IsZero()):
		return fmt.Errorf("%w: no request waits and %d priorities are kept", ErrBroken, len(q.classes))
	}
	return nil
}

func (c *class) check() (nItems, nTokens int, err error) {
	weight := 0.0
	var of [len(sizes)]*list.Element
	for size := range of {
		of[size] = c.bySize[size].Front()
	}
	for e := c.items.Front(); e != nil; e = e.Next() {
		i := e.Value.(*Item)
		at := &of[sizeOf(i.Tokens)]
		if *at == nil || *at != i.inSize {
			return 0, 0, fmt.Errorf("%w: request %d of %d tokens is in the wrong place of its size", ErrBroken, i.seq, i.Tokens)
		}
		*at = (*at).Next()
	}
	if size := slices.IndexFunc(of[:], func(e *list.Element) bool { return e != nil }); size >= 0 {
		return 0, 0, fmt.Errorf("%w: a request of at most %d tokens is gone and may pass", ErrBroken, sizes[size])
	}
	for at, s := range c.flows {
		tokens := 0
		for e := s.items.Front(); e != nil; e = e.Next() {
			i := e.Value.(*Item)
			if tokens += i.Tokens; i.share != s || i.Priority != c.priority || i.inShare != e {
				return 0, 0, fmt.Errorf("%w: request %d is in the wrong place", ErrBroken, i.seq)
			}
		}
		switch {
		case s.class != c || s.at != at || s.items.Len() == 0 || tokens != s.tokens:
			return 0, 0, fmt.Errorf("%w: a flow with %d requests at %d of priority %d", ErrBroken, s.items.Len(), at, c.priority)
		case s.vt < c.v:
			return 0, 0, fmt.Errorf("%w: a flow at %g behind its priority's %g", ErrBroken, s.vt, c.v)
		case at > 0 && c.flows.Less(at, (at-1)/2):
			return 0, 0, fmt.Errorf("%w: flows are out of order", ErrBroken)
		}
		nItems, nTokens, weight = nItems+s.items.Len(), nTokens+tokens, weight+s.flow.weight
	}
	if nItems != c.items.Len() || nTokens != c.tokens || math.Abs(weight-c.weight) > 1e-6*(1+weight) {
		return 0, 0, fmt.Errorf("%w: priority %d has %d requests with %d tokens and weight %g, counted %d, %d, %g",
			ErrBroken, c.priority, nItems, nTokens, weight, c.items.Len(), c.tokens, c.weight)
	}
	return nItems, nTokens, nil
}
