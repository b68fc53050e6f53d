// The kernels, once for all instruction sets. Each variant's .c file sets KERNEL_ISA and
// KERNELS, the name of its table, and includes this.
//
// One lane is one result. Each result is one sequential chain over the reduction, or 16
// interleaved chains joined by a fixed tree. No chain depends on how many rows or tiles an
// inner loop holds.
#ifndef KERNEL_AMX
#define KERNEL_AMX 0
#endif
#include "kernels.h"

#include <math.h>
#include <stddef.h>

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF // GCC: by -std=c11
#endif

#define UNROLL _Pragma("GCC unroll 16")

#include "vec.h"

FN int min_int(int a, int b) { return a < b ? a : b; }

FN v16 v16_sigmoid(v16 x) {
	const v16 one = v16_set1(1.0f);
	return v16_div(one, v16_add(one, v16_exp(v16_sub(v16_zero(), x))));
}

#include "linear.h"

#include "attention.h"

#include "moe.h"

#include "sample.h"

static TARGET void embed(const tandem_op *op, const tandem_step *st, int row) {
	int id = st->ids[row] - op->from;
	float *dst = op->dst + (size_t)row * op->n;
	if (id < 0 || id >= op->w_rows) {
		memset(dst, 0, op->n * sizeof *dst);
		return;
	}
	const char *tile = (const char *)op->w + (id / TILE) * tile_bytes(op);
	if (op->bf16 == ELEM_INT8 || op->bf16 == ELEM_INT4) {
		unpack_quant(op, (const uint8_t *)tile, id % TILE, dst);
	} else if (op->bf16 == ELEM_GRID) {
		unpack_grid(op, (const uint8_t *)tile + sizeof(tandem_grid), id % TILE, dst);
	} else if (op->bf16 == ELEM_FP8) {
		unpack_fp8_row(op, id / TILE, id % TILE, dst);
	} else if (op->bf16) {
		const uint16_t *w = (const uint16_t *)tile + id % TILE * 2;
		for (int k = 0; k < op->n; k++) {
			uint32_t u = (uint32_t)w[k / 2 * 2 * TILE + k % 2] << 16;
			memcpy(dst + k, &u, 4);
		}
	} else {
		const float *w = (const float *)tile + id % TILE;
		for (int k = 0; k < op->n; k++)
			dst[k] = w[(size_t)k * TILE];
	}
}

FN void norm(float *dst, float *x, const float *add, const float *w, int n, float eps) {
	int body = n / 16 * 16, tail = n - body;
	if (add) {
		for (int i = 0; i < body; i += 16)
			v16_store(x + i, v16_add(v16_load(x + i), v16_load(add + i)));
		if (tail)
			v16_storen(x + body, v16_add(v16_loadn(x + body, tail), v16_loadn(add + body, tail)), tail);
	}
	v16 sum = v16_zero();
	for (int i = 0; i < body; i += 16) {
		v16 v = v16_load(x + i);
		sum = v16_fma(v, v, sum);
	}
	if (tail) {
		v16 v = v16_loadn(x + body, tail);
		sum = v16_fma(v, v, sum);
	}
	v16 inv = v16_set1(1.0f / sqrtf(v16_sum(sum) / (float)n + eps));
	for (int i = 0; i < body; i += 16) {
		v16 y = v16_mul(v16_load(x + i), inv);
		v16_store(dst + i, w ? v16_mul(y, v16_load(w + i)) : y);
	}
	if (tail) {
		v16 y = v16_mul(v16_loadn(x + body, tail), inv);
		v16_storen(dst + body, w ? v16_mul(y, v16_loadn(w + body, tail)) : y, tail);
	}
}

static TARGET void rmsnorm(const tandem_op *op, int row) {
	size_t at = (size_t)row * op->n;
	if (!op->heads) {
		norm(op->dst + at, op->a + at, op->b ? op->b + at : 0, op->w, op->n, op->scale);
		return;
	}
	for (int h = 0; h < op->heads; h++, at += op->dim)
		norm(op->dst + at, op->a + at, 0, op->w, op->dim, op->scale);
}

static TARGET void rope(const tandem_op *op, int row) {
	int half = op->dim / 2;
	const float *cosine = op->cs + (size_t)row * op->dim, *sine = cosine + half;
	for (int h = 0; h < op->heads; h++) {
		float *x = op->a + (size_t)row * op->k + (size_t)(h + 1) * (op->k / op->heads) - op->dim, *y = x + half;
		for (int i = 0; i < half; i += 16) {
			int n = min_int(16, half - i);
			v16 a = v16_loadn(x + i, n), b = v16_loadn(y + i, n);
			v16 c = v16_loadn(cosine + i, n), s = v16_loadn(sine + i, n);
			v16_storen(x + i, v16_sub(v16_mul(a, c), v16_mul(b, s)), n);
			v16_storen(y + i, v16_add(v16_mul(b, c), v16_mul(a, s)), n);
		}
	}
}

