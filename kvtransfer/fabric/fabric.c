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

// lib are the six symbols that everything starts from; the rest is reached through tables in what they return.
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
	int notes; // writes bring nothing along, a message follows them
};

struct td_mr {
	struct ofi_mr *mr;
};

// op is what an operation's context points to until it completes.
typedef struct op {
	struct ofi_context2 ctx; // the provider's, first
	uint64_t token;
	struct op *next;
	int busy;
} op;

// news is that writes are over: how many, and what they bring along.
typedef struct {
	uint32_t data, n;
} news;

// note has room for a message with news.
typedef struct note {
	struct ofi_context2 ctx;
	struct note *next;
	news it;
} note;

enum { NOTES = 64 };

struct td_end {
	td_device *d;
	struct ofi_ep *ep;
	struct ofi_av *av;
	struct ofi_cq *cq;
	uint64_t peer;
	op *ops, *free;
	int depth;
	news owed;                          // to the peer, not sent yet
	note *notes, *come, **last;         // all; those whose news are not told, oldest first, and where the next one goes
	char why[sizeof why]; // what td_post and td_poll say; whoever calls them takes turns
};

// Libraries and providers put signal handlers of their own in place, of which a Go program must have none: handlers are what they were
// once a call is over.
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
	// Registrations here are explicit and live as long as their memory, so the library needs no cache of its own, for which it would patch munmap.
	setenv("FI_MR_CACHE_MONITOR", "disabled", 0);
	// Nor are messages sent, for whose coming ofi_rxm would set memory aside and fill it with zeros at each meeting: 16 KiB each, thousands of them.
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

// The library's structures hold strings that freeinfo frees.
static int named(char **to, const char *s) {
	free(*to);
	*to = strdup(s);
	return *to != NULL;
}

static struct ofi_info *hints(const char *provider, int hmem, int notes) {
	struct ofi_info *h = lib.dupinfo(NULL);
	if (!h || !named(&h->fabric_attr->prov_name, provider)) {
		if (h) lib.freeinfo(h);
		return NULL;
	}
	h->caps = OFI_MSG | OFI_RMA | OFI_WRITE | OFI_REMOTE_WRITE | (hmem ? OFI_HMEM : 0) | (notes ? OFI_RECV | OFI_TRANSMIT : 0);
	h->mode = OFI_CONTEXT | OFI_CONTEXT2;
	h->ep_attr->type = OFI_EP_RDM;
	h->domain_attr->threading = OFI_THREAD_SAFE;
	h->domain_attr->mr_mode = OFI_MR_LOCAL | OFI_MR_VIRT_ADDR | OFI_MR_ALLOCATED | OFI_MR_PROV_KEY | (hmem ? OFI_MR_HMEM : 0);
	return h;
}

static const char *find(const char *provider, const char *address, td_device *d) {
	struct ofi_info *h = hints(d->notes ? "tcp;ofi_rxm" : provider, d->hmem, d->notes);
	if (!h) return plain("out of memory");
	uint32_t api = OFI_VERSION(1, 20), has = lib.version();
	int rc = lib.getinfo(has < api ? has : api, *address ? address : NULL, NULL, *address ? OFI_SOURCE : 0, h, &d->info);
	lib.freeinfo(h);
	return rc ? failed("fi_getinfo", rc) : NULL;
}

