// The gated delta rule, backend.DeltaSpec; part of body.h.
//
// An item is one key head of one sequence. It computes the tokens of the step one after the
// other, so that no bit depends on the chunks. A lane is one column of the values; its sums over
// the rows of the matrix are one chain from the first row to the last.

// The natural logarithm of x >= 1, from basic operations alone, so that all machines agree.
FN double log_of(double x) {
	uint64_t bits;
	memcpy(&bits, &x, 8);
	int exponent = (int)(bits >> 52) - 1023;
	bits = (bits & 0xfffffffffffff) | 0x3ff0000000000000;
	double m;
	memcpy(&m, &bits, 8);
	if (m > 1.4142135623730951) {
		m *= 0.5;
		exponent++;
	}
	double s = (m - 1) / (m + 1), t = s * s, sum = 1.0 / 17;
	for (int i = 15; i > 0; i -= 2)
		sum = sum * t + 1.0 / i;
	return exponent * 0.6931471805599453 + 2 * s * sum;
}

FN float first_lane(v16 v) {
	float t[16];
	v16_store(t, v);
	return t[0];
}

// The factor of a head's matrix.
FN float decay_of(float x, float log_rate) {
	double softplus = x;
	if (x <= 20) {
		double e = first_lane(v16_exp(v16_set1(x)));
		softplus = e < 1e-6 ? e - e * e / 2 : log_of(1 + e);
	}
	float rate = first_lane(v16_exp(v16_set1(log_rate)));
	return first_lane(v16_exp(v16_set1(-rate * (float)softplus)));
}

// One part of the convolution: columns [from, from + n) of x, whose last rows begin at column at
// of history.
FN void convolve(float *dst, const float *x, const float *w, float *history, int wide, int pos, int n) {
	float *oldest = history + (size_t)(pos % 3) * wide, *older = history + (size_t)((pos + 1) % 3) * wide;
	const float *old = history + (size_t)((pos + 2) % 3) * wide;
	for (int c = 0; c < n; c++, w += 4) {
		float y = w[0] * oldest[c];
		y += w[1] * older[c];
		y += w[2] * old[c];
		y += w[3] * x[c];
		oldest[c] = x[c];
		dst[c] = y;
	}
	for (int c = 0; c < n; c += 16) {
		int lanes = min_int(16, n - c);
		v16_storen(dst + c, act(ACT_SILU, v16_loadn(dst + c, lanes), v16_set1(1.0f)), lanes);
	}
}

FN void unit_length(float *x, int n, float by) {
	v16 sum = v16_zero();
	for (int i = 0; i < n; i += 16) {
		v16 v = v16_loadn(x + i, min_int(16, n - i));
		sum = v16_fma(v, v, sum);
	}
	v16 f = v16_set1(by / sqrtf(v16_sum(sum) + 1e-6f));
	for (int i = 0; i < n; i += 16) {
		int lanes = min_int(16, n - i);
		v16_storen(x + i, v16_mul(v16_loadn(x + i, lanes), f), lanes);
	}
}

// Up to 4 vectors of columns of a matrix of keys rows with stride columns; the last vector has
// lanes of them.
FN void delta_columns(float *m, const float *q, const float *k, const float *v, float *dst, int keys, int stride, const int vectors, int lanes, float decay, float beta) {
	v16 sum[4], out[4];
	const v16 d = v16_set1(decay), b = v16_set1(beta);
	for (int j = 0; j < vectors; j++)
		sum[j] = out[j] = v16_zero();
	for (int i = 0; i < keys; i++) {
		const v16 ki = v16_set1(k[i]);
		for (int j = 0; j < vectors; j++)
			sum[j] = v16_fma(v16_loadn(m + (size_t)i * stride + 16 * j, j + 1 < vectors ? 16 : lanes), ki, sum[j]);
	}
	for (int j = 0; j < vectors; j++) // what is to be written: the part of v that the matrix does not return for k
		sum[j] = v16_mul(v16_sub(v16_loadn(v + 16 * j, j + 1 < vectors ? 16 : lanes), v16_mul(d, sum[j])), b);
	for (int i = 0; i < keys; i++) {
		const v16 ki = v16_set1(k[i]), qi = v16_set1(q[i]);
		for (int j = 0; j < vectors; j++) {
			int n = j + 1 < vectors ? 16 : lanes;
			float *at = m + (size_t)i * stride + 16 * j;
			v16 s = v16_fma(ki, sum[j], v16_mul(v16_loadn(at, n), d));
			v16_storen(at, s, n);
			out[j] = v16_fma(s, qi, out[j]);
		}
	}
	for (int j = 0; j < vectors; j++)
		v16_storen(dst + 16 * j, out[j], j + 1 < vectors ? 16 : lanes);
}

