//go:build cgo

// The thread pool of the C kernels. The caller publishes one operation at a time as a
// word (operation number, items left). A thread that decrements the word owns an item. A
// claimed item keeps the operation from ending, so that its fields are read only after a
// claim, and no operation waits for a thread that has not started. Idle threads spin for
// some ten microseconds, because the next operation usually follows at once, and then
// sleep.
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

int tandem_hardware_prefetch;

#if defined(__x86_64__)
__attribute__((constructor)) static void look_at_cpu(void) {
	unsigned most, b, c, d;
	if (__get_cpuid(0, &most, &b, &c, &d))
		tandem_hardware_prefetch = b == signature_AMD_ebx && c == signature_AMD_ecx && d == signature_AMD_edx;
}
#endif

enum { SPINS = 400 }; // pauses before sleeping: 10 to 30 microseconds

struct tandem_pool {
	const tandem_kernels *kernels;
	int threads; // caller included
	int started;
	pthread_t *ids;
	tandem_scratch *scratch; // [threads]

	const tandem_op *op; // the published operation
	const tandem_step *step;
	tandem_split split;

	_Alignas(64) _Atomic uint64_t claim; // operation number << 32 | items left
	_Alignas(64) _Atomic int32_t pending; // items not yet finished
	_Atomic int32_t caller_waits;
	_Alignas(64) _Atomic int32_t sleepers;
	_Atomic int32_t quit;
	pthread_mutex_t lock;
	pthread_cond_t wake, done;
};

typedef struct {
	tandem_pool *pool;
	int index;
} worker_arg;

