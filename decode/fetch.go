package decode

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/decode/course"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/obs/trace"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/kvtransfer"
)

// Reader is what a decode node needs of kvtransfer: to admit a writer, and to revoke it.
// *kvtransfer.Reader is one.
type Reader interface {
	Grant(kvtransfer.GrantRequest) (kvtransfer.Grant, error)
	Cancel(kvtransfer.LeaseID) bool
}

// fetch is one Prefill sent to one node.
type fetch struct {
	key    key
	span   trace.Span
	events chan fetchEvent // from the prefill node
	moved  chan error      // capacity 1: the end of the lease, nil if the KV arrived
}

// fetchEvent is a Queued, GrantRequest or End of a prefill node.
type fetchEvent struct {
	frame rpc.Type
	err   error // of an End
}

// maxFetchEvents bounds a fetch's unread events. A well-behaved node sends two that matter. Queue
// positions may be dropped.
const maxFetchEvents = 16

// Errors after which a prompt is sent to the next prefill node.
var (
	errSilent   = errors.New("decode: prefill node sent nothing in time")
	errNoRoom   = errors.New("decode: no room for the KV in time")
	errMismatch = errors.New("decode: prefill node does not match")
	errPrefill  = errors.New("decode: prefill node gave up")
	errReach    = errors.New("decode: prefill node not reached")
	errGone     = errors.New("decode: prefill node's connection lost")
	errMoved    = errors.New("decode: KV did not arrive")
)

// fill gets a held request's KV by the request's course: from prefill nodes, in the order of the
// gateway's ranking, or, when none delivers, by computing it.
func (n *Node) fill(ctx context.Context, a *attempt, id scheduler.RequestID, g *nodepb.Generate, tokens []int32, cached int) {
	wanted := tokens[:len(tokens)-1]
	p := course.Prompt{UpTo: len(wanted), Cached: cached, Block: n.o.BlockTokens, Nodes: len(g.Prefill)}
	if p.Short() {
		n.mu.Lock()
		p.Moved = n.recent.has(n.recent.key(kvcache.Hash(g.PrefixRoot), wanted))
		n.mu.Unlock()
	}
	way := course.New(p)
	for {
		step, node := way.Next()
		switch step {
		case course.Compute:
			n.addCount(&n.count.LocalPrefills)
			n.o.Engine.Proceed(id)
			return
		case course.Stop:
			return
		}
		addr := g.Prefill[node]
		err := n.breakers.do(addr, func() error { return n.fetchFrom(ctx, a, id, g, addr, wanted, cached) })
		out := outcome(ctx, err)
		switch out {
		case course.Delivered:
			if p.Short() {
				n.mu.Lock()
				n.recent.add(n.recent.key(kvcache.Hash(g.PrefixRoot), wanted))
				n.mu.Unlock()
			}
		case course.Failed:
			n.addCount(&n.count.PrefillFailures)
			n.log.Warn("prefill node did not deliver", "request", a.request, "prefill", addr, "err", err)
		}
		way.Report(out)
	}
}

// outcome classifies the end of a fetch.
func outcome(ctx context.Context, err error) course.Outcome {
	switch {
	case err == nil:
		return course.Delivered
	case ctx.Err() != nil:
		return course.Over
	case errors.Is(err, scheduler.ErrNothingMissing), errors.Is(err, scheduler.ErrNeverFits):
		return course.Useless
	case errors.Is(err, errOpen):
		return course.Skipped
	}
	return course.Failed
}

func (n *Node) addCount(c *uint64) {
	n.mu.Lock()
	*c++
	n.mu.Unlock()
}

