package prefill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/node"
	"github.com/tandem-serving/tandem/internal/obs/trace"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/prefill/line"
)

// job is one Prefill, or one Generate for a vector, from its queueing to its answer.
type job struct {
	key    key
	asked  *nodepb.Prefill    // of a Generate: its prompt
	vector *nodepb.Generate   // nil: a decode node asks for KV
	grant  chan *nodepb.Grant // capacity 1
	span   trace.Span

	// Guarded by Node.mu.
	ticket   line.ID // in the line, and in the engine
	admitted bool    // has asked for its grant
	stop     context.CancelCauseFunc
	timer    *time.Timer // JobTimeout
}

// run carries an admitted job to its answer.
func (n *Node) run(ctx context.Context, j *job) {
	defer n.Owners.Done()
	defer j.stop(nil)
	serve := n.serve
	if j.vector != nil {
		serve = n.pool
	}
	done, err := serve(ctx, j)
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx) // the cause, instead of an error that it led to
	}
	n.mu.Lock()
	n.remove(j, err)
	n.mu.Unlock()
	n.answer(j, err, done)
}

// unwanted reports whether a job's answer is not wanted any more. A decode node that gives up may
// end the lease before its Cancel arrives.
func unwanted(err error) bool {
	return errors.Is(err, errCancelled) || errors.Is(err, errGone) || errors.Is(err, kvtransfer.ErrCancelled)
}

// answer sends the job's result.
func (n *Node) answer(j *job, err error, done proto.Message) {
	if err == nil {
		t := rpc.FramePrefillDone
		if j.vector != nil {
			t = rpc.FrameVector
		}
		n.send(j.key, t, done)
		return
	}
	if unwanted(err) {
		return
	}
	n.log.Warn("prefill failed", "request", j.asked.RequestId, "tokens", len(j.asked.Tokens), "err", err)
	n.send(j.key, rpc.FrameEnd, &nodepb.End{Code: codeOf(err), Message: err.Error(), Attempt: j.vector.GetAttempt()})
}

func codeOf(err error) nodepb.Code {
	switch {
	case errors.Is(err, errDrained):
		return nodepb.Code_CODE_DRAINING
	case errors.Is(err, errNoGrant), errors.Is(err, errRefused), errors.Is(err, engine.ErrStuck), errors.Is(err, kvtransfer.ErrBusy):
		return nodepb.Code_CODE_OVERLOADED
	case errors.Is(err, errTimeout):
		return nodepb.Code_CODE_DEADLINE
	}
	return node.Code(err)
}

// serve asks for the grant, computes and pushes.
func (n *Node) serve(ctx context.Context, j *job) (proto.Message, error) {
	// Ask without knowing what the engine has cached: its answer would wait for the running step,
	// and the grant is to arrive during that step.
	n.send(j.key, rpc.FrameGrantRequest, &nodepb.GrantRequest{})
	j.span.Event("asked for a grant", time.Now())
	g, err := n.awaitGrant(ctx, j)
	if err != nil {
		n.update(func(l *line.Line) { l.Remove(j.ticket) })
		return nil, err
	}
	n.update(func(l *line.Line) { l.Grant(j.ticket) })
	if ctx.Err() != nil { // cancelled while the grant arrived: do not dial
		return nil, context.Cause(ctx)
	}
	push, err := n.o.Writer.Open(ctx, g.Grant, kvtransfer.PushOptions{})
	if err != nil {
		return nil, err
	}
	p := j.asked
	f := newFeed(n.o.Engine, int(g.From), len(p.Tokens))
	if push.Pages() != f.nPages || !slices.Equal(push.Runs(), f.runs) {
		err := fmt.Errorf("%w: %d pages (%v) for tokens [%d,%d), want %d (%v)", errRefused, push.Pages(), push.Runs(), g.From, g.UpTo, f.nPages, f.runs)
		return nil, errors.Join(err, push.Abort(err))
	}
	digest, _ := kvcache.ParseRootDigest(p.PrefixDigest) // checked
	ej := &engine.Job{
		Root: kvcache.Hash(p.PrefixRoot), RootDigest: digest, Tokens: p.Tokens, Priority: int(p.Priority), Ticket: j.ticket,
		Adapter: p.Adapter.GetName(), AdapterDigest: p.Adapter.GetDigest(), Direct: push.Direct(),
		First: f.first, Layer: f.layer, Done: func(err error) {
			n.update(func(l *line.Line) { l.Remove(j.ticket) })
			f.done(err)
		},
		OnFinish: func(l engine.RequestStats) { n.engineSpans(j, l) },
	}
	id, cached, err := n.o.Engine.AddJob(ej)
	if err != nil {
		return nil, errors.Join(err, push.Abort(err))
	}
	n.update(func(l *line.Line) { l.Cached(j.ticket, cached) })
	// The source blocks stay pinned until the push has ended.
	defer n.o.Engine.ReleaseJob(id, ej)
	err = f.pump(ctx, push, n.o.Engine.Progress)
	if err == nil {
		err = push.Wait(ctx)
	}
	landed := time.Now()
	t := f.transfer(landed)
	t.Bytes = push.Bytes()
	n.transferSpan(j, t, landed, err)
	if err == nil && n.o.Transferred != nil {
		n.o.Transferred(t)
	}
	if err != nil {
		if aerr := push.Abort(err); aerr != nil {
			n.log.Debug("abort of a push", "request", p.RequestId, "err", aerr)
		}
		return nil, err
	}
	return &nodepb.PrefillDone{ComputedTokens: uint32(len(p.Tokens) - cached), CachedTokens: uint32(cached)}, nil
}

