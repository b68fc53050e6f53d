package engine

import (
	"errors"
	"fmt"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// Pool is how the rows behind the model's last norm, one for each token, become one vector.
type Pool uint8

// Values of Pool.
const (
	PoolNone   Pool = iota // no vector: the request is for tokens
	PoolLast               // the row of the last token
	PoolMean               // the mean of all rows, added in the order of tokens
	PoolScores             // the outputs of Options.Classifier for the row of the last token
	PoolLogits             // the logits of Request.PoolTokens after the last token
)

// maxPoolTokens bounds Request.PoolTokens.
const maxPoolTokens = 16

// ErrPool refuses a request for a vector that this engine does not compute.
var ErrPool = errors.New("engine: no vectors here")

// hiddenModel is a Model whose rows behind the last norm can be read. *model.Model is one.
type hiddenModel interface {
	Hidden() backend.Buf // [outputs, HiddenSize] of the last step
	HiddenSize() int
}

// VectorSize returns how many numbers a vector has; 0: the engine computes none.
func (e *Engine) VectorSize() int {
	if e.hiddenModel == nil {
		return 0
	}
	return e.hiddenModel.HiddenSize()
}

// checkPool refuses what a request for a vector excludes.
func (e *Engine) checkPool(r *Request) error {
	switch {
	case r.Pool == PoolNone:
	case r.Pool > PoolLogits || e.hiddenModel == nil || r.Pool == PoolScores && len(e.o.Classifier) == 0:
		return fmt.Errorf("%w: of kind %d", ErrPool, r.Pool)
	case (r.Pool == PoolLogits) != (len(r.PoolTokens) > 0) || len(r.PoolTokens) > maxPoolTokens:
		return fmt.Errorf("%w: of kind %d with %d tokens", ErrPool, r.Pool, len(r.PoolTokens))
	case len(r.Output) > 0 || r.Grammar != nil || r.LogProbs || r.EmitPrompt != nil || r.Pool == PoolMean && r.Hold:
		return fmt.Errorf("%w: with output, a grammar or log-probabilities, or a mean with KV of another node", ErrPool)
	}
	return nil
}

// pool returns the Pool of a request, and PoolNone for a job.
func (r *run) pool() Pool {
	if r.req == nil {
		return PoolNone
	}
	return r.req.Pool
}

// needsHidden reports whether the host reads rows of this batch behind the model's last norm.
func (e *Engine) needsHidden(b scheduler.Batch) bool {
	for i := range b.Seqs {
		q := &b.Seqs[i]
		if r := e.live[q.ID]; r != nil && r.pool() != PoolNone && (q.Sample || q.ScoreFrom < q.ScoreTo) {
			return true
		}
	}
	return false
}

// readHidden sets e.hidden to the step's rows behind the last norm, [outputs, hidden].
func (e *Engine) readHidden() {
	if e.rows != nil {
		e.hidden = e.rows.View(e.hiddenModel.Hidden())
		return
	}
	e.hidden = e.o.Backend.Download(e.hidden, e.hiddenModel.Hidden())
}

// hiddenOf returns one of these rows.
func (e *Engine) hiddenOf(row int) []float32 {
	n := e.hiddenModel.HiddenSize()
	return e.hidden[row*n : (row+1)*n]
}

// addRows adds n rows of a request with PoolMean to their sum.
func (e *Engine) addRows(r *run, row, n int) {
	if r.rowSum == nil {
		r.rowSum = make([]float64, e.hiddenModel.HiddenSize())
	}
	for i := range n {
		for k, x := range e.hiddenOf(row + i) {
			r.rowSum[k] += float64(x)
		}
	}
}

// classify returns the outputs of the classifier for a row. Each is summed in the row's order.
func (e *Engine) classify(row []float32) []float32 {
	out := make([]float32, len(e.o.Classifier)/len(row))
	for i := range out {
		sum := 0.0
		for k, w := range e.o.Classifier[i*len(row) : (i+1)*len(row)] {
			sum += float64(w) * float64(row[k])
		}
		out[i] = float32(sum)
	}
	return out
}

// emitVector emits the vector of a request, whose last token has this row.
func (e *Engine) emitVector(r *run, row int) {
	var v []float32
	switch r.req.Pool {
	case PoolMean:
		e.addRows(r, row, 1)
		for _, sum := range r.rowSum {
			v = append(v, float32(sum/float64(r.prompt)))
		}
	case PoolScores:
		v = e.classify(e.hiddenOf(row))
	case PoolLogits:
		for _, id := range r.req.PoolTokens {
			v = append(v, e.logitsOf(row)[id])
		}
	default:
		v = append(v, e.hiddenOf(row)...)
	}
	r.stats.First, r.stats.Last, r.stats.Finish = e.emitted, e.emitted, FinishStop
	e.countSource(&r.stats)
	e.reportEnd(r, e.emitted)
	r.req.Emit(Token{ID: -1, Position: r.prompt, Finish: FinishStop, Vector: v})
}
