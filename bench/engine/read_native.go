//go:build cgo && linux && (amd64 || arm64)

package main

/*
#cgo CFLAGS: -O3 -std=gnu11 -Wall -Wextra -Wno-psabi
#include <stdint.h>

typedef uint64_t words __attribute__((vector_size(64)));

#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
static uint64_t read_words(const uint64_t *p, int64_t n, int64_t ahead) {
	const uint64_t *s[4];
	words sum[4] = {0};
	for (int i = 0; i < 4; i++)
		s[i] = p + n / 4 * i;
	for (int64_t at = 0; at + 8 <= n / 4; at += 8)
		for (int i = 0; i < 4; i++) {
			__builtin_prefetch(s[i] + at + ahead);
			words w;
			__builtin_memcpy(&w, s[i] + at, sizeof w);
			sum[i] += w;
		}
	words all = sum[0] + sum[1] + sum[2] + sum[3];
	uint64_t total = 0;
	for (int i = 0; i < 8; i++)
		total += all[i];
	return total;
}
*/
import "C"

// read sums words in four streams, a vector at a time, and prefetches ahead words.
func read(data []uint64, ahead int) uint64 {
	return uint64(C.read_words((*C.uint64_t)(&data[0]), C.int64_t(len(data)), C.int64_t(ahead)))
}
