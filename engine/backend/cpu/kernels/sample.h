// Loops over rows of logits and weights: engine/sample's Kernels, whose Portable they
// follow bit for bit. Every product and sum rounds by itself, and each of the 16
// lanes of a block has a sum of its own.

// The weight of each lane: 2^((logit - max) * scale), or 0. Filters are those of by
// beside that.
FN v16 weight(v16 logit, const tandem_weighing *by, int filters) {
	v16 x = v16_mul(v16_sub(logit, v16_set1(by->max)), v16_set1(by->scale));
	v16 n, f = v16_sub(x, v16_round(x, &n));
	v16 p = v16_add(v16_mul(v16_set1(0.0001545316294214853f), f), v16_set1(0.001339086336464892f));
	p = v16_add(v16_mul(p, f), v16_set1(0.009618082557285924f));
	p = v16_add(v16_mul(p, f), v16_set1(0.05550357114219124f));
	p = v16_add(v16_mul(p, f), v16_set1(0.24022650760568087f));
	p = v16_add(v16_mul(p, f), v16_set1(0.6931471880262288f));
	p = v16_add(v16_mul(p, f), v16_set1(1.0f));
	p = v16_raise(p, n);
	p = v16_where_least(p, x, v16_set1(-90.0f));
	if (!filters)
		return p;
	p = v16_where_least(p, logit, v16_set1(by->lowest));
	return v16_where_least(p, p, v16_set1(by->min_p));
}

// Of the lanes of a block, as Go joins them.
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
			most = v16_max(v16_load(x + i), most); // of a NaN, most
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
		for (; i + 16 <= end; i += 16) {
			v16 w = weight(v16_load(x + i), by, filters);
			if (weights)
				v16_store(weights + i, w);
			sum = w16_add(sum, w);
		}
		if (i < end) {
			int rest = (int)(end - i);
			float tail[16], keep[16] = {0};
			v16_store(tail, weight(v16_loadn(x + i, rest), by, filters));
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

static TARGET int64_t between(float *dst, const float *weights, int64_t n, float least, float limit, double *above) {
	const v16 low = v16_set1(least), high = v16_set1(limit);
	w16 sum = w16_zero();
	int64_t count = 0, i = 0;
	for (; i + 16 <= n; i += 16) {
		v16 w = v16_load(weights + i);
		sum = w16_add(sum, v16_where_least(w, w, high));
		for (uint32_t in = v16_above(high, w) & ~v16_above(low, w); in; in &= in - 1)
			dst[count++] = weights[i + __builtin_ctz(in)];
	}
	*above = lanes_sum(sum);
	for (; i < n; i++) {
		if (weights[i] >= limit)
			*above += weights[i];
		else if (weights[i] >= least)
			dst[count++] = weights[i];
	}
	return count;
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

static TARGET int64_t first_equal(const float *x, int64_t n, int64_t i, float to) {
	const v16 value = v16_set1(to);
	for (; i + 16 <= n; i += 16) {
		uint32_t same = v16_equal(v16_load(x + i), value);
		if (same)
			return i + __builtin_ctz(same);
	}
	while (i < n && x[i] != to)
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
