package kvcache

// EventKind is the kind of a change of the prefix cache.
type EventKind uint8

// The kinds of Event.
const (
	Stored  EventKind = iota + 1 // blocks with this hash can be found
	Removed                      // no block with this hash is left
)

// Event is a change of a group's cached blocks, published for routers. Parent is the
// hash of the block before, or the root.
type Event struct {
	Kind         EventKind
	Group        int
	Hash, Parent Hash
}

// eventRing keeps the newest events until they are drained. It grows as far as it is used.
type eventRing struct {
	buf  []Event
	most int  // length of buf
	head int  // index of the oldest
	n    int  // events in buf
	gap  bool // older ones were dropped since the last drain
}

// firstEvents is the number of events that a ring has room for when it gets the first one.
const firstEvents = 64

func (r *eventRing) push(e Event) {
	switch {
	case r.n < len(r.buf):
	case r.n < r.most:
		buf := make([]Event, min(max(firstEvents, 2*r.n), r.most))
		copy(buf[copy(buf, r.buf[r.head:]):], r.buf[:r.head])
		r.buf, r.head = buf, 0
	default:
		r.head = (r.head + 1) % len(r.buf)
		r.n--
		r.gap = true
	}
	r.buf[(r.head+r.n)%len(r.buf)] = e
	r.n++
}

// Events appends the events since the last call to dst, oldest first, and removes them
// from the pool. gap means that older events were dropped because the ring was full.
// The reader then needs a snapshot (AppendHashed).
func (p *Pool) Events(dst []Event) (events []Event, gap bool) {
	r := &p.events
	for ; r.n > 0; r.n-- {
		dst = append(dst, r.buf[r.head])
		r.head = (r.head + 1) % len(r.buf)
	}
	gap, r.gap = r.gap, false
	return dst, gap
}

// HasEvents reports whether Events would return an event.
func (p *Pool) HasEvents() bool { return p.events.n > 0 }

// AppendHashed appends a Stored event for every hashed block, in block order. Later
// events continue this snapshot. A hash that two blocks of a group share comes twice.
func (p *Pool) AppendHashed(dst []Event) []Event {
	for i := range p.blocks {
		if b, c := &p.blocks[i], &p.contents[i]; b.hashed {
			dst = append(dst, Event{Kind: Stored, Group: int(b.group), Hash: c.hash, Parent: c.parent})
		}
	}
	return dst
}
