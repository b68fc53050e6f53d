package cuda

import (
	"fmt"
	"unsafe"

	"github.com/tandem-serving/tandem/engine/backend"
)

// KV that the network transfers directly to or from device memory never passes the
// host. The device computes a checksum of each page and writes it to the host, next to
// the copies of mirror.go.

// kvDigests allocates the checksums of a region.
func (c *CUDA) kvDigests(blocks int) ([]uint32, error) {
	m := c.dev.host(nil, 4*blocks)
	if m == nil {
		return nil, c.failed(fmt.Sprintf("%d bytes of pinned memory", 4*blocks))
	}
	return unsafe.Slice((*uint32)(unsafe.Pointer(&m[0])), blocks), nil
}

// KVAddress returns the address of a region; see backend.Direct.
func (c *CUDA) KVAddress(region int) (at uintptr, gpu int) {
	if c.info.twin != 0 {
		return uintptr(c.kv.regions[region]), -1
	}
	return uintptr(c.kv.regions[region]), c.opts.Device
}

// KVError returns why the network cannot access the regions; see backend.Direct.
func (c *CUDA) KVError() error { return c.kv.refused }

// KVDigest returns the checksum of a page that Digest, or a step, computed last.
func (c *CUDA) KVDigest(region int, block int32) uint32 { return c.kv.digests[region][block] }

// Digest computes the checksums of all layers' pages, and waits.
func (c *CUDA) Digest(blocks [][]int32) error {
	if err := c.checkBlocks(blocks); err != nil {
		return err
	}
	c.kv.pieces = c.kv.pieces[:0]
	for layer := range c.kv.spec.Layers {
		c.addDigests(layer, blocks)
	}
	return c.digestNow()
}

// Verify compares pages with the checksums of their source; see backend.Direct.
func (c *CUDA) Verify(pages []backend.PageDigest) (backend.Arrival, error) {
	c.kv.pieces = c.kv.pieces[:0]
	for _, p := range pages {
		if c.kv.mirror == nil || p.Region < 0 || p.Region >= c.kv.spec.Regions || p.Page < 0 || int(p.Page) >= c.kv.spec.Blocks {
			return nil, fmt.Errorf("%w: page %d of region %d to verify, there are %d in %d", backend.ErrShape, p.Page, p.Region, c.kv.spec.Blocks, c.kv.spec.Regions)
		}
		c.kv.pieces = append(c.kv.pieces, c.digestOf(p.Region, p.Page))
	}
	if !c.dev.flush() {
		return nil, c.failed("KV that has arrived")
	}
	if err := c.startDigests(); err != nil {
		return nil, err
	}
	c.kv.pieces = c.kv.pieces[:0]
	if err := c.copyPieces(false); err != nil {
		return nil, err
	}
	return c.arrival(c.kv.copies, func() error {
		for _, p := range pages {
			if got := c.kv.digests[p.Region][p.Page]; got != p.CRC {
				return fmt.Errorf("%w: page %d of region %d has %08x, it was sent with %08x", backend.ErrDigest, p.Page, p.Region, got, p.CRC)
			}
		}
		return nil
	}), nil
}

// addDigests adds a layer's pages in blocks, one piece each.
func (c *CUDA) addDigests(layer int, blocks [][]int32) {
	place := c.kv.spec.Layers[layer]
	for _, id := range blocks[place.Group] {
		c.kv.pieces = append(c.kv.pieces, c.digestOf(place.Region, id))
	}
}

func (c *CUDA) digestOf(region int, block int32) piece {
	size := c.kv.spec.PageBytes
	return piece{c.kv.regions[region] + address(int(block)*size), uint64(uintptr(unsafe.Pointer(&c.kv.digests[region][block]))), int64(size)}
}

// startDigests starts the checksums of c.kv.pieces. They are complete when the next copies are.
func (c *CUDA) startDigests() error {
	if !c.dev.digest(c.kv.pieces) {
		return c.failed("checksums of KV")
	}
	return nil
}

func (c *CUDA) digestNow() error {
	if err := c.startDigests(); err != nil {
		return err
	}
	c.kv.pieces = c.kv.pieces[:0]
	if err := c.copyPieces(false); err != nil {
		return err
	}
	return c.awaitCopies(c.kv.copies)
}
