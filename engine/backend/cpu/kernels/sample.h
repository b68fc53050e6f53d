// Loops over rows of logits and weights: engine/sample's Kernels. They return the bits of
// its Portable. Every product and sum rounds by itself, and each of the 16 lanes of a block
// has a sum of its own.

// Vectors whose weights are computed together.
enum { SAMPLE_CHAINS = KERNEL_ISA == 512 ? 8 : KERNEL_ISA ? 4 : 1 };

// The weight of each lane of n vectors: 2^((logit - max) * scale), or 0. If filters is set,
// the filters of by apply as well. Each vector is one long chain, so that all advance
// step by step together.
FN void weight(v16 *p, const v16 *logit, const int n, const tandem_weighing *by, int filters) {
	static const float coefficients[] = {0.001339086336464892f, 0.009618082557285924f, 0.05550357114219124f,
	                                     0.24022650760568087f, 0.6931471880262288f, 1.0f};
	v16 x[SAMPLE_CHAINS], to[SAMPLE_CHAINS], f[SAMPLE_CHAINS];
	UNROLL for (int i = 0; i < n; i++)
		x[i] = v16_sub(logit[i], v16_set1(by->max));
	UNROLL for (int i = 0; i < n; i++)
		x[i] = v16_mul(x[i], v16_set1(by->scale));
	UNROLL for (int i = 0; i < n; i++)
		f[i] = v16_round(x[i], &to[i]);
	UNROLL for (int i = 0; i < n; i++)
		f[i] = v16_sub(x[i], f[i]);
	UNROLL for (int i = 0; i < n; i++)
		p[i] = v16_set1(0.0001545316294214853f);
	UNROLL for (int c = 0; c < 6; c++) {
		UNROLL for (int i = 0; i < n; i++)
			p[i] = v16_mul(p[i], f[i]);
		UNROLL for (int i = 0; i < n; i++)
			p[i] = v16_add(p[i], v16_set1(coefficients[c]));
	}
	UNROLL for (int i = 0; i < n; i++)
		p[i] = v16_raise(p[i], to[i]);
	UNROLL for (int i = 0; i < n; i++)
		p[i] = v16_where_least(p[i], x[i], v16_set1(-90.0f));
	if (filters)
		UNROLL for (int i = 0; i < n; i++) {
			p[i] = v16_where_least(p[i], logit[i], v16_set1(by->lowest));
			p[i] = v16_where_least(p[i], p[i], v16_set1(by->min_p));
		}
}

// Sum of the lanes of a block, joined as in Go.
FN double lanes_sum(w16 v) {
	double t[16];
	w16_store(t, v);
	for (int half = 8; half; half /= 2)
		for (int i = 0; i < half; i++)
			t[i] += t[i + half];
	return t[0];
}

static TARGET int64_t argmax(const float *x, int64_t n) {
	float best = -INFINITY;
	int64_t block = -1, at = 0;
	for (int64_t from = 0; from < n; from += SAMPLE_BLOCK) {
		int64_t end = from + SAMPLE_BLOCK < n ? from + SAMPLE_BLOCK : n, i = from;
		v16 most = v16_set1(best);
		for (; i + 16 <= end; i += 16)
			most = v16_max(v16_load(x + i), most); // for a NaN, most
		int more = v16_above(most, v16_set1(best)) != 0;
		for (; i < end; i++)
			more |= x[i] > best;
		if (!more)
			continue;
		block = from;
		best = v16_hmax(most);
		for (i = from + (end - from) / 16 * 16; i < end; i++)
			best = x[i] > best ? x[i] : best;
	}
	if (block >= 0)
		for (at = block; x[at] != best;)
			at++;
	return at;
}

