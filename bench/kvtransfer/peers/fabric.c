// Plain libfabric for comparison: one-sided writes of scattered pages with a provider on this
// machine, without protocol, lease or checksum. Two processes with one thread each poll. Every
// write carries 32 bits. The reader answers one byte when as many writes have landed as a round has
// pages. The reader's pages are compared after each round and overwritten.
//
//   fabric PROVIDER PAGES PAGE_BYTES ROUNDS SMALL_PAGES SMALL_ROUNDS
//
// It prints one JSON object.

#include <errno.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pages.h"

enum { DEPTH = 512, AT_ONCE = 64 };

static const char *provider;

static struct fi_info *info;
static struct fid_fabric *fabric;
static struct fid_domain *domain;
static struct fid_ep *ep;
static struct fid_cq *cq;
static struct fid_av *av;
static struct fid_mr *mr;
static fi_addr_t peer;

static void die(const char *what, long rc) {
	fprintf(stderr, "%s: %s\n", what, fi_strerror((int)(rc < 0 ? -rc : rc)));
	exit(1);
}

static void must(const char *what, long rc) { if (rc) die(what, rc); }

// meeting is the message that each side sends to the other.
struct meeting { char name[256]; uint64_t at, key; };

// open_side opens the provider and exchanges meeting over fd.
static struct meeting open_side(int fd, char *m, int out) {
	struct fi_info *h = fi_allocinfo();
	h->caps = FI_MSG | FI_RMA | FI_WRITE | FI_REMOTE_WRITE;
	h->mode = FI_CONTEXT | FI_CONTEXT2;
	h->ep_attr->type = FI_EP_RDM;
	h->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	h->fabric_attr->prov_name = strdup(provider);
	const char *node = strcmp(provider, "tcp") == 0 ? "127.0.0.1" : NULL;
	must("fi_getinfo", fi_getinfo(FI_VERSION(1, 17), node, NULL, node ? FI_SOURCE : 0, h, &info));
	must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	must("fi_domain", fi_domain(fabric, info, &domain, NULL));
	struct fi_av_attr aa = {.count = 1};
	must("fi_av_open", fi_av_open(domain, &aa, &av, NULL));
	struct fi_cq_attr ca = {.size = 2 * DEPTH, .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_NONE};
	must("fi_cq_open", fi_cq_open(domain, &ca, &cq, NULL));
	must("fi_endpoint", fi_endpoint(domain, info, &ep, NULL));
	must("fi_ep_bind", fi_ep_bind(ep, &av->fid, 0));
	must("fi_ep_bind", fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
	must("fi_enable", fi_enable(ep));
	must("fi_mr_reg", fi_mr_reg(domain, m, n_pages * page_bytes, out ? FI_WRITE : FI_REMOTE_WRITE, 0, 0x5eed, 0, &mr, NULL));
	struct meeting ours = {.key = fi_mr_key(mr), .at = info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)m : 0}, theirs;
	size_t n = sizeof ours.name;
	must("fi_getname", fi_getname(&ep->fid, ours.name, &n));
	if (write(fd, &ours, sizeof ours) != sizeof ours || recv(fd, &theirs, sizeof theirs, MSG_WAITALL) != sizeof theirs) die("meeting", EIO);
	if (fi_av_insert(av, theirs.name, 1, &peer, 0, NULL) != 1) die("fi_av_insert", EINVAL);
	return theirs;
}

static struct fi_context2 contexts[DEPTH];
static struct fi_context2 *unused[DEPTH];
static size_t n_unused;

// poll_once frees the contexts of finished writes and returns how many of the peer's have landed.
static size_t poll_once(void) {
	struct fi_cq_data_entry e[AT_ONCE];
	ssize_t n = fi_cq_read(cq, e, AT_ONCE);
	if (n == -FI_EAGAIN) return 0;
	if (n < 0) die("fi_cq_read", n);
	size_t landed = 0;
	for (ssize_t i = 0; i < n; i++) {
		if (e[i].flags & FI_REMOTE_CQ_DATA) landed++;
		else unused[n_unused++] = e[i].op_context;
	}
	return landed;
}

