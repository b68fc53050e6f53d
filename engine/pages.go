package engine

import (
	"errors"
	"fmt"
	"slices"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// mirrorOf returns the backend if its KVRegion is a copy, else nil.
func mirrorOf(b backend.Backend) backend.Mirror {
	if m, ok := b.(backend.Mirror); ok && m.Mirrored() {
		return m
	}
	return nil
}

// directOf returns the mirror if the network can reach its device's memory, else nil.
func directOf(m backend.Mirror) backend.Direct {
	d, _ := m.(backend.Direct)
	return d
}

// announceCached calls Layer for all layers of a job whose tokens were all cached.
func (e *Engine) announceCached(id scheduler.RequestID) {
	r := e.live[id]
	if r == nil || r.job == nil {
		return
	}
	tables := e.sched.Tables(id)
	e.pin(r, tables)
	if e.mirror != nil {
		e.resetFetch()
		e.addPushBlocks(r, tables, len(r.job.Tokens))
		err := e.fetchNow(r.job)
		if err != nil {
			e.log.Error("KV of a prompt cannot be copied from the device", "id", uint64(id), "err", err)
			e.abort(id)
			e.fail(id, fmt.Errorf("%w: %w", ErrStep, err))
			return
		}
	}
	for layer := range e.o.KV.Layers {
		r.job.Layer(layer, len(r.job.Tokens), tables)
	}
}

// fetchNow copies or checksums a job's blocks where its push will read them.
func (e *Engine) fetchNow(j *Job) error {
	if j.Direct {
		return e.direct.Digest(e.digest)
	}
	return e.mirror.Fetch(e.fetch)
}

// pin pins those of a job's blocks that its push reads. Its tables may hold other
// blocks than in the last step, after a cache hit or a preemption. Pins on the old
// blocks stay, because the push may be reading them.
func (e *Engine) pin(r *run, tables [][]kvcache.BlockID) {
	if r.pinned == nil {
		r.pinned = make([][]kvcache.BlockID, len(tables))
	}
	for g, blocks := range tables {
		first, pinned := 0, &r.pinned[g]
		if g < len(r.job.First) {
			first = r.job.First[g]
		}
		for i, id := range blocks {
			if i == len(*pinned) {
				*pinned = append(*pinned, kvcache.NoBlock)
			}
			if i < first || id == kvcache.NoBlock || (*pinned)[i] == id {
				continue
			}
			(*pinned)[i] = id
			e.sched.PinOut(blocks[i : i+1])
			r.job.held = append(r.job.held, id)
		}
	}
}

// addPushBlocks adds to e.fetch the blocks of a job's tables that its push reads and the
// mirror does not have yet; to e.digest if the push reads the device's memory. The
// first upTo tokens of the tables are computed.
func (e *Engine) addPushBlocks(r *run, tables [][]kvcache.BlockID, upTo int) {
	if r.fetched == nil {
		r.fetched = make([][]kvcache.BlockID, len(tables))
	}
	to := e.fetch
	if r.job.Direct {
		to = e.digest
	}
	for g, blocks := range tables {
		first, had := 0, &r.fetched[g]
		if g < len(r.job.First) {
			first = r.job.First[g]
		}
		for i, id := range blocks {
			if i == len(*had) {
				*had = append(*had, kvcache.NoBlock)
			}
			if i < first || id == kvcache.NoBlock || (*had)[i] == id {
				continue
			}
			to[g] = append(to[g], int32(id))
			if (i+1)*e.o.KV.Groups[g].BlockTokens <= upTo {
				(*had)[i] = id // else more tokens of the block follow
			}
		}
	}
}

// resetFetch empties e.fetch and e.digest.
func (e *Engine) resetFetch() {
	if e.fetch == nil {
		e.fetch, e.digest = make([][]int32, len(e.o.KV.Groups)), make([][]int32, len(e.o.KV.Groups))
	}
	for g := range e.fetch {
		e.fetch[g], e.digest[g] = e.fetch[g][:0], e.digest[g][:0]
	}
}

// arrival is a reservation that has landed and whose pages are being copied to the device, or
// verified there.
type arrival struct {
	res      scheduler.ReservationID
	request  scheduler.RequestID
	poll     backend.Arrival
	mismatch func() // called if the pages differ from their checksums; nil: none
}

// arrived accepts a reservation that has landed. If the device has its own memory, the
// pages are copied there, or, if they landed there, compared with their checksums. Meanwhile
// the step goroutine continues; see settleArrivals.
func (e *Engine) arrived(res scheduler.ReservationID, pages []backend.PageDigest, mismatch func()) {
	a := arrival{res: res, mismatch: mismatch}
	if r, live := e.sched.Reservation(res); e.mirror != nil && live {
		var err error
		if a.request = r.Request; len(pages) > 0 {
			a.poll, err = e.direct.Verify(pages)
		} else {
			a.poll, err = e.mirror.Land(e.reserved(&r))
		}
		if err != nil {
			e.refuseArrival(&a, err)
			return
		}
	}
	if !e.settle(&a) {
		e.arrivals = append(e.arrivals, a)
	}
}

// settle completes an arrival whose pages can be used and reports whether it has ended. If they
// cannot be used, the request computes here.
func (e *Engine) settle(a *arrival) bool {
	if a.poll != nil {
		complete, err := a.poll()
		if err != nil {
			e.refuseArrival(a, err)
			return true
		}
		if !complete {
			return false
		}
	}
	e.logErr("arrived", uint64(a.res), e.sched.Arrived(a.res))
	return true
}

// settleArrivals completes the arrivals that have ended.
func (e *Engine) settleArrivals() {
	e.arrivals = slices.DeleteFunc(e.arrivals, func(a arrival) bool { return e.settle(&a) })
}

// refuseArrival gives up a reservation whose pages cannot be used.
func (e *Engine) refuseArrival(a *arrival, err error) {
	e.log.Error("received KV cannot be used on the device", "reservation", uint64(a.res), "request", uint64(a.request), "err", err)
	e.logErr("release", uint64(a.res), e.sched.Release(a.res))
	e.logErr("proceed", uint64(a.request), e.sched.Proceed(a.request))
	if a.mismatch != nil && errors.Is(err, backend.ErrDigest) {
		a.mismatch()
	}
}

// reserved returns a reservation's blocks, until the next use of e.fetch.
func (e *Engine) reserved(r *scheduler.Reservation) [][]int32 {
	e.resetFetch()
	for g := range r.Groups {
		for _, id := range r.Groups[g].Blocks {
			e.fetch[g] = append(e.fetch[g], int32(id))
		}
	}
	return e.fetch
}
