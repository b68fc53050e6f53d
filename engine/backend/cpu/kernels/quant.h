// Products with weights of 8 and 4 bits; part of body.h.
//
// Weights and activations are integers, with a scale for each group of 32 of the
// reduction. A group's products are summed exactly, so that only the chain over the groups
// rounds: sum = fma(products, weight's scale · activation's scale, sum). Every variant gives
// the same bits, whatever its instructions.
//
// A packed tile is [k/64] pairs of groups; a short k is padded with zeros. A group is 8
// lines of 64 bytes, each 4 elements of the reduction for 16 outputs. A pair ends with a
// line of both scales, bf16, of each output. Int8 weights are stored with an offset of 128
// and int4 weights with one of 8. An int4 line holds line i of the group in the low and
// line i+4 in the high half of its bytes. The start value of a sum subtracts the offset.
//
// A quantized row of activations is int8 [k], padded likewise. For each group follow the
// fp32 scale, as int32 -8 and -128 times the sum of its numbers, the fp32 negative sum of what
// they mean and, as int32, -32 times the sums of its halves.

typedef struct {
	size_t scale, less8, less128, less, less32, size; // bytes from the start of the row
} quant_row;

FN quant_row quant_layout(int k) {
	size_t pad = (size_t)(k + QUANT_PAIR - 1) / QUANT_PAIR * QUANT_PAIR, each = pad / QUANT_GROUP * 4;
	return (quant_row){pad, pad + each, pad + 2 * each, pad + 3 * each, pad + 4 * each, (pad + 6 * each + 63) / 64 * 64};
}

static TARGET void quantize(const tandem_op *op, int row) {
	const v16 magic = v16_set1(12582912.0f); // 1.5·2^23: a sum's low bits are the rounded number
	const quant_row at = quant_layout(op->k);
	const float *x = op->a + (size_t)row * op->k;
	uint8_t *q = op->q + (size_t)row * at.size;
	const int32_t *order = op->order;
	if (op->experts) // of the row's expert: count[e] is the slot behind its last
		for (int low = 0, high = op->n_experts - 1;;) {
			int e = (low + high) / 2;
			if (low == high) {
				order = op->experts[e].order;
				break;
			}
			if (op->count[e] > row)
				high = e;
			else
				low = e + 1;
		}
	for (int g = 0, k = 0; k < (int)at.scale; g++, k += QUANT_GROUP) {
		int n = min_int(QUANT_GROUP, op->k - k);
		v16 a = v16_zero(), b = a;
		const float *from = x + k;
		float gathered[QUANT_GROUP];
		if (order) {
			for (int i = 0; i < n; i++)
				gathered[i] = x[order[k + i]];
			from = gathered;
		}
		if (n >= 16)
			a = v16_load(from);
		else if (n > 0)
			a = v16_loadn(from, n);
		if (n >= 32)
			b = v16_load(from + 16);
		else if (n > 16)
			b = v16_loadn(from + 16, n - 16);
		v16 size = v16_max(v16_max(a, v16_sub(v16_zero(), a)), v16_max(b, v16_sub(v16_zero(), b)));
		float most = v16_hmax(size), scale = 0, up = 0;
		if (most > 1e-30f)
			scale = most / 127.0f, up = 127.0f / most;
		v16_low_bytes(q + k, v16_add(v16_mul(a, v16_set1(up)), magic));
		v16_low_bytes(q + k + 16, v16_add(v16_mul(b, v16_set1(up)), magic));
		int32_t first = 0, second = 0;
		for (int i = 0; i < QUANT_GROUP / 2; i++) {
			first += (int8_t)q[k + i];
			second += (int8_t)q[k + QUANT_GROUP / 2 + i];
		}
		memcpy(q + at.scale + g * 4, &scale, 4);
		((int32_t *)(q + at.less8))[g] = -8 * (first + second);
		((int32_t *)(q + at.less128))[g] = -128 * (first + second);
		((float *)(q + at.less))[g] = -scale * (float)(first + second);
		((int32_t *)(q + at.less32))[2 * g] = -32 * first;
		((int32_t *)(q + at.less32))[2 * g + 1] = -32 * second;
	}
}

FN float bf16_at(const void *p) {
	uint16_t h;
	memcpy(&h, p, 2);
	uint32_t u = (uint32_t)h << 16;
	float f;
	memcpy(&f, &u, 4);
	return f;
}

// A scale as bf16, rounded away from zero if up is set, so that no weight is cut off. It is
// 0 if it is too small to be of use.
FN float bf16_scale(float f, int up) {
	uint32_t u;
	memcpy(&u, &f, 4);
	u += up ? 0xffff : 0x7fff + (u >> 16 & 1);
	u &= 0xffff0000;
	memcpy(&f, &u, 4);
	return f > 1e-35f || f < -1e-35f ? f : 0;
}

