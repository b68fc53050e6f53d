//go:build !cgo || !linux || !(amd64 || arm64)

package main

// read sums words in four streams, each a quarter of them.
func read(data []uint64, _ int) uint64 {
	n := len(data) / 4
	a, b, c, d := data[:n], data[n:2*n], data[2*n:3*n], data[3*n:4*n]
	var s0, s1, s2, s3, s4, s5, s6, s7 uint64
	for len(a) >= 8 && len(b) >= 8 && len(c) >= 8 && len(d) >= 8 {
		s0 += a[0] + a[1]
		s1 += a[2] + a[3]
		s2 += a[4] + a[5]
		s3 += a[6] + a[7]
		s4 += b[0] + b[1]
		s5 += b[2] + b[3]
		s6 += b[4] + b[5]
		s7 += b[6] + b[7]
		s0 += c[0] + c[1]
		s1 += c[2] + c[3]
		s2 += c[4] + c[5]
		s3 += c[6] + c[7]
		s4 += d[0] + d[1]
		s5 += d[2] + d[3]
		s6 += d[4] + d[5]
		s7 += d[6] + d[7]
		a, b, c, d = a[8:], b[8:], c[8:], d[8:]
	}
	return s0 + s1 + s2 + s3 + s4 + s5 + s6 + s7
}