static void send_pages(char *m, const uint32_t *src, const uint32_t *dst, size_t n, const struct meeting *to) {
	for (size_t i = 0; i < n;) {
		if (n_unused > 0) {
			struct iovec v = {m + src[i] * page_bytes, page_bytes};
			struct fi_rma_iov at = {to->at + dst[i] * page_bytes, page_bytes, to->key};
			void *desc = fi_mr_desc(mr);
			struct fi_msg_rma w = {&v, &desc, 1, peer, &at, 1, unused[n_unused - 1], (uint32_t)i};
			ssize_t rc = fi_writemsg(ep, &w, FI_REMOTE_CQ_DATA | FI_COMPLETION);
			if (rc == 0) { n_unused--; i++; continue; }
			if (rc != -FI_EAGAIN) die("fi_writemsg", rc);
		}
		poll_once();
	}
	while (n_unused < DEPTH) poll_once();
}

// rounds runs one side. It stores the writer's times in took, and returns the CPU time of all
// rounds.
static double rounds(int fd, char *m, size_t n, int count, uint64_t seed, const struct meeting *to, double *took) {
	uint32_t *src = malloc(n_pages * 4), *dst = malloc(n_pages * 4);
	double used = 0;
	int out = took != NULL;
	for (int r = -1; r < count; r++) { // the first warms up
		shuffle(src, seed + 2 * (uint64_t)(r + 1));
		shuffle(dst, seed + 2 * (uint64_t)(r + 1) + 1);
		char byte = 1;
		if (out && read(fd, &byte, 1) != 1) die("ready", EIO); // the reader has overwritten its pages
		if (!out && write(fd, &byte, 1) != 1) die("ready", EIO);
		double c = cpu(), t = seconds();
		if (out) send_pages(m, src, dst, n, to);
		for (size_t landed = 0; !out && landed < n;) landed += poll_once();
		if (!out && write(fd, &byte, 1) != 1) die("ack", EIO);
			while (out && recv(fd, &byte, 1, MSG_DONTWAIT) != 1) poll_once(); // some providers only finish while they are polled
		if (r >= 0) used += cpu() - c;
		if (r >= 0 && out) took[r] = seconds() - t;
		if (!out) compare(m, src, dst, n);
	}
	free(src); free(dst);
	return used;
}

int main(int argc, char **argv) {
	if (argc != 7) { fprintf(stderr, "usage: fabric PROVIDER PAGES PAGE_BYTES ROUNDS SMALL_PAGES SMALL_ROUNDS\n"); return 2; }
	provider = argv[1];
	n_pages = strtoull(argv[2], NULL, 10); page_bytes = strtoull(argv[3], NULL, 10);
	int count = atoi(argv[4]), smalls = atoi(argv[6]);
	size_t small = strtoull(argv[5], NULL, 10);
	if (n_pages < 2 || page_bytes < 8 || page_bytes % 8 || count < 1) { fprintf(stderr, "bad sizes\n"); return 2; }
	int pair[2];
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) die("socketpair", errno);
	pid_t reader = fork();
	if (reader < 0) die("fork", errno);
	for (; n_unused < DEPTH; n_unused++) unused[n_unused] = &contexts[n_unused];
	if (reader == 0) {
		close(pair[0]);
		char *m = memory(0);
		struct meeting to = open_side(pair[1], m, 0);
		double used = rounds(pair[1], m, n_pages, count, 1, &to, NULL);
		if (smalls > 0) rounds(pair[1], m, small, smalls, 1u << 20, &to, NULL);
		if (write(pair[1], &used, sizeof used) != sizeof used) die("result", EIO);
		char byte;
		if (read(pair[1], &byte, 1)) return 1; // until the writer exits
		return 0;
	}
	close(pair[1]);
	char *m = memory(1);
	struct meeting to = open_side(pair[0], m, 1);
	double *took = malloc(sizeof(double) * (size_t)(count > smalls ? count : smalls)), used;
	double own = rounds(pair[0], m, n_pages, count, 1, &to, took);
	qsort(took, (size_t)count, sizeof *took, by_value);
	double gb = 1e-9 * (double)(n_pages * page_bytes);
	printf("{\"gb_per_second\": %.4f", gb / took[count / 2]);
	if (smalls > 0) {
		rounds(pair[0], m, small, smalls, 1u << 20, &to, took);
		qsort(took, (size_t)smalls, sizeof *took, by_value);
		printf(", \"small_p50_ms\": %.4f, \"small_p90_ms\": %.4f", 1e3 * took[smalls / 2], 1e3 * took[smalls * 9 / 10]);
	}
	if (recv(pair[0], &used, sizeof used, MSG_WAITALL) != sizeof used) die("result", EIO);
	printf(", \"cpu_seconds_per_gb\": %.4f}\n", (own + used) / gb / count);
	fflush(stdout);
	close(pair[0]);
	int status = 0;
	waitpid(reader, &status, 0);
	return status != 0;
}