// Converts up to 32 weights to 8 or 4 bits, offset included, and returns the scale.
static TARGET float quantize_weights(const float *w, int n, int four, uint8_t *q) {
	float most = 0, signed_most = 0;
	for (int i = 0; i < n; i++) {
		float size = w[i] < 0 ? -w[i] : w[i];
		if (size > most)
			most = size, signed_most = w[i];
	}
	const float least = four ? -8 : -127, greatest = four ? 7 : 127, magic = 12582912.0f;
	float scale = four ? bf16_scale(signed_most / -8.0f, 0) : bf16_scale(most / 127.0f, 1);
	float up = scale != 0 ? 1.0f / scale : 0;
	for (int i = 0; i < n; i++) {
		float v = w[i] * up;
		v = v > least ? v : least;
		v = v < greatest ? v : greatest;
		v = v + magic;
		uint32_t u;
		memcpy(&u, &v, 4);
		q[i] = (uint8_t)(u + (four ? 8 : 128));
	}
	return scale;
}

// Packs one tile from rows of fp32 or bf16.
static TARGET void pack_quant(const tandem_op *op, int tile) {
	const int four = op->bf16 == ELEM_INT4, size = op->from == ELEM_BF16 ? 2 : 4;
	const size_t pair = four ? INT4_PAIR : INT8_PAIR;
	int pairs = (op->k + QUANT_PAIR - 1) / QUANT_PAIR, lanes = min_int(TILE, op->n - tile * TILE);
	uint8_t *dst = (uint8_t *)op->w + (size_t)tile * pairs * pair;
	for (int p = 0; p < pairs; p++, dst += pair)
		for (int lane = 0; lane < TILE; lane++)
			for (int h = 0; h < 2; h++) {
				int k = p * QUANT_PAIR + h * QUANT_GROUP, n = min_int(QUANT_GROUP, op->k - k);
				float w[QUANT_GROUP], scale = 0;
				uint8_t q[QUANT_GROUP];
				memset(q, four ? 8 : 128, sizeof q);
				if (lane < lanes && n > 0) {
					const char *src = (const char *)op->a + ((size_t)(tile * TILE + lane) * op->k + k) * size;
					for (int i = 0; i < n; i++)
						if (size == 2)
							w[i] = bf16_at(src + i * 2);
						else
							memcpy(w + i, src + i * 4, 4);
					scale = quantize_weights(w, n, four, q);
				}
				uint8_t *to = dst + h * (four ? 256 : 512) + lane * 4;
				for (int i = 0; i < QUANT_GROUP / 4; i++)
					for (int j = 0; j < 4; j++)
						if (!four)
							to[i * 64 + j] = q[i * 4 + j];
						else if (i < 4)
							to[i * 64 + j] = (uint8_t)(q[i * 4 + j] | q[(i + 4) * 4 + j] << 4);
				uint32_t u;
				memcpy(&u, &scale, 4);
				uint16_t half = (uint16_t)(u >> 16);
				memcpy(dst + pair - 64 + lane * 4 + h * 2, &half, 2);
			}
}

// Row `lane` of a packed tile, [k].
static TARGET void unpack_quant(const tandem_op *op, const uint8_t *tile, int lane, float *dst) {
	const int four = op->bf16 == ELEM_INT4;
	const size_t pair = four ? INT4_PAIR : INT8_PAIR;
	for (int k = 0; k < op->k; k++) {
		const uint8_t *at = tile + (size_t)(k / QUANT_PAIR) * pair;
		int h = k / QUANT_GROUP % 2, i = k % QUANT_GROUP / 4;
		float scale = bf16_at(at + pair - 64 + lane * 4 + h * 2);
		at += h * (four ? 256 : 512) + (four ? i % 4 : i) * 64 + lane * 4 + k % 4;
		dst[k] = scale * (float)(four ? (*at >> i / 4 * 4 & 15) - 8 : *at - 128);
	}
}

// Rows up to which a processor that prefetches reads one tile at a time, without prefetch
// instructions. More rows are bound by computing.
enum { ONE_STREAM_ROWS = KERNEL_ISA == 512 ? 4 : 1 };

