package fleet

import (
	"math"
	"slices"
	"time"
)

// Transfers share the links of their two nodes (Kind.Link). A link is split equally among the
// transfers that have bytes to send: a transfer gets the least of Bandwidth, its share of the
// prefill node's link and its share of the decode node's link. What a transfer cannot use of a
// share, because its other link is slower, stays unused. So shares are never larger than those of
// max-min fairness, and a transfer that begins or ends changes only transfers of its two nodes.
//
// Bytes of a chunk, except those of its last layer, can be sent from the start of the chunk's step
// on, and the last layer from its end on.

// maxTransfer bounds the time of a transfer, so that times do not overflow.
const maxTransfer = 100_000 * time.Hour

// transfer is the KV of a prompt on its way over the links of its nodes.
type transfer struct {
	from, to *node
	released float64 // bytes that could be sent so far
	pending  float64 // of these, bytes that have not crossed at since
	rate     float64 // bytes per second; 0: there are none to send
	since    time.Duration
	plan     int    // alarms of earlier ones are void
	whole    bool   // all bytes are released
	arrived  func() // is called once, when all bytes have crossed
}

// release lets so many bytes of the whole transfer be sent, those of earlier calls included.
func (f *fleet) release(t *transfer, bytes float64, whole bool) {
	f.settle(t)
	t.pending += max(0, bytes-t.released)
	t.released = max(t.released, bytes)
	t.whole = whole
	switch {
	case t.pending > 0 && t.rate == 0:
		t.from.transfers, t.to.transfers = append(t.from.transfers, t), append(t.to.transfers, t)
		f.share(t.from, t.to)
	case t.pending > 0:
		f.setArrival(t)
	case whole:
		f.stop(t) // if the last byte crosses now
		t.arrived()
	}
}

// settle counts the bytes that have crossed until now.
func (f *fleet) settle(t *transfer) {
	t.pending = max(0, t.pending-t.rate*(f.clock.now-t.since).Seconds())
	t.since = f.clock.now
}

// share splits the links of two nodes among their transfers.
func (f *fleet) share(nodes ...*node) {
	for _, n := range nodes {
		for _, t := range n.transfers {
			rate := min(f.o.Bandwidth, t.from.linkShare(), t.to.linkShare())
			if rate != t.rate {
				f.settle(t)
				t.rate = rate
				f.setArrival(t)
			}
		}
	}
}

// linkShare returns the bytes per second of each transfer over the node's link.
func (n *node) linkShare() float64 {
	if n.kind.Link == 0 {
		return math.Inf(1)
	}
	return n.kind.Link / float64(len(n.transfers))
}

// setArrival sets the alarm for the time when the pending bytes have crossed.
func (f *fleet) setArrival(t *transfer) {
	t.plan++
	left := min(t.pending/t.rate, maxTransfer.Seconds())
	f.clock.planned(f.clock.now+time.Duration(math.Ceil(left*float64(time.Second))), &t.plan, func() {
		f.stop(t)
		if t.whole {
			t.arrived()
		}
	})
}

// stop removes a transfer from its links, because it has ended or has nothing to send.
func (f *fleet) stop(t *transfer) {
	t.plan++
	if t.rate == 0 {
		return
	}
	t.pending, t.rate = 0, 0
	for _, n := range []*node{t.from, t.to} {
		n.transfers = slices.DeleteFunc(n.transfers, func(o *transfer) bool { return o == t })
	}
	f.share(t.from, t.to)
}

// releaseChunks releases the KV of the running step's chunks: at the step's start without their
// last layer, and at its end with it.
func (n *node) releaseChunks(ended bool) {
	f := n.f
	if !n.computes || !f.links {
		return
	}
	for i := range n.batch.Seqs {
		q := &n.batch.Seqs[i]
		k := n.computing.get(uint64(q.ID))
		if k == nil {
			continue
		}
		tokens := float64(q.Start + len(q.Tokens) - k.from)
		if !ended {
			tokens -= float64(len(q.Tokens)) / float64(f.o.Layers)
		}
		f.release(f.transferOf(k), tokens*f.o.KVBytes, false)
	}
}

// transferOf returns the transfer of a job, which ends at the job's decode node.
func (f *fleet) transferOf(k *ask) *transfer {
	if k.transfer == nil {
		k.transfer = &transfer{from: k.p, to: k.a.n, since: f.clock.now, arrived: func() { f.clock.runAt(f.clock.now+f.o.Setup+f.o.RoundTrip/2, (*delivering)(k)) }}
	}
	return k.transfer
}