// fetchFrom asks one node and returns nil once all of its KV has arrived.
func (n *Node) fetchFrom(ctx context.Context, a *attempt, id scheduler.RequestID, g *nodepb.Generate, addr string, tokens []int32, cached int) (err error) {
	span := a.fetchSpan(addr, cached)
	defer func() {
		if err != nil && span.On() {
			span.Fail("prefill", err.Error())
		}
		span.End(time.Now())
	}()
	dctx, stop := context.WithTimeout(ctx, n.o.PrefillTimeout)
	conn, err := n.prefill.Get(dctx, addr)
	stop()
	switch {
	case err != nil && ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return fmt.Errorf("%w: %w", errReach, err)
	}
	if err := n.matches(conn.Peer()); err != nil {
		return err
	}
	f := &fetch{key: key{conn, conn.NewStream()}, span: span, events: make(chan fetchEvent, maxFetchEvents), moved: make(chan error, 1)}
	n.mu.Lock()
	n.fetches[f.key] = f
	n.mu.Unlock()
	defer func() {
		n.mu.Lock()
		delete(n.fetches, f.key)
		n.mu.Unlock()
	}()
	err = conn.Send(rpc.FramePrefill, f.key.stream, &nodepb.Prefill{
		RequestId: a.request, Attempt: a.number, Tokens: tokens, Have: uint32(cached),
		PrefixRoot: g.PrefixRoot, PrefixDigest: g.PrefixDigest, Fingerprint: n.o.Identity.Fingerprint,
		NumericsClass: n.o.Identity.Class, Layout: n.o.Identity.Layout, Kv: n.o.Identity.KV, Priority: g.Priority, Trace: span.Context(),
		Adapter: g.Adapter,
	})
	if err != nil {
		return err
	}
	l, err := n.await(ctx, id, f, len(tokens))
	if err == nil || n.giveUp(l) {
		return nil
	}
	// In any case the prefill node is to stop computing.
	if cerr := conn.Send(rpc.FrameCancel, f.key.stream, &nodepb.Cancel{Reason: err.Error()}); cerr != nil {
		n.log.Debug("cancel not sent", "prefill", addr, "err", cerr)
	}
	return err
}

// matches refuses a node whose KV would differ from this node's own.
func (n *Node) matches(p *nodepb.Hello) error {
	switch id := n.o.Identity; {
	case p.GetFingerprint() != id.Fingerprint:
		return fmt.Errorf("%w: model fingerprint %016x there, %016x here", errMismatch, p.GetFingerprint(), id.Fingerprint)
	case p.GetNumericsClass() != id.Class:
		return fmt.Errorf("%w: numerics class %q there, %q here", errMismatch, p.GetNumericsClass(), id.Class)
	}
	return nil
}

// await follows a Prefill until its KV has arrived. It returns the lease that was granted
// meanwhile; nil: none.
func (n *Node) await(ctx context.Context, id scheduler.RequestID, f *fetch, upTo int) (*lease, error) {
	var l *lease
	silence := time.NewTimer(n.o.PrefillTimeout)
	defer silence.Stop()
	for {
		select {
		case <-ctx.Done():
			return l, context.Cause(ctx)
		case <-f.key.conn.Done():
			return l, fmt.Errorf("%w: %w", errGone, f.key.conn.Err())
		case <-silence.C:
			return l, fmt.Errorf("%w: %v", errSilent, n.o.PrefillTimeout)
		case err := <-f.moved:
			if err != nil {
				err = fmt.Errorf("%w: %w", errMoved, err)
			}
			return l, err
		case ev := <-f.events:
			switch ev.frame {
			case rpc.FrameQueued:
				if l == nil { // a late position does not restart the timer
					silence.Reset(n.o.PrefillTimeout)
				}
			case rpc.FrameGrantRequest:
				if l != nil {
					return l, fmt.Errorf("%w: asked for a second grant", errPrefill)
				}
				var err error
				if l, err = n.grant(ctx, id, f, upTo); err != nil {
					return l, err
				}
				silence.Stop() // from now on LeaseDuration bounds it
			case rpc.FrameEnd:
				return l, ev.err
			}
		}
	}
}

// grant reserves blocks, waiting a bounded time for room, and lets the prefill node write into
// them.
func (n *Node) grant(ctx context.Context, id scheduler.RequestID, f *fetch, upTo int) (*lease, error) {
	res, err := n.reserve(ctx, id, f, upTo)
	if err != nil {
		n.refuseGrant(f, err)
		return nil, err
	}
	kv, ranks := n.o.Engine.KV(), n.o.Engine.Workers()
	var pages []int32 // group by group
	var counts, of []int
	for i, g := range res.Groups {
		for _, b := range g.Blocks {
			pages = append(pages, int32(b))
		}
		counts, of = append(counts, len(g.Blocks)), append(of, kv.Groups[i].Layers*ranks)
	}
	n.mu.Lock() // the lease must be registered before its first event
	g, err := n.o.Reader.Grant(kvtransfer.GrantRequest{
		Pages: pages, Runs: kvtransfer.Runs(kv.Regions*ranks, counts, of), Duration: n.o.LeaseDuration,
	})
	if err != nil {
		n.o.Engine.Lost(res.ID)
		n.o.Engine.Release(res.ID)
		n.mu.Unlock()
		n.refuseGrant(f, err)
		return nil, err
	}
	l := &lease{id: g.Lease, res: res.ID, fetch: f}
	n.leases[l.id] = l
	n.mu.Unlock()
	f.span.Event("granted", time.Now())
	err = f.key.conn.Send(rpc.FrameGrant, f.key.stream, &nodepb.Grant{
		Grant: g.Wire, From: uint32(res.From), UpTo: uint32(res.UpTo),
	})
	return l, err
}

