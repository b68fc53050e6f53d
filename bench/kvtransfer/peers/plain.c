// Plain TCP for comparison: writev and readv of scattered pages on this machine, without protocol,
// lease or checksum. Two processes over loopback; the reader answers one byte when a round's last
// byte has arrived. The reader's pages are compared after each round and overwritten.
//
//   plain PAGES PAGE_BYTES ROUNDS SMALL_PAGES SMALL_ROUNDS
//   plain memcpy PAGES PAGE_BYTES ROUNDS   memcpy of the same pages in one thread
//
// It prints one JSON object.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pages.h"

enum { BATCH = 64 };           // pages of one writev or readv
enum { SOCKET_BUFFER = 4 << 20 };

static void die(const char *what) { perror(what); exit(1); }

// move sends or receives n pages in the order given.
static void move(int fd, char *m, const uint32_t *order, size_t n, int out) {
	struct iovec v[BATCH];
	for (size_t at = 0; at < n;) {
		int k = 0;
		for (; k < BATCH && at < n; k++, at++) v[k] = (struct iovec){m + order[at] * page_bytes, page_bytes};
		struct iovec *p = v;
		while (k > 0) {
			ssize_t r = out ? writev(fd, p, k) : readv(fd, p, k);
			if (r <= 0) die(out ? "writev" : "readv");
			for (; k > 0 && (size_t)r >= p->iov_len; p++, k--) r -= (ssize_t)p->iov_len;
			if (k > 0) { p->iov_base = (char *)p->iov_base + r; p->iov_len -= (size_t)r; }
		}
	}
}

// rounds runs one side. It stores the writer's times in took, and returns the CPU time of all
// rounds.
static double rounds(int fd, char *m, size_t n, int count, uint64_t seed, int out, double *took) {
	uint32_t *src = malloc(n_pages * 4), *dst = malloc(n_pages * 4);
	double used = 0;
	for (int r = -1; r < count; r++) { // the first warms up
		shuffle(src, seed + 2 * (uint64_t)(r + 1));
		shuffle(dst, seed + 2 * (uint64_t)(r + 1) + 1);
		char byte = 1;
		if (out && read(fd, &byte, 1) != 1) die("ready"); // the reader has overwritten its pages
		if (!out && write(fd, &byte, 1) != 1) die("ready");
		double c = cpu(), t = seconds();
		move(fd, m, out ? src : dst, n, out);
		if (out && read(fd, &byte, 1) != 1) die("ack");
		if (!out && write(fd, &byte, 1) != 1) die("ack");
		if (r >= 0) used += cpu() - c;
		if (r >= 0 && took) took[r] = seconds() - t;
		if (!out) compare(m, src, dst, n);
	}
	free(src); free(dst);
	return used;
}

static void socket_options(int fd) {
	int on = 1, size = SOCKET_BUFFER;
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
	setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
}

static int only_memcpy(int count) {
	char *from = memory(1), *to = memory(0);
	uint32_t *src = malloc(n_pages * 4), *dst = malloc(n_pages * 4);
	double *took = malloc(sizeof(double) * (size_t)count);
	for (int r = -1; r < count; r++) {
		shuffle(src, 2 * (uint64_t)(r + 1)); shuffle(dst, 2 * (uint64_t)(r + 1) + 1);
		double t = seconds();
		for (size_t i = 0; i < n_pages; i++) memcpy(to + dst[i] * page_bytes, from + src[i] * page_bytes, page_bytes);
		if (r >= 0) took[r] = seconds() - t;
		compare(to, src, dst, n_pages);
	}
	qsort(took, (size_t)count, sizeof *took, by_value);
	printf("{\"gb_per_second\": %.4f}\n", 1e-9 * (double)(n_pages * page_bytes) / took[count / 2]);
	return 0;
}

int main(int argc, char **argv) {
	int only = argc == 5 && strcmp(argv[1], "memcpy") == 0;
	if (!only && argc != 6) { fprintf(stderr, "usage: plain PAGES PAGE_BYTES ROUNDS SMALL_PAGES SMALL_ROUNDS\n"); return 2; }
	n_pages = strtoull(argv[1 + only], NULL, 10); page_bytes = strtoull(argv[2 + only], NULL, 10);
	int count = atoi(argv[3 + only]);
	if (n_pages < 2 || page_bytes < 8 || page_bytes % 8 || count < 1) { fprintf(stderr, "bad sizes\n"); return 2; }
	if (only) return only_memcpy(count);
	size_t small = strtoull(argv[4], NULL, 10);
	int smalls = atoi(argv[5]);
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof a;
	int l = socket(AF_INET, SOCK_STREAM, 0);
	socket_options(l);
	if (bind(l, (struct sockaddr *)&a, len) || listen(l, 1) || getsockname(l, (struct sockaddr *)&a, &len)) die("listen");
	int back[2];
	if (pipe(back)) die("pipe");
	pid_t reader = fork();
	if (reader < 0) die("fork");
	if (reader == 0) {
		int fd = accept(l, NULL, NULL);
		if (fd < 0) die("accept");
		socket_options(fd);
		char *m = memory(0);
		double used[2] = {rounds(fd, m, n_pages, count, 1, 0, NULL), 0};
		if (smalls > 0) used[1] = rounds(fd, m, small, smalls, 1u << 20, 0, NULL);
		if (write(back[1], used, sizeof used) != sizeof used) die("pipe");
		return 0;
	}
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	socket_options(fd);
	char *m = memory(1);
	if (connect(fd, (struct sockaddr *)&a, len)) die("connect");
	double *took = malloc(sizeof(double) * (size_t)(count > smalls ? count : smalls)), used[2];
	double own = rounds(fd, m, n_pages, count, 1, 1, took);
	qsort(took, (size_t)count, sizeof *took, by_value);
	double gb = 1e-9 * (double)(n_pages * page_bytes);
	printf("{\"gb_per_second\": %.4f", gb / took[count / 2]);
	if (smalls > 0) {
		rounds(fd, m, small, smalls, 1u << 20, 1, took);
		qsort(took, (size_t)smalls, sizeof *took, by_value);
		printf(", \"small_p50_ms\": %.4f, \"small_p90_ms\": %.4f", 1e3 * took[smalls / 2], 1e3 * took[smalls * 9 / 10]);
	}
	if (read(back[0], used, sizeof used) != sizeof used) die("pipe");
	printf(", \"cpu_seconds_per_gb\": %.4f}\n", (own + used[0]) / gb / count);
	int status = 0;
	waitpid(reader, &status, 0);
	return status != 0;
}