static inline void relax(void) {
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

// Claims and runs items until none is left; returns 1 if it finished the last one.
static int drain(tandem_pool *p, int worker) {
	for (;;) {
		uint64_t word = atomic_load(&p->claim);
		uint32_t left = (uint32_t)word;
		if (left == 0)
			return 0;
		if (!atomic_compare_exchange_weak(&p->claim, &word, word - 1))
			continue;
		p->kernels->item(p->op, p->step, &p->split, p->split.items - (int)left, &p->scratch[worker]);
		if (atomic_fetch_sub(&p->pending, 1) == 1)
			return 1;
	}
}

static void *work(void *v) {
	worker_arg arg = *(worker_arg *)v;
	tandem_pool *p = arg.pool;
	free(v);
	for (;;) {
		if (drain(p, arg.index) && atomic_load(&p->caller_waits)) {
			pthread_mutex_lock(&p->lock);
			pthread_cond_signal(&p->done);
			pthread_mutex_unlock(&p->lock);
		}
		int spins = 0;
		while ((uint32_t)atomic_load(&p->claim) == 0 && !atomic_load(&p->quit) && spins++ < SPINS)
			relax();
		if (spins <= SPINS && !atomic_load(&p->quit))
			continue;
		pthread_mutex_lock(&p->lock);
		atomic_fetch_add(&p->sleepers, 1);
		while ((uint32_t)atomic_load(&p->claim) == 0 && !atomic_load(&p->quit))
			pthread_cond_wait(&p->wake, &p->lock);
		atomic_fetch_sub(&p->sleepers, 1);
		pthread_mutex_unlock(&p->lock);
		if (atomic_load(&p->quit))
			return NULL;
	}
}

// Wakes as many sleepers as there are items that the caller does not take.
static void wake(tandem_pool *p, int items) {
	int n = atomic_load(&p->sleepers);
	if (n == 0)
		return;
	pthread_mutex_lock(&p->lock);
	if (items - 1 < n) {
		for (int i = 0; i < items - 1; i++)
			pthread_cond_signal(&p->wake);
	} else {
		pthread_cond_broadcast(&p->wake);
	}
	pthread_mutex_unlock(&p->lock);
}

static void wait_done(tandem_pool *p) {
	for (int i = 0; i < SPINS; i++) {
		if (atomic_load(&p->pending) == 0)
			return;
		relax();
	}
	pthread_mutex_lock(&p->lock);
	atomic_store(&p->caller_waits, 1);
	while (atomic_load(&p->pending) != 0)
		pthread_cond_wait(&p->done, &p->lock);
	atomic_store(&p->caller_waits, 0);
	pthread_mutex_unlock(&p->lock);
}

// Multiply-adds, or operations of the same cost, below which an operation is not worth
// waking another thread.
static const int64_t worth_sharing = 1 << 16;

static int64_t cost(const tandem_op *op, const tandem_step *st, int rows) {
	int64_t cells = (int64_t)rows * (op->n > op->k ? op->n : op->k);
	switch (op->kind) {
	case OP_LINEAR:
	case OP_EXPERTS:
		return (int64_t)rows * op->n * op->k;
	case OP_PACK:
		return (int64_t)op->n * op->k;
	case OP_ATTENTION: {
		int64_t keys = 0;
		for (int i = 0; i < rows; i++)
			keys += op->window && op->window <= st->positions[i] ? op->window : st->positions[i] + 1;
		return keys * op->heads * op->dim;
	}
	case OP_DELTA:
		return (int64_t)rows * op->kv_heads * op->dim * op->value_dim * 2;
	case OP_GATE:
	case OP_GATEDACT:
		return cells * 8;
	case OP_STOREKV:
	case OP_EMBED:
	case OP_QUANTIZE:
		return cells * 4;
	}
	return cells * 2;
}

void tandem_run(tandem_pool *p, const tandem_op *ops, int count, const tandem_step *st) {
	for (int i = 0; i < count; i++) {
		tandem_split split = tandem_cut(&ops[i], st, p->threads);
		if (split.items == 0)
			continue;
		if (p->threads == 1 || split.items == 1 || cost(&ops[i], st, split.rows) < worth_sharing) {
			for (int j = 0; j < split.items; j++)
				p->kernels->item(&ops[i], st, &split, j, &p->scratch[0]);
			continue;
		}
		p->op = &ops[i];
		p->step = st;
		p->split = split;
		atomic_store(&p->pending, split.items);
		uint64_t number = (atomic_load(&p->claim) >> 32) + 1;
		atomic_store(&p->claim, number << 32 | (uint32_t)split.items);
		wake(p, split.items);
		if (!drain(p, 0))
			wait_done(p);
	}
}

void tandem_pack(tandem_pool *p, tandem_op op, const void *matrix, const tandem_step *st) {
	op.kind = OP_PACK;
	op.a = (float *)matrix;
	tandem_run(p, &op, 1, st);
}

tandem_split tandem_cut(const tandem_op *op, const tandem_step *st, int threads) {
	tandem_split s = {0};
	s.rows = (op->output_rows ? st->outputs : st->tokens) * (op->slots ? op->slots : 1);
	s.items = s.rows;
	int tiles = (op->n + TILE - 1) / TILE;
	if (op->kind == OP_PACK) {
		s.items = tiles;
	} else if (op->kind == OP_LINEAR) {
		s.chunk = LINEAR_ROWS;
		s.chunks = (s.rows + s.chunk - 1) / s.chunk;
		s.tiles = LINEAR_TILES;
		// Fewer tiles per item if otherwise threads would be idle.
		if (tiles * s.chunks < threads * 2 * LINEAR_TILES)
			s.tiles = 1;
		s.items = (tiles + s.tiles - 1) / s.tiles * s.chunks;
	} else if (op->kind == OP_EXPERTS) {
		s.chunks = op->list[0];
		s.tiles = tiles * s.chunks < threads * 2 * LINEAR_TILES ? 1 : LINEAR_TILES;
		s.items = (tiles + s.tiles - 1) / s.tiles * s.chunks;
	} else if (op->kind == OP_ADAPT) {
		s.items = op->list[0] ? s.rows : 0;
	} else if (op->kind == OP_DELTA) {
		s.items = st->spans * op->heads;
	} else if (op->kind == OP_GROUP) {
		s.items = s.rows > 0;
	} else if (op->kind == OP_ATTENTION) {
		int group = op->heads / op->kv_heads;
		s.chunk = group < QUERIES ? QUERIES / group : 1;
		if ((s.rows + s.chunk - 1) / s.chunk * op->kv_heads < threads * 2)
			s.chunk = 1;
		s.items = (s.rows + s.chunk - 1) / s.chunk * op->kv_heads;
	}
	return s;
}

int tandem_has_f16c(void) {
#if defined(__x86_64__)
	unsigned a, b, c, d;
	return __get_cpuid(1, &a, &b, &c, &d) && c >> 29 & 1;
#else
	return 0;
#endif
}

static const tandem_kernels *kernels_of(int variant) {
#if defined(__x86_64__)
	if (variant == 6)
		return &tandem_amx;
	if (variant == 5)
		return &tandem_avx512vnni;
	if (variant == 4)
		return &tandem_avxvnni;
	if (variant == 2)
		return &tandem_avx512;
	if (variant == 1)
		return &tandem_avx2;
#elif defined(__aarch64__)
	if (variant == 3)
		return &tandem_neon;
#endif
	(void)variant;
	return &tandem_generic;
}

int64_t tandem_argmax(int variant, const float *x, int64_t n) { return kernels_of(variant)->argmax(x, n); }

void tandem_weigh(int variant, float *weights, double *sums, const float *x, int64_t n, const tandem_weighing *by) {
	kernels_of(variant)->weigh(weights, sums, x, n, by);
}

void tandem_mass(int variant, double *sums, const float *weights, int64_t n, float least) {
	kernels_of(variant)->mass(sums, weights, n, least);
}

int64_t tandem_between(int variant, float *dst, int32_t *counts, double *above, const float *weights, int64_t n, float least, float limit) {
	return kernels_of(variant)->between(dst, counts, above, weights, n, least, limit);
}

int64_t tandem_first_above(int variant, const float *x, int64_t n, int64_t from, float than) {
	return kernels_of(variant)->first_above(x, n, from, than);
}

int64_t tandem_count_above(int variant, const float *x, int64_t n, float than) {
	return kernels_of(variant)->count_above(x, n, than);
}

tandem_pool *tandem_pool_new(int threads, int variant) {
	tandem_pool *p;
	if (posix_memalign((void **)&p, 64, sizeof *p))
		return NULL;
	*p = (tandem_pool){.kernels = kernels_of(variant), .threads = threads};
	pthread_mutex_init(&p->lock, NULL);
	pthread_cond_init(&p->wake, NULL);
	pthread_cond_init(&p->done, NULL);
	p->ids = calloc(threads, sizeof *p->ids);
	void *scratch = NULL;
	if (!p->ids || posix_memalign(&scratch, 64, threads * sizeof(tandem_scratch))) {
		tandem_pool_free(p);
		return NULL;
	}
	p->scratch = scratch;

	// Signals belong to the Go runtime: block all of them on these threads.
	sigset_t all, old;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	for (int i = 1; i < threads; i++) {
		worker_arg *arg = malloc(sizeof *arg);
		if (arg)
			*arg = (worker_arg){p, i};
		if (!arg || pthread_create(&p->ids[p->started], NULL, work, arg)) {
			free(arg);
			break;
		}
		p->started++;
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (p->started < threads - 1) {
		tandem_pool_free(p);
		return NULL;
	}
	return p;
}

void tandem_pool_free(tandem_pool *p) {
	atomic_store(&p->quit, 1);
	pthread_mutex_lock(&p->lock);
	pthread_cond_broadcast(&p->wake);
	pthread_mutex_unlock(&p->lock);
	for (int i = 0; i < p->started; i++)
		pthread_join(p->ids[i], NULL);
	pthread_mutex_destroy(&p->lock);
	pthread_cond_destroy(&p->wake);
	pthread_cond_destroy(&p->done);
	free(p->ids);
	free(p->scratch);
	free(p);
}
