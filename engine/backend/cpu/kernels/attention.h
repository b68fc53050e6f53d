// Paged attention; part of body.h.
//
// A page is K [kv_heads, dim, block_tokens] then V [kv_heads, block_tokens, dim], so that
// scores have a position per lane and outputs a dimension per lane. Positions are cut
// into segments of whole blocks counted from position 0. Each segment gets its own
// maximum, sum and output, and they are merged in order. A query reads only its own
// positions, whichever queries share a pass.
//
// KV of ELEM_FP8 is stored divided by the scale of its head. Its bytes are read as a 256th of
// their values, and op->k_scales and op->v_scales, 256 times the scales, are factors of scores
// and outputs. The NaN of E4M3 is read as 480.

FN uint16_t to_bf16(float f) {
	uint32_t u;
	memcpy(&u, &f, 4);
	if ((u & 0x7fffffff) > 0x7f800000)
		return (uint16_t)(u >> 16 | 0x40);
	return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// f as E4M3, rounded to nearest even, within ±448.
FN uint8_t to_fp8(float f) {
	uint32_t u;
	memcpy(&u, &f, 4);
	uint32_t sign = u >> 24 & 0x80, most = 0x43e00000; // 448
	u &= 0x7fffffff;
	if (u > 0x7f800000)
		return (uint8_t)(sign | 0x7f);
	if (u > most)
		u = most;
	if (u < 0x3c800000) { // below 2^-6 in steps of 2^-9, as is a float from 2^14 on
		float small;
		memcpy(&small, &u, 4);
		small += 0x1p14f;
		memcpy(&u, &small, 4);
		return (uint8_t)(sign | (u - 0x46800000));
	}
	u += 0x7ffff + (u >> 20 & 1);
	return (uint8_t)(sign | ((u >> 20) - (120 << 3)));
}

// The bytes of an element of KV.
FN int kv_size(int elem) { return elem == ELEM_FP8 ? 1 : elem == ELEM_BF16 ? 2 : 4; }

FN void put_kv(int elem, uint8_t *p, size_t i, float f, float scale) {
	if (elem == ELEM_FP8)
		p[i] = to_fp8(f / scale);
	else if (elem == ELEM_BF16)
		((uint16_t *)p)[i] = to_bf16(f);
	else
		((float *)p)[i] = f;
}

// The scale of a head's keys or values, from 256 times the scales.
FN float kv_scale(const float *scales, int head) { return scales ? scales[head] * 0x1p-8f : 1; }

static TARGET void storekv(const tandem_op *op, const tandem_step *st, int row) {
	int bt = op->block_tokens, dim = op->dim, off = op->slots_kv[row] % bt;
	uint8_t *page = op->kv + (size_t)(op->slots_kv[row] / bt) * st->page_bytes;
	const float *k = op->a + (size_t)row * op->k, *v = op->b + (size_t)row * op->k;
	if (op->latent) {
		int rest = dim - op->latent;
		v = op->b + (size_t)row * rest;
		for (int d = 0; d < dim; d++) {
			float f = d < op->latent ? k[d] : v[d - op->latent];
			put_kv(st->kv_elem, page, (size_t)off * dim + d, f, kv_scale(op->k_scales, 0));
		}
		return;
	}
	for (int h = 0; h < op->kv_heads; h++) {
		float k_scale = kv_scale(op->k_scales, h), v_scale = kv_scale(op->v_scales, h);
		for (int d = 0; d < dim; d++, k++, v++) {
			put_kv(st->kv_elem, page, (size_t)(h * dim + d) * bt + off, *k, k_scale);
			put_kv(st->kv_elem, page + op->v_at, (size_t)(h * bt + off) * dim + d, *v, v_scale);
		}
	}
}

// Queries that share a pass: of one sequence and one KV head, positions ascending.
typedef struct {
	int n;
	const float *q[QUERIES]; // [dim]
	float *dst[QUERIES];     // [dim]
	int keys[QUERIES];       // positions up to the query's own
	int first[QUERIES];      // first position of its window
	float most[QUERIES], sum[QUERIES];
	float sink[QUERIES]; // a score in addition to those of the keys, if there are sinks
	const int32_t *table; // the sequence's blocks
	size_t k_at, v_at;    // of the KV head in a page, bytes
	float k_factor, v_factor; // of its scores, and of its outputs
} pass;

FN V load_kv(int elem, const uint8_t *p) {
	return elem == ELEM_FP8 ? vload_fp8(p) : elem == ELEM_BF16 ? vload_bf16(p) : vload((const float *)p);
}

FN float kv_at(int elem, const uint8_t *p, int i) {
	float f;
	if (elem == ELEM_FP8) {
		f = fp8_at(p[i]);
	} else if (elem == ELEM_BF16) {
		uint32_t u = (uint32_t)((const uint16_t *)p)[i] << 16;
		memcpy(&f, &u, 4);
	} else {
		memcpy(&f, p + (size_t)i * 4, 4);
	}
	return f;
}

// Scores of nq queries against ng groups of 16 positions. A group's K begins at k[g], and
// its dimensions are stride bytes apart.
FN void score_block(const int elem, const int nq, const int ng, int dim, const float *const *q,
                    const uint8_t *const *k, size_t stride, float *out, size_t ld) {
	V acc[SCORE_NQ][SCORE_NG * VPT];
	UNROLL for (int i = 0; i < nq; i++)
		UNROLL for (int g = 0; g < ng * VPT; g++)
			acc[i][g] = vzero();
	for (int d = 0; d < dim; d++) {
		V kv[SCORE_NG * VPT];
		UNROLL for (int g = 0; g < ng * VPT; g++)
			kv[g] = load_kv(elem, k[g / VPT] + d * stride + g % VPT * (VL * kv_size(elem)));
		UNROLL for (int i = 0; i < nq; i++) {
			V qv = vset1(q[i][d]);
			UNROLL for (int g = 0; g < ng * VPT; g++)
				acc[i][g] = vfma(kv[g], qv, acc[i][g]);
		}
	}
	UNROLL for (int i = 0; i < nq; i++)
		UNROLL for (int g = 0; g < ng * VPT; g++)
			vstore(out + i * ld + g * VL, acc[i][g]);
}

// score_block with constants at each call.
#define SCORE_CASE(nq, ng) \
	do { \
		if (elem == ELEM_FP8) \
			score_block(ELEM_FP8, nq, ng, dim, q, k, stride, out, SEGMENT + TILE); \
		else if (elem == ELEM_BF16) \
			score_block(ELEM_BF16, nq, ng, dim, q, k, stride, out, SEGMENT + TILE); \
		else \
			score_block(ELEM_F32, nq, ng, dim, q, k, stride, out, SEGMENT + TILE); \
	} while (0)

static TARGET void score_groups(int elem, int nq, int ng, int dim, const float *const *q, const uint8_t *const *k,
                                size_t stride, float *out) {
	int whole = nq == SCORE_NQ;
	if (ng == SCORE_NG) {
		if (whole)
			SCORE_CASE(SCORE_NQ, SCORE_NG);
		else
			for (; nq; nq--, q++, out += SEGMENT + TILE)
				SCORE_CASE(1, SCORE_NG);
		return;
	}
	for (; ng; ng--, k++, out += TILE) {
		const float *const *q0 = q;
		float *out0 = out;
		if (whole)
			SCORE_CASE(SCORE_NQ, 1);
		else
			for (int i = 0; i < nq; i++, q++, out += SEGMENT + TILE)
				SCORE_CASE(1, 1);
		q = q0, out = out0;
	}
}

// Scores over a latent, whose keys are stored in rows. 16 of them are transposed at a time.
static TARGET void latent_scores(const tandem_op *op, const tandem_step *st, const pass *p, int i0, int i1, int from,
                                 int keys, tandem_scratch *s) {
	int bt = op->block_tokens, dim = op->dim, elem = st->kv_elem;
	int begin = p->first[i0] > from ? (p->first[i0] - from) / TILE * TILE : 0;
	for (int t = begin; t < keys; t += TILE) {
		const uint8_t *k = (const uint8_t *)s->tile;
		for (int i = 0; i < TILE; i++) {
			int at = from + min_int(t + i, keys - 1);
			const uint8_t *row = op->kv + (size_t)p->table[at / bt] * st->page_bytes + (size_t)(at % bt) * dim * kv_size(elem);
			for (int d = 0; d < dim; d++)
				s->tile[d][i] = kv_at(elem, row, d);
		}
		for (int i = i0; i < i1; i += SCORE_NQ)
			score_groups(ELEM_F32, min_int(SCORE_NQ, i1 - i), 1, dim, p->q + i, &k, TILE * sizeof(float), s->scores[i] + t);
	}
}

// Scores of queries [i0, i1) for the keys of the segment, unscaled, from the block of the
// first query's window on.
static TARGET void scores(const tandem_op *op, const tandem_step *st, const pass *p, int i0, int i1, int from, int keys,
                          tandem_scratch *s) {
	if (op->latent) {
		latent_scores(op, st, p, i0, i1, from, keys, s);
		return;
	}
	int bt = op->block_tokens, size = kv_size(st->kv_elem);
	int begin = p->first[i0] > from ? (p->first[i0] - from) / bt * bt : 0;
	for (int t = begin; t < keys;) {
		const uint8_t *k[SCORE_NG];
		int ng = 0, first = t, elem = st->kv_elem;
		size_t stride = (size_t)bt * size;
		while (ng < SCORE_NG && t < keys) {
			int off = (from + t) % bt, left = bt - off;
			const uint8_t *page = op->kv + (size_t)p->table[(from + t) / bt] * st->page_bytes;
			const uint8_t *at = page + p->k_at + (size_t)off * size;
			if (left >= TILE) {
				k[ng++] = at;
				t += TILE;
				continue;
			}
			if (ng)
				break; // whole groups first, with their own stride
			for (int d = 0; d < op->dim; d++)
				for (int i = 0; i < left; i++)
					s->tile[d][i] = kv_at(elem, at + d * stride, i);
			k[ng++] = (const uint8_t *)s->tile;
			stride = TILE * sizeof(float);
			elem = ELEM_F32;
			t += left;
			break;
		}
		for (int i = i0; i < i1; i += SCORE_NQ)
			score_groups(elem, min_int(SCORE_NQ, i1 - i), ng, op->dim, p->q + i, k, stride, s->scores[i] + first);
	}
}

// Bounds n scores by cap. tanh y is twice the logistic function of 2y, less one.
FN void cap_scores(float *w, int n, float cap) {
	const v16 twice = v16_set1(2 / cap), limit = v16_set1(cap);
	for (int t = 0; t < n; t += TILE) {
		v16 s = v16_sigmoid(v16_mul(v16_load(w + t), twice));
		v16_store(w + t, v16_mul(limit, v16_sub(v16_add(s, s), v16_set1(1.0f))));
	}
}

// Turns one query's scores of keys [lo, keys) into weights and stores their sum in *sum. A
// key's lane is its place in the segment, wherever the window begins.
FN float softmax(float *w, int lo, int keys, float scale, float cap, float *sum) {
	int begin = lo / TILE * TILE, end = (keys + TILE - 1) / TILE * TILE;
	const v16 factor = v16_set1(scale);
	v16 top = v16_set1(-INFINITY);
	for (int t = begin; t < end; t += TILE)
		v16_store(w + t, v16_mul(v16_load(w + t), factor));
	if (cap > 0)
		cap_scores(w + begin, end - begin, cap);
	for (int t = begin; t < lo; t++)
		w[t] = -INFINITY;
	for (int t = keys; t < end; t++)
		w[t] = -INFINITY;
	for (int t = begin; t < end; t += TILE)
		top = v16_max(top, v16_load(w + t));
	float most = v16_hmax(top);
	const v16 shift = v16_set1(most);
	v16 total = v16_zero();
	for (int t = begin; t < end; t += TILE) {
		v16 e = v16_exp(v16_sub(v16_load(w + t), shift));
		total = v16_add(total, e);
		v16_store(w + t, e);
	}
	*sum = v16_sum(total);
	return most;
}

// out += weights [t0, t1) times V for nq queries and nv registers of
// dimensions from d.
FN void mix_block(const int elem, const int nq, const int nv, int t0, int t1, const uint8_t *const *v, int d,
                  const float *w, float *out) {
	const size_t ldw = SEGMENT + TILE, ldo = MAX_HEAD_DIM;
	const size_t at = (size_t)d * kv_size(elem), step = VL * kv_size(elem);
	V acc[MIX_NQ][MIX_NV];
	UNROLL for (int i = 0; i < nq; i++)
		UNROLL for (int j = 0; j < nv; j++)
			acc[i][j] = vload(out + i * ldo + d + j * VL);
	for (int t = t0; t < t1; t++) {
		V vv[MIX_NV];
		UNROLL for (int j = 0; j < nv; j++)
			vv[j] = load_kv(elem, v[t] + at + j * step);
		UNROLL for (int i = 0; i < nq; i++) {
			V wv = vset1(w[i * ldw + t]);
			UNROLL for (int j = 0; j < nv; j++)
				acc[i][j] = vfma(vv[j], wv, acc[i][j]);
		}
	}
	UNROLL for (int i = 0; i < nq; i++)
		UNROLL for (int j = 0; j < nv; j++)
			vstore(out + i * ldo + d + j * VL, acc[i][j]);
}

// out += weights [t0, t1) times V for nq queries, all dimensions.
FN void mix(const int elem, const int nq, int dim, int t0, int t1, const uint8_t *const *v, const float *w, float *out) {
	int d = 0;
	for (; d + MIX_NV * VL <= dim; d += MIX_NV * VL)
		mix_block(elem, nq, MIX_NV, t0, t1, v, d, w, out);
	for (; d + VL <= dim; d += VL)
		mix_block(elem, nq, 1, t0, t1, v, d, w, out);
	if (d == dim)
		return;
	for (int i = 0; i < nq; i++) {
		float row[TILE] = {0};
		float *o = out + i * MAX_HEAD_DIM + d;
		V acc = vload(o);
		for (int t = t0; t < t1; t++) {
			for (int j = 0; j < dim - d; j++)
				row[j] = kv_at(elem, v[t], d + j);
			acc = vfma(vload(row), vset1(w[i * (SEGMENT + TILE) + t]), acc);
		}
		vstore(o, acc);
	}
}

// Number of columns of a head's values.
FN int value_dim(const tandem_op *op) { return op->latent ? op->latent : op->dim; }

// mix with constants at each call, for one or MIX_NQ queries from i.
static TARGET void mix_keys(const tandem_op *op, const tandem_step *st, int i, int nq, int t0, int t1, tandem_scratch *s) {
	if (t0 >= t1)
		return;
	const int elem = st->kv_elem;
	if (nq == 1 && elem == ELEM_FP8)
		mix(ELEM_FP8, 1, value_dim(op), t0, t1, s->v, s->scores[i], s->part[i]);
	else if (nq == 1 && elem == ELEM_BF16)
		mix(ELEM_BF16, 1, value_dim(op), t0, t1, s->v, s->scores[i], s->part[i]);
	else if (nq == 1)
		mix(ELEM_F32, 1, value_dim(op), t0, t1, s->v, s->scores[i], s->part[i]);
	else if (elem == ELEM_FP8)
		mix(ELEM_FP8, MIX_NQ, value_dim(op), t0, t1, s->v, s->scores[i], s->part[i]);
	else if (elem == ELEM_BF16)
		mix(ELEM_BF16, MIX_NQ, value_dim(op), t0, t1, s->v, s->scores[i], s->part[i]);
	else
		mix(ELEM_F32, MIX_NQ, value_dim(op), t0, t1, s->v, s->scores[i], s->part[i]);
}

// Outputs of queries [i0, i1) over the segment, each over its own keys only and in their
// order.
static TARGET void mix_segment(const tandem_op *op, const tandem_step *st, const pass *p, int i0, int i1, int from,
                               int keys, tandem_scratch *s) {
	int bt = op->block_tokens, dim = op->dim, elem = st->kv_elem;
	int lo[QUERIES], hi[QUERIES];
	if (i0 >= i1)
		return;
	for (int i = i0; i < i1; i++) {
		lo[i] = p->first[i] > from ? p->first[i] - from : 0;
		hi[i] = min_int(keys, p->keys[i] - from);
		memset(s->part[i], 0, (value_dim(op) + TILE - 1) / TILE * TILE * sizeof(float));
	}
	for (int t = lo[i0]; t < keys; t++)
		s->v[t] = op->kv + (size_t)p->table[(from + t) / bt] * st->page_bytes + p->v_at +
		          (size_t)((from + t) % bt) * dim * kv_size(elem);
	for (int i = i0; i < i1;) {
		int nq = i1 - i >= MIX_NQ ? MIX_NQ : 1, last = i + nq - 1;
		if (nq == 1 || lo[last] >= hi[i]) { // no key that all of them read
			for (; i <= last; i++)
				mix_keys(op, st, i, 1, lo[i], hi[i], s);
			continue;
		}
			for (int j = i; j < last; j++) // earlier rows read a few keys before
			mix_keys(op, st, j, 1, lo[j], lo[last], s);
		mix_keys(op, st, i, nq, lo[last], hi[i], s);
			for (int j = i + 1; j <= last; j++) // later rows read a few keys more
			mix_keys(op, st, j, 1, hi[i], hi[j], s);
		i += nq;
	}
}

// Merges a segment into the ones before it.
FN void merge(pass *p, int i, float most, float sum, int first, int dim, tandem_scratch *s) {
	float *out = s->out[i], *part = s->part[i];
	if (first) {
		memcpy(out, part, dim * sizeof(float));
		p->most[i] = most, p->sum[i] = sum;
		return;
	}
	float top = p->most[i] > most ? p->most[i] : most;
	float down[TILE] = {p->most[i] - top, most - top};
	v16_store(down, v16_exp(v16_load(down)));
	const v16 a = v16_set1(down[0]), b = v16_set1(down[1]);
	for (int d = 0; d < dim; d += TILE)
		v16_store(out + d, v16_fma(v16_load(part + d), b, v16_mul(v16_load(out + d), a)));
	p->sum[i] = p->sum[i] * down[0] + sum * down[1];
	p->most[i] = top;
}

static TARGET void attend(const tandem_op *op, const tandem_step *st, pass *p, tandem_scratch *s) {
	int dim = value_dim(op), longest = p->keys[p->n - 1];
	int segment = op->block_tokens < SEGMENT ? SEGMENT / op->block_tokens * op->block_tokens : op->block_tokens;
	for (int from = p->first[0] / segment * segment, i0 = 0, i1 = 0; from < longest; from += segment) {
		int keys = min_int(segment, longest - from);
		while (p->keys[i0] <= from)
			i0++; // these queries end before the segment
		while (i1 < p->n && p->first[i1] < from + keys)
			i1++; // the other queries' windows begin after the segment
		scores(op, st, p, i0, i1, from, keys, s);
		float most[QUERIES], sum[QUERIES];
		for (int i = i0; i < i1; i++) {
			int lo = p->first[i] > from ? p->first[i] - from : 0;
			most[i] = softmax(s->scores[i], lo, min_int(keys, p->keys[i] - from), op->scale * p->k_factor, op->cap, &sum[i]);
		}
		mix_segment(op, st, p, i0, i1, from, keys, s);
		for (int i = i0; i < i1; i++)
			merge(p, i, most[i], sum[i], p->first[i] >= from, dim, s);
	}
	for (int i = 0; i < p->n; i++) {
		float whole = 1.0f / p->sum[i];
		if (op->sinks) {
			float top = p->most[i] > p->sink[i] ? p->most[i] : p->sink[i];
			float down[TILE] = {p->most[i] - top, p->sink[i] - top};
			v16_store(down, v16_exp(v16_load(down)));
			whole = down[0] / (p->sum[i] * down[0] + down[1]);
		}
		const v16 inv = v16_set1(whole * p->v_factor);
		for (int d = 0; d < dim; d += TILE)
			v16_storen(p->dst[i] + d, v16_mul(v16_load(s->out[i] + d), inv), min_int(TILE, dim - d));
	}
}

// One KV head for a few rows: collects queries that may share passes.
static TARGET void attention(const tandem_op *op, const tandem_step *st, const tandem_split *sp, int item,
                             tandem_scratch *s) {
	int head = item % op->kv_heads, r0 = item / op->kv_heads * sp->chunk, r1 = min_int(r0 + sp->chunk, sp->rows);
	int group = op->heads / op->kv_heads, size = kv_size(st->kv_elem);
	pass p = {
	    .k_at = (size_t)head * op->dim * op->block_tokens * size,
	    .v_at = op->v_at + (size_t)head * op->dim * op->block_tokens * size,
	    .k_factor = op->k_scales ? op->k_scales[head] : 1,
	    .v_factor = op->v_scales ? op->v_scales[head] : 1,
	};
	for (int r = r0, span = -1; r < r1; r++) {
		for (int h = 0; h < group; h++) {
			if (p.n && (p.n == QUERIES || st->row_span[r] != span)) {
				attend(op, st, &p, s);
				p.n = 0;
			}
			span = st->row_span[r];
			p.table = op->tables + (size_t)span * st->table_stride;
			p.q[p.n] = op->a + (size_t)r * op->k + (size_t)(head * group + h) * op->dim;
			p.dst[p.n] = op->dst + (size_t)r * op->n + (size_t)(head * group + h) * value_dim(op);
			p.keys[p.n] = st->positions[r] + 1;
			p.sink[p.n] = op->sinks ? op->sinks[head * group + h] : 0;
			p.first[p.n] = op->window && op->window < p.keys[p.n] ? p.keys[p.n] - op->window : 0;
			p.n++;
		}
	}
	if (p.n)
		attend(op, st, &p, s);
}
