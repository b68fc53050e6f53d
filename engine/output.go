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
func (e *Engine) emit(b scheduler.Batch, sampled []int32) {
	if e.wantsLogits(b) {
		e.logits = e.o.Backend.Download(e.logits, e.o.Model.Logits())
	}
	row := 0
	e.emitted = e.now()
	for i := range b.Seqs {
		q := &b.Seqs[i]
		r := e.live[q.ID]
		if r != nil && q.ScoreFrom < q.ScoreTo {
			e.emitScores(r.req, q, row)
		}
		row += q.ScoreTo - q.ScoreFrom
		if q.Sample {
			e.results = append(e.results, e.emitSampled(r, q, sampled, row))
			row += 1 + q.Drafts
		}
	}
}

// logitsOf is row's logits, [vocab].
func (e *Engine) logitsOf(row int) []float32 {
	vocab := e.o.Model.VocabSize()
	return e.logits[row*vocab : (row+1)*vocab]
}

// emitScores tells of the prompt's tokens after those that were scored.
func (e *Engine) emitScores(req *Request, q *scheduler.Seq, row int) {
	probs := make([]LogProbs, q.ScoreTo-q.ScoreFrom)
	for i := range probs {
		p := &probs[i]
		at := q.ScoreFrom + i + 1
		p.LogProb, p.Rank, p.Top = sample.LogProbs(e.logitsOf(row+i), req.Prompt[at], req.TopPromptLogProbs, nil, nil)
	}
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
		t.LogProbs = e.logProbs(r, token, row)
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

// logProbs is what a request sees of a token that was drawn.
func (e *Engine) logProbs(r *run, token int32, row int) *LogProbs {
	p, req := new(LogProbs), r.req
	if !e.scored(r) {
		p.LogProb, p.Rank, p.Top = sample.LogProbs(e.logitsOf(row), token, req.TopLogProbs, req.LogProbTokens, nil)
		return p
	}
	var ok bool
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
