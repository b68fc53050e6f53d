package transfer

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/tandem-serving/tandem/kvtransfer"
)

// wordBytes is the grain of the pattern.
const wordBytes = 8

// poison fills pages before anything lands in them.
const poison = 0xa5a5a5a5a5a5a5a5

// memory is one side's registered memory.
type memory struct {
	s       *setup
	regions [][]byte           // [layer] positions × page bytes
	shared  *kvtransfer.Shared // contains the regions; nil: private memory
}

func (m *memory) page(layer int, page int32) []byte {
	at := int(page) * m.s.PageBytes
	return m.regions[layer][at : at+m.s.PageBytes]
}

// Region returns a layer's memory, for kvtransfer.
func (m *memory) Region(i int) []byte { return m.regions[i] }

// newMemory allocates a side's memory. With shared, it is in a file that readers on this host can
// map.
func newMemory(s *setup, shared bool) (*memory, error) {
	m := &memory{s: s}
	for range s.Layers {
		m.regions = append(m.regions, nil)
	}
	var err error
	if shared {
		if m.shared, err = kvtransfer.NewShared(); err != nil {
			return nil, err
		}
	}
	for i := range m.regions {
		if !shared {
			m.regions[i] = make([]byte, s.Positions*s.PageBytes)
		} else if m.regions[i], err = m.shared.Map(s.Positions * s.PageBytes); err != nil {
			return nil, errors.Join(err, m.free())
		}
	}
	return m, nil
}

func (m *memory) free() error {
	if m.shared == nil {
		return nil
	}
	return m.shared.Close()
}

// base returns the base of a source page's pattern: word i is (base+i)·odd.
func (s *setup) base(layer int, page int32) uint64 {
	x := s.Seed + uint64(layer)<<40 + uint64(page)<<8
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

const odd = 0x9e3779b97f4a7c15

// fill writes the pattern into every page.
func (m *memory) fill() {
	for layer := range m.regions {
		for page := range int32(m.s.Positions) {
			b, w := m.page(layer, page), m.s.base(layer, page)
			for i := 0; i < len(b); i += wordBytes {
				binary.LittleEndian.PutUint64(b[i:], w*odd)
				w++
			}
		}
	}
}

// spoil overwrites pages with poison.
func (m *memory) spoil(pages []int32) {
	for layer := range m.regions {
		for _, page := range pages {
			b := m.page(layer, page)
			for i := 0; i < len(b); i += wordBytes {
				binary.LittleEndian.PutUint64(b[i:], poison)
			}
		}
	}
}

// compare compares dst's pages with the patterns of src's.
func (m *memory) compare(src, dst []int32) error {
	var wrong []error
	n := 0
	for layer := range m.regions {
		for i := range dst {
			b, w := m.page(layer, dst[i]), m.s.base(layer, src[i])
			for at := 0; at < len(b); at += wordBytes {
				if binary.LittleEndian.Uint64(b[at:]) != w*odd {
					if n++; n <= 3 {
						wrong = append(wrong, fmt.Errorf("%w: layer %d, position %d (page %d), byte %d", ErrWrong, layer, i, dst[i], at))
					}
					break
				}
				w++
			}
		}
	}
	if n > 3 {
		wrong = append(wrong, fmt.Errorf("and %d pages more", n-3))
	}
	return errors.Join(wrong...)
}
