package cuda

import (
	"fmt"

	"github.com/tandem-serving/tandem/engine/backend"
)

// Devices of one model communicate by NCCL, which the shared object opens on demand.
// Steps come through backend.WorkerGroup, which knows when a worker is lost. Then the NCCL
// communicator is aborted, because a device would wait for ever.

// NCCLName is the default file name of NCCL.
const NCCLName = "libnccl.so.2"

const ncclIDBytes = 128

// NewGroupID returns the id of a new NCCL communicator.
func NewGroupID(libraryPath, nccl string) ([]byte, error) {
	l, err := open(libraryPath)
	if err != nil {
		return nil, err
	}
	id, err := l.ncclID(nccl)
	if err != nil {
		return nil, fmt.Errorf("%w: NCCL, which tensor parallelism on GPUs needs: %w", backend.ErrNoDevice, err)
	}
	return id, nil
}

// JoinGroup waits until all workers have called it with the same id.
func (c *CUDA) JoinGroup(nccl string, id []byte) error {
	r := c.opts.Group
	if r == nil || len(id) != ncclIDBytes {
		return fmt.Errorf("%w: a communicator id of %d bytes", backend.ErrShape, len(id))
	}
	if !c.dev.joinGroup(nccl, id, r.Rank(), r.Size()) {
		return c.failed("joining the communicator")
	}
	return nil
}

// AllReduce records x = the sum of all workers' x.
func (c *CUDA) AllReduce(x backend.Buf) {
	b := c.buf(x)
	if c.opts.Group != nil {
		c.record(b, op{kind: opAllReduce, n: int32(b.cols), dst: b.data})
	}
}

// AllGather records dst = all workers' src, side by side. NCCL requires parts of equal
// size, so that narrower parts are padded.
func (c *CUDA) AllGather(dst, src backend.Buf) {
	d, a := c.buf(dst), c.buf(src)
	if c.opts.Group == nil {
		need(d == a, "AllGather: %d of %d columns with one worker", a.cols, d.cols)
		return
	}
	n := c.opts.Group.Size()
	from, end := backend.Cut(d.cols, 1, c.opts.Group.Rank(), n)
	need(d != a && d.rows == a.rows && a.cols == end-from, "AllGather: %d columns of %d, want %d", a.cols, d.cols, end-from)
	wide := (d.cols + n - 1) / n
	if c.gathered == nil {
		c.gathered = make(map[backend.Buf]address)
	}
	scratch, ok := c.gathered[src]
	if !ok {
		var err error
		scratch, err = c.reserve((n+1)*c.limit(d.rows)*wide*4, "gathering")
		need(err == nil, "AllGather: %v", err)
		c.gathered[src] = scratch
	}
	all := scratch + address(c.limit(d.rows)*wide*4)
	c.record(d, op{kind: opPack, n: int32(wide), k: int32(a.cols), dst: scratch, a: a.data})
	c.record(d, op{kind: opAllGather, n: int32(wide), dst: all, a: scratch})
	c.record(d, op{kind: opUnpack, n: int32(d.cols), heads: int32(n), dim: int32(wide), dst: d.data, a: all})
}
