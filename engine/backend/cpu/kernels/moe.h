// A mixture of experts; part of body.h.
//
// Each row selects top_k experts. Its selections get slots sorted by expert, so that the
// products read each matrix once for all rows that selected it. A row's slots are summed
// in the order of its selections, best first.

// The softmax of n scores, stored twice.
static TARGET void softmax_scores(const float *z, int n, float *one, float *other) {
	float most = z[0];
	for (int e = 1; e < n; e++)
		most = z[e] > most ? z[e] : most;
	v16 total = v16_zero();
	for (int e = 0; e < n; e += TILE) {
		int lanes = min_int(TILE, n - e);
		v16_store(one + e, v16_exp(v16_sub(v16_loadn(z + e, lanes), v16_set1(most))));
		if (lanes < TILE)
			memset(one + n, 0, (TILE - lanes) * sizeof *one);
		total = v16_add(total, v16_load(one + e));
	}
	float sum = v16_sum(total);
	for (int e = 0; e < n; e++)
		other[e] = one[e] = one[e] / sum;
}

// Selects a row's experts, only from the best groups of neighbours: by the logistic function of
// their scores plus a bias, which is not part of the weights, or by softmax without a bias.
static TARGET void route_groups(const tandem_op *op, int row) {
	int n = op->n_experts, size = n / op->groups;
	const float *z = op->a + (size_t)row * n;
	int32_t *chosen = op->chosen + (size_t)row * op->top_k;
	float *weights = op->weights + (size_t)row * op->top_k;
	float p[MAX_EXPERTS + TILE], choice[MAX_EXPERTS + TILE], together[MAX_EXPERTS], sum = 0;
	uint8_t kept[MAX_EXPERTS] = {0}, taken[MAX_EXPERTS] = {0};
	if (!op->bias)
		softmax_scores(z, n, choice, p);
	for (int e = 0; op->bias && e < n; e += TILE) {
		int lanes = min_int(TILE, n - e);
		v16 s = v16_sigmoid(v16_loadn(z + e, lanes));
		v16_store(p + e, s);
		v16_store(choice + e, v16_add(s, v16_loadn(op->bias + e, lanes)));
	}
	for (int g = 0; g < op->groups; g++) {
		float first = -INFINITY, second = -INFINITY;
		for (int e = g * size; e < (g + 1) * size; e++) {
			if (choice[e] > first) {
				second = first;
				first = choice[e];
			} else if (choice[e] > second) {
				second = choice[e];
			}
		}
		together[g] = size > 1 && op->bias ? first + second : first;
	}
	for (int j = 0; j < op->keep; j++) {
		int best = -1;
		for (int g = 0; g < op->groups; g++)
			if (!kept[g] && (best < 0 || together[g] > together[best]))
				best = g;
		kept[best] = 1;
	}
	for (int j = 0; j < op->top_k; j++) {
		int best = -1;
		for (int e = 0; e < n; e++)
			if (kept[e / size] && !taken[e] && (best < 0 || choice[e] > choice[best]))
				best = e;
		taken[best] = 1;
		chosen[j] = best;
		sum += p[best];
	}
	for (int j = 0; j < op->top_k; j++)
		weights[j] = (op->normalize ? p[chosen[j]] / (sum + 1e-20f) : p[chosen[j]]) * op->scale;
}

// Selects a row's experts and computes their weights. Each selection takes an expert that
// none before it took, whatever the scores are, so that a NaN score selects a valid one.
static TARGET void route(const tandem_op *op, int row) {
	if (op->groups) {
		route_groups(op, row);
		return;
	}
	int n = op->n_experts;
	const float *z = op->a + (size_t)row * n;
	int32_t *chosen = op->chosen + (size_t)row * op->top_k;
	float *weights = op->weights + (size_t)row * op->top_k;
	uint8_t taken[MAX_EXPERTS] = {0};
	for (int j = 0; j < op->top_k; j++) {
		int best = -1;
		for (int e = 0; e < n; e++)
			if (!taken[e] && (best < 0 || z[e] > z[best]))
				best = e;
		taken[best] = 1;
		chosen[j] = best;
	}
	float p[MAX_EXPERTS + TILE], sum = 0;
	const v16 shift = v16_set1(z[chosen[0]]);
	v16 total = v16_zero();
	for (int e = 0; e < n; e += TILE) {
		int lanes = min_int(TILE, n - e);
		v16 v = v16_exp(v16_sub(v16_loadn(z + e, lanes), shift));
		v16_store(p + e, v);
		if (lanes < TILE) {
			memset(p + n, 0, (TILE - lanes) * sizeof *p);
			v = v16_load(p + e);
		}
		total = v16_add(total, v);
	}
	if (op->normalize)
		for (int j = 0; j < op->top_k; j++)
			sum += p[chosen[j]];
	else
		sum = v16_sum(total);
	for (int j = 0; j < op->top_k; j++)
		weights[j] = p[chosen[j]] / sum;
	if (op->scales)
		for (int j = 0; j < op->top_k; j++)
			weights[j] *= op->scales[chosen[j]];
}

