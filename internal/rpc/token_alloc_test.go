//go:build !race

package rpc

import "testing"

// The race detector allocates, so that this file is not for its builds.

// Sending, writing, reading and decoding a token frame allocate nothing: all of
// it runs inside the measured function, on four goroutines.
func TestTokenFramesDoNotAllocate(t *testing.T) {
	for _, network := range []string{"memory", "tcp"} {
		c, h := connect(t, network, Options{}, Options{})
		for _, n := range []int{1, 64, 2000, 4000} { // 4000: beyond the reader's buffer is a frame of its own
			ts := batch(n)
			for range 50 {
				step(t, c, h, ts)
			}
			got := testing.AllocsPerRun(500, func() { step(t, c, h, ts) })
			if n*tokenBytes+headerBytes > readBufBytes {
				if got < 1 {
					t.Errorf("%s, %d tokens: no allocation, so this test measures nothing", network, n)
				}
			} else if got != 0 {
				t.Errorf("%s, %d tokens: %v allocations a frame", network, n, got)
			}
		}
		if h.bad.Load() != 0 {
			t.Errorf("%d bad frames", h.bad.Load())
		}
	}
}
