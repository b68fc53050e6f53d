package prefill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/tandem-serving/tandem/engine"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
	"github.com/tandem-serving/tandem/internal/obs/trace"
	"github.com/tandem-serving/tandem/internal/rpc"
	"github.com/tandem-serving/tandem/internal/rpc/nodepb"
	"github.com/tandem-serving/tandem/kvtransfer"
	"github.com/tandem-serving/tandem/prefill/line"
)

// job is one Prefill from its queueing to its answer.
type job struct {
	key      key
	request  string
	root     kvcache.Hash
	digest   kvcache.RootDigest
	tokens   []int32
	priority int
	adapter  *nodepb.Adapter    // nil: none
	grant    chan *nodepb.Grant // capacity 1
	span     trace.Span

	// Guarded by Node.mu.
	ticket   line.ID // in the line, and in the engine
	admitted bool    // has asked for its grant
	stop     context.CancelCauseFunc
	timer    *time.Timer // JobTimeout
}

func newJob(k key, p *nodepb.Prefill) *job {
	digest, _ := kvcache.ParseRootDigest(p.PrefixDigest) // checked
	return &job{
		key: k, request: p.RequestId, root: kvcache.Hash(p.PrefixRoot), digest: digest, tokens: p.Tokens,
		priority: int(p.Priority), adapter: p.Adapter, grant: make(chan *nodepb.Grant, 1),
	}
}

// granted hands over decode's answer; a second one is ignored.
func (j *job) granted(g *nodepb.Grant) {
	select {
	case j.grant <- g:
	default:
	}
}

// run carries an admitted job to its answer.
func (n *Node) run(ctx context.Context, j *job) {
	defer n.wg.Done()
	defer j.stop(nil)
	done, err := n.serve(ctx, j)
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx) // what ended it, rather than what that broke
	}
	n.mu.Lock()
	n.forget(j, err)
	n.mu.Unlock()
	n.answer(j, err, done)
}

// unwanted says that nobody waits for a job's answer. A decode node that gives up
// may be heard first by its lease.
func unwanted(err error) bool {
	return errors.Is(err, errCancelled) || errors.Is(err, errGone) || errors.Is(err, kvtransfer.ErrCancelled)
}

// answer says the job's last word.
func (n *Node) answer(j *job, err error, done *nodepb.PrefillDone) {
	if err == nil {
		n.send(j.key, rpc.FramePrefillDone, done)
		return
	}
	if unwanted(err) {
		return
	}
	n.log.Warn("prefill failed", "request", j.request, "tokens", len(j.tokens), "err", err)
	n.send(j.key, rpc.FrameEnd, &nodepb.End{Code: codeOf(err), Message: err.Error()})
}

func codeOf(err error) nodepb.Code {
	switch {
	case errors.Is(err, errDrained), errors.Is(err, engine.ErrClosed), errors.Is(err, engine.ErrLost):
		return nodepb.Code_CODE_DRAINING
	case errors.Is(err, errNoGrant), errors.Is(err, errRefused), errors.Is(err, scheduler.ErrQueueFull), errors.Is(err, engine.ErrStuck), errors.Is(err, kvtransfer.ErrBusy):
		return nodepb.Code_CODE_OVERLOADED
	case errors.Is(err, errTimeout):
		return nodepb.Code_CODE_DEADLINE
	case errors.Is(err, engine.ErrToken), errors.Is(err, scheduler.ErrTooLong):
		return nodepb.Code_CODE_INVALID
	case errors.Is(err, engine.ErrAdapter):
		return nodepb.Code_CODE_MISMATCH
	}
	return nodepb.Code_CODE_INTERNAL
}

