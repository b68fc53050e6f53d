package kvtransfer

import (
	"errors"
	"fmt"

	"github.com/tandem-serving/tandem/kvtransfer/fabric"
	"github.com/tandem-serving/tandem/kvtransfer/lease"
)

// Bounds on what a peer may claim; a layout or grant beyond them is refused before memory is set aside for it.
const (
	MaxRegions    = 1 << 12 // layers times what each keeps
	MaxPageBytes  = 1 << 26
	MaxGrantPages = 1 << 20
	maxName       = 255 // bytes of a node's name or an address
)

// Run is some consecutive pages of a grant that exist in the first Regions regions only: those of a group of layers that is smaller
// than others.
type Run = lease.Run

// Runs says how a grant's pages lie when pages[i] of them, in order, are of the first of[i] regions out of so many; nil when all
// are of all.
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

// Layout is what both ends must agree on before a page means the same to both.
type Layout struct {
	Regions   int    // the most KV layers that share a block table
	PageBytes int    // bytes of one page of one region
	Hash      uint64 // of everything else that gives the bytes their meaning: layer names, dtype, tokens per page, numerics class
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

// Memory is the memory one end registers. Regions must not move while a Reader or Writer has them.
type Memory interface {
	// Region returns layer i's memory: nPages × Layout.PageBytes bytes, nPages being the same for all.
	Region(i int) []byte
}

// DeviceMemory is where the pages of a Memory lie in a GPU. By RDMA they go from there to there, past Memory and the processor: so their CRC32C
// are the device's to make, and the owner's to compare.
type DeviceMemory interface {
	// KVAddress is where region i lies, as large as Memory's, and in which CUDA device; negative: the processor's memory stands in for one's.
	KVAddress(region int) (at uintptr, gpu int)
	// KVDigest is the CRC32C of a page that was given to Send.
	KVDigest(region int, page int32) uint32
}

// Digest is the CRC32C that a page which has landed in a device was sent with.
type Digest struct {
	Region int
	Page   int32
	CRC    uint32
}

// fabricMemory is what RDMA reads or writes, by region: the device's if there is one.
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

// CheckDevice says whether a fabric reaches a device's memory: that can be read and written to by others.
func CheckDevice(f *fabric.Device, d DeviceMemory) error {
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

// checkBytes is how much of a device's memory is tried: a page of the smallest models.
const checkBytes = 4096

// regions is registered memory cut into pages.
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
