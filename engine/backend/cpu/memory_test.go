package cpu

import (
	"testing"
	"unsafe"
)

// Hot parts are aligned to pages, zeroed, and do not overlap. Parts smaller than a huge page share
// mappings.
func TestHotMemory(t *testing.T) {
	var m memory
	defer func() {
		if err := m.free(); err != nil {
			t.Error(err)
		}
	}()
	sizes := []int{1, pageBytes, pageBytes + 1, 600 << 10, 1700 << 10, hotBytes - pageBytes, hotBytes, hotBytes + 1, 5}
	var parts [][]byte
	for _, n := range sizes {
		n = max(1, n)
		b, err := m.bytes(n, true)
		if err != nil {
			t.Fatal(err)
		}
		if len(b) != n || uintptr(unsafe.Pointer(&b[0]))%pageBytes != 0 {
			t.Fatalf("a part of %d bytes has %d at %p", n, len(b), &b[0])
		}
		if b[0] != 0 || b[n-1] != 0 {
			t.Errorf("a part of %d bytes begins with %d and ends with %d", n, b[0], b[n-1])
		}
		b[0], b[n-1] = 1, 1
		parts = append(parts, b)
	}
	for i, b := range parts {
		for j, o := range parts[:i] {
			start, other := uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&o[0]))
			if start < other+uintptr(len(o)) && other < start+uintptr(len(b)) {
				t.Errorf("parts %d and %d overlap", i, j)
			}
		}
	}
	if n := len(m.maps); hotBytes > 0 && n > 5 {
		t.Errorf("%d parts are in %d mappings", len(sizes), n)
	}
}
