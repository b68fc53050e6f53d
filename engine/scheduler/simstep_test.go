package scheduler

import (
	"errors"
	"fmt"
	"slices"

	"github.com/tandem-serving/tandem/engine/kvcache"
)

// step schedules, runs the device and updates, with events in between.
func (m *sim) step() error {
	before := m.s.Stats()
	where := make([]requestState, len(m.live))
	held := map[*request]bool{}
	for i, q := range m.live {
		where[i] = q.r.state
		if q.r.state == stateHeld && q.r.nBlocks() > 0 {
			held[q.r] = true
		}
	}
	m.scoreLimit = 0
	if m.rng.IntN(3) == 0 {
		m.scoreLimit = 1 + m.rng.IntN(4)
	}
	m.s.LimitScores(m.scoreLimit)
	for _, q := range m.live {
		q.sitsOut = m.sitting != nil && !m.draining && !q.ComputeOnly && m.sitting.IntN(10) == 0
		m.s.SitOut(q.ID, q.sitsOut)
	}
	b := m.s.Schedule(m.now)
	m.stepping = true
	m.batch, m.completed = nil, nil
	for _, q := range m.live {
		if held[q.r] && q.r.nBlocks() == 0 {
			m.n["reclaimed-held"]++
			if q.r.reservation != nil {
				m.n["reclaimed-held-reserved"]++
			}
		}
	}
	if err := m.checkBatch(b, before, where); err != nil {
		return fmt.Errorf("batch: %w", err)
	}
	if err := m.after("Schedule"); err != nil {
		return err
	}
	for {
		if err := m.meanwhile(); err != nil {
			return err
		}
		f, err := m.fly()
		if err != nil {
			return fmt.Errorf("ahead: %w", err)
		}
		results, err := m.run(b)
		if err != nil {
			return err
		}
		if err := m.end(b, results); err != nil || f == nil {
			return err
		}
		if b, err = m.land(f, b, results); err != nil {
			return err
		}
	}
}

// end is the end of a step.
func (m *sim) end(b Batch, results []Result) error {
	if err := m.meanwhile(); err != nil {
		return err
	}
	var own [][]kvcache.BlockID
	for _, seq := range b.Seqs {
		own = append(own, slices.Clone(seq.Tables[0]))
	}
	batch := m.s.batch // as the scheduler sees it
	done := m.s.Update(b, results)
	m.stepping = m.s.stepping
	for i, seq := range batch.Seqs {
		if !slices.Equal(seq.Tables[0], own[i]) && m.groups[0].Window == 0 {
			m.n["same-block-kept"]++
		}
	}
	if err := m.checkDone(b, results, done); err != nil {
		return err
	}
	return m.after("Update")
}

// meanwhile is what happens while a step runs.
func (m *sim) meanwhile() error {
	for n := m.rng.IntN(3); n > 0 && !m.draining; n-- {
		if err := m.event(); err != nil {
			return fmt.Errorf("in step: %w", err)
		}
	}
	return nil
}