func (n *Node) refuseGrant(f *fetch, err error) {
	m := &nodepb.Grant{Refused: nodepb.Code_CODE_OVERLOADED, Reason: err.Error()}
	if serr := f.key.conn.Send(rpc.FrameGrant, f.key.stream, m); serr != nil {
		n.log.Debug("refusal not sent", "err", serr)
	}
}

// reserved is the result of a reservation.
type reserved struct {
	res scheduler.Reservation
	err error
}

// reserve takes blocks. Without room it waits for a bounded time, in the order in which grants were
// requested. The prefill node is notified and computes for others meanwhile. A prefill node of the
// previous version ignores that and waits.
func (n *Node) reserve(ctx context.Context, id scheduler.RequestID, f *fetch, upTo int) (scheduler.Reservation, error) {
	ready := make(chan reserved, 1)
	res, err := n.o.Engine.ReserveInTurn(id, upTo, func(res scheduler.Reservation, err error) { ready <- reserved{res, err} })
	if err == nil || !errors.Is(err, scheduler.ErrNoRoom) || errors.Is(err, scheduler.ErrNeverFits) {
		return res, err
	}
	f.span.Event("no room yet", time.Now())
	if serr := f.key.conn.Send(rpc.FrameQueued, f.key.stream, &nodepb.Queued{}); serr != nil {
		n.log.Debug("wait not sent", "err", serr)
	}
	deadline := time.NewTimer(n.o.GrantTimeout)
	defer deadline.Stop()
	select {
	case r := <-ready:
		return r.res, r.err
	case <-deadline.C:
		err = fmt.Errorf("%w: %v: %w", errNoRoom, n.o.GrantTimeout, err)
	case <-f.key.conn.Done():
		err = fmt.Errorf("%w: %w", errGone, f.key.conn.Err())
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if n.o.Engine.StopWaiting(id) {
		return res, err
	}
	r := <-ready // granted at the same time
	if r.err == nil && !errors.Is(err, errNoRoom) {
		n.o.Engine.Lost(r.res.ID) // no writer will use it
		n.o.Engine.Release(r.res.ID)
		return res, err
	}
	return r.res, r.err
}

// push queues an event for the goroutine that awaits. It never blocks. It closes the connection of
// a peer that floods a fetch with events other than queue positions.
func (f *fetch) push(frame rpc.Type, err error) {
	select {
	case f.events <- fetchEvent{frame, err}:
	default:
		if frame != rpc.FrameQueued {
			f.key.conn.Close(fmt.Errorf("%w: more than %d unread events on one stream", errPrefill, maxFetchEvents))
		}
	}
}

// prefillHandler handles the frames of connections to prefill nodes.
type prefillHandler struct{ n *Node }

// Frame passes a prefill node's message to its fetch.
func (h prefillHandler) Frame(c *rpc.Conn, t rpc.Type, stream uint64, payload []byte) {
	n := h.n
	n.mu.Lock()
	f := n.fetches[key{c, stream}]
	n.mu.Unlock()
	if f == nil {
		return // the fetch has ended
	}
	switch t {
	case rpc.FrameQueued, rpc.FrameGrantRequest:
		f.push(t, nil)
	case rpc.FramePrefillDone:
		// The transfer's Arrived event decides.
	case rpc.FrameEnd:
		e := new(nodepb.End)
		if err := proto.Unmarshal(payload, e); err != nil {
			e.Message = err.Error()
		}
		f.push(t, fmt.Errorf("%w: %s: %s", errPrefill, e.Code, e.Message))
	default:
		n.log.Debug("frame ignored", "type", t, "peer", c.RemoteAddr())
	}
}

// Closed does nothing, because fetches watch their connection.
func (h prefillHandler) Closed(*rpc.Conn, error) {}
