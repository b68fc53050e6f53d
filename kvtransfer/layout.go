package kvtransfer

import (
	"errors"
	"fmt"

	"github.com/tandem-serving/tandem/kvtransfer/fabric"
	"github.com/tandem-serving/tandem/kvtransfer/lease"
)

// Bounds on what a peer may send. A layout or grant beyond them is rejected before memory is
// allocated for it.
const (
	MaxRegions    = 1 << 12 // layers × regions of a layer
	MaxPageBytes  = 1 << 26
	MaxGrantPages = 1 << 20
	maxName       = 255 // bytes of a node's name or an address
)

// Run is a number of consecutive pages of a grant that exist only in the first Regions regions: the
// pages of a group of layers that is smaller than others.
type Run = lease.Run

// Runs returns the runs of a grant in which pages[i] pages, in order, exist in of[i] of the
// regions; nil if all pages exist in all regions.
func Runs(regions int, pages, of []int) (runs []Run) {
	partial := false
	for i, n := range pages {
		if n > 0 {
			runs = append(runs, Run{Pages: n, Regions: of[i]})
			partial = partial || of[i] != regions
		}
	}
	if !partial {
		return nil
	}
	return runs
}

// Layout describes the pages. Both ends must have the same.
type Layout struct {
	Regions   int    // the most KV layers that share a block table
	PageBytes int    // bytes of one page of one region
	Hash      uint64 // of the rest of the format: layer names, dtype, tokens per page, numerics class
}

func (l Layout) String() string {
	return fmt.Sprintf("%016x (%d regions, pages of %d bytes)", l.Hash, l.Regions, l.PageBytes)
}

func (l Layout) validate() error {
	if l.Regions < 1 || l.Regions > MaxRegions || l.PageBytes < 1 || l.PageBytes > MaxPageBytes {
		return fmt.Errorf("%w: layout %v: want 1..%d regions and pages of 1..%d bytes", ErrArguments, l, MaxRegions, MaxPageBytes)
	}
	return nil
}

// Memory is the memory that one end registers. Regions must not move while a Reader or Writer uses
// them.
type Memory interface {
	// Region returns layer i's memory: nPages × Layout.PageBytes bytes, nPages being the same for all.
	Region(i int) []byte
}

// DeviceMemory describes the GPU memory of a Memory's pages. RDMA transfers them between devices
// without Memory and the processor. So the device computes their CRC32C, and the owner compares it.
type DeviceMemory interface {
	// KVAddress returns the address of region i, which has the size of Memory's, and its CUDA
	// device; a negative device means host memory.
	KVAddress(region int) (at uintptr, gpu int)
	// KVError returns why the network cannot access the regions; nil if it can.
	KVError() error
	// KVDigest returns the CRC32C of a page that was given to Send.
	KVDigest(region int, page int32) uint32
}

// Digest is the expected CRC32C of a page that has landed in a device.
type Digest struct {
	Region int
	Page   int32
	CRC    uint32
}

// fabricMemory returns the memory that RDMA accesses, by region: the device's if there is one.
func (r *regions) fabricMemory(d DeviceMemory) []fabric.Memory {
	all := make([]fabric.Memory, len(r.mem))
	for i, b := range r.mem {
		if all[i] = fabric.Of(b); d != nil {
			at, gpu := d.KVAddress(i)
			all[i].At, all[i].GPU = at, max(gpu, fabric.Host)
		}
	}
	return all
}

// CheckDevice returns an error if a fabric cannot read and write a device's memory.
func CheckDevice(f *fabric.Device, d DeviceMemory) error {
	if err := d.KVError(); err != nil {
		return err
	}
	at, gpu := d.KVAddress(0)
	m := fabric.Memory{At: at, Bytes: checkBytes, GPU: max(gpu, fabric.Host)}
	k, err := f.Grant([]fabric.Memory{m})
	if err != nil {
		return err
	}
	s, err := f.Source(m)
	if err == nil {
		err = s.Close()
	}
	return errors.Join(err, k.Close())
}

// checkBytes is the size of the device memory that CheckDevice tries: a page of the smallest
// models.
const checkBytes = 4096

// regions is registered memory, split into pages.
type regions struct {
	layout Layout
	nPages int
	mem    [][]byte // [region] nPages × PageBytes
}

func register(l Layout, m Memory) (*regions, error) {
	if err := l.validate(); err != nil {
		return nil, err
	}
	if m == nil {
		return nil, fmt.Errorf("%w: no memory", ErrArguments)
	}
	r := &regions{layout: l, mem: make([][]byte, l.Regions)}
	for i := range r.mem {
		r.mem[i] = m.Region(i)
		if i == 0 {
			r.nPages = len(r.mem[0]) / l.PageBytes
		}
		if r.nPages == 0 || len(r.mem[i]) != r.nPages*l.PageBytes {
			return nil, fmt.Errorf("%w: region %d has %d bytes, want %d pages of %d", ErrArguments, i, len(r.mem[i]), r.nPages, l.PageBytes)
		}
	}
	return r, nil
}

// page returns one page of one region.
func (r *regions) page(region int, page int32) []byte {
	at := int(page) * r.layout.PageBytes
	return r.mem[region][at : at+r.layout.PageBytes : at+r.layout.PageBytes]
}