func (m *sim) checkBatch(b Batch, before Stats, where []requestState) error {
	if len(b.Seqs)+len(b.Completed) == 0 {
		m.n["empty-step"]++
		st := m.s.Stats()
		sits := slices.ContainsFunc(m.live, func(q *simRequest) bool { return q.sitsOut })
		if st.Running+st.Waiting > 0 && st.Blocks.Arriving+st.Blocks.Leaving == 0 && !sits {
			return fmt.Errorf("is empty with nothing in the way: %+v", st)
		}
	}
	for _, id := range b.Preempted {
		q := m.find(id)
		q.preempted = true
		switch i := slices.Index(m.live, q); {
		case where[i] == stateWaiting:
			m.n["preempted-waiting"]++
		case slices.Contains(m.s.placed, q.r):
			m.n["preempted-in-batch"]++
		default:
			m.n["preempted-running"]++
		}
	}
	tokens, single, rows := 0, true, 0
	for _, seq := range b.Seqs {
		q := m.find(seq.ID)
		if q == nil || slices.Contains(m.batch, q) || slices.Contains(b.Preempted, seq.ID) {
			return fmt.Errorf("has request %d, which is gone, preempted, or there twice", seq.ID)
		}
		m.batch = append(m.batch, q)
		if q.sitsOut {
			if m.n["sat-out-chunk"]++; seq.Sample {
				return fmt.Errorf("samples for request %d, which sits out", seq.ID)
			}
		}
		tokens += len(seq.Tokens)
		if err := m.checkRows(q, seq); err != nil {
			return err
		}
		rows += seq.ScoreTo - seq.ScoreFrom + seq.Drafts
		if seq.Sample {
			rows++
		}
		seq.Tokens = seq.Tokens[:len(seq.Tokens)-seq.Drafts]
		end := seq.Start + len(seq.Tokens)
		if len(seq.Tokens) == 0 || end > len(q.Tokens) || !slices.Equal(seq.Tokens, q.Tokens[seq.Start:end]) {
			return fmt.Errorf("has tokens %v of request %d at %d, want a part of %v", seq.Tokens, seq.ID, seq.Start, q.Tokens)
		}
		if len(seq.Tables) != len(m.groups) || seq.Sample != (end == len(q.Tokens) && !q.ComputeOnly) {
			return fmt.Errorf("has %d tables and sample %v for request %d up to %d of %d",
				len(seq.Tables), seq.Sample, seq.ID, end, len(q.Tokens))
		}
		for g, spec := range m.groups {
			if len(seq.Tables[g]) != spec.End(end+seq.Drafts) {
				return fmt.Errorf("has %d places in group %d for request %d up to %d", len(seq.Tables[g]), g, seq.ID, end)
			}
			if spec.First(seq.Start) > 0 {
				m.n["window-passed"]++
			}
		}
		if end < len(q.Tokens) {
			m.n["chunk"]++
		}
		if one := where[slices.Index(m.live, q)] == stateRunning && seq.Start == len(q.Tokens)-1; one && !single {
			return fmt.Errorf("has decoding request %d after a chunk", seq.ID)
		} else if !one {
			single = false
		}
		if seq.Start > 0 && q.r.tables[0].hashed*m.groups[0].BlockTokens == seq.Start && where[slices.Index(m.live, q)] == stateWaiting {
			m.n["prefix-hit"]++
		}
	}
	if tokens != b.Tokens || tokens+m.s.budget != m.cfg.MaxBatchedTokens || m.s.budget < 0 || m.s.Stats().Running > m.cfg.MaxSeqs {
		return fmt.Errorf("has %d tokens, says %d, of at most %d; %d running of %d",
			tokens, b.Tokens, m.cfg.MaxBatchedTokens, before.Running, m.cfg.MaxSeqs)
	}
	if err := m.checkScores(b, where); err != nil {
		return err
	}
	if rows > m.s.cfg.MaxOutputs {
		return fmt.Errorf("has %d rows of logits, at most %d", rows, m.s.cfg.MaxOutputs)
	}
	if m.s.Stats().Running > len(m.batch)+len(b.Completed) {
		m.n["stalled"]++
	}
	for _, id := range b.Completed {
		q := m.find(id)
		if q == nil || !q.ComputeOnly {
			return fmt.Errorf("completes request %d", id)
		}
		m.completed = append(m.completed, q)
		if err := m.verify("completed request", m.s.Tables(id), len(q.Tokens), len(q.Tokens), q.cells); err != nil {
			return err
		}
	}
	return nil
}

// checkScores holds the scored rows against LimitScores: a request that runs already
// has no row beyond it, and one that is admitted at most one.
func (m *sim) checkScores(b Batch, where []requestState) error {
	left := m.scoreLimit
	for _, seq := range b.Seqs {
		scored := seq.ScoreTo - seq.ScoreFrom
		if m.scoreLimit == 0 || scored == 0 {
			continue
		}
		free := max(0, left)
		if where[slices.Index(m.live, m.find(seq.ID))] == stateWaiting {
			free = max(1, free)
		}
		if scored > free {
			return fmt.Errorf("scores %d rows of request %d, with %d left of %d", scored, seq.ID, left, m.scoreLimit)
		}
		left -= scored
		if seq.ScoreTo < m.find(seq.ID).Score {
			m.n["score-limited"]++
		}
	}
	return nil
}

