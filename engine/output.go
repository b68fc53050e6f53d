package engine

import (
	"math"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/sample"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// outputs adds a sequence's rows of logits to the step: one behind each token
// that is scored, then one for each token that may be sampled. row is its first
// token's. Guesses count as output where they precede what is sampled.
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
		r.byHost = !e.ruled(r.req)
	}
	for n := first; n <= len(q.Tokens); n++ {
		out := backend.Output{Row: int32(row + n - 1), Position: int32(q.Start + n)}
		if r != nil {
			out.Params = r.req.Sampling
			if e.scored(r) {
				out.Probs = 1 + r.req.TopLogProbs
			}
			if c := out.Params.Controls; c != nil {
				out.Params.Controls = c.After(q.Tokens[first:n])
			}
		}
		s.Outputs = append(s.Outputs, out)
	}
}

// emit turns the step's rows into results and hands out what clients asked for.
// Tokens of requests whose prompts are not scored in this step leave first: scoring
// takes as long as some steps.
func (e *Engine) emit(b scheduler.Batch, sampled []int32) {
	if e.wantsLogits(b) {
		e.readLogits()
	}
	e.emitted = e.now()
	e.rateSampled(b, sampled)
	row, at, scoring, others := 0, len(e.results), false, false
	for i := range b.Seqs {
		q := &b.Seqs[i]
		scored := q.ScoreTo - q.ScoreFrom
		row += scored
		if q.Sample {
			var result scheduler.Result
			if scored == 0 {
				result, others = e.emitSampled(e.live[q.ID], q, sampled, row), true
			}
			e.results = append(e.results, result)
			row += 1 + q.Drafts
		}
		scoring = scoring || scored > 0
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
		r, scored := e.live[q.ID], q.ScoreTo-q.ScoreFrom
		if r != nil && scored > 0 {
			e.emitScores(r.req, q, row)
		}
		row += scored
		if q.Sample {
			if scored > 0 {
				e.results[at] = e.emitSampled(r, q, sampled, row)
			}
			at++
			row += 1 + q.Drafts
		}
	}
}

// readLogits makes e.logits the logits of the step, [outputs, vocab].
func (e *Engine) readLogits() {
	if e.rows != nil {
		e.logits = e.rows.View(e.o.Model.Logits())
		return
	}
	e.logits = e.o.Backend.Download(e.logits, e.o.Model.Logits())
}

// logitsOf is row's logits, [vocab].
func (e *Engine) logitsOf(row int) []float32 {
	vocab := e.o.Model.VocabSize()
	return e.logits[row*vocab : (row+1)*vocab]
}

// rating is a row of logits whose log-probabilities a client asked for.
type rating struct {
	row, most int     // row of the step's outputs, number of best tokens
	token     int32   // the token that follows
	only      []int32 // see sample.LogProbs
	to        *LogProbs
}

// rate computes ratings, which do not depend on each other.
func (e *Engine) rate(ratings []rating) {
	if e.rows != nil && len(ratings) > 1 {
		e.rows.EachRow(len(ratings), func(i int) { e.rateRow(&ratings[i]) })
		return
	}
	for i := range ratings {
		e.rateRow(&ratings[i])
	}
}

func (e *Engine) rateRow(r *rating) {
	r.to.LogProb, r.to.Rank, r.to.Top = sample.LogProbs(e.kernels, e.logitsOf(r.row), r.token, r.most, r.only, nil)
}

// rateSampled computes the log-probabilities of the step's tokens for requests that
// asked for them, except where the device has done so. Those of guesses that turn out
// wrong are computed in vain.
func (e *Engine) rateSampled(b scheduler.Batch, sampled []int32) {
	clear(e.rated)
	e.rated, e.ratings = e.rated[:0], e.ratings[:0]
	row := 0
	for i := range b.Seqs {
		q := &b.Seqs[i]
		row += q.ScoreTo - q.ScoreFrom
		if !q.Sample {
			continue
		}
		r := e.live[q.ID]
		for range 1 + q.Drafts {
			if r != nil && r.req.LogProbs && !e.scored(r) {
				for len(e.rated) <= row {
					e.rated = append(e.rated, nil)
				}
				e.rated[row] = new(LogProbs)
				e.ratings = append(e.ratings, rating{row, r.req.TopLogProbs, sampled[row], r.req.LogProbTokens, e.rated[row]})
			}
			row++
		}
	}
	e.rate(e.ratings)
}

