// Weights in floats of 8 bits, E4M3; part of body.h.
//
// A packed matrix is a tandem_fp8, then tiles of [k/2, 16, 2] bytes with a zero after an
// odd k, then 256 times the scales, [tile, block] of lanes. They are unpacked to fp32 a
// stretch at a time. Each value is multiplied by its scale and rounded once, so that the
// result has the bits of an fp32 matrix of the same values. For AMX they are rounded to
// bf16, as all its inputs.

static TARGET void pack_fp8(const tandem_op *op, int tile) {
	size_t k = op->k;
	uint8_t *dst = (uint8_t *)op->w + sizeof(tandem_fp8) + tile * tile_bytes(op);
	const uint8_t *src = (const uint8_t *)op->a;
	int lanes = min_int(TILE, op->n - tile * TILE);
	for (int lane = 0; lane < lanes; lane++) {
		const uint8_t *row = src + (size_t)(tile * TILE + lane) * k;
		for (size_t i = 0; i < k; i++)
			dst[i / 2 * 32 + lane * 2 + i % 2] = row[i];
	}
}

// The scales of a tile's outputs in a block.
FN v16 fp8_scale(const tandem_fp8 *head, int tile, int block) {
	const float *s = (const float *)((const char *)head + head->scales) + ((size_t)tile * head->across + block) * head->lanes;
	return head->lanes == 1 ? v16_set1(*s) : v16_load(s);
}

// One or two elements of the reduction from an even one on, stored to a tile of the products' type.
FN void fp8_pair(const uint8_t *w, v16 scale, int even, int odd, void *dst) {
#if KERNEL_AMX
	__m512i a = _mm512_setzero_si512(), b = a;
	if (even)
		a = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v16_mul(v16_fp8(w, 0), scale)));
	if (odd)
		b = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v16_mul(v16_fp8(w, 1), scale))), 16);
	__m512i *to = dst;
	if (!even)
		a = _mm512_loadu_si512(to);
	_mm512_storeu_si512(to, _mm512_or_si512(a, b));
#else
	if (even)
		v16_store(dst, v16_mul(v16_fp8(w, 0), scale));
	if (odd)
		v16_store((float *)dst + TILE, v16_mul(v16_fp8(w, 1), scale));
#endif
}

// fours times four elements of the reduction, all of one scale. Returns the end of their bytes.
FN const uint8_t *fp8_lines(const uint8_t *w, v16 scale, int fours, char *dst) {
	enum { AHEAD = 2048 };
	for (; fours > 0; fours--, w += 64) {
		__builtin_prefetch(w + AHEAD);
#if KERNEL_AMX
		fp8_pair(w, scale, 1, 1, dst);
		fp8_pair(w + 32, scale, 1, 1, dst + 64);
		dst += 128;
#else
		v16 v[4];
		v16_fp8_four(w, v);
		UNROLL for (int i = 0; i < 4; i++)
			v16_store((float *)dst + i * TILE, v16_mul(v[i], scale));
		dst += 256;
#endif
	}
	return w;
}

// [k0, k1) of a packed tile, k0 even, as a stretch of an fp32 tile or, for AMX, of a bf16 one.
static TARGET void unpack_fp8(const tandem_op *op, int tile, int k0, int k1, char *dst) {
	enum { PAIR = KERNEL_AMX ? 64 : 128 };
	const tandem_fp8 *head = op->w;
	const uint8_t *w = (const uint8_t *)(head + 1) + tile * tile_bytes(op) + (size_t)k0 / 2 * 32;
	for (int k = k0; k < k1;) {
		int block = (k + head->from) / head->cols, end = min_int(k1, (block + 1) * head->cols - head->from);
		v16 scale = fp8_scale(head, tile, block);
		if (k % 2) {
			fp8_pair(w, scale, 0, 1, dst);
			w += 32, dst += PAIR, k++;
		}
		int fours = (end - k) / 4;
		w = fp8_lines(w, scale, fours, dst);
		dst += (size_t)fours * 2 * PAIR, k += fours * 4;
		if (k + 2 <= end) {
			fp8_pair(w, scale, 1, 1, dst);
			w += 32, dst += PAIR, k += 2;
		}
		if (k < end) {
			fp8_pair(w, scale, 1, 0, dst);
			k++;
		}
	}
}

// Row `lane` of a packed tile, [k].
static TARGET void unpack_fp8_row(const tandem_op *op, int tile, int lane, float *dst) {
	const tandem_fp8 *head = op->w;
	const uint8_t *w = (const uint8_t *)(head + 1) + tile * tile_bytes(op);
	for (int k = 0; k < op->k; k++) {
		float values[TILE];
		v16_store(values, v16_mul(v16_fp8(w + k / 2 * 32, k % 2), fp8_scale(head, tile, (k + head->from) / head->cols)));
		dst[k] = values[lane];
	}
}
