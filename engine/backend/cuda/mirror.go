package cuda

import (
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/tandem-serving/tandem/engine/backend"
)

// The network reads and writes KV in a copy of the device's KV in host memory. A block
// has one number in both. Blocks to send are copied to the host layer by layer, on a
// stream of their own while the step runs. Received blocks are copied to the device
// before a step begins that uses them.

// mapMirror maps n bytes of host memory that copies can use.
func (c *CUDA) mapMirror(n int) ([]byte, error) {
	var m []byte
	if c.opts.MapKV != nil {
		var err error
		if m, err = c.opts.MapKV(n); err != nil {
			return nil, err
		}
		if len(m) < n {
			return nil, fmt.Errorf("%w: %d bytes are mapped, want %d", backend.ErrMemory, len(m), n)
		}
	}
	if m = c.dev.host(m, n); m == nil {
		return nil, c.failed(fmt.Sprintf("%d bytes of pinned memory", n))
	}
	return m, nil
}

// KVRegion returns the host's copy of one region's pages, or nil if there is none.
func (c *CUDA) KVRegion(region int) []byte {
	if c.kv.mirror == nil {
		return nil
	}
	return c.kv.mirror[region]
}

// Mirrored reports whether KVRegion is a copy.
func (c *CUDA) Mirrored() bool { return c.kv.mirror != nil }

// Fetch copies pages to the host and waits for them; see backend.Mirror.
func (c *CUDA) Fetch(blocks [][]int32) error {
	if err := c.checkBlocks(blocks); err != nil {
		return err
	}
	c.kv.pieces = c.kv.pieces[:0]
	for layer := range c.kv.spec.Layers {
		c.addPieces(layer, blocks)
	}
	if err := c.copyPieces(false); err != nil {
		return err
	}
	return c.awaitCopies(c.kv.copies)
}

// Land copies pages to the device; see backend.Mirror. Steps that use none of the blocks do not
// wait.
func (c *CUDA) Land(blocks [][]int32) (backend.Arrival, error) {
	if err := c.checkBlocks(blocks); err != nil {
		return nil, err
	}
	c.kv.pieces = c.kv.pieces[:0]
	for layer := range c.kv.spec.Layers {
		c.addPieces(layer, blocks)
	}
	if err := c.copyPieces(true); err != nil {
		return nil, err
	}
	n := c.kv.copies
	c.kv.landed = n
	for _, ids := range blocks {
		for _, id := range ids {
			c.kv.landing[id] = n
		}
	}
	return c.arrival(n, func() error { return nil }), nil
}

// arrival is complete when n calls of copy have ended. check is called then.
func (c *CUDA) arrival(n uint32, check func() error) backend.Arrival {
	return func() (bool, error) {
		if !c.copied(n) {
			if _, err := c.dev.poll(); err != nil {
				return false, fmt.Errorf("cuda: copies of KV: %w", err)
			}
		}
		if !c.copied(n) {
			return false, nil
		}
		return true, check()
	}
}

// copied reports whether n calls of copy have ended.
func (c *CUDA) copied(n uint32) bool { return int32(atomic.LoadUint32(c.memory[0].copied)-n) >= 0 }

func (c *CUDA) checkBlocks(blocks [][]int32) error {
	if c.kv.mirror == nil || len(blocks) != len(c.kv.spec.Groups) {
		return fmt.Errorf("%w: blocks of %d groups to copy, the KV has %d; the host has a copy: %v", backend.ErrShape, len(blocks), len(c.kv.spec.Groups), c.kv.mirror != nil)
	}
	for g, ids := range blocks {
		for _, id := range ids {
			if id < 0 || int(id) >= c.kv.spec.Blocks {
				return fmt.Errorf("%w: block %d of group %d to copy, there are %d", backend.ErrShape, id, g, c.kv.spec.Blocks)
			}
		}
	}
	return nil
}

