package kvtransfer

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Shared is memory that readers on this host can map, to copy pages out of it. It is one sealed
// memory file: no other process can write to it, shrink it, or map it writable.
type Shared struct {
	file  *os.File
	size  int64
	parts []sharedPart
	err   error // set once sealed
}

// sharedPart is one mapping of the file.
type sharedPart struct {
	at  int64 // in the file
	mem []byte
}

// NewShared returns an empty memory file. Calls of Map follow, then a Writer seals it.
func NewShared() (*Shared, error) {
	fd, err := unix.MemfdCreate("tandem-kv", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("kvtransfer: memory file: %w", err)
	}
	return &Shared{file: os.NewFile(uintptr(fd), "tandem-kv")}, nil
}

// Map adds n zeroed bytes to the file and returns them, aligned to a system page. The kernel
// allocates each page at its first access.
func (s *Shared) Map(n int) ([]byte, error) {
	if s.err != nil {
		return nil, fmt.Errorf("%w: mapping %d bytes: %w", ErrArguments, n, s.err)
	}
	if n < 1 {
		return nil, fmt.Errorf("%w: mapping %d bytes, want at least 1", ErrArguments, n)
	}
	size := s.size + int64(n)
	if page := int64(os.Getpagesize()); size%page != 0 {
		size += page - size%page
	}
	if err := s.file.Truncate(size); err != nil {
		return nil, fmt.Errorf("kvtransfer: memory file of %d bytes: %w", size, err)
	}
	b, err := unix.Mmap(int(s.file.Fd()), s.size, int(size-s.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("kvtransfer: mapping %d bytes of a memory file: %w", n, err)
	}
	s.parts = append(s.parts, sharedPart{s.size, b})
	s.size = size
	return b[:n:n], nil
}

// seal seals the file as readers require. Parts that are already mapped stay writable here.
func (s *Shared) seal() error {
	if s.err != nil {
		return nil
	}
	s.err = errors.New("the memory is in use")
	_, err := unix.FcntlInt(s.file.Fd(), unix.F_ADD_SEALS, sharedSeals|unix.F_SEAL_FUTURE_WRITE|unix.F_SEAL_SEAL)
	return err
}

// sharedSeals are the required seals: without them a reader could crash when it reads its mapping.
const sharedSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW

// File returns the memory file. Another process of this node may map it before a Writer seals it.
func (s *Shared) File() *os.File { return s.file }

// Place returns the offset of memory in the file.
func (s *Shared) Place(b []byte) (int64, bool) {
	for _, p := range s.parts {
		base, at := uintptr(unsafe.Pointer(&p.mem[0])), uintptr(unsafe.Pointer(&b[0]))
		if at >= base && at-base+uintptr(len(b)) <= uintptr(len(p.mem)) {
			return p.at + int64(at-base), true
		}
	}
	return 0, false
}

// readOnly opens the file a second time, for other processes.
func (s *Shared) readOnly() (*os.File, error) {
	return os.Open(fmt.Sprintf("/proc/self/fd/%d", s.file.Fd()))
}

// Close unmaps the memory, which must no longer be in use here. Readers keep their mappings.
func (s *Shared) Close() error {
	errs := []error{s.file.Close()}
	for _, p := range s.parts {
		errs = append(errs, unix.Munmap(p.mem))
	}
	s.parts = nil
	return errors.Join(errs...)
}

// flag is a word that a writer shares with one reader. While it is set, the reader's copies of the
// writer's pages are what the writer meant to send. A writer that gives up on a reader clears it
// before its pages get other contents, so that a reader that was suspended in between discards its
// copies.
type flag struct {
	*Shared
	word *atomic.Uint32
}

func newFlag() (*flag, error) {
	s, err := NewShared()
	if err != nil {
		return nil, err
	}
	b, err := s.Map(4)
	if err == nil {
		err = s.seal()
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	f := &flag{s, (*atomic.Uint32)(unsafe.Pointer(&b[0]))}
	f.word.Store(1)
	return f, nil
}

// close clears the flag. A writer does so before it releases pages that a reader may be copying.
// Readers keep their mappings.
func (f *flag) close() {
	if f != nil {
		f.word.Store(0)
		_ = f.Shared.Close() // unmaps exactly what was mapped
	}
}

// mapping is a reader's read-only mapping of a writer's memory.
type mapping struct {
	regions [][]byte // [region] pages × page bytes
	nPages  int
	all     [][]byte       // to unmap
	word    *atomic.Uint32 // the writer's flag
	fence   atomic.Uint32  // see revoked
	users   atomic.Int32
}

// mapShared maps a writer's memory if it has the announced size and is sealed. It closes the files.
func mapShared(l Layout, m *memoryMessage, files []*os.File) (_ *mapping, err error) {
	s := &mapping{nPages: m.nPages}
	defer func() {
		if err != nil {
			s.unmap()
		}
		for _, f := range files {
			f.Close()
		}
	}()
	if len(files) != 2 {
		return nil, fmt.Errorf("%w: %d files with a memory message, want 2", ErrProtocol, len(files))
	}
	for _, f := range files {
		seals, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
		if err != nil {
			return nil, fmt.Errorf("%w: a file that is no sealed memory: %w", ErrProtocol, err)
		}
		if seals&sharedSeals != sharedSeals {
			return nil, fmt.Errorf("%w: memory with seals %x, want %x", ErrProtocol, seals, sharedSeals)
		}
		st, err := f.Stat()
		if err != nil {
			return nil, err
		}
		b, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			return nil, fmt.Errorf("kvtransfer: mapping a writer's %d bytes: %w", st.Size(), err)
		}
		s.all = append(s.all, b)
	}
	size := m.nPages * l.PageBytes
	for i, at := range m.offsets {
		if at > uint64(len(s.all[0])) || uint64(size) > uint64(len(s.all[0]))-at {
			return nil, fmt.Errorf("%w: region %d of %d bytes at %d of %d", ErrProtocol, i, size, at, len(s.all[0]))
		}
		s.regions = append(s.regions, s.all[0][at:at+uint64(size)])
	}
	if len(s.all[1]) < 4 {
		return nil, fmt.Errorf("%w: a flag of %d bytes", ErrProtocol, len(s.all[1]))
	}
	s.word = (*atomic.Uint32)(unsafe.Pointer(&s.all[1][0]))
	return s, nil
}

// revoked reports whether the writer has cleared its flag. Then earlier copies may be invalid.
func (s *mapping) revoked() bool {
	s.fence.Add(1) // orders the copy's loads before the load below
	return s.word.Load() == 0
}

// page returns one of the writer's pages.
func (s *mapping) page(l Layout, region, page int) []byte {
	return s.regions[region][page*l.PageBytes:][:l.PageBytes]
}

func (s *mapping) unmap() {
	for _, b := range s.all {
		_ = unix.Munmap(b) // exactly what was mapped
	}
	s.all = nil
}