// checkRows holds a Seq's guesses and scored positions against what they may be.
func (m *sim) checkRows(q *simRequest, seq Seq) error {
	end := seq.Start + len(seq.Tokens) - seq.Drafts
	if seq.Drafts > 0 {
		m.n["drafted"]++
		if seq.Drafts < min(m.cfg.MaxDrafts, len(guess(q.Tokens, m.cfg.MaxDrafts))-len(q.Tokens)) {
			m.n["draft-short"]++
		}
		if all := guess(q.Tokens, seq.Drafts); !seq.Sample || seq.Drafts > m.cfg.MaxDrafts || end+seq.Drafts >= m.cfg.MaxModelLen ||
			!slices.Equal(seq.Tokens[end-seq.Start:], all[len(q.Tokens):]) {
			return fmt.Errorf("has guesses %v of request %d, which has %v", seq.Tokens[end-seq.Start:], seq.ID, q.Tokens)
		}
	}
	if seq.ScoreFrom == seq.ScoreTo {
		if q.scored < q.Score && end > q.scored {
			return fmt.Errorf("computes request %d up to %d and scores nothing after %d of %d", seq.ID, end, q.scored, q.Score)
		}
		return nil
	}
	m.n["scored"]++
	if end < q.Score {
		m.n["scored-chunk"]++
	}
	if q.preempted && q.scored > 0 {
		m.n["scored-after-preemption"]++
		if q.r.tables[0].hashed > 0 {
			m.n["scored-prefix-hit"]++
		}
	}
	if seq.ScoreFrom != max(q.scored, seq.Start) || seq.Start > q.scored || seq.ScoreTo != min(end, q.Score) {
		return fmt.Errorf("computes request %d from %d to %d and scores %d to %d; %d of %d are scored",
			seq.ID, seq.Start, end, seq.ScoreFrom, seq.ScoreTo, q.scored, q.Score)
	}
	q.scored = seq.ScoreTo
	return nil
}

// run is the device's step. Requests that were aborted meanwhile run like others.
func (m *sim) run(b Batch) (results []Result, err error) {
	for i, seq := range b.Seqs {
		q := m.batch[i]
		end := seq.Start + len(seq.Tokens)
		what := fmt.Sprintf("request %d (aborted %v), which computes %d to %d,", seq.ID, q.aborted, seq.Start, end)
		if m.checks {
			if err := m.verify(what, seq.Tables, seq.Start, seq.Start, q.cells); err != nil {
				return nil, err
			}
		}
		for g, spec := range m.groups {
			for _, id := range seq.Tables[g][seq.Start/spec.BlockTokens:] {
				if info := m.s.pool.Info(id); m.checks && (info.Hashed || info.Refs != 1 || info.PinsIn != 0) {
					return nil, fmt.Errorf("%s writes block %d: %+v", what, id, info)
				}
			}
		}
		m.compute(q.Root, seq)
		if m.checks || q.ComputeOnly || seq.ScoreFrom < seq.ScoreTo {
			if err := m.verify(what, seq.Tables, seq.Start, end-seq.Drafts, q.cells); err != nil {
				return nil, err
			}
		}
		if seq.Sample {
			results = append(results, m.draw(q, seq))
		}
	}
	return results, nil
}

// draw samples after the last token, and continues while a draft is accepted.
func (m *sim) draw(q *simRequest, seq Seq) (r Result) {
	guesses := seq.Tokens[len(seq.Tokens)-seq.Drafts:]
	for at := seq.Start + len(seq.Tokens) - seq.Drafts; ; at++ {
		token, stop := sample(m.groups, at, func(g, pos int) cell { return *m.at(g, seq.Tables[g], pos) })
		r.Tokens = append(r.Tokens, token)
		r.Finished = stop && !m.unending || len(q.output())+len(r.Tokens) == q.maxNew
		if len(guesses) == 0 || r.Finished || token != guesses[0] {
			break
		}
		guesses = guesses[1:]
	}
	switch kept := len(r.Tokens) - 1; {
	case seq.Drafts == 0:
	case kept == seq.Drafts:
		m.n["draft-accepted"]++
	case kept == 0:
		m.n["draft-refused"]++
	default:
		m.n["draft-in-part"]++
	}
	return r
}

