// The common parts of the plain programs: pages whose words depend on their place, a permutation of
// them that both sides draw alike, the comparison after each round, and clocks.

#ifndef TANDEM_BENCH_PAGES_H
#define TANDEM_BENCH_PAGES_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>

static size_t n_pages, page_bytes;

static double seconds(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double cpu(void) {
	struct rusage u;
	getrusage(RUSAGE_SELF, &u);
	return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + 1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static uint64_t draw(uint64_t *s) {
	uint64_t x = (*s += 0x9e3779b97f4a7c15u);
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
	x = (x ^ x >> 27) * 0x94d049bb133111ebu;
	return x ^ x >> 31;
}

// shuffle fills order with a permutation of the pages; both sides draw the same.
static void shuffle(uint32_t *order, uint64_t seed) {
	for (size_t i = 0; i < n_pages; i++) order[i] = (uint32_t)i;
	for (size_t i = n_pages - 1; i > 0; i--) {
		size_t j = draw(&seed) % (i + 1);
		uint32_t t = order[i]; order[i] = order[j]; order[j] = t;
	}
}

static char *memory(int fill) {
	char *m = mmap(NULL, n_pages * page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (m == MAP_FAILED) { perror("mmap"); exit(1); }
	uint64_t *w = (uint64_t *)m;
	for (size_t i = 0; i < n_pages * page_bytes / 8; i++) w[i] = fill ? i * 0x9e3779b97f4a7c15u : 0;
	return m;
}

static void compare(char *m, const uint32_t *src, const uint32_t *dst, size_t n) {
	for (size_t i = 0; i < n; i++) {
		const uint64_t *w = (const uint64_t *)(m + dst[i] * page_bytes);
		uint64_t at = src[i] * page_bytes / 8;
		for (size_t k = 0; k < page_bytes / 8; k++)
			if (w[k] != (at + k) * 0x9e3779b97f4a7c15u) { fprintf(stderr, "wrong byte in page %zu\n", i); exit(1); }
		memset(m + dst[i] * page_bytes, 0xa5, page_bytes);
	}
}

static int by_value(const void *a, const void *b) {
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

#endif