// awaitGrant waits a bounded time for a grant and checks it.
func (n *Node) awaitGrant(ctx context.Context, j *job) (*nodepb.Grant, error) {
	timer := time.NewTimer(n.o.GrantTimeout)
	defer timer.Stop()
	select {
	case g := <-j.grant:
		switch {
		case g.Refused != 0:
			return nil, fmt.Errorf("%w: %s: %s", errRefused, g.Refused, g.Reason)
		case int(g.UpTo) != len(j.asked.Tokens) || g.From >= g.UpTo || int(g.From)%n.o.Engine.Align() != 0:
			return nil, fmt.Errorf("%w: it covers tokens [%d,%d) of %d", errRefused, g.From, g.UpTo, len(j.asked.Tokens))
		}
		return g, nil
	case <-timer.C:
		return nil, fmt.Errorf("%w: %v", errNoGrant, n.o.GrantTimeout)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// feed passes finished layers from the step goroutine, which must not wait, to the job's own
// goroutine. It holds at most one piece per layer and block of the prompt. Of each KV group it
// passes the places that the decode node will read. In the grant, the places of one group follow
// those of the group before.
type feed struct {
	kv     engine.KVSpec
	ranks  int // with pages of their own
	groups []kvcache.Group
	first  []int // [groups] first place
	end    []int // [groups] place after the last one
	at     []int // [groups] index of the first place in the grant
	nPages int
	runs   []kvtransfer.Run
	total  int // tokens

	mu     sync.Mutex
	sent   []int // [layers] blocks passed on, counted from first
	pieces []piece
	began  time.Time // of the first piece
	last   time.Time // end of the prompt's computation
	ended  bool
	err    error
	wake   chan struct{} // capacity 1
}

// piece is some consecutive blocks of one layer.
type piece struct {
	region int
	first  int     // index in the grant's pages
	src    []int32 // this node's blocks
}

func newFeed(e *engine.Engine, from, total int) *feed {
	f := &feed{kv: e.KV(), ranks: e.Workers(), groups: e.Groups(), total: total, wake: make(chan struct{}, 1)}
	var pages, of []int
	for g, spec := range f.groups {
		first, end := scheduler.Places(spec, from, total)
		f.first, f.end, f.at = append(f.first, first), append(f.end, end), append(f.at, f.nPages)
		pages, of = append(pages, end-first), append(of, f.kv.Groups[g].Layers*f.ranks)
		f.nPages += end - first
	}
	f.runs = kvtransfer.Runs(f.kv.Regions*f.ranks, pages, of)
	f.sent = make([]int, len(f.kv.Layers))
	return f
}

// layer is the engine's Job.Layer. It adds the blocks of the layer that are complete. The last
// block may be partial and is added when the prompt ends.
func (f *feed) layer(layer, upTo int, tables [][]kvcache.BlockID) {
	place := f.kv.Layers[layer]
	g := place.Group
	end := upTo / f.groups[g].BlockTokens
	if upTo == f.total {
		end = f.end[g]
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	first := f.sent[layer]
	if n := end - f.first[g]; n > first {
		src := make([]int32, n-first)
		for i := range src {
			src[i] = int32(tables[g][f.first[g]+first+i])
		}
		if f.began.IsZero() {
			f.began = time.Now()
		}
		for rank := range f.ranks { // each has part of the heads, in pages of its own
			f.pieces = append(f.pieces, piece{region: place.Region*f.ranks + rank, first: f.at[g] + first, src: src})
		}
		f.sent[layer] = n
	}
	f.poke()
}

// done is the engine's Job.Done.
func (f *feed) done(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ended, f.err, f.last = true, err, time.Now()
	f.poke()
}

// Transfer is the time of a push. Hidden is from its first block to the end of the prompt's
// computation, and Exposed from there until all had arrived, which delays the request.
type Transfer struct {
	First           time.Time
	Hidden, Exposed time.Duration
	Bytes           int64 // of pages
}

// transfer returns the times of a push that had arrived at landed. The last block may arrive before
// the step that computed it has ended: then all of the push was hidden.
func (f *feed) transfer(landed time.Time) Transfer {
	f.mu.Lock()
	defer f.mu.Unlock()
	computed := f.last
	if computed.IsZero() || computed.After(landed) {
		computed = landed
	}
	return Transfer{First: f.began, Hidden: computed.Sub(f.began), Exposed: landed.Sub(computed)}
}

func (f *feed) poke() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// take returns the pieces that are ready, and whether they are the last.
func (f *feed) take() (ps []piece, ended bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	ps, f.pieces = f.pieces, nil
	return ps, f.ended, f.err
}

// progressInterval is how often a push learns that the engine works, even while it works for other
// jobs. It is well below any useful lease duration.
const progressInterval = 500 * time.Millisecond

// pump pushes pieces as they become ready until the engine is done.
func (f *feed) pump(ctx context.Context, push *kvtransfer.Push, progress func() uint64) error {
	tick := time.NewTicker(progressInterval)
	defer tick.Stop()
	for {
		ps, ended, err := f.take()
		if err != nil {
			return err
		}
		for _, p := range ps {
			if err := push.Send(p.region, p.src, p.first); err != nil {
				return err
			}
		}
		push.Renew(progress())
		if ended {
			return nil
		}
		select {
		case <-f.wake:
		case <-tick.C:
		case <-push.Done():
			return push.Err()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
