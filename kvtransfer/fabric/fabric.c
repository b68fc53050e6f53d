//go:build cgo && linux

#define _GNU_SOURCE
#include "fabric.h"
#include "abi.h"

#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// lib holds the six symbols that are looked up by name. The other functions are in tables that
// these return.
static struct {
	int (*getinfo)(uint32_t, const char *, const char *, uint64_t, const struct ofi_info *, struct ofi_info **);
	void (*freeinfo)(struct ofi_info *);
	struct ofi_info *(*dupinfo)(const struct ofi_info *);
	int (*fabric)(struct ofi_fabric_attr *, struct ofi_fabric **, void *);
	const char *(*strerror)(int);
	uint32_t (*version)(void);
} lib;

static _Thread_local char why[512];

static const char *failed(const char *what, long rc) {
	snprintf(why, sizeof why, "%s: %s", what, lib.strerror((int)(rc < 0 ? -rc : rc)));
	return why;
}

static const char *plain(const char *what) {
	snprintf(why, sizeof why, "%s", what);
	return why;
}

struct td_device {
	struct ofi_info *info;
	struct ofi_fabric *fabric;
	struct ofi_domain *domain;
	int hmem;
	int reports; // writes carry no data, a report message follows them
};

struct td_mr {
	struct ofi_mr *mr;
};

// op is the context of an operation until it completes.
typedef struct op {
	struct ofi_context2 ctx; // for the provider; must be first
	uint64_t token;
	struct op *next;
	int busy;
} op;

// writes_done reports n completed writes and the data that they carry.
typedef struct {
	uint32_t data, n;
} writes_done;

// report is a buffer for a message of writes_done.
typedef struct report {
	struct ofi_context2 ctx;
	struct report *next;
	writes_done it;
} report;

enum { REPORTS = 64 };

struct td_end {
	td_device *d;
	struct ofi_ep *ep;
	struct ofi_av *av;
	struct ofi_cq *cq;
	uint64_t peer;
	op *ops, *free;
	int depth;
	writes_done pending;               // not yet sent to the peer
	report *reports, *arrived, **last; // all; those not yet returned by td_poll, oldest first; the end of that list
	char why[sizeof why];              // error of td_post and td_poll; their callers must not overlap
};

// Libraries and providers install signal handlers, which a Go program must not have. Each call that
// may do so restores the handlers.
typedef struct {
	struct sigaction was[NSIG];
} handlers;

static void save(handlers *h) {
	for (int i = 1; i < NSIG; i++) sigaction(i, NULL, &h->was[i]);
}

static void restore(const handlers *h) {
	struct sigaction is;
	for (int i = 1; i < NSIG; i++)
		if (sigaction(i, NULL, &is) == 0 && is.sa_sigaction != h->was[i].sa_sigaction) sigaction(i, &h->was[i], NULL);
}

static const char *load(const char *path) {
	// Registrations are explicit and live as long as their memory, so that the library needs no cache,
	// for which it would patch munmap.
	setenv("FI_MR_CACHE_MONITOR", "disabled", 0);
	// No large messages are sent. ofi_rxm would allocate and zero buffers for them at each connection:
	// thousands of 16 KiB.
	setenv("FI_OFI_RXM_BUFFER_SIZE", "1024", 0);
	void *so = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!so) return plain(dlerror());
	struct { const char *name, *version; void **to; } want[] = {
		{"fi_getinfo", "FABRIC_1.3", (void **)&lib.getinfo}, {"fi_freeinfo", "FABRIC_1.3", (void **)&lib.freeinfo},
		{"fi_dupinfo", "FABRIC_1.3", (void **)&lib.dupinfo}, {"fi_fabric", "FABRIC_1.1", (void **)&lib.fabric},
		{"fi_strerror", "FABRIC_1.0", (void **)&lib.strerror}, {"fi_version", "FABRIC_1.0", (void **)&lib.version},
	};
	for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
		*want[i].to = dlvsym(so, want[i].name, want[i].version);
		if (!*want[i].to) {
			memset(&lib, 0, sizeof lib);
			snprintf(why, sizeof why, "%s has no %s@%s", path, want[i].name, want[i].version);
			dlclose(so);
			return why;
		}
	}
	return NULL;
}