// The matrix of one value head for one token.
FN void delta_matrix(float *m, const float *q, const float *k, const float *v, float *dst, int keys, int n, float decay, float beta) {
	int c = 0;
	for (; c + 64 <= n; c += 64)
		delta_columns(m + c, q, k, v + c, dst + c, keys, n, 4, 16, decay, beta);
	for (; c < n; c += 16)
		delta_columns(m + c, q, k, v + c, dst + c, keys, n, 1, min_int(16, n - c), decay, beta);
}

static TARGET void delta(const tandem_op *op, const tandem_step *st, int item, tandem_scratch *scratch) {
	int keys = op->dim, values = op->value_dim, group = op->kv_heads / op->heads, in_part = op->heads / op->parts;
	int span = item / op->heads, head = item % op->heads, wide = 2 * keys + group * values;
	size_t unit = 3 * (size_t)wide + (size_t)group * keys * values;
	const tandem_state *part = op->states + head / in_part;
	const int32_t *table = part->tables + (size_t)span * st->table_stride;
	size_t offset = (size_t)(head % in_part) * unit;
	float *mixed = &scratch->part[0][0];
	const int first_key = op->heads * keys + head * keys, first_value = 2 * op->heads * keys + head * group * values;
	const float *w = op->w;
	for (int row = st->span_rows[span]; row < st->span_rows[span + 1]; row++) {
		int pos = st->positions[row], place = pos / op->block_tokens;
		float *state = (float *)(part->kv + (size_t)table[place] * st->page_bytes) + offset;
		if (pos == 0)
			memset(state, 0, unit * sizeof *state);
		else if (pos % op->block_tokens == 0 && table[place - 1] != table[place])
			memcpy(state, (float *)(part->kv + (size_t)table[place - 1] * st->page_bytes) + offset, unit * sizeof *state);
		const float *x = op->a + (size_t)row * op->k;
		convolve(mixed, x + head * keys, w + 4 * (size_t)(head * keys), state, wide, pos, keys);
		convolve(mixed + keys, x + first_key, w + 4 * (size_t)first_key, state + keys, wide, pos, keys);
		convolve(mixed + 2 * keys, x + first_value, w + 4 * (size_t)first_value, state + 2 * keys, wide, pos, group * values);
		unit_length(mixed, keys, 1.0f / sqrtf((float)keys));
		unit_length(mixed + keys, keys, 1.0f);
		for (int j = 0; j < group; j++) {
			int h = head * group + j;
			float beta = first_lane(v16_sigmoid(v16_set1(op->b[(size_t)row * op->kv_heads + h])));
			float decay = decay_of(op->alpha[(size_t)row * op->kv_heads + h] + op->bias[h], op->scales[h]);
			delta_matrix(state + 3 * (size_t)wide + (size_t)j * keys * values, mixed, mixed + keys, mixed + 2 * keys + j * values,
				op->dst + (size_t)row * op->n + (size_t)h * values, keys, values, decay, beta);
		}
	}
}

// dst = the logistic function of b times a; each column of b is the factor of n / heads columns.
static TARGET void gate(const tandem_op *op, int row) {
	int wide = op->n / op->heads;
	const float *g = op->b + (size_t)row * op->heads;
	size_t at = (size_t)row * op->n;
	if (wide == 1) {
		for (int i = 0; i < op->n; i += 16) {
			int n = min_int(16, op->n - i);
			v16_storen(op->dst + at + i, v16_mul(v16_sigmoid(v16_loadn(g + i, n)), v16_loadn(op->a + at + i, n)), n);
		}
		return;
	}
	for (int h = 0; h < op->heads; h++, at += wide) {
		const v16 f = v16_sigmoid(v16_set1(g[h]));
		for (int i = 0; i < wide; i += 16) {
			int n = min_int(16, wide - i);
			v16_storen(op->dst + at + i, v16_mul(f, v16_loadn(op->a + at + i, n)), n);
		}
	}
}
