package cpu

import (
	"sync"
	"sync/atomic"
)

// task is work in independent items. worker is below the pool's thread count and
// unique among the items that run at the same time.
type task interface {
	item(worker, index int)
}

// pool runs tasks on a fixed set of goroutines and the caller, for portable kernels.
// Items are claimed one by one, so that no task waits for a worker that has not
// started. Idle workers sleep on a channel.
type pool struct {
	task    task
	items   uint32
	claim   atomic.Uint64 // task number << 32 | items not yet claimed
	pending atomic.Int32  // items not yet finished
	wake    chan struct{} // one token wakes one worker
	done    chan struct{} // one token per task whose last item a worker finished
	quit    chan struct{}
	exited  sync.WaitGroup
}

// newPool starts threads-1 workers. The caller of run is the other one.
func newPool(threads int) *pool {
	p := &pool{wake: make(chan struct{}, threads), done: make(chan struct{}, 1), quit: make(chan struct{})}
	for w := 1; w < threads; w++ {
		p.exited.Go(func() { p.work(w) })
	}
	return p
}

func (p *pool) work(worker int) {
	for {
		select {
		case <-p.wake:
		case <-p.quit:
			return
		}
		if p.drain(worker) {
			p.done <- struct{}{}
		}
	}
}

// run returns when every item of t is finished.
func (p *pool) run(t task, items int) {
	if items <= 0 {
		return
	}
	p.task, p.items = t, uint32(items)
	p.pending.Store(int32(items))
	p.claim.Store((p.claim.Load()>>32+1)<<32 | uint64(items))
	for range min(items-1, cap(p.wake)-1) {
		select {
		case p.wake <- struct{}{}:
		default: // enough workers have been woken already
		}
	}
	if !p.drain(0) {
		<-p.done
	}
}

// drain claims and runs items until none is left, and reports whether it finished the
// task's last one. The task cannot change while a claimed item is unfinished, so that
// its fields are read only after a claim.
func (p *pool) drain(worker int) bool {
	for {
		word := p.claim.Load()
		left := uint32(word)
		if left == 0 {
			return false
		}
		if !p.claim.CompareAndSwap(word, word-1) {
			continue
		}
		p.task.item(worker, int(p.items-left))
		if p.pending.Add(-1) == 0 {
			return true
		}
	}
}

func (p *pool) close() {
	close(p.quit)
	p.exited.Wait()
}