const char *td_load(const char *path) {
	if (lib.version) return NULL;
	handlers h;
	save(&h);
	const char *bad = load(path);
	restore(&h);
	return bad;
}

// freeinfo frees the strings in the library's structures.
static int named(char **to, const char *s) {
	free(*to);
	*to = strdup(s);
	return *to != NULL;
}

static struct ofi_info *hints(const char *provider, int hmem, int reports) {
	struct ofi_info *h = lib.dupinfo(NULL);
	if (!h || !named(&h->fabric_attr->prov_name, provider)) {
		if (h) lib.freeinfo(h);
		return NULL;
	}
	h->caps = OFI_MSG | OFI_RMA | OFI_WRITE | OFI_REMOTE_WRITE | (hmem ? OFI_HMEM : 0) | (reports ? OFI_RECV | OFI_TRANSMIT : 0);
	h->mode = OFI_CONTEXT | OFI_CONTEXT2;
	h->ep_attr->type = OFI_EP_RDM;
	h->domain_attr->threading = OFI_THREAD_SAFE;
	h->domain_attr->mr_mode = OFI_MR_LOCAL | OFI_MR_VIRT_ADDR | OFI_MR_ALLOCATED | OFI_MR_PROV_KEY | (hmem ? OFI_MR_HMEM : 0);
	return h;
}

static const char *find(const char *provider, const char *address, td_device *d) {
	struct ofi_info *h = hints(d->reports ? "tcp;ofi_rxm" : provider, d->hmem, d->reports);
	if (!h) return plain("out of memory");
	uint32_t api = OFI_VERSION(1, 20), has = lib.version();
	int rc = lib.getinfo(has < api ? has : api, *address ? address : NULL, NULL, *address ? OFI_SOURCE : 0, h, &d->info);
	lib.freeinfo(h);
	return rc ? failed("fi_getinfo", rc) : NULL;
}

static const char *start(td_device *d, const char *provider, const char *address) {
	// Over TCP, a write that carries data has no context at its target. ofi_rxm reads the context
	// nevertheless if the write is interrupted, by its peer or by closing the endpoint, and the
	// process crashes. So writes over TCP carry no data. A report message follows several writes on
	// the same connection instead; other providers do not guarantee that order. The native
	// endpoints of tcp since 1.18 (net, before) are not used, because they access memory of closed
	// ones.
	d->reports = !strcmp(provider, "tcp");
	const char *bad = find(provider, address, d);
	if (bad) return bad;
	int rc;
	if ((rc = lib.fabric(d->info->fabric_attr, &d->fabric, NULL))) return failed("fi_fabric", rc);
	if ((rc = d->fabric->ops->domain(d->fabric, d->info, &d->domain, NULL))) return failed("fi_domain", rc);
	if (!d->reports && d->info->domain_attr->cq_data_size < 4) return plain("its writes carry less than 32 bits of immediate data");
	if (d->reports && d->info->domain_attr->mr_mode & OFI_MR_LOCAL) return plain("its messages need registered memory");
	if (d->hmem && !(d->info->caps & OFI_HMEM)) return plain("it reaches no GPU memory (FI_HMEM)");
	return NULL;
}

static const char *open_device(const char *provider, const char *address, int hmem, td_device **out, td_info *i) {
	*out = NULL;
	td_device *d = calloc(1, sizeof *d);
	if (!d) return plain("out of memory");
	d->hmem = hmem;
	const char *bad = start(d, provider, address);
	if (bad) {
		static _Thread_local char first[sizeof why];
		snprintf(first, sizeof first, "%s", bad);
		td_close(d);
		return first;
	}
	memset(i, 0, sizeof *i);
	snprintf(i->provider, sizeof i->provider, "%s", d->info->fabric_attr->prov_name);
	snprintf(i->fabric, sizeof i->fabric, "%s", d->info->fabric_attr->name ? d->info->fabric_attr->name : "");
	snprintf(i->domain, sizeof i->domain, "%s", d->info->domain_attr->name ? d->info->domain_attr->name : "");
	int mode = d->info->domain_attr->mr_mode;
	i->library = lib.version();
	i->virtual_addresses = !!(mode & OFI_MR_VIRT_ADDR);
	i->provider_keys = !!(mode & OFI_MR_PROV_KEY) || d->info->domain_attr->mr_key_size < 8;
	i->local_keys = !!(mode & OFI_MR_LOCAL);
	i->hmem = !!(d->info->caps & OFI_HMEM);
	i->most = d->info->ep_attr->max_msg_size;
	*out = d;
	return NULL;
}