// emitScores emits the log-probabilities of the prompt's tokens after those that
// were scored. row is the first of them.
func (e *Engine) emitScores(req *Request, q *scheduler.Seq, row int) {
	probs := make([]LogProbs, q.ScoreTo-q.ScoreFrom)
	e.ratings = e.ratings[:0]
	for i := range probs {
		e.ratings = append(e.ratings, rating{row + i, req.TopPromptLogProbs, req.Prompt[q.ScoreFrom+i+1], nil, &probs[i]})
	}
	e.rate(e.ratings)
	req.EmitPrompt(q.ScoreFrom+1, probs)
}

// emitSampled emits the token after the last known one, and then, as long as each
// is what was guessed and ends nothing, the one after that: those were drawn from
// the very logits that they would be drawn from alone. r is nil when its owner
// wants no more.
func (e *Engine) emitSampled(r *run, q *scheduler.Seq, sampled []int32, row int) scheduler.Result {
	start := len(e.sampled)
	first := len(q.Tokens) - q.Drafts
	for n := first; ; n++ {
		token := sampled[row]
		e.sampled = append(e.sampled, token)
		finished := r == nil || e.emitToken(r, token, q.Start+n, row) != 0
		if finished || n == len(q.Tokens) || token != q.Tokens[n] {
			return scheduler.Result{Tokens: e.sampled[start:], Finished: finished}
		}
		row++
	}
}

// emitToken hands out one token and says whether it is the last.
func (e *Engine) emitToken(r *run, token int32, pos, row int) Finish {
	req := r.req
	if e.o.Probe != nil {
		e.o.Probe(req, pos, e.logitsOf(row))
	}
	t := Token{ID: token, Position: pos}
	if req.LogProbs {
		t.LogProbs = e.logProbs(r, row)
	}
	if c := req.Sampling.Controls; c != nil {
		c.Add(token)
	}
	r.output++
	e.count.Generated++
	t.Finish = req.finishAfter(token, r.output, pos+1, e.o.Scheduler.MaxModelLen)
	e.measure(r, t.Finish)
	req.Emit(t)
	return t.Finish
}

// ruled says whether the device draws by a request's rules, also behind as many
// tokens as one step may guess.
func (e *Engine) ruled(req *Request) bool {
	c := req.Sampling.Controls
	return c == nil || e.ruler != nil && e.ruler.Rules(c, 1+scheduler.DraftLimit)
}

// scored says whether the device tells all log-probabilities that a request wants, as
// it was when its step was filled.
func (e *Engine) scored(r *run) bool {
	return r.req.LogProbs && e.scorer != nil && len(r.req.LogProbTokens) == 0 && r.req.TopLogProbs < e.scorer.MostProbs() && !r.byHost
}

// logProbs returns what a request sees of the token that was drawn from row.
func (e *Engine) logProbs(r *run, row int) *LogProbs {
	if !e.scored(r) {
		return e.rated[row]
	}
	p, ok := new(LogProbs), false
	if p.LogProb, p.Rank, p.Top, ok = e.scorer.LogProbs(row, nil); !ok { // no logit is finite
		p.LogProb, p.Rank = float32(math.Inf(-1)), e.o.Model.VocabSize()
	}
	return p
}

// wantsLogits says whether anybody looks at the logits of this batch.
func (e *Engine) wantsLogits(b scheduler.Batch) bool {
	for i := range b.Seqs {
		q := &b.Seqs[i]
		if r := e.live[q.ID]; r != nil && (q.ScoreFrom < q.ScoreTo || q.Sample && (r.req.LogProbs && !e.scored(r) || e.o.Probe != nil)) {
			return true
		}
	}
	return false
}