static const char *start(td_device *d, const char *provider, const char *address) {
	// Over TCP a write that brings data along has no context at its target, which ofi_rxm reads nevertheless when the write is cut short, by its
	// peer or by closing the endpoint: the process ends. So there nothing is brought along, and a message says what has come before it on its
	// connection: one for several writes. Others do not promise that order. The endpoints that tcp has of its own since 1.18 (net, before)
	// are not taken: they go on to use what belonged to closed ones.
	d->notes = !strcmp(provider, "tcp");
	const char *bad = find(provider, address, d);
	if (bad) return bad;
	int rc;
	if ((rc = lib.fabric(d->info->fabric_attr, &d->fabric, NULL))) return failed("fi_fabric", rc);
	if ((rc = d->fabric->ops->domain(d->fabric, d->info, &d->domain, NULL))) return failed("fi_domain", rc);
	if (!d->notes && d->info->domain_attr->cq_data_size < 4) return plain("its writes carry less than 32 bits of immediate data");
	if (d->notes && d->info->domain_attr->mr_mode & OFI_MR_LOCAL) return plain("its messages need registered memory");
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

// await has the next message come to o.
static int await(td_end *e, note *o) {
	return (int)e->ep->msg->recv(e->ep, &o->it, sizeof o->it, NULL, OFI_ADDR_UNSPEC, o);
}

// A queue has nothing to wait on: software providers then tell it of each completion by a system call here, and another there.
static const char *open_end(td_end *e) {
	td_device *d = e->d;
	struct ofi_av_attr av = {.count = 1};
	int rc = d->domain->ops->av_open(d->domain, &av, &e->av, NULL);
	if (rc) return failed("fi_av_open", rc);
	struct ofi_cq_attr cq = {.size = (size_t)e->depth * 2 + NOTES, .format = OFI_CQ_FORMAT_DATA, .wait_obj = OFI_WAIT_NONE};
	if ((rc = d->domain->ops->cq_open(d->domain, &cq, &e->cq, NULL))) return failed("fi_cq_open", rc);
	if ((rc = d->domain->ops->endpoint(d->domain, d->info, &e->ep, NULL))) return failed("fi_endpoint", rc);
	struct ofi_fid *f = &e->ep->fid;
	if ((rc = f->ops->bind(f, &e->av->fid, 0))) return failed("fi_ep_bind of the addresses", rc);
	if ((rc = f->ops->bind(f, &e->cq->fid, OFI_TRANSMIT | OFI_RECV))) return failed("fi_ep_bind of the queue", rc);
	if ((rc = f->ops->control(f, OFI_ENABLE, NULL))) return failed("fi_enable", rc);
	for (int i = 0; e->notes && i < NOTES; i++)
		if ((rc = await(e, &e->notes[i]))) return failed("fi_recv", rc);
	return NULL;
}

const char *td_endpoint(td_device *d, int depth, td_end **out) {
	td_end *e = calloc(1, sizeof *e);
	if (!e || !(e->ops = calloc((size_t)depth, sizeof *e->ops)) || (d->notes && !(e->notes = calloc(NOTES, sizeof *e->notes)))) {
		if (e) free(e->ops);
		free(e);
		return plain("out of memory");
	}
	e->d = d;
	e->last = &e->come;
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

// pay sends the news that the peer is owed. 0: it has; else the library's error, EAGAIN for now.
static int pay(td_end *e) {
	if (!e->owed.n) return 0;
	int rc = (int)-e->ep->msg->inject(e->ep, &e->owed, sizeof e->owed, e->peer);
	if (!rc) e->owed.n = 0;
	return rc;
}

// AT_MOST are the writes that one message tells of: with a whole frame's in one the other side looks in vain too often, and sleeps.
enum { AT_MOST = 8 };

// td_post starts writes, each with the same data, and returns how many it could; less than n with *why null: the queue is full for now.
int td_post(td_end *e, const td_write *w, int n, uint64_t token, uint32_t data, const char **bad) {
	*bad = NULL;
	int rc = pay(e), i = 0;
	for (; !rc && i < n && e->free; i++) {
		op *o = e->free;
		struct iovec iov = {(void *)(uintptr_t)w[i].from, w[i].len};
		struct ofi_rma_iov to = {w[i].to, w[i].len, w[i].key};
		void *desc = w[i].mr ? w[i].mr->mr->mem_desc : NULL;
		struct ofi_msg_rma m = {&iov, &desc, 1, e->peer, &to, 1, o, data};
		rc = (int)-e->ep->rma->writemsg(e->ep, &m, OFI_COMPLETION | (e->d->notes ? 0 : OFI_REMOTE_CQ_DATA));
		if (rc) break;
		e->free = o->next;
		o->token = token;
		o->busy = 1;
		if (!e->d->notes) continue;
		e->owed = (news){data, e->owed.n + 1};
		if (e->owed.n == AT_MOST) rc = pay(e);
	}
	int later = pay(e);
	if (!rc || rc == EAGAIN) rc = later;
	if (rc && rc != EAGAIN) *bad = keep(e, failed("fi_writemsg or fi_inject", rc));
	return i;
}

// done gives an operation's context back and says whether it was one.
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

// tell makes an event of what the queue says; 0: it is none, or news for later.
static int tell(td_end *e, const struct ofi_cq_data_entry *in, td_event *ev) {
	memset(ev, 0, sizeof *ev);
	note *o = in->op_context;
	if (e->notes && o >= e->notes && o < e->notes + NOTES) {
		if (in->len != sizeof o->it) o->it.n = 0; // says nothing
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

// read_out tells the news that have come, at most n events, and returns how many.
static int read_out(td_end *e, td_event *ev, int n, const char **bad) {
	int k = 0;
	while (e->come && k < n) {
		note *o = e->come;
		if (o->it.n) {
			ev[k++] = (td_event){.kind = TD_LANDED, .data = o->it.data};
			o->it.n--;
			continue;
		}
		if (!(e->come = o->next)) e->last = &e->come;
		int rc = await(e, o);
		if (rc) *bad = keep(e, failed("fi_recv", rc));
	}
	return k;
}

enum { AT_ONCE = 64 };

// td_poll reads completions, which also lets the provider do its work, and returns how many; negative: the queue is broken. While there are
// none it looks again at once, at most so often; once there are some it goes on until there are no more, or n.
int td_poll(td_end *e, td_event *ev, int n, int looks, const char **bad) {
	struct ofi_cq_data_entry in[AT_ONCE];
	*bad = NULL;
	int rc = pay(e);
	if (rc && rc != EAGAIN) {
		*bad = keep(e, failed("fi_inject", rc));
		return -1;
	}
	int k = read_out(e, ev, n, bad);
	while (k < n && !*bad) {
		ssize_t got = e->cq->ops->read(e->cq, in, (size_t)(n - k < AT_ONCE ? n - k : AT_ONCE));
		if (got == -EAGAIN && k == 0 && --looks > 0) continue;
		if (got < 0 && k > 0) return k; // an error is there the next time, too
		if (got == -EAGAIN) return 0;
		if (got == -OFI_EAVAIL) return broken(e, ev, bad);
		if (got < 0) {
			*bad = keep(e, failed("fi_cq_read", got));
			return -1;
		}
		for (ssize_t i = 0; i < got; i++) k += tell(e, &in[i], &ev[k]);
		k += read_out(e, ev + k, n - k, bad);
	}
	return k;
}

// td_end_close may be called again where it failed: the endpoint may then still be written through, and what the library may point to stays.
const char *td_end_close(td_end *e) {
	int rc;
	if (e->ep && (rc = shut(&e->ep->fid))) return failed("closing an endpoint", rc);
	e->ep = NULL;
	if (e->cq && (rc = shut(&e->cq->fid))) return failed("closing an endpoint's queue", rc);
	e->cq = NULL;
	if (e->av && (rc = shut(&e->av->fid))) return failed("closing an endpoint's addresses", rc);
	free(e->notes);
	free(e->ops);
	free(e);
	return NULL;
}