const char *td_open(const char *provider, const char *address, int hmem, td_device **out, td_info *i) {
	handlers h;
	save(&h);
	const char *bad = open_device(provider, address, hmem, out, i);
	restore(&h);
	return bad;
}

static int shut(struct ofi_fid *f) { return f ? f->ops->close(f) : 0; }

const char *td_close(td_device *d) {
	int rc = 0;
	if (d->domain) rc = shut(&d->domain->fid);
	if (!rc && d->fabric) rc = shut(&d->fabric->fid);
	if (d->info) lib.freeinfo(d->info);
	free(d);
	return rc ? failed("closing the domain", rc) : NULL;
}

const char *td_register(td_device *d, uint64_t at, uint64_t len, uint64_t key, int remote, int device, int dmabuf, uint64_t offset, td_mr **out) {
	struct iovec iov = {(void *)(uintptr_t)at, len};
	struct ofi_mr_dmabuf buf = {dmabuf, offset, len, (void *)(uintptr_t)at};
	struct ofi_mr_attr a;
	memset(&a, 0, sizeof a);
	a.mr_iov = &iov;
	a.iov_count = 1;
	a.access = remote ? OFI_REMOTE_WRITE : OFI_WRITE;
	a.requested_key = key;
	uint64_t flags = 0;
	if ((device >= 0 || dmabuf >= 0) && !d->hmem) return plain("the device was opened without GPU memory (FI_HMEM)");
	if (device >= 0) {
		a.iface = OFI_HMEM_CUDA;
		a.device.cuda = device;
	}
	if (dmabuf >= 0) {
		if (lib.version() < OFI_VERSION(1, 20)) return plain("dma-bufs (FI_MR_DMABUF) need libfabric 1.20");
		a.mr_iov = &buf;
		flags = OFI_MR_DMABUF;
	}
	td_mr *m = calloc(1, sizeof *m);
	if (!m) return plain("out of memory");
	int rc = d->domain->mr->regattr(&d->domain->fid, &a, flags, &m->mr);
	if (rc) {
		free(m);
		return failed("fi_mr_regattr", rc);
	}
	*out = m;
	return NULL;
}

uint64_t td_key(td_mr *m) { return m->mr->key; }

const char *td_unregister(td_mr *m) {
	int rc = shut(&m->mr->fid);
	free(m);
	return rc ? failed("closing a memory registration", rc) : NULL;
}

// post_recv posts o as the buffer of a message.
static int post_recv(td_end *e, report *o) {
	return (int)e->ep->msg->recv(e->ep, &o->it, sizeof o->it, NULL, OFI_ADDR_UNSPEC, o);
}

// The queue has no wait object: with one, software providers make a system call for each completion
// at both ends.
static const char *open_end(td_end *e) {
	td_device *d = e->d;
	struct ofi_av_attr av = {.count = 1};
	int rc = d->domain->ops->av_open(d->domain, &av, &e->av, NULL);
	if (rc) return failed("fi_av_open", rc);
	struct ofi_cq_attr cq = {.size = (size_t)e->depth * 2 + REPORTS, .format = OFI_CQ_FORMAT_DATA, .wait_obj = OFI_WAIT_NONE};
	if ((rc = d->domain->ops->cq_open(d->domain, &cq, &e->cq, NULL))) return failed("fi_cq_open", rc);
	if ((rc = d->domain->ops->endpoint(d->domain, d->info, &e->ep, NULL))) return failed("fi_endpoint", rc);
	struct ofi_fid *f = &e->ep->fid;
	if ((rc = f->ops->bind(f, &e->av->fid, 0))) return failed("fi_ep_bind of the addresses", rc);
	if ((rc = f->ops->bind(f, &e->cq->fid, OFI_TRANSMIT | OFI_RECV))) return failed("fi_ep_bind of the queue", rc);
	if ((rc = f->ops->control(f, OFI_ENABLE, NULL))) return failed("fi_enable", rc);
	for (int i = 0; e->reports && i < REPORTS; i++)
		if ((rc = post_recv(e, &e->reports[i]))) return failed("fi_recv", rc);
	return NULL;
}

