package engine

import (
	"fmt"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/kvcache"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// mirrorOf is the backend where its KVRegion is a copy, nil elsewhere.
func mirrorOf(b backend.Backend) backend.Mirror {
	if m, ok := b.(backend.Mirror); ok && m.Mirrored() {
		return m
	}
	return nil
}

// directOf is a mirror that others can go past, nil elsewhere.
func directOf(m backend.Mirror) backend.Direct {
	d, _ := m.(backend.Direct)
	return d
}

// announceCached tells a job whose tokens were all cached that its layers are
// in place.
func (e *Engine) announceCached(id scheduler.RequestID) {
	r := e.live[id]
	if r == nil || r.job == nil {
		return
	}
	tables := e.sched.Tables(id)
	e.pin(r, tables)
	if e.mirror != nil {
		e.fetchNothing()
		e.wanted(r, tables, len(r.job.Tokens))
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

// fetchNow has what a job wants looked at where it will be read.
func (e *Engine) fetchNow(j *Job) error {
	if j.Direct {
		return e.direct.Digest(e.digest)
	}
	return e.mirror.Fetch(e.fetch)
}

// pin keeps those of a job's blocks from reuse that its push reads. Its tables
// may name other blocks than in the last step, where the cache had the content
// or after a preemption; pins on the old ones stay, they may be being read.
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

// wanted adds to e.fetch the blocks of a job's tables, of which the first upTo tokens
// are there, that its push reads and that the mirror does not have yet; to e.digest
// where the push reads the device's memory.
func (e *Engine) wanted(r *run, tables [][]kvcache.BlockID, upTo int) {
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
				(*had)[i] = id // else there is more to come
			}
		}
	}
}

// fetchNothing empties e.fetch and e.digest.
func (e *Engine) fetchNothing() {
	if e.fetch == nil {
		e.fetch, e.digest = make([][]int32, len(e.o.KV.Groups)), make([][]int32, len(e.o.KV.Groups))
	}
	for g := range e.fetch {
		e.fetch[g], e.digest[g] = e.fetch[g][:0], e.digest[g][:0]
	}
}

// arrived takes what has landed. Where the device has memory of its own it goes there
// first, or, where that is where it landed, is held against its checksums there; if
// it cannot, or does not match, the request computes here.
func (e *Engine) arrived(res scheduler.ReservationID, pages []backend.PageDigest) error {
	if e.mirror != nil {
		r, live := e.sched.Reservation(res)
		if live {
			if err := e.bring(&r, pages); err != nil {
				e.log.Error("KV that arrived cannot be used on the device", "reservation", uint64(res), "request", uint64(r.Request), "err", err)
				e.logErr("release", uint64(res), e.sched.Release(res))
				e.logErr("proceed", uint64(r.Request), e.sched.Proceed(r.Request))
				return err
			}
		}
	}
	e.logErr("arrived", uint64(res), e.sched.Arrived(res))
	return nil
}

// bring has a reservation's pages on the device: those that are there it verifies.
func (e *Engine) bring(r *scheduler.Reservation, pages []backend.PageDigest) error {
	if len(pages) > 0 {
		return e.direct.Verify(pages)
	}
	e.fetchNothing()
	for g := range r.Groups {
		for _, id := range r.Groups[g].Blocks {
			e.fetch[g] = append(e.fetch[g], int32(id))
		}
	}
	return e.mirror.Land(e.fetch)
}
