// Products with bf16 weights by AMX; part of body.h.
//
// Rows are rounded to bf16 first (OP_QUANTIZE) and k is padded with zeros to a multiple
// of 32. A result is one chain of TDPBF16PS from the start of the reduction, 32
// elements each, for one row as for many. So it does not depend on a step's batch and
// chunks. No other variant gives these bits: products lose the bits of a row that bf16
// does not have, and denormal numbers count as zero.

FN size_t amx_row(int k) { return (size_t)(k + AMX_DEPTH - 1) / AMX_DEPTH * AMX_DEPTH * 2; }

static TARGET void amx_round(const tandem_op *op, int row) {
	const float *x = op->a + (size_t)row * op->k;
	uint8_t *q = op->q + (size_t)row * amx_row(op->k);
	for (int k = 0; k < op->k; k += AMX_DEPTH) {
		int n = op->k - k;
		v16 a = n >= 16 ? v16_load(x + k) : v16_loadn(x + k, n), b = v16_zero();
		if (n >= 32)
			b = v16_load(x + k + 16);
		else if (n > 16)
			b = v16_loadn(x + k + 16, n - 16);
		_mm512_storeu_si512(q + k * 2, (__m512i)_mm512_cvtne2ps_pbh(b, a));
	}
}

// Tile registers: 0 to 3 sums, 4 rows, 5 weights; 6 and 7 the remainders of both.
typedef struct {
	uint8_t palette, start, reserved[14];
	uint16_t bytes[16];
	uint8_t rows[16];
} amx_shape;

#define AMX_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile :)
#define AMX_LOAD(tile, from, stride) \
	__asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"((size_t)(stride)) : "memory")
#define AMX_STORE(tile, to, stride) \
	__asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"((size_t)(stride)) : "memory")
#define AMX_PRODUCT(sum, x, w) __asm__ volatile("tdpbf16ps %%tmm" #w ", %%tmm" #x ", %%tmm" #sum :)

#define AMX_EACH(tiles, DO) \
	DO(0) \
	if (tiles > 1) \
		DO(1) \
	if (tiles > 2) \
		DO(2) \
	if (tiles > 3) \
		DO(3)

// nt rows times tiles tiles, a constant at each call; k1 - k0 is even, or ends the reduction.
FN void amx_block(const int tiles, int nt, const part *p) {
	enum { AHEAD = 2048 };
	const int whole = (p->k1 - p->k0) / AMX_DEPTH, lines = ((p->k1 - p->k0) % AMX_DEPTH + 1) / 2;
	amx_shape shape = {.palette = 1};
	for (int i = 0; i < 8; i++) {
		shape.rows[i] = i < 5 || i == 6 ? nt : AMX_DEPTH / 2;
		shape.bytes[i] = 64;
	}
	shape.bytes[6] = lines ? lines * 4 : 4;
	shape.rows[7] = lines ? lines : 1;
	__asm__ volatile("ldtilecfg %0" : : "m"(shape));
	const uint8_t *x = p->q + (size_t)p->k0 * 2;
	const char *w = p->w + (size_t)p->k0 * 32;
	const size_t ldq = p->ldq, tile = p->tile, ldy = p->ldy * sizeof(float);
	if (p->fresh) {
#define DO(i) AMX_ZERO(i);
		AMX_EACH(tiles, DO)
#undef DO
	} else {
#define DO(i) AMX_LOAD(i, p->y + i * TILE, ldy);
		AMX_EACH(tiles, DO)
#undef DO
	}
	for (int i = 0; i < whole; i++, x += 64, w += 1024) {
		AMX_LOAD(4, x, ldq);
#define DO(i) \
	{ \
		UNROLL for (int line = 0; line < 16; line++) \
			__builtin_prefetch(w + i * tile + line * 64 + AHEAD); \
		AMX_LOAD(5, w + i * tile, 64); \
		AMX_PRODUCT(i, 4, 5); \
	}
		AMX_EACH(tiles, DO)
#undef DO
	}
	if (lines) {
		AMX_LOAD(6, x, ldq);
#define DO(i) \
	{ \
		AMX_LOAD(7, w + i * tile, 64); \
		AMX_PRODUCT(i, 6, 7); \
	}
		AMX_EACH(tiles, DO)
#undef DO
	}
	float sums[AMX_ROWS][LINEAR_TILES * TILE] __attribute__((aligned(64)));
#define DO(i) AMX_STORE(i, sums[0] + i * TILE, sizeof sums[0]);
	AMX_EACH(tiles, DO)
#undef DO
	__asm__ volatile("tilerelease" :);
	for (int t = 0; t < nt; t++)
		UNROLL for (int v = 0; v < tiles; v++)
			part_store(p, t, v, vload(sums[t] + v * TILE));
}

static TARGET void amx_rows(int tiles, int nt, const part *p) {
	switch (tiles) {
	case 1:
		amx_block(1, nt, p);
		break;
	case 2:
		amx_block(2, nt, p);
		break;
	case 3:
		amx_block(3, nt, p);
		break;
	case 4:
		amx_block(4, nt, p);
		break;
	}
}