// addPieces adds a layer's pages in blocks. Consecutive blocks are one piece.
func (c *CUDA) addPieces(layer int, blocks [][]int32) {
	place, size, first := c.kv.spec.Layers[layer], c.kv.spec.PageBytes, len(c.kv.pieces)
	for _, id := range blocks[place.Group] {
		p := piece{c.kv.regions[place.Region] + address(int(id)*size), hostAddress(c.kv.mirror[place.Region]) + uint64(int(id)*size), int64(size)}
		if n := len(c.kv.pieces); n > first && c.kv.pieces[n-1].device+address(c.kv.pieces[n-1].bytes) == p.device {
			c.kv.pieces[n-1].bytes += p.bytes
			continue
		}
		c.kv.pieces = append(c.kv.pieces, p)
	}
}

func hostAddress(m []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(m)))) }

func (c *CUDA) copyPieces(toDevice bool) error {
	if !c.dev.copy(c.kv.pieces, toDevice) {
		return c.failed("copies of KV")
	}
	c.kv.copies++
	return nil
}

// awaitCopies waits until n calls of copy have ended.
func (c *CUDA) awaitCopies(n uint32) error {
	return c.await("copies of KV", func() bool { return c.copied(n) })
}

// await polls what the device writes. It yields to other goroutines, and now and then
// asks the driver for errors.
func (c *CUDA) await(what string, there func() bool) error {
	const ask = 200 * time.Microsecond
	var since time.Time
	began := time.Now()
	for i := 0; !there(); i++ {
		runtime.Gosched()
		if i%64 != 63 {
			continue
		}
		if now := time.Now(); now.Sub(since) > ask {
			since = now
			if r := c.opts.Group; r != nil {
				if err := r.Waiting(began); err != nil {
					return err
				}
			}
			idle, err := c.dev.poll()
			if err != nil {
				return fmt.Errorf("%w: cuda: %s: %w", backend.ErrDevice, what, err)
			}
			if idle && !there() {
				return fmt.Errorf("cuda: the device finished %s without its completion write: %w", what, c.dev.err())
			}
		}
	}
	return nil
}

// hasBlocks reports whether blocks is not empty. It returns an error for blocks outside of the KV.
func (c *CUDA) hasBlocks(blocks [][]int32) (some bool, err error) {
	if c.kv.mirror == nil || !slices.ContainsFunc(blocks, func(b []int32) bool { return len(b) > 0 }) {
		return false, nil
	}
	return true, c.checkBlocks(blocks)
}

// runMarked starts a step part by part. After each part it copies the requested pages of
// its layer, and it calls onMark when the copies have ended, while later parts run.
func (c *CUDA) runMarked(p *plan, which int, step *backend.Step, onMark func(layer int)) error {
	copying, err := c.hasBlocks(step.Fetch)
	if err != nil {
		return err
	}
	checking, err := c.hasBlocks(step.Digest)
	if err != nil {
		return err
	}
	done, marked := 0, 0
	first := c.kv.copies
	callMarks := func(wait bool) error {
		for ; marked < len(p.marks); marked++ {
			n := first + uint32(marked) + 1
			if int32(c.kv.copies-n) < 0 || !wait && !c.copied(n) {
				return nil
			}
			if err := c.awaitCopies(n); err != nil {
				return err
			}
			onMark(p.marks[marked].layer)
		}
		return nil
	}
	for _, m := range p.marks {
		if !c.dev.run(p.eager, which, done, m.at) {
			return c.failed("a step")
		}
		done = m.at
		c.kv.pieces = c.kv.pieces[:0]
		if checking {
			c.addDigests(m.layer, step.Digest)
			if err := c.startDigests(); err != nil {
				return err
			}
			c.kv.pieces = c.kv.pieces[:0]
		}
		if copying {
			c.addPieces(m.layer, step.Fetch)
		}
		if err := c.copyPieces(false); err != nil {
			return err
		}
		if err := callMarks(false); err != nil {
			return err
		}
	}
	if !c.dev.run(p.eager, which, done, len(p.ops)) {
		return c.failed("a step")
	}
	return callMarks(true)
}