// Copies the first dim columns of each of a row's heads to the head's slots.
static TARGET void split(const tandem_op *op, const tandem_split *sp, int row) {
	int width = op->k / op->heads;
	for (int h = 0; h < op->heads; h++)
		memcpy(op->dst + ((size_t)h * sp->rows + row) * op->dim, op->a + (size_t)row * op->k + (size_t)h * width,
		       op->dim * sizeof(float));
}

// Copies a row's heads from their slots, dim columns each, and the other columns from a.
static TARGET void join(const tandem_op *op, const tandem_split *sp, int row) {
	int width = op->n / op->heads, rest = width - op->dim, from = op->k / op->heads;
	for (int h = 0; h < op->heads; h++) {
		float *dst = op->dst + (size_t)row * op->n + (size_t)h * width;
		memcpy(dst, op->b + ((size_t)h * sp->rows + row) * op->dim, op->dim * sizeof(float));
		memcpy(dst + op->dim, op->a + (size_t)row * op->k + (size_t)(h + 1) * from - rest, rest * sizeof(float));
	}
}

// Assigns slots to all selections and lists the spans of slots for OP_EXPERTS.
static TARGET void group(const tandem_op *op, const tandem_split *sp) {
	int32_t *count = op->count, *list = op->list + 1;
	int choices = sp->rows * op->top_k, spans = 0;
	memset(count, 0, (op->n_experts + 1) * sizeof *count);
	for (int i = 0; i < choices; i++)
		count[op->chosen[i] + 1]++;
	for (int e = 0; e < op->n_experts; e++) {
		int n = count[e + 1];
		count[e + 1] += count[e]; // from here the expert's first slot is count[e]
		for (int at = 0; at < n; at += LINEAR_ROWS, spans++) {
			*list++ = e;
			*list++ = count[e] + at;
			*list++ = min_int(LINEAR_ROWS, n - at);
		}
	}
	op->list[0] = spans;
	for (int i = 0; i < choices; i++)
		op->slot[i] = count[op->chosen[i]]++;
}

static TARGET void scatter(const tandem_op *op, int row) {
	const float *x = op->a + (size_t)row * op->k;
	for (int j = 0; j < op->top_k; j++)
		memcpy(op->dst + (size_t)op->slot[(size_t)row * op->top_k + j] * op->k, x, op->k * sizeof *x);
}

static TARGET void experts(const tandem_op *op, const tandem_step *st, const tandem_split *sp, int item,
                           tandem_scratch *s) {
	const int32_t *span = op->list + 1 + item % sp->chunks * 3;
	int t0 = item / sp->chunks * sp->tiles, t1 = min_int(t0 + sp->tiles, (op->n + TILE - 1) / TILE);
	tandem_op one = *op;
	one.w = op->experts[span[0]].w;
	one.bf16 = (int32_t)op->experts[span[0]].bf16;
	one.bias = op->experts[span[0]].bias;
	linear_item(&one, st, t0, t1, span[1], span[1] + span[2], span[2], s);
}

static TARGET void combine(const tandem_op *op, int row) {
	const int32_t *slot = op->slot + (size_t)row * op->top_k;
	const float *weights = op->weights + (size_t)row * op->top_k;
	float *dst = op->dst + (size_t)row * op->n;
	for (int i = 0; i < op->n; i += TILE) {
		int lanes = min_int(TILE, op->n - i);
		v16 sum = v16_zero();
		for (int j = 0; j < op->top_k; j++)
			sum = v16_fma(v16_set1(weights[j]), v16_loadn(op->a + (size_t)slot[j] * op->n + i, lanes), sum);
		v16_storen(dst + i, sum, lanes);
	}
}