FN void weigh_all(float *weights, double *sums, const float *x, int64_t n, const tandem_weighing *by, int filters) {
	for (int64_t from = 0; from < n; from += SAMPLE_BLOCK) {
		int64_t end = from + SAMPLE_BLOCK < n ? from + SAMPLE_BLOCK : n, i = from;
		w16 sum = w16_zero();
		v16 logit[SAMPLE_CHAINS], w[SAMPLE_CHAINS];
		for (; i + 16 * SAMPLE_CHAINS <= end; i += 16 * SAMPLE_CHAINS) {
			UNROLL for (int j = 0; j < SAMPLE_CHAINS; j++)
				logit[j] = v16_load(x + i + 16 * j);
			weight(w, logit, SAMPLE_CHAINS, by, filters);
			UNROLL for (int j = 0; j < SAMPLE_CHAINS; j++) {
				if (weights)
					v16_store(weights + i + 16 * j, w[j]);
				sum = w16_add(sum, w[j]);
			}
		}
		for (int rest; i < end; i += rest) {
			float tail[16], keep[16] = {0};
			rest = end - i < 16 ? (int)(end - i) : 16;
			*logit = v16_loadn(x + i, rest);
			weight(w, logit, 1, by, filters);
			v16_store(tail, *w);
			memcpy(keep, tail, rest * sizeof *tail);
			if (weights)
				memcpy(weights + i, tail, rest * sizeof *tail);
			sum = w16_add(sum, v16_load(keep));
		}
		*sums++ = lanes_sum(sum);
	}
}

static TARGET void weigh(float *weights, double *sums, const float *x, int64_t n, const tandem_weighing *by) {
	if (by->lowest > -INFINITY || !(by->min_p <= 0))
		weigh_all(weights, sums, x, n, by, 1);
	else if (weights)
		weigh_all(weights, sums, x, n, by, 0);
	else
		weigh_all(NULL, sums, x, n, by, 0);
}

static TARGET void mass(double *sums, const float *weights, int64_t n, float least) {
	const v16 edge = v16_set1(least);
	for (int64_t from = 0; from < n; from += SAMPLE_BLOCK) {
		int64_t end = from + SAMPLE_BLOCK < n ? from + SAMPLE_BLOCK : n, i = from;
		w16 sum = w16_zero();
		for (; i + 16 <= end; i += 16) {
			v16 w = v16_load(weights + i);
			sum = w16_add(sum, v16_where_least(w, w, edge));
		}
		if (i < end) {
			float tail[16] = {0};
			for (int j = 0; j < end - i; j++)
				if (weights[i + j] >= least)
					tail[j] = weights[i + j];
			sum = w16_add(sum, v16_load(tail));
		}
		*sums++ = lanes_sum(sum);
	}
}

FN int64_t between_all(float *dst, int32_t *counts, double *above, const float *weights, int64_t n, float least, float limit) {
	const v16 low = v16_set1(least), high = v16_set1(limit);
	int64_t count = 0;
	for (int64_t from = 0, before = 0; from < n; from += SAMPLE_BLOCK, before = count) {
		int64_t end = from + SAMPLE_BLOCK < n ? from + SAMPLE_BLOCK : n, i = from;
		w16 sum = w16_zero();
		for (; i + 16 <= end; i += 16) {
			v16 w = v16_load(weights + i);
			if (above)
				sum = w16_add(sum, v16_where_least(w, w, high));
			for (uint32_t in = v16_above(high, w) & ~v16_above(low, w); in; in &= in - 1)
				dst[count++] = weights[i + __builtin_ctz(in)];
		}
		float tail[16] = {0};
		for (int j = 0; i + j < end; j++) {
			float w = weights[i + j];
			if (w >= limit)
				tail[j] = w;
			else if (w >= least)
				dst[count++] = w;
		}
		if (above)
			*above++ = lanes_sum(w16_add(sum, v16_load(tail)));
		if (counts)
			*counts++ = (int32_t)(count - before);
	}
	return count;
}

static TARGET int64_t between(float *dst, int32_t *counts, double *above, const float *weights, int64_t n, float least, float limit) {
	return above ? between_all(dst, counts, above, weights, n, least, limit) : between_all(dst, counts, NULL, weights, n, least, limit);
}

static TARGET int64_t first_above(const float *x, int64_t n, int64_t i, float than) {
	const v16 edge = v16_set1(than);
	for (; i + 16 <= n; i += 16) {
		uint32_t more = v16_above(v16_load(x + i), edge);
		if (more)
			return i + __builtin_ctz(more);
	}
	while (i < n && !(x[i] > than))
		i++;
	return i;
}

static TARGET int64_t count_above(const float *x, int64_t n, float than) {
	const v16 edge = v16_set1(than);
	int64_t count = 0, i = 0;
	for (; i + 16 <= n; i += 16)
		count += __builtin_popcount(v16_above(v16_load(x + i), edge));
	for (; i < n; i++)
		count += x[i] > than;
	return count;
}