// checkDone holds what left against what had to, and outputs against the
// sequential model.
func (m *sim) checkDone(b Batch, results []Result, done []RequestID) error {
	var want []RequestID
	for i, seq := range b.Seqs {
		q := m.batch[i]
		var result Result
		if seq.Sample {
			result, results = results[0], results[1:]
		}
		if q.aborted || !slices.Contains(m.live, q) {
			continue
		}
		if q.ComputeOnly {
			if seq.Start+len(seq.Tokens) == len(q.Tokens) {
				m.n["compute-only-done"]++
				want = append(want, q.ID)
				m.forget(q)
			}
			continue
		}
		if !seq.Sample {
			continue
		}
		for _, token := range result.Tokens {
			q.cells = append(q.cells, next(q.Root, q.cells[len(q.cells)-1], len(q.Tokens), token))
			q.Tokens = append(q.Tokens, token)
		}
		if !result.Finished && len(q.Tokens) < m.cfg.MaxModelLen {
			continue
		}
		if !result.Finished {
			m.n["finished-at-max-model-len"]++
		}
		want = append(want, q.ID)
		m.forget(q)
		if err := m.checkOutput(q); err != nil {
			return err
		}
	}
	for _, q := range m.completed {
		if !q.aborted {
			m.n["compute-only-cached"]++
			want = append(want, q.ID)
			m.forget(q)
		}
	}
	if !slices.Equal(done, want) {
		return fmt.Errorf("Update says %v are done, want %v", done, want)
	}
	return nil
}

func (m *sim) checkOutput(q *simRequest) error {
	m.n["finished"]++
	if q.preempted {
		m.n["finished-after-preemption"]++
	}
	if q.resumed {
		m.n["finished-after-resume"]++
	}
	want := sequential(m.groups, q.Root, q.Tokens[:q.prompt], q.maxNew, m.cfg.MaxModelLen, m.unending)
	if !slices.Equal(q.output(), want) {
		return fmt.Errorf("request %d says %v, alone it says %v", q.ID, q.output(), want)
	}
	return nil
}

// reserve grants blocks to a held request, as when its prefill is about to run.
func (m *sim) reserve() error {
	var held []*simRequest
	for _, q := range m.live {
		if q.r.state == stateHeld {
			held = append(held, q)
		}
	}
	if len(held) == 0 {
		return nil
	}
	q := held[m.rng.IntN(len(held))]
	n := len(q.Tokens)
	upTo := n - 1
	if m.rng.IntN(3) == 0 {
		upTo = m.rng.IntN(n + 1)
	}
	reserved := q.r.reservation != nil
	waits := slices.ContainsFunc(m.waits, func(w waiter) bool { return w.q == q })
	if waits && m.rng.IntN(4) == 0 {
		m.n["reserve-wait-ended"]++
		m.waits = slices.DeleteFunc(m.waits, func(w waiter) bool { return w.q == q })
		if !m.s.StopWaiting(q.ID) || m.s.StopWaiting(q.ID) {
			return fmt.Errorf("request %d does not wait once", q.ID)
		}
		return nil
	}
	if m.rng.IntN(3) == 0 {
		return m.reserveInTurn(q, upTo, waits)
	}
	before := m.s.Stats().Blocks
	res, err := m.s.Reserve(q.ID, upTo)
	switch {
	case reserved:
		if !errors.Is(err, ErrReserved) {
			return fmt.Errorf("a second time: %v", err)
		}
		return nil
	case upTo < 1 || upTo >= n:
		if !errors.Is(err, ErrRange) {
			return fmt.Errorf("up to %d of %d: %v", upTo, n, err)
		}
		return nil
	case errors.Is(err, ErrNothingMissing):
		m.n["reserve-nothing-missing"]++
		return nil
	case errors.Is(err, ErrNoRoom):
		m.n["reserve-no-room"]++
		return nil
	case err != nil:
		return err
	}
	return m.reserved(q, upTo, before.Arriving, res)
}