const char *td_endpoint(td_device *d, int depth, td_end **out) {
	td_end *e = calloc(1, sizeof *e);
	if (!e || !(e->ops = calloc((size_t)depth, sizeof *e->ops)) || (d->reports && !(e->reports = calloc(REPORTS, sizeof *e->reports)))) {
		if (e) free(e->ops);
		free(e);
		return plain("out of memory");
	}
	e->d = d;
	e->last = &e->arrived;
	e->depth = depth;
	for (int i = 0; i < depth; i++) {
		e->ops[i].next = e->free;
		e->free = &e->ops[i];
	}
	handlers h;
	save(&h);
	const char *bad = open_end(e);
	restore(&h);
	if (bad) {
		static _Thread_local char first[sizeof why];
		snprintf(first, sizeof first, "%s", bad);
		td_end_close(e);
		return first;
	}
	*out = e;
	return NULL;
}

const char *td_name(td_end *e, void *to, size_t *n) {
	int rc = e->ep->cm->getname(&e->ep->fid, to, n);
	return rc ? failed("fi_getname", rc) : NULL;
}

const char *td_peer(td_end *e, const void *name) {
	int n = e->av->ops->insert(e->av, name, 1, &e->peer, 0, NULL);
	return n == 1 ? NULL : failed("fi_av_insert", n < 0 ? n : EINVAL);
}

static const char *keep(td_end *e, const char *s) {
	snprintf(e->why, sizeof e->why, "%s", s);
	return e->why;
}

// send_pending sends pending to the peer. It returns 0, or the library's error: EAGAIN if the queue
// is full.
static int send_pending(td_end *e) {
	if (!e->pending.n) return 0;
	int rc = (int)-e->ep->msg->inject(e->ep, &e->pending, sizeof e->pending, e->peer);
	if (!rc) e->pending.n = 0;
	return rc;
}

// AT_MOST bounds the writes of one report. If a report covered a whole frame, the peer would poll
// without result too often, and sleep.
enum { AT_MOST = 8 };

// td_post starts writes, each with the same data, and returns the number started. It is less than n
// with *bad null if the queue is full.
int td_post(td_end *e, const td_write *w, int n, uint64_t token, uint32_t data, const char **bad) {
	*bad = NULL;
	int rc = send_pending(e), i = 0;
	for (; !rc && i < n && e->free; i++) {
		op *o = e->free;
		struct iovec iov = {(void *)(uintptr_t)w[i].from, w[i].len};
		struct ofi_rma_iov to = {w[i].to, w[i].len, w[i].key};
		void *desc = w[i].mr ? w[i].mr->mr->mem_desc : NULL;
		struct ofi_msg_rma m = {&iov, &desc, 1, e->peer, &to, 1, o, data};
		rc = (int)-e->ep->rma->writemsg(e->ep, &m, OFI_COMPLETION | (e->d->reports ? 0 : OFI_REMOTE_CQ_DATA));
		if (rc) break;
		e->free = o->next;
		o->token = token;
		o->busy = 1;
		if (!e->d->reports) continue;
		e->pending = (writes_done){data, e->pending.n + 1};
		if (e->pending.n == AT_MOST) rc = send_pending(e);
	}
	int later = send_pending(e);
	if (!rc || rc == EAGAIN) rc = later;
	if (rc && rc != EAGAIN) *bad = keep(e, failed("fi_writemsg or fi_inject", rc));
	return i;
}

// done frees the context of an operation, and returns whether context was one.
static int done(td_end *e, void *context, uint64_t *token) {
	op *o = context;
	if (!o || o < e->ops || o >= e->ops + e->depth || !o->busy) return 0;
	*token = o->token;
	o->busy = 0;
	o->next = e->free;
	e->free = o;
	return 1;
}