// The inner loop, as linear_block; k0 and k1 are multiples of 64.
FN void quant_block(const int four, const int nv, const int nt, const part *p) {
	const int ahead = nt <= ONE_STREAM_ROWS && tandem_hardware_prefetch ? 0 : 2048; // bytes of prefetch in each tile's stream
	const size_t pair = four ? INT4_PAIR : INT8_PAIR, tile = p->tile, ldq = p->ldq;
	const quant_row at = quant_layout(p->k);
	const uint8_t *start = p->q + (four ? at.less8 : at.less128);
	V acc[LINEAR_NT][LINEAR_TILES * VPT];
	UNROLL for (int t = 0; t < nt; t++)
		UNROLL for (int v = 0; v < nv; v++)
			acc[t][v] = p->fresh ? vzero() : vload(p->y + t * p->ldy + v * VL);

	const char *w = p->w + p->k0 / QUANT_PAIR * pair;
	for (int k = p->k0; k < p->k1; k += QUANT_PAIR, w += pair) {
		UNROLL for (int v = 0; v < nv; v += VPT)
			vfetch(w + v / VPT * tile + ahead, four ? 9 : 17);
		UNROLL for (int h = 0; h < 2; h++) {
			const int g = k / QUANT_GROUP + h;
			const char *lines = w + h * (four ? 256 : 512);
			const uint8_t *x = p->q + k + h * QUANT_GROUP;
			VI sum[LINEAR_NT][LINEAR_TILES * VPT];
			UNROLL for (int t = 0; t < nt; t++) {
				int32_t from = 0;
				if (four || DOT_OFFSET)
					memcpy(&from, start + t * ldq + g * 4, 4);
				UNROLL for (int v = 0; v < nv; v++)
					sum[t][v] = vints(from);
			}
			VI before[LINEAR_TILES * VPT]; // one row has a sum for each half, see grid_half_pair
			UNROLL for (int i = 0; i < 8; i++) {
				if (i == 4 && nt == 1)
					UNROLL for (int v = 0; v < nv; v++) {
						before[v] = sum[0][v];
						sum[0][v] = vints(0);
					}
				if (i == 4 && nt == 1 && four) {
					VI xs[4];
					UNROLL for (int j = 0; j < 4; j++)
						xs[j] = vinputs(x + (4 + j) * 4);
					UNROLL for (int v = 0; v < nv; v++) {
						VI line[4];
						UNROLL for (int j = 0; j < 4; j++)
							line[j] = vload_pairs(lines + v / VPT * tile + j * 64 + v % VPT * (VL * 4));
						sum[0][v] = vdot_uppers(sum[0][v], line, xs);
					}
					break;
				}
				VI wv[LINEAR_TILES * VPT];
				UNROLL for (int v = 0; v < nv; v++) {
					const char *line = lines + v / VPT * tile + (four ? i % 4 : i) * 64 + v % VPT * (VL * 4);
					wv[v] = vload_pairs(line);
					if (four)
						wv[v] = vnibbles(wv[v], i / 4);
				}
				UNROLL for (int t = 0; t < nt; t++) {
					VI xv = vinputs(x + t * ldq + i * 4);
					UNROLL for (int v = 0; v < nv; v++)
						sum[t][v] = four ? vdot_uint4(sum[t][v], wv[v], xv) : vdot_int8(sum[t][v], wv[v], xv);
				}
			}
			if (nt == 1)
				UNROLL for (int v = 0; v < nv; v++)
					sum[0][v] = vplus(sum[0][v], before[v]);
			V ws[LINEAR_TILES * VPT];
			UNROLL for (int v = 0; v < nv; v++) {
				const char *line = w + v / VPT * tile + pair - 64 + v % VPT * (VL * 4);
				ws[v] = h ? vodd(vload_pairs(line)) : veven(vload_pairs(line));
			}
			UNROLL for (int t = 0; t < nt; t++) {
				float scale;
				memcpy(&scale, p->q + at.scale + t * ldq + g * 4, 4);
				V xs = vset1(scale);
				UNROLL for (int v = 0; v < nv; v++)
					acc[t][v] = vfma(vfloat(sum[t][v]), vmul(ws[v], xs), acc[t][v]);
			}
		}
	}
	UNROLL for (int t = 0; t < nt; t++)
		UNROLL for (int v = 0; v < nv; v++)
			part_store(p, t, v, acc[t][v]);
}

#define QUANT_CASE(tiles, nt) \
	case (tiles) * 16 + nt: \
		if (four) \
			quant_block(1, (tiles) * VPT, nt, p); \
		else \
			quant_block(0, (tiles) * VPT, nt, p); \
		break;

// Returns how many of a group's tiles nt rows take at once: as many as registers allow, but
// few rows read in order of address if the processor prefetches.
FN int quant_tiles(int nt) {
	if (nt <= ONE_STREAM_ROWS && tandem_hardware_prefetch)
		return 1;
#if KERNEL_ISA == 512
	return nt <= 3 ? 4 : nt <= 6 ? 2 : 1;
#elif KERNEL_ISA == 2
	return nt == 1 ? 2 : 1;
#else
	return 1;
#endif
}

// nt rows times tiles tiles, quant_tiles at once.
static TARGET void quant_group(int four, int tiles, int nt, const part *p) {
	switch (tiles * 16 + nt) {
		QUANT_CASE(1, 1)
		QUANT_CASE(1, 2)
#if KERNEL_ISA || defined(__aarch64__)
		QUANT_CASE(1, 3)
		QUANT_CASE(1, 4)
#endif
#if KERNEL_ISA
		QUANT_CASE(1, 5)
		QUANT_CASE(1, 6)
#endif
#if KERNEL_ISA == 512
		QUANT_CASE(1, 7)
		QUANT_CASE(1, 8)
#endif
#if KERNEL_ISA == 2 || KERNEL_ISA == 512
		QUANT_CASE(2, 1)
#endif
#if KERNEL_ISA == 512
		QUANT_CASE(2, 2)
		QUANT_CASE(2, 3)
		QUANT_CASE(2, 4)
		QUANT_CASE(2, 5)
		QUANT_CASE(2, 6)
		QUANT_CASE(4, 1)
		QUANT_CASE(4, 2)
		QUANT_CASE(4, 3)
#endif
	}
}
