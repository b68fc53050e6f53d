package engine

import (
	"math"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/sample"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// outputs adds a sequence's rows of logits to the step: one after each token that
// is scored, then one for each token that may be sampled. row is the row of its
// first token. Drafts count as output for the rows after them.
func (e *Engine) outputs(q *scheduler.Seq, r *run, row int) {
	s := &e.step
	for pos := q.ScoreFrom; pos < q.ScoreTo; pos++ {
		s.Outputs = append(s.Outputs, backend.Output{Row: int32(row + pos - q.Start), Position: int32(pos + 1)})
	}
	if !q.Sample {
		return
	}
	first := len(q.Tokens) - q.Drafts
	if r != nil {
		r.hostRules = !e.deviceRules(r.req)
	}
	for n := first; n <= len(q.Tokens); n++ {
		out := backend.Output{Row: int32(row + n - 1), Position: int32(q.Start + n)}
		if r != nil {
			out.Params = r.req.Sampling
			if e.deviceLogprobs(r) {
				out.LogProbs = 1 + r.req.TopLogProbs
			}
			if c := out.Params.Controls; c != nil {
				out.Params.Controls = c.After(q.Tokens[first:n])
			}
			if r.guide != nil {
				out.Params.Mask = r.guide.Mask(n - first)
			}
		}
		s.Outputs = append(s.Outputs, out)
	}
}

// emit turns the step's rows into results and emits what clients requested. Tokens
// of requests whose prompts are not scored in this step are sent first, because
// scoring takes as long as some steps.
func (e *Engine) emit(b scheduler.Batch, sampled []int32) {
	if e.needsLogits(b) {
		e.readLogits()
	}
	if e.needsHidden(b) {
		e.readHidden()
	}
	e.emitted = e.now()
	e.sampledLogprobs(b, sampled)
	row, at, scoring, others := 0, len(e.results), false, false
	for i := range b.Seqs {
		q := &b.Seqs[i]
		scoreRows := q.ScoreTo - q.ScoreFrom
		row += scoreRows
		if q.Sample {
			var result scheduler.Result
			if scoreRows == 0 {
				result, others = e.emitSampled(e.live[q.ID], q, sampled, row), true
			}
			e.results = append(e.results, result)
			row += 1 + q.Drafts
		}
		scoring = scoring || scoreRows > 0
	}
	if !scoring {
		return
	}
	if others && e.o.OnStep != nil {
		e.publish()
		e.o.OnStep()
	}
	row = 0
	for i := range b.Seqs {
		q := &b.Seqs[i]
		r, scoreRows := e.live[q.ID], q.ScoreTo-q.ScoreFrom
		switch {
		case r == nil || scoreRows == 0:
		case r.req.Pool != PoolNone:
			e.addRows(r, row, scoreRows)
		default:
			e.emitPromptLogprobs(r.req, q, row)
		}
		row += scoreRows
		if q.Sample {
			if scoreRows > 0 {
				e.results[at] = e.emitSampled(r, q, sampled, row)
			}
			at++
			row += 1 + q.Drafts
		}
	}
}

// readLogits sets e.logits to the logits of the step, [outputs, vocab].
func (e *Engine) readLogits() {
	if e.rows != nil {
		e.logits = e.rows.View(e.o.Model.Logits())
		return
	}
	e.logits = e.o.Backend.Download(e.logits, e.o.Model.Logits())
}

// logitsOf returns a row's logits, [vocab].
func (e *Engine) logitsOf(row int) []float32 {
	vocab := e.o.Model.VocabSize()
	return e.logits[row*vocab : (row+1)*vocab]
}

// logprobRow is a row of logits whose log-probabilities a client requested.
type logprobRow struct {
	row, most int     // row of the step's outputs, number of best tokens
	token     int32   // the token that follows
	only      []int32 // see sample.LogProbs
	to        *LogProbs
}

// computeLogprobs computes rows, which are independent of each other.
func (e *Engine) computeLogprobs(rows []logprobRow) {
	if e.rows != nil && len(rows) > 1 {
		e.rows.EachRow(len(rows), func(i int) { e.computeLogprob(&rows[i]) })
		return
	}
	for i := range rows {
		e.computeLogprob(&rows[i])
	}
}

func (e *Engine) computeLogprob(r *logprobRow) {
	r.to.LogProb, r.to.Rank, r.to.Top = sample.LogProbs(e.kernels, e.logitsOf(r.row), r.token, r.most, r.only, nil)
}

// sampledLogprobs computes the log-probabilities of the step's tokens for requests that
// want them, unless the device has done so. It also computes those of drafts that
// turn out to be rejected.
func (e *Engine) sampledLogprobs(b scheduler.Batch, sampled []int32) {
	clear(e.outputLogprobs)
	e.outputLogprobs, e.logprobRows = e.outputLogprobs[:0], e.logprobRows[:0]
	row := 0
	for i := range b.Seqs {
		q := &b.Seqs[i]
		row += q.ScoreTo - q.ScoreFrom
		if !q.Sample {
			continue
		}
		r := e.live[q.ID]
		for range 1 + q.Drafts {
			if r != nil && r.req.LogProbs && !e.deviceLogprobs(r) {
				for len(e.outputLogprobs) <= row {
					e.outputLogprobs = append(e.outputLogprobs, nil)
				}
				e.outputLogprobs[row] = new(LogProbs)
				e.logprobRows = append(e.logprobRows, logprobRow{row, r.req.TopLogProbs, sampled[row], r.req.LogProbTokens, e.outputLogprobs[row]})
			}
			row++
		}
	}
	e.computeLogprobs(e.logprobRows)
}

// emitPromptLogprobs emits the log-probabilities of the prompt's tokens after those that
// were scored. row is the first row of these.
func (e *Engine) emitPromptLogprobs(req *Request, q *scheduler.Seq, row int) {
	logprobs := make([]LogProbs, q.ScoreTo-q.ScoreFrom)
	e.logprobRows = e.logprobRows[:0]
	for i := range logprobs {
		e.logprobRows = append(e.logprobRows, logprobRow{row + i, req.TopPromptLogProbs, req.Prompt[q.ScoreFrom+i+1], nil, &logprobs[i]})
	}
	e.computeLogprobs(e.logprobRows)
	req.EmitPrompt(q.ScoreFrom+1, logprobs)
}

// emitSampled emits the token after the last known one. While each token equals its
// draft and is not the last, it also emits the token after it: that was sampled from
// the same logits as without drafts. r is nil if the request has been aborted.
func (e *Engine) emitSampled(r *run, q *scheduler.Seq, sampled []int32, row int) scheduler.Result {
	start := len(e.sampled)
	if r != nil && r.req.Pool != PoolNone {
		e.emitVector(r, row)
		e.sampled = append(e.sampled, sampled[row])
		return scheduler.Result{Tokens: e.sampled[start:], Finished: true}
	}
	first := len(q.Tokens) - q.Drafts
	for n := first; ; n++ {
		token := sampled[row]
		e.sampled = append(e.sampled, token)
		finished := r == nil || r.guide != nil && e.failGuided(r, n-first, token) || e.emitToken(r, token, q.Start+n, row) != 0
		if finished || n == len(q.Tokens) || token != q.Tokens[n] {
			if !finished && r.guide != nil {
				e.advanceGuide(q.ID, r, n-first+1, token)
			}
			return scheduler.Result{Tokens: e.sampled[start:], Finished: finished}
		}
		row++
	}
}

// emitToken emits one token and returns why it is the last, or 0.
func (e *Engine) emitToken(r *run, token int32, pos, row int) Finish {
	req := r.req
	if e.o.Probe != nil {
		e.o.Probe(req, pos, e.logitsOf(row))
	}
	t := Token{ID: token, Position: pos}
	if req.LogProbs {
		t.LogProbs = e.logprobsOf(r, row)
	}
	if c := req.Sampling.Controls; c != nil {
		c.Add(token)
	}
	r.output++
	e.count.Generated++
	t.Finish = req.finishAfter(token, r.output, pos+1, e.o.Scheduler.MaxModelLen)
	if r.guide != nil && r.guide.Ends(e.masks, token) { // also where the request ignores such tokens
		t.Finish = FinishStop
	}
	e.recordToken(r, t.Finish)
	req.Emit(t)
	return t.Finish
}

// deviceRules reports whether the device applies a request's rules and masks, also after as
// many drafts as one step may have.
func (e *Engine) deviceRules(req *Request) bool {
	c := req.Sampling.Controls
	return req.Grammar == nil && c == nil || e.ruler != nil && e.ruler.Rules(c, 1+scheduler.DraftLimit)
}

// deviceLogprobs reports whether the device computes all log-probabilities that a request
// wants, as decided when its step was filled.
func (e *Engine) deviceLogprobs(r *run) bool {
	return r.req.LogProbs && e.scorer != nil && len(r.req.LogProbTokens) == 0 && r.req.TopLogProbs < e.scorer.MaxLogProbs() && !r.hostRules
}

// logprobsOf returns the log-probabilities of the token that was sampled from row.
func (e *Engine) logprobsOf(r *run, row int) *LogProbs {
	if !e.deviceLogprobs(r) {
		return e.outputLogprobs[row]
	}
	p, ok := new(LogProbs), false
	if p.LogProb, p.Rank, p.Top, ok = e.scorer.LogProbs(row, nil); !ok { // no logit is finite
		p.LogProb, p.Rank = float32(math.Inf(-1)), e.o.Model.VocabSize()
	}
	return p
}

// needsLogits reports whether the host reads the logits of this batch.
func (e *Engine) needsLogits(b scheduler.Batch) bool {
	for i := range b.Seqs {
		q := &b.Seqs[i]
		r := e.live[q.ID]
		switch {
		case r == nil:
		case r.pool() != PoolNone:
			if r.pool() == PoolLogits && q.Sample {
				return true
			}
		case q.ScoreFrom < q.ScoreTo, q.Sample && (r.req.LogProbs && !e.deviceLogprobs(r) || e.o.Probe != nil):
			return true
		}
	}
	return false
}
