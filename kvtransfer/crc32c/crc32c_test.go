package crc32c

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"testing"
)

// TestSame holds both functions against hash/crc32 at random lengths, places and beginnings, on this processor's way and on the portable one.
func TestSame(t *testing.T) {
	t.Run(Name(), same)
	defer func(f bool) { folds = f }(folds)
	folds = false
	t.Run(Name(), same)
}

func same(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	data := make([]byte, 1<<17)
	for i := range data {
		data[i] = byte(rng.Uint32())
	}
	to := make([]byte, len(data))
	for n := range 3000 {
		size := rng.IntN(1 << (6 + n%12))
		from := data[rng.IntN(len(data)-size):][:size]
		dst := to[rng.IntN(len(to)-size):]
		if n%2 == 0 {
			dst = to[:size]
		}
		crc := rng.Uint32()
		want := crc32.Update(crc, table, from)
		if got := Update(crc, from); got != want {
			t.Fatalf("Update(%08x, %d bytes) = %08x, want %08x (%s)", crc, size, got, want, Name())
		}
		clear(to)
		if got := Copy(crc, dst, from); got != want || !bytes.Equal(dst[:size], from) {
			t.Fatalf("Copy(%08x, %d bytes) = %08x, want %08x; copied %t (%s)", crc, size, got, want, bytes.Equal(dst[:size], from), Name())
		}
		if n := bytes.Count(dst[size:], []byte{0}); n != len(dst)-size {
			t.Fatalf("Copy of %d bytes wrote %d beyond", size, len(dst)-size-n)
		}
	}
}

// TestKnown holds the polynomial against the published check value, and the constants against what they are for.
func TestKnown(t *testing.T) {
	if got := Update(0, []byte("123456789")); got != 0xe3069283 {
		t.Errorf("CRC32C of the digits is %08x", got)
	}
	if power(0) != 1<<32 || power(32) != crc32.Castagnoli<<1 {
		t.Errorf("x^0 = %x, x^32 = %x", power(0), power(32))
	}
}

// BenchmarkCold sums and copies 32 KiB pages that are in no cache, as a transfer meets them.
func BenchmarkCold(b *testing.B) {
	const page, nPages = 32 << 10, 8 << 10
	src, dst := make([]byte, page*nPages), make([]byte, page*nPages)
	for i := range src {
		src[i], dst[i] = byte(i*7), 1
	}
	order := rand.New(rand.NewPCG(1, 2)).Perm(nPages)
	for name, f := range map[string]func(to, from []byte) uint32{
		"hash-crc32": func(_, from []byte) uint32 { return crc32.Update(0, table, from) },
		"update":     func(_, from []byte) uint32 { return Update(0, from) },
		"copy-only":  func(to, from []byte) uint32 { copy(to, from); return 0 },
		"copy":       func(to, from []byte) uint32 { return Copy(0, to, from) },
	} {
		b.Run(fmt.Sprintf("%s/%s", Name(), name), func(b *testing.B) {
			b.SetBytes(page)
			i := 0
			for b.Loop() {
				at := order[i%nPages] * page
				from := order[(i+nPages/2)%nPages] * page
				f(dst[at:at+page], src[from:from+page])
				i++
			}
		})
	}
}