// The activations of backend.Act; SiLU as one quotient.
FN v16 act(int kind, v16 g, v16 u) {
	const v16 one = v16_set1(1.0f);
	if (kind == ACT_GELU_TANH) { // (1 + tanh y) / 2 is the logistic function of 2y
		v16 cube = v16_mul(v16_mul(g, g), v16_mul(g, v16_set1(0.044715f)));
		v16 y = v16_mul(v16_add(g, cube), v16_set1(2 * 0.7978845608028654f));
		return v16_mul(v16_mul(g, v16_sigmoid(y)), u);
	}
	if (kind == ACT_CLAMPED_SWISH) {
		const v16 limit = v16_set1(7.0f);
		g = v16_min(g, limit);
		u = v16_max(v16_min(u, limit), v16_set1(-7.0f));
		return v16_mul(v16_mul(g, v16_sigmoid(v16_mul(g, v16_set1(1.702f)))), v16_add(u, one));
	}
	return v16_mul(v16_div(g, v16_add(one, v16_exp(v16_sub(v16_zero(), g)))), u);
}

static TARGET void gatedact(const tandem_op *op, int row) {
	size_t at = (size_t)row * op->n;
	float *dst = op->dst + at;
	const float *gate = op->a + at, *up = op->b + at;
	for (int i = 0; i < op->n; i += 16) {
		int n = op->n - i;
		v16 g = n >= 16 ? v16_load(gate + i) : v16_loadn(gate + i, n);
		v16 u = n >= 16 ? v16_load(up + i) : v16_loadn(up + i, n);
		v16 y = act(op->act, g, u);
		if (n >= 16)
			v16_store(dst + i, y);
		else
			v16_storen(dst + i, y, n);
	}
}

static TARGET void add(const tandem_op *op, int row) {
	size_t at = (size_t)row * op->n;
	const v16 by = v16_set1(op->w ? *(const float *)op->w : op->scale);
	for (int i = 0; i < op->n; i += 16) {
		int n = min_int(16, op->n - i);
		v16 x = v16_loadn(op->a + at + i, n);
		if (op->b)
			x = v16_add(x, v16_loadn(op->b + at + i, n));
		v16_storen(op->dst + at + i, v16_mul(x, by), n);
	}
}

// tanh y is twice the logistic function of 2y, less one.
static TARGET void softcap(const tandem_op *op, int row) {
	size_t at = (size_t)row * op->n;
	const v16 twice = v16_set1(2 / op->scale), limit = v16_set1(op->scale);
	for (int i = 0; i < op->n; i += 16) {
		int n = min_int(16, op->n - i);
		v16 s = v16_sigmoid(v16_mul(v16_loadn(op->a + at + i, n), twice));
		v16_storen(op->dst + at + i, v16_mul(limit, v16_sub(v16_add(s, s), v16_set1(1.0f))), n);
	}
}

#include "delta.h"

static TARGET void item(const tandem_op *op, const tandem_step *st, const tandem_split *sp, int i, tandem_scratch *s) {
	switch (op->kind) {
	case OP_EMBED:
		embed(op, st, i);
		break;
	case OP_LINEAR:
		linear(op, st, sp, i, s);
		break;
	case OP_RMSNORM:
		rmsnorm(op, i);
		break;
	case OP_ROPE:
		rope(op, i);
		break;
	case OP_STOREKV:
		storekv(op, st, i);
		break;
	case OP_ATTENTION:
		attention(op, st, sp, i, s);
		break;
	case OP_GATEDACT:
		gatedact(op, i);
		break;
	case OP_ROWS:
		memcpy(op->dst + (size_t)i * op->n, op->a + (size_t)st->output_rows[i] * op->n, op->n * sizeof(float));
		break;
	case OP_ROUTE:
		route(op, i);
		break;
	case OP_GROUP:
		group(op, sp);
		break;
	case OP_SCATTER:
		scatter(op, i);
		break;
	case OP_EXPERTS:
		experts(op, st, sp, i, s);
		break;
	case OP_COMBINE:
		combine(op, i);
		break;
	case OP_ADD:
		add(op, i);
		break;
	case OP_SOFTCAP:
		softcap(op, i);
		break;
	case OP_COLUMNS:
		memcpy(op->dst + (size_t)i * op->n, op->a + (size_t)i * op->k + op->from, op->n * sizeof(float));
		break;
	case OP_SPLIT:
		split(op, sp, i);
		break;
	case OP_JOIN:
		join(op, sp, i);
		break;
	case OP_ADAPT:
		if (op->chosen[i] >= 0)
			add(op, i);
		break;
	case OP_DELTA:
		delta(op, st, i, s);
		break;
	case OP_GATE:
		gate(op, i);
		break;
	case OP_QUANTIZE:
#if KERNEL_AMX
		if (op->bf16 == ELEM_BF16)
			amx_round(op, i);
		else
#endif
			quantize(op, i);
		break;
	case OP_PACK:
		pack(op, i);
		break;
	}
}

const tandem_kernels KERNELS = {item, argmax, weigh, mass, between, first_above, count_above};
