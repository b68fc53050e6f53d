package engine

import (
	"errors"
	"fmt"
	"math/bits"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/draft"
	"github.com/tandem-serving/tandem/engine/memory"
	"github.com/tandem-serving/tandem/engine/model"
	"github.com/tandem-serving/tandem/engine/scheduler"
)

// Drafter drafts tokens for several sequences. *draft.Drafter implements it. It is
// called on the step goroutine.
type Drafter interface {
	Draft(requests []draft.Request) error
	Remove(id uint64)
	Check() error
}

// draftAll is the scheduler's DraftAll. A failing drafter costs only the drafts.
func (e *Engine) draftAll(requests []scheduler.DraftRequest) {
	e.draftRequests = e.draftRequests[:0]
	for _, a := range requests {
		to := draft.Request{ID: uint64(a.ID), Tokens: a.Tokens, MaxDrafts: a.MaxDrafts}
		if r := e.live[a.ID]; r != nil && r.req != nil {
			to.Root, to.Sampling = r.req.Root, r.req.Sampling
			to.MaxDrafts = min(to.MaxDrafts, r.req.MaxTokens-r.output-1) // the target samples one more itself
		} else {
			to.MaxDrafts = 0 // its request has been aborted
		}
		e.draftRequests = append(e.draftRequests, to)
	}
	if err := e.o.Drafter.Draft(e.draftRequests); err != nil {
		e.count.FailedDrafts++
		if n := e.count.FailedDrafts; bits.OnesCount64(n) == 1 { // 1, 2, 4, …: it may fail in each step
			e.log.Error("draft model step failed", "times", n, "err", err)
		}
	}
	for i := range requests {
		requests[i].Tokens = e.draftRequests[i].Tokens
	}
}

func (e *Engine) checkDrafter() error {
	if e.o.Drafter == nil {
		return nil
	}
	return e.o.Drafter.Check()
}

// draftModel is what is known of a draft model before it is loaded.
type draftModel struct {
	config  model.Config
	weights int64 // bytes
}

// lookAtDraft opens the draft model of o and refuses one that cannot draft for the
// target.
func (l *Loaded) lookAtDraft(o *LoadOptions, device choice) (d draftModel, err error) {
	name := o.Speculation.Model
	if name == "" {
		return d, nil
	}
	src, err := OpenModel(name)
	if err != nil {
		return d, fmt.Errorf("--speculative-config: %w", refuse(name, err))
	}
	device.widen(src, "")
	d.config = src.Config
	d.weights, err = src.WeightBytes(l.Quantization)
	if err = errors.Join(err, src.Close()); err != nil {
		return d, fmt.Errorf("--speculative-config: %w", refuse(name, err))
	}
	if d.config.HasStates() {
		return d, fmt.Errorf("%w: --speculative-config: the draft model %s has layers with a state, which a rejected guess would change: give another model", ErrOption, name)
	}
	if ours, theirs := l.Source.Config.Vocab, d.config.Vocab; ours != theirs {
		return d, fmt.Errorf("%w: --speculative-config: the draft model %s has %d tokens in its vocabulary, the model %s %d: both need the same vocabulary",
			ErrOption, name, theirs, l.Source.Name, ours)
	}
	return d, nil
}

// share splits the memory for KV so that the draft model holds as many tokens as
// the target.
func (d *draftModel) share(o *LoadOptions, target *model.Config) (forDraft int64, err error) {
	if d.config.Vocab == 0 {
		return 0, nil
	}
	bytes := func(c *model.Config) (n int64, err error) { // of a token
		dtype, err := kvDType(o.KVDType, c.DType)
		for _, s := range c.KVLayers() {
			n += int64(backend.KVGroup{KVHeads: s.KVHeads, HeadDim: s.HeadDim, Latent: s.Latent}.TokenBytes(dtype))
		}
		return n, err
	}
	theirs, err := bytes(&d.config)
	if err != nil {
		return 0, err
	}
	ours, err := bytes(target)
	forDraft = int64(float64(o.KVMemory) * float64(theirs) / float64(ours+theirs))
	return forDraft, err
}

// loadDraft loads the draft model on the same device as the target, with the same
// kernels and quantization.
func (l *Loaded) loadDraft(o LoadOptions, d *draftModel, kvMemory int64) (err error) {
	if d.config.Vocab == 0 {
		return nil
	}
	name := o.Speculation.Model
	l.Draft, err = Load(LoadOptions{
		Model: name, Device: o.Device, Kernels: o.Kernels, Quantization: o.Quantization, Threads: o.Threads, Logger: o.Logger,
		CUDALibrary: o.CUDALibrary, GPUMemory: o.GPUMemory, EnforceEager: o.EnforceEager,
		KVMemory: kvMemory, KVDType: o.KVDType, BlockTokens: o.BlockTokens,
		MaxModelLen: min(l.Scheduler.MaxModelLen, d.config.MaxPositions), MaxSeqs: o.MaxSeqs, MaxBatchedTokens: o.MaxBatchedTokens, MaxQueued: o.MaxQueued,
		Progress: o.Progress,
	})
	if err != nil {
		return fmt.Errorf("--speculative-config, the draft model's share of --kv-cache-memory-bytes is %s: %w", memory.Bytes(kvMemory), err)
	}
	l.Drafter, err = draft.New(draft.Config{
		Model: l.Draft.Model, Pool: l.Draft.Scheduler.Pool,
		MaxTokens: l.Draft.Scheduler.MaxBatchedTokens, MaxOutputs: l.Draft.Scheduler.MaxOutputs, MaxModelLen: l.Draft.Scheduler.MaxModelLen,
	})
	if err != nil {
		return fmt.Errorf("%w: --speculative-config: %w", ErrOption, err)
	}
	o.Logger.Info("draft model loaded", "model", name, "tokens", o.Speculation.Tokens, "weights", memory.Bytes(d.weights), "kv_memory", memory.Bytes(kvMemory))
	return nil
}