// reserveInTurn is reserve for a request that waits if it must.
func (m *sim) reserveInTurn(q *simRequest, upTo int, waits bool) error {
	before, others := m.s.Stats().Blocks, len(m.waits)
	res, err := m.s.ReserveInTurn(q.ID, upTo)
	switch {
	case q.r.reservation != nil && err != nil || waits:
		if !errors.Is(err, ErrReserved) && !errors.Is(err, ErrRange) {
			return fmt.Errorf("a second time: %v", err)
		}
		return nil
	case upTo < 1 || upTo >= len(q.Tokens):
		if !errors.Is(err, ErrRange) {
			return fmt.Errorf("up to %d of %d: %v", upTo, len(q.Tokens), err)
		}
		return nil
	case errors.Is(err, ErrNothingMissing), errors.Is(err, ErrNeverFits):
		return nil
	case errors.Is(err, ErrNoRoom):
		m.n["reserve-waits"]++
		m.waits = append(m.waits, waiter{q, upTo})
		return nil
	case err != nil:
		return err
	case others > 0:
		return fmt.Errorf("request %d overtakes %d that wait", q.ID, others)
	}
	return m.reserved(q, upTo, before.Arriving, res)
}

// takeTurns gives room to those that wait, in order, and as long as there is some.
func (m *sim) takeTurns() error {
	for {
		before := m.s.Stats().Blocks
		id, res, err, ok := m.s.NextReserved()
		if !ok {
			break
		}
		w := m.waits[0]
		m.waits = m.waits[1:]
		switch {
		case id != w.q.ID:
			return fmt.Errorf("request %d is served, %d waits longer", id, w.q.ID)
		case errors.Is(err, ErrNotHeld), errors.Is(err, ErrReserved), errors.Is(err, ErrNothingMissing), errors.Is(err, ErrNeverFits):
			m.n["reserve-turn-lost"]++
			continue
		case err != nil:
			return err
		}
		m.n["reserve-in-turn"]++
		if err := m.reserved(w.q, w.upTo, before.Arriving, res); err != nil {
			return err
		}
	}
	if len(m.waits) == 0 {
		return nil
	}
	// What the one whose turn it is lacks is more than there is.
	r, u := m.waits[0].q.r, m.s.Stats().Blocks
	if limit := int(m.cfg.ArrivingFraction * float64(u.Blocks)); r.state != stateHeld || r.reservation != nil || u.Arriving+r.reserveBlocks <= limit && m.s.pool.Available()-r.reserveBlocks >= m.s.watermark {
		return fmt.Errorf("request %d waits for %d blocks and nothing: %+v", r.id, r.reserveBlocks, u)
	}
	return nil
}

// reserved checks a reservation and gives it to the network.
func (m *sim) reserved(q *simRequest, upTo, arriving int, res Reservation) error {
	m.n["reserve"]++
	if m.stepping {
		m.n["reserve-in-step"]++
	}
	for _, tr := range m.transfers {
		if tr.q == q {
			m.n["reserve-again"]++
		}
	}
	st := m.s.Stats().Blocks
	if limit := int(m.cfg.ArrivingFraction * float64(st.Blocks)); st.Arriving > limit || st.Arriving != arriving+res.size() {
		return fmt.Errorf("%d blocks arrive of at most %d, %d before", st.Arriving, limit, arriving)
	}
	if res.UpTo != upTo || res.From%m.s.pool.Align() != 0 || res.From >= upTo || len(res.Groups) != len(m.groups) {
		return fmt.Errorf("up to %d: %+v", upTo, res)
	}
	if err := m.verify("prefix before a reservation", m.s.Tables(q.ID), res.From, res.From, q.cells); err != nil {
		return err
	}
	// The network has its own notes of where to write.
	res.Groups = slices.Clone(res.Groups)
	for g := range res.Groups {
		res.Groups[g].Blocks = slices.Clone(res.Groups[g].Blocks)
	}
	m.transfers = append(m.transfers, &transfer{Reservation: res, q: q})
	return nil
}

