//go:build cgo && linux

package cuda

/*
#cgo CFLAGS: -I${SRCDIR}/../../../cuda
#cgo LDFLAGS: -ldl
#cgo noescape td_l_upload
#cgo noescape td_l_download
#cgo noescape td_l_record
#cgo noescape td_l_copy
#cgo noescape td_l_digest
#cgo nocallback td_l_upload
#cgo nocallback td_l_download
#cgo nocallback td_l_record
#cgo nocallback td_l_run
#cgo nocallback td_l_copy
#cgo nocallback td_l_digest
#cgo nocallback td_l_poll
#cgo nocallback td_l_wait
#cgo nocallback td_l_tables
#include "library.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"unsafe"
)

// The structures have the same size on both sides.
var (
	_ = [1]byte{}[unsafe.Sizeof(C.td_op{})-unsafe.Sizeof(op{})]
	_ = [1]byte{}[unsafe.Sizeof(C.td_info{})-unsafe.Sizeof(info{})]
	_ = [1]byte{}[unsafe.Sizeof(C.td_draw{})-unsafe.Sizeof(draw{})]
	_ = [1]byte{}[unsafe.Sizeof(C.td_limits{})-unsafe.Sizeof(limits{})]
	_ = [1]byte{}[unsafe.Sizeof(C.td_expert{})-unsafe.Sizeof(expert{})]
	_ = [1]byte{}[unsafe.Sizeof(C.td_probs{})-unsafe.Sizeof(probs{})]
	_ = [1]byte{}[unsafe.Sizeof(C.td_rules{})-unsafe.Sizeof(rules{})]
	_ = [1]byte{}[unsafe.Sizeof(C.td_ban{})-unsafe.Sizeof(ban{})]
	_ = [1]byte{}[unsafe.Sizeof(C.td_mark{})-unsafe.Sizeof(mark{})]
	_ = [1]byte{}[C.TD_RULE_WORDS-ruleWords]
	_ = [1]byte{}[C.TD_TOP-topProbs]
	_ = [1]byte{}[unsafe.Sizeof(C.td_piece{})-unsafe.Sizeof(piece{})]
	_ = [1]byte{}[C.TD_VERSION-version]
	_ = [1]byte{}[C.TD_IN_CHUNK-inChunk+C.TD_CHUNK_ROWS-chunkRows+C.TD_CHUNK_LEAST-chunkLeast+C.TD_FEW-fewRows+C.TD_MOE_ROWS-moeRows]
	_ = [1]byte{}[unsafe.Sizeof(C.td_state{})-unsafe.Sizeof(state{})]
	_ = [1]byte{}[C.TD_DELTA_WIDTH-deltaWidth+C.TD_DELTA_WIDEST-deltaWidest]
	_ = [1]byte{}[C.TD_DELTA-int(opDelta)]
	_ = [1]byte{}[C.TD_DRAWS_SLICES-drawsSlices+C.TD_DRAWS_ALONE-drawsAlone]
)

// library is an opened shared object. It stays open, because what a GPU's driver started
// for it ends only with the process.
type library struct{ c *C.td_library }

// openLibrary opens the shared object at path.
func openLibrary(path string) (*library, error) {
	l := &library{(*C.td_library)(C.calloc(1, C.size_t(unsafe.Sizeof(C.td_library{}))))}
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	if bad := C.td_load(l.c, name); bad != nil {
		defer C.free(unsafe.Pointer(l.c))
		return nil, fmt.Errorf("%s: %s", path, C.GoString(bad))
	}
	if v := C.td_l_version(l.c); v != version {
		return nil, fmt.Errorf("%s: it has version %d of the interface, this program %d; build both from one source", path, v, version)
	}
	return l, nil
}

// count returns the number of devices.
func (l *library) count() (int, error) {
	var why [256]C.char
	n := C.td_l_count(l.c, &why[0], C.int(len(why)))
	if n < 0 {
		return 0, errors.New(C.GoString(&why[0]))
	}
	return int(n), nil
}

// ncclID returns the id of a new NCCL communicator.
func (l *library) ncclID(nccl string) ([]byte, error) {
	var why [256]C.char
	id := make([]byte, ncclIDBytes)
	path := C.CString(nccl)
	defer C.free(unsafe.Pointer(path))
	if C.td_l_nccl_id(l.c, path, (*C.char)(unsafe.Pointer(&id[0])), &why[0], C.int(len(why))) == 0 {
		return nil, errors.New(C.GoString(&why[0]))
	}
	return id, nil
}

// joinGroup joins the communicator with that id.
func (d *driver) joinGroup(nccl string, id []byte, rank, ranks int) bool {
	path := C.CString(nccl)
	defer C.free(unsafe.Pointer(path))
	return C.td_l_ranks(d.l, d.d, path, (*C.char)(unsafe.Pointer(&id[0])), C.int(rank), C.int(ranks)) != 0
}

func (d *driver) abortGroup() { C.td_l_leave(d.l, d.d) }

// driver is an open device.
type driver struct {
	l *C.td_library
	d *C.td_device
}

func (l *library) open(ordinal int, m limits) (*driver, error) {
	var why [256]C.char
	lim := C.td_limits{tokens: C.int32_t(m.tokens), outputs: C.int32_t(m.outputs), seqs: C.int32_t(m.seqs), blocks: C.int32_t(m.blocks), one_order: C.int32_t(m.oneOrder), draws: C.int32_t(m.draws)}
	d := C.td_l_open(l.c, C.int(ordinal), lim, &why[0], C.int(len(why)))
	if d == nil {
		return nil, errors.New(C.GoString(&why[0]))
	}
	return &driver{l.c, d}, nil
}

// blas opens cuBLASLt and returns its version.
func (d *driver) blas(path string) (version int, err error) {
	var why [256]C.char
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	if version = int(C.td_l_blas(d.l, d.d, name, &why[0], C.int(len(why)))); version == 0 {
		return 0, errors.New(C.GoString(&why[0]))
	}
	return version, nil
}

func (d *driver) close()     { C.td_l_close(d.l, d.d) }
func (d *driver) err() error { return errors.New(C.GoString(C.td_l_error(d.l, d.d))) }

func (d *driver) describe() (i info) {
	C.td_l_describe(d.l, d.d, (*C.td_info)(unsafe.Pointer(&i)))
	return i
}

// alloc returns n bytes of device memory, or 0.
func (d *driver) alloc(n int) address { return address(C.td_l_alloc(d.l, d.d, C.int64_t(n))) }

func (d *driver) upload(to address, from []byte) bool {
	return len(from) == 0 || C.td_l_upload(d.l, d.d, C.td_address(to), unsafe.Pointer(&from[0]), C.int64_t(len(from))) != 0
}

func (d *driver) download(to []byte, from address) bool {
	return len(to) == 0 || C.td_l_download(d.l, d.d, unsafe.Pointer(&to[0]), C.td_address(from), C.int64_t(len(to))) != 0
}

// groups allocates the memory of two steps for n groups of KV.
func (d *driver) groups(n int, m limits) (s [2]stepMemory, ok bool) {
	var both [2]C.td_step
	if C.td_l_groups(d.l, d.d, C.int(n), &both[0]) == 0 {
		return s, false
	}
	ints := func(p *C.int32_t, n int) []int32 { return unsafe.Slice((*int32)(unsafe.Pointer(p)), n) }
	tokens, outputs := int(m.tokens), int(m.outputs)
	for i, c := range both {
		s[i] = stepMemory{
			counts: ints(c.counts, 5), ids: ints(c.ids, tokens), positions: ints(c.positions, tokens), rowSpan: ints(c.row_span, tokens), adapters: ints(c.adapters, tokens),
			outRows: ints(c.out_rows, outputs), slots: ints(c.slots, max(n, 1)*tokens), sampled: ints(c.sampled, outputs),
			draws: unsafe.Slice((*draw)(unsafe.Pointer(c.draws)), outputs), done: (*uint32)(unsafe.Pointer(c.done)), copied: (*uint32)(unsafe.Pointer(c.copied)),
			probs: unsafe.Slice((*probs)(unsafe.Pointer(c.probs)), outputs), rules: unsafe.Slice((*uint64)(unsafe.Pointer(c.rules)), outputs*ruleWords),
		}
		if n > 0 {
			s[i].tables = ints(c.tables, n*int(m.seqs)*int(m.blocks))
		}
	}
	return s, true
}

func (d *driver) tables(which, group, seq, from, n int) bool {
	return C.td_l_tables(d.l, d.d, C.int(which), C.int(group), C.int(seq), C.int(from), C.int(n)) != 0
}

// recorded is a plan of the shared object.
type recorded struct{ p *C.td_plan }

func (d *driver) record(ops []op, tokens, outputs int, graph bool) (recorded, bool) {
	g, first := C.int(0), unsafe.Pointer(unsafe.SliceData(ops))
	if graph {
		g = 1
	}
	p := C.td_l_record(d.l, d.d, first, C.int(len(ops)), C.int(tokens), C.int(outputs), g)
	return recorded{p}, p != nil
}

func (d *driver) run(p recorded, which, from, to int) bool {
	return C.td_l_run(d.l, d.d, p.p, C.int(which), C.int(from), C.int(to)) != 0
}

// host returns n bytes of host memory that copies can use: memory, or memory of the
// library if that is nil. It returns nil on failure.
func (d *driver) host(memory []byte, n int) []byte {
	p := C.td_l_host(d.l, d.d, unsafe.Pointer(unsafe.SliceData(memory)), C.int64_t(n))
	if p == nil {
		return nil
	}
	return unsafe.Slice((*byte)(p), n)
}

func (d *driver) copy(pieces []piece, toDevice bool) bool {
	to := C.int(0)
	if toDevice {
		to = 1
	}
	return C.td_l_copy(d.l, d.d, unsafe.Pointer(unsafe.SliceData(pieces)), C.int(len(pieces)), to) != 0
}

// follow makes steps started later wait for the copies to the device.
func (d *driver) follow() bool { return C.td_l_follow(d.l, d.d) != 0 }

// direct prepares memory of alloc for the network.
func (d *driver) direct(memory address) bool {
	return C.td_l_direct(d.l, d.d, C.td_address(memory)) != 0
}

// flush makes what the network has written visible to everything started later.
func (d *driver) flush() bool { return C.td_l_flush(d.l, d.d) != 0 }

// digest writes the checksums of pieces to the host, before the copies of the next call
// of copy end.
func (d *driver) digest(pieces []piece) bool {
	return len(pieces) == 0 || C.td_l_digest(d.l, d.d, unsafe.Pointer(unsafe.SliceData(pieces)), C.int(len(pieces))) != 0
}

// poll reports whether all work has ended. It returns an error if it failed.
func (d *driver) poll() (bool, error) {
	switch C.td_l_poll(d.l, d.d) {
	case 0:
		return false, nil
	case 1:
		return true, nil
	}
	return false, d.err()
}

func (d *driver) wait() bool { return C.td_l_wait(d.l, d.d) != 0 }

// memory returns a twin's memory, which is host memory.
func (d *driver) memory(at address, n int) []byte {
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&at))), n)
}

// twin sets how the host twin runs later calls: a seed, whether copies land late, and
// which barrier is left out.
func (l *library) twin(seed uint64, deferred bool, skip string) {
	late, name := C.int(0), C.CString(skip)
	defer C.free(unsafe.Pointer(name))
	if deferred {
		late = 1
	}
	C.td_l_twin(l.c, C.uint64_t(seed), late, name)
}

// sites returns the barriers and waits that the twin has reached, one per line.
func (l *library) sites() string {
	b := make([]byte, 64<<10)
	n := C.td_l_twin_sites(l.c, (*C.char)(unsafe.Pointer(&b[0])), C.int(len(b)))
	return string(b[:min(int(n), len(b)-1)])
}

// refuse makes some calls of the twin's runtime fail, after others, for lack of memory or for good.
// call is one of td_twin_refuse.
func (l *library) refuse(call string, fatal bool, after, calls int) {
	name, forGood := C.CString(call), C.int(0)
	defer C.free(unsafe.Pointer(name))
	if fatal {
		forGood = 1
	}
	C.td_l_twin_refuse(l.c, name, forGood, C.int(after), C.int(calls))
}

// fault runs one of the twin's kernels with faults and returns what it detected, or
// false if there is no such kernel.
func (l *library) fault(kind int, deferred bool) (string, bool) {
	var why [256]C.char
	late := C.int(0)
	if deferred {
		late = 1
	}
	ok := C.td_l_twin_fault(l.c, C.int(kind), late, &why[0], C.int(len(why)))
	return C.GoString(&why[0]), ok != 0
}