static int broken(td_end *e, td_event *ev, const char **bad) {
	struct ofi_cq_err_entry x;
	memset(&x, 0, sizeof x);
	ssize_t rc = e->cq->ops->readerr(e->cq, &x, 0);
	if (rc == -EAGAIN) return 0;
	if (rc < 0) {
		*bad = keep(e, failed("fi_cq_readerr", rc));
		return -1;
	}
	memset(ev, 0, sizeof *ev);
	ev->kind = TD_FAILED;
	ev->err = x.err;
	ev->own = done(e, x.op_context, &ev->token);
	*bad = keep(e, failed("a write failed", x.err));
	return 1;
}

// to_event converts an entry of the queue to an event. It returns 0 for other entries, and for
// reports, which it queues.
static int to_event(td_end *e, const struct ofi_cq_data_entry *in, td_event *ev) {
	memset(ev, 0, sizeof *ev);
	report *o = in->op_context;
	if (e->reports && o >= e->reports && o < e->reports + REPORTS) {
		if (in->len != sizeof o->it) o->it.n = 0; // malformed: ignored
		o->next = NULL;
		*e->last = o;
		e->last = &o->next;
	} else if (in->flags & OFI_REMOTE_CQ_DATA) {
		ev->kind = TD_LANDED;
		ev->data = (uint32_t)in->data;
	} else if (done(e, in->op_context, &ev->token)) {
		ev->kind = TD_WRITTEN;
	}
	return ev->kind != 0;
}

// read_out returns events of the reports that have arrived, at most n, and their number.
static int read_out(td_end *e, td_event *ev, int n, const char **bad) {
	int k = 0;
	while (e->arrived && k < n) {
		report *o = e->arrived;
		if (o->it.n) {
			ev[k++] = (td_event){.kind = TD_LANDED, .data = o->it.data};
			o->it.n--;
			continue;
		}
		if (!(e->arrived = o->next)) e->last = &e->arrived;
		int rc = post_recv(e, o);
		if (rc) *bad = keep(e, failed("fi_recv", rc));
	}
	return k;
}

enum { AT_ONCE = 64 };

// td_poll reads completions, which also drives the provider. It returns their number, or a negative
// one if the queue is broken. Without completions it polls at most spins times; otherwise until
// there are no more, or n.
int td_poll(td_end *e, td_event *ev, int n, int spins, const char **bad) {
	struct ofi_cq_data_entry in[AT_ONCE];
	*bad = NULL;
	int rc = send_pending(e);
	if (rc && rc != EAGAIN) {
		*bad = keep(e, failed("fi_inject", rc));
		return -1;
	}
	int k = read_out(e, ev, n, bad);
	while (k < n && !*bad) {
		ssize_t got = e->cq->ops->read(e->cq, in, (size_t)(n - k < AT_ONCE ? n - k : AT_ONCE));
		if (got == -EAGAIN && k == 0 && --spins > 0) continue;
		if (got < 0 && k > 0) return k; // the next call returns the error
		if (got == -EAGAIN) return 0;
		if (got == -OFI_EAVAIL) return broken(e, ev, bad);
		if (got < 0) {
			*bad = keep(e, failed("fi_cq_read", got));
			return -1;
		}
		for (ssize_t i = 0; i < got; i++) k += to_event(e, &in[i], &ev[k]);
		k += read_out(e, ev + k, n - k, bad);
	}
	return k;
}

// td_end_close may be called again after an error. Then peers may still write through the endpoint,
// and memory that the library may access stays allocated.
const char *td_end_close(td_end *e) {
	int rc;
	if (e->ep && (rc = shut(&e->ep->fid))) return failed("closing an endpoint", rc);
	e->ep = NULL;
	if (e->cq && (rc = shut(&e->cq->fid))) return failed("closing an endpoint's queue", rc);
	e->cq = NULL;
	if (e->av && (rc = shut(&e->av->fid))) return failed("closing an endpoint's addresses", rc);
	free(e->reports);
	free(e->ops);
	free(e);
	return NULL;
}
