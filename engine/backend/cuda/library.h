// The functions of api.h and direct.h in a shared object that is opened at run time.
#pragma once
#include <dlfcn.h>
#include <stdlib.h>

#include "direct.h"

#define TD_FUNCTIONS(f) \
	f(version) f(count) f(open) f(close) f(error) f(describe) f(alloc) f(upload) f(download) f(groups) f(tables) f(record) f(run) f(poll) f(wait) f(host) f(copy) f(follow) f(direct) f(flush) f(digest) f(nccl_id) f(ranks) f(leave) f(blas)

typedef struct {
	void *handle;
#define TD_FIELD(name) __typeof__(&td_##name) name;
	TD_FUNCTIONS(TD_FIELD)
	void (*twin)(uint64_t seed, int deferred, const char *skip); // of the host twin only
	int (*twin_sites)(char *to, int n);
	int (*twin_fault)(int kind, int deferred, char *why, int n);
	void (*twin_refuse)(const char *call, int fatal, int after, int calls);
} td_library;

// td_load fills l and returns NULL, or returns an error text.
static inline const char *td_load(td_library *l, const char *path) {
	l->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!l->handle) return dlerror();
#define TD_FIND(name) \
	l->name = (__typeof__(&td_##name))dlsym(l->handle, "td_" #name); \
	if (!l->name) return "it has no function td_" #name;
	TD_FUNCTIONS(TD_FIND)
	l->twin = (void (*)(uint64_t, int, const char *))dlsym(l->handle, "td_twin");
	l->twin_sites = (int (*)(char *, int))dlsym(l->handle, "td_twin_sites");
	l->twin_refuse = (void (*)(const char *, int, int, int))dlsym(l->handle, "td_twin_refuse");
	l->twin_fault = (int (*)(int, int, char *, int))dlsym(l->handle, "td_twin_fault");
	return NULL;
}

static inline int td_l_version(td_library *l) { return l->version(); }
static inline int td_l_count(td_library *l, char *e, int n) { return l->count(e, n); }
static inline td_device *td_l_open(td_library *l, int i, td_limits m, char *e, int n) { return l->open(i, m, e, n); }
static inline void td_l_close(td_library *l, td_device *d) { l->close(d); }
static inline const char *td_l_error(td_library *l, td_device *d) { return l->error(d); }
static inline void td_l_describe(td_library *l, td_device *d, td_info *i) { l->describe(d, i); }
static inline td_address td_l_alloc(td_library *l, td_device *d, int64_t n) { return l->alloc(d, n); }
static inline int td_l_upload(td_library *l, td_device *d, td_address to, const void *from, int64_t n) { return l->upload(d, to, from, n); }
static inline int td_l_download(td_library *l, td_device *d, void *to, td_address from, int64_t n) { return l->download(d, to, from, n); }
static inline int td_l_groups(td_library *l, td_device *d, int n, td_step *s) { return l->groups(d, n, s); }
static inline int td_l_tables(td_library *l, td_device *d, int w, int g, int s, int from, int n) { return l->tables(d, w, g, s, from, n); }
static inline td_plan *td_l_record(td_library *l, td_device *d, const void *o, int n, int t, int out, int g) { return l->record(d, (const td_op *)o, n, t, out, g); }
static inline int td_l_run(td_library *l, td_device *d, td_plan *p, int w, int from, int to) { return l->run(d, p, w, from, to); }
static inline int64_t td_l_blas(td_library *l, td_device *d, const char *p, char *e, int n) { return l->blas(d, p, e, n); }
static inline void *td_l_host(td_library *l, td_device *d, void *m, int64_t n) { return l->host(d, m, n); }
static inline int td_l_copy(td_library *l, td_device *d, const void *p, int n, int to) { return l->copy(d, (const td_piece *)p, n, to); }
static inline int td_l_follow(td_library *l, td_device *d) { return l->follow(d); }
static inline int td_l_direct(td_library *l, td_device *d, td_address at) { return l->direct(d, at); }
static inline int td_l_flush(td_library *l, td_device *d) { return l->flush(d); }
static inline int td_l_digest(td_library *l, td_device *d, const void *p, int n) { return l->digest(d, (const td_piece *)p, n); }
static inline int td_l_poll(td_library *l, td_device *d) { return l->poll(d); }
static inline int td_l_wait(td_library *l, td_device *d) { return l->wait(d); }
static inline void td_l_twin(td_library *l, uint64_t seed, int deferred, const char *skip) { if (l->twin) l->twin(seed, deferred, skip); }
static inline int td_l_twin_sites(td_library *l, char *to, int n) { return l->twin_sites ? l->twin_sites(to, n) : 0; }
static inline int td_l_twin_fault(td_library *l, int kind, int deferred, char *why, int n) { return l->twin_fault ? l->twin_fault(kind, deferred, why, n) : 0; }
static inline void td_l_twin_refuse(td_library *l, const char *call, int fatal, int after, int calls) { if (l->twin_refuse) l->twin_refuse(call, fatal, after, calls); }
static inline int td_l_nccl_id(td_library *l, const char *nccl, char *id, char *e, int n) { return l->nccl_id(nccl, id, e, n); }
static inline int td_l_ranks(td_library *l, td_device *d, const char *nccl, const char *id, int rank, int ranks) { return l->ranks(d, nccl, id, rank, ranks); }
static inline void td_l_leave(td_library *l, td_device *d) { l->leave(d); }