// network moves one transfer: bytes in any order, correct and incomplete ones, also after the
// request is gone, until the lease has ended.
func (m *sim) network() error {
	if len(m.transfers) == 0 {
		return nil
	}
	i := m.rng.IntN(len(m.transfers))
	tr := m.transfers[i]
	end := func() { m.transfers = slices.Delete(m.transfers, i, i+1) }
	switch k := m.rng.IntN(10); {
	case k < 4:
		for range 1 + m.rng.IntN(4) {
			m.write(tr)
		}
		if tr.lost {
			m.n["late-write"]++
		} else if tr.q.aborted {
			m.n["late-write-after-abort"]++
		}
		return nil
	case tr.lost && k < 6:
		if err := m.s.Arrived(tr.ID); !errors.Is(err, ErrLost) {
			return fmt.Errorf("arrived after lost: %v", err)
		}
		m.n["refused-arrived-after-lost"]++
		return nil
	case tr.lost || k == 9:
		end()
		if m.n["release-lost"]++; !tr.lost {
			m.n["release-lost"]--
			m.n["release-live"]++
		}
		return m.s.Release(tr.ID)
	case k == 8:
		m.n["lost"]++
		tr.lost = true
		return m.s.Lost(tr.ID)
	}
	end()
	return m.arrive(tr)
}

// write puts one cell of a transfer into memory.
func (m *sim) write(tr *transfer) {
	g := m.rng.IntN(len(m.groups))
	bt, got := m.groups[g].BlockTokens, tr.Groups[g]
	if len(got.Blocks) == 0 {
		return
	}
	pos := got.First*bt + m.rng.IntN(tr.UpTo-got.First*bt)
	c := tr.q.cells[pos].of(g)
	if m.rng.IntN(3) == 0 {
		c = poison
	}
	*m.at(g, got.Blocks, pos-got.First*bt) = c
}

func (m *sim) arrive(tr *transfer) error {
	for g, got := range tr.Groups {
		first := got.First * m.groups[g].BlockTokens
		for pos := first; pos < tr.UpTo && len(got.Blocks) > 0; pos++ {
			*m.at(g, got.Blocks, pos-first) = tr.q.cells[pos].of(g)
		}
	}
	q := tr.q
	prefix := q.r.computed
	cached := m.s.Cached(q.Root, q.Tokens[:tr.UpTo])
	if err := m.s.Arrived(tr.ID); err != nil {
		return err
	}
	if err := m.s.Arrived(tr.ID); !errors.Is(err, ErrUnknownReservation) {
		return fmt.Errorf("arrived twice: %v", err)
	}
	m.n["arrived"]++
	if m.stepping {
		m.n["arrived-in-step"]++
	}
	if q.aborted {
		m.n["arrived-after-abort"]++
		if m.s.Cached(q.Root, q.Tokens[:tr.UpTo]) > cached {
			m.n["arrived-cached-for-others"]++
		}
		return nil
	}
	switch r := q.r; {
	case r.state != stateWaiting:
		return fmt.Errorf("request %d is in state %d after it arrived", q.ID, r.state)
	case r.computed < tr.UpTo && (prefix == tr.From || cached >= tr.From && !q.NoCacheRead):
		return fmt.Errorf("request %d runs from %d after %d to %d arrived, with %d cached",
			q.ID, r.computed, tr.From, tr.UpTo, cached)
	case r.computed < tr.UpTo:
		m.n["arrived-prefix-gone"]++
	case cached > tr.From:
		m.n["arrived-prefix-grew"]++
	case tr.UpTo%m.s.pool.BlockTokens() != 0:
		m.n["arrived-partial-block"]++
	}
	if !m.checks {
		return nil
	}
	return m.verify("arrived request", m.s.Tables(q.ID), q.r.computed, q.r.computed, q.cells)
}
