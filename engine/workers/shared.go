package workers

import (
	"errors"
	"os"
	"unsafe"
)

// Memory is a file of memory that this process and its workers map piece by piece.
type Memory struct {
	file  *os.File
	size  int64
	parts [][]byte
}

// NewMemory returns an empty Memory.
func NewMemory(name string) (*Memory, error) {
	f, err := newMemory(name, 0)
	if err != nil {
		return nil, err
	}
	return &Memory{file: f}, nil
}

// File returns the file that workers map.
func (m *Memory) File() *os.File { return m.file }

// Map returns n more zeroed bytes. A page takes memory when it is first touched.
func (m *Memory) Map(n int) ([]byte, error) {
	page := int64(os.Getpagesize())
	size := m.size + (int64(n)+page-1)/page*page
	if err := m.file.Truncate(size); err != nil {
		return nil, err
	}
	b, err := Map(m.file, m.size, n)
	if err != nil {
		return nil, err
	}
	m.size = size
	m.parts = append(m.parts, b)
	return b, nil
}

// Place returns the offset in the file of memory that Map returned.
func (m *Memory) Place(b []byte) (at int64, ok bool) {
	page := os.Getpagesize()
	for _, p := range m.parts {
		if unsafe.SliceData(p) == unsafe.SliceData(b) {
			return at, true
		}
		at += int64((len(p) + page - 1) / page * page)
	}
	return 0, false
}

// Close unmaps the memory. It must not be in use in this process.
func (m *Memory) Close() error {
	errs := []error{m.file.Close()}
	for _, p := range m.parts {
		errs = append(errs, unmap(p))
	}
	return errors.Join(errs...)
}