// serve asks for the grant, computes and pushes.
func (n *Node) serve(ctx context.Context, j *job) (*nodepb.PrefillDone, error) {
	// At once, without asking the engine what it has cached: the answer would
	// wait for the running step, and the grant is to travel during it.
	n.send(j.key, rpc.FrameGrantRequest, &nodepb.GrantRequest{})
	j.span.Event("asked for a grant", time.Now())
	g, err := n.awaitGrant(ctx, j)
	n.grantEnded(j, err == nil)
	if err != nil {
		return nil, err
	}
	if ctx.Err() != nil { // the grant and the end came together: nobody is dialled for it
		return nil, context.Cause(ctx)
	}
	push, err := n.o.Writer.Open(ctx, g.Grant, kvtransfer.PushOptions{})
	if err != nil {
		return nil, err
	}
	f := newFeed(n.o.Engine, int(g.From), len(j.tokens))
	if push.Pages() != f.nPages || !slices.Equal(push.Runs(), f.runs) {
		err := fmt.Errorf("%w: %d pages (%v) for tokens [%d,%d), want %d (%v)", errRefused, push.Pages(), push.Runs(), g.From, g.UpTo, f.nPages, f.runs)
		return nil, errors.Join(err, push.Abort(err))
	}
	ej := &engine.Job{
		Root: j.root, RootDigest: j.digest, Tokens: j.tokens, Priority: j.priority, Ticket: j.ticket, Adapter: j.adapter.GetName(), AdapterDigest: j.adapter.GetDigest(), Direct: push.Direct(),
		First: f.first, Layer: f.layer, Done: func(err error) { n.computed(j); f.done(err) },
		OnFinish: func(l engine.RequestStats) { n.engineSpans(j, l) },
	}
	id, cached, err := n.o.Engine.AddJob(ej)
	if err != nil {
		return nil, errors.Join(err, push.Abort(err))
	}
	n.cachedHere(j, cached)
	// The source blocks stay pinned until the push reads them no more.
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
			n.log.Debug("abort of a push", "request", j.request, "err", aerr)
		}
		return nil, err
	}
	return &nodepb.PrefillDone{ComputedTokens: uint32(len(j.tokens) - cached), CachedTokens: uint32(cached)}, nil
}

// awaitGrant waits a bounded time and checks what comes.
func (n *Node) awaitGrant(ctx context.Context, j *job) (*nodepb.Grant, error) {
	timer := time.NewTimer(n.o.GrantTimeout)
	defer timer.Stop()
	select {
	case g := <-j.grant:
		switch {
		case g.Refused != 0:
			return nil, fmt.Errorf("%w: %s: %s", errRefused, g.Refused, g.Reason)
		case int(g.UpTo) != len(j.tokens) || g.From >= g.UpTo || int(g.From)%n.o.Engine.Align() != 0:
			return nil, fmt.Errorf("%w: it covers tokens [%d,%d) of %d", errRefused, g.From, g.UpTo, len(j.tokens))
		}
		return g, nil
	case <-timer.C:
		return nil, fmt.Errorf("%w: %v", errNoGrant, n.o.GrantTimeout)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// feed takes finished layers from the step goroutine, which must not wait, to
// the job's own goroutine, which may. It holds at most one piece per layer and
// block of the prompt. Of each group it takes the places that decode will read,
// which stand one group after the other in the grant.
type feed struct {
	kv     engine.KVSpec
	ranks  int // that have pages of their own
	groups []kvcache.Group
	first  []int // [groups] place of the first one wanted
	end    []int // [groups] place after the last one
	at     []int // [groups] index of the first one in the grant
	nPages int
	runs   []kvtransfer.Run
	total  int // tokens

	mu     sync.Mutex
	sent   []int // [layers] blocks handed on, counted from first
	pieces []piece
	began  time.Time // when the first piece was there
	last   time.Time // when the engine was done
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

// layer is the engine's Job.Layer: it files the blocks of this layer that have
// become complete. The last block may be a partial one and goes when the
// prompt ends.
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
		for rank := range f.ranks { // each has a part of the heads in pages of its own
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

// Transfer is a push's time: from its first block to the end of the prompt's
// computation, which hides it, and from there until all had landed, which the
// request waits for.
type Transfer struct {
	First           time.Time
	Hidden, Exposed time.Duration
	Bytes           int64 // of pages
}

// transfer is the feed's, which had landed at a time. The last block may land
// before the step that computed it has ended: then all of it was hidden.
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

// take returns what is ready, and whether that was all.
func (f *feed) take() (ps []piece, ended bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	ps, f.pieces = f.pieces, nil
	return ps, f.ended, f.err
}

// progressInterval is how often a push learns that the engine works, also when
// it works for others first; well below any sensible lease.
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
