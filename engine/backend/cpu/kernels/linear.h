// Matrix products over packed weights; part of body.h.
//
// A tile holds 16 outputs: fp32 [k, 16], or bf16 [k/2, 16, 2] with a zero after an odd k.
// Either way a 64-byte line feeds 16 lanes. MXFP4 is kept as it is, [k/32] of 16 blocks
// and their exponents. It is unpacked a stretch at a time to bf16, which holds its values
// exactly, so that it gives the bits of a bf16 matrix. FP8 is unpacked likewise, to fp32
// (fp8.h).

// The values of E2M1.
static const float e2m1[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};

FN size_t tile_bytes(const tandem_op *op) {
	if (op->bf16 == ELEM_MXFP4)
		return (size_t)op->k / 32 * MXFP4_GROUP;
	if (op->bf16 == ELEM_GRID)
		return ((const tandem_grid *)op->w)->tile;
	if (op->bf16 == ELEM_INT8 || op->bf16 == ELEM_INT4)
		return (size_t)((op->k + QUANT_PAIR - 1) / QUANT_PAIR) * (op->bf16 == ELEM_INT8 ? INT8_PAIR : INT4_PAIR);
	if (op->bf16 == ELEM_FP8)
		return (size_t)(op->k + 1) / 2 * 32;
	return op->bf16 ? (size_t)(op->k + 1) / 2 * 64 : (size_t)op->k * 64;
}

// A part of the reduction: [k0, k1) of rows of x times neighbouring tiles.
typedef struct {
	const char *w;    // first tile
	size_t tile;      // bytes from tile to tile
	const float *x;   // first row
	size_t ldx;       // floats from row to row
	const uint8_t *q; // first row of quantized activations
	size_t ldq;       // bytes from row to row
	const tandem_grid *grid; // of ELEM_GRID, else null
	int k;            // of the whole reduction
	float *y;         // results, 16 per tile
	size_t ldy;
	const float *bias; // 16 per tile, or null
	int k0, k1;        // k0 is even
	int fresh;         // start at zero, not at y
	int add;           // add the chain to y: only under fault_batch_order
} part;

FN void part_store(const part *p, int t, int v, V sum) {
	float *y = p->y + t * p->ldy + v * VL;
	if (p->add)
		sum = vadd(vload(y), sum);
	if (p->bias)
		sum = vadd(sum, vload(p->bias + v * VL));
	vstore(y, sum);
}

#include "quant.h"

#include "grid.h"

#include "fp8.h"

#if KERNEL_AMX
#include "amx.h"
#endif

// Packs one tile of the row-major matrix a [n, k], a stretch of k at a time so that the
// lines being written stay in L1.
static TARGET void pack_mxfp4(const tandem_op *op, int tile) {
	int groups = op->k / 32, lanes = min_int(TILE, op->n - tile * TILE);
	uint8_t *dst = (uint8_t *)op->w + tile * tile_bytes(op);
	const uint8_t *blocks = (const uint8_t *)op->a, *scales = blocks + (size_t)op->n * groups * 16;
	for (int g = 0; g < groups; g++, dst += MXFP4_GROUP)
		for (int lane = 0; lane < lanes; lane++) {
			size_t at = (size_t)(tile * TILE + lane) * groups + g;
			memcpy(dst + lane * 16, blocks + at * 16, 16);
			dst[16 * 16 + lane] = scales[at];
		}
}

// Groups [g0, g1) of a packed MXFP4 tile as a stretch of a bf16 one.
static TARGET void unpack_mxfp4(const uint8_t *tile, int g0, int g1, uint16_t *dst) {
	for (int g = g0; g < g1; g++, dst += 32 * TILE) {
		const uint8_t *group = tile + (size_t)g * MXFP4_GROUP;
		for (int lane = 0; lane < TILE; lane++) {
			uint32_t s = group[16 * 16 + lane], bits = s ? s << 23 : 1u << 22;
			float scale;
			uint16_t table[16];
			memcpy(&scale, &bits, 4);
			for (int i = 0; i < 16; i++) {
				float f = e2m1[i] * scale;
				memcpy(&bits, &f, 4);
				table[i] = (uint16_t)(bits >> 16);
			}
			for (int i = 0; i < 16; i++) {
				dst[i * 2 * TILE + lane * 2] = table[group[lane * 16 + i] & 15];
				dst[i * 2 * TILE + lane * 2 + 1] = table[group[lane * 16 + i] >> 4];
			}
		}
	}
}

static TARGET void pack(const tandem_op *op, int tile) {
	enum { STRETCH = 256 };
	if (op->bf16 == ELEM_MXFP4) {
		pack_mxfp4(op, tile);
		return;
	}
	if (op->bf16 == ELEM_INT8 || op->bf16 == ELEM_INT4) {
		pack_quant(op, tile);
		return;
	}
	if (op->bf16 == ELEM_FP8) {
		pack_fp8(op, tile);
		return;
	}
	size_t k = op->k;
	char *dst = (char *)op->w + tile * tile_bytes(op);
	const char *src = (const char *)op->a;
	int lanes = min_int(TILE, op->n - tile * TILE), size = op->bf16 ? 2 : 4;
	for (size_t from = 0; from < k; from += STRETCH) {
		size_t to = from + STRETCH < k ? from + STRETCH : k;
		for (int lane = 0; lane < lanes; lane++) {
			const char *row = src + (size_t)(tile * TILE + lane) * k * size;
			if (op->bf16)
				for (size_t i = from; i < to; i++)
					memcpy(dst + i / 2 * 64 + lane * 4 + i % 2 * 2, row + i * 2, 2);
			else
				for (size_t i = from; i < to; i++)
					memcpy(dst + i * 64 + lane * 4, row + i * 4, 4);
		}
	}
}

// The inner loop: nv registers of outputs by nt rows. bf16, nv and nt are constants at each
// call, so that the sums stay in registers.
FN void linear_block(const int bf16, const int nv, const int nt, const part *p) {
	const int ahead = nt == 1 && tandem_hardware_prefetch ? 0 : 1536; // bytes of prefetch in each tile's stream
	V acc[LINEAR_NT][LINEAR_TILES * VPT];
	UNROLL for (int t = 0; t < nt; t++)
		UNROLL for (int v = 0; v < nv; v++)
			acc[t][v] = p->fresh ? vzero() : vload(p->y + t * p->ldy + v * VL);

	const float *x = p->x;
	const size_t ldx = p->ldx, tile = p->tile;
	const char *w = p->w + (size_t)p->k0 * (bf16 ? 32 : 64);
	int k = p->k0, k1 = p->k1;
	if (bf16) {
		for (; k + 2 <= k1; k += 2, w += 64) {
			V wv[LINEAR_TILES * VPT];
			UNROLL for (int v = 0; v < nv; v += VPT)
				__builtin_prefetch(w + v / VPT * tile + ahead);
			UNROLL for (int v = 0; v < nv; v++)
				wv[v] = veven(vload_pairs(w + v / VPT * tile + v % VPT * (VL * 4)));
			UNROLL for (int t = 0; t < nt; t++) {
				V xv = vset1(x[t * ldx + k]);
				UNROLL for (int v = 0; v < nv; v++)
					acc[t][v] = vfma(wv[v], xv, acc[t][v]);
			}
			UNROLL for (int v = 0; v < nv; v++)
				wv[v] = vodd(vload_pairs(w + v / VPT * tile + v % VPT * (VL * 4)));
			UNROLL for (int t = 0; t < nt; t++) {
				V xv = vset1(x[t * ldx + k + 1]);
				UNROLL for (int v = 0; v < nv; v++)
					acc[t][v] = vfma(wv[v], xv, acc[t][v]);
			}
		}
		if (k < k1)
			UNROLL for (int v = 0; v < nv; v++) {
				V wv = veven(vload_pairs(w + v / VPT * tile + v % VPT * (VL * 4)));
				UNROLL for (int t = 0; t < nt; t++)
					acc[t][v] = vfma(wv, vset1(x[t * ldx + k]), acc[t][v]);
			}
	} else {
		for (; k < k1; k++, w += 64) {
			V wv[LINEAR_TILES * VPT];
			UNROLL for (int v = 0; v < nv; v += VPT)
				__builtin_prefetch(w + v / VPT * tile + ahead);
			UNROLL for (int v = 0; v < nv; v++)
				wv[v] = vload((const float *)(w + v / VPT * tile + v % VPT * (VL * 4)));
			UNROLL for (int t = 0; t < nt; t++) {
				V xv = vset1(x[t * ldx + k]);
				UNROLL for (int v = 0; v < nv; v++)
					acc[t][v] = vfma(wv[v], xv, acc[t][v]);
			}
		}
	}
	UNROLL for (int t = 0; t < nt; t++)
		UNROLL for (int v = 0; v < nv; v++)
			part_store(p, t, v, acc[t][v]);
}

// Constant-shape instances of the inner loop.
#define ROWS_CASE(nv, nt) \
	case nt: \
		if (bf16) \
			linear_block(1, nv, nt, p); \
		else \
			linear_block(0, nv, nt, p); \
		break;

static TARGET void linear_one_tile(int bf16, int nt, const part *p) {
	switch (nt) {
		ROWS_CASE(VPT, 1)
		ROWS_CASE(VPT, 2)
#if KERNEL_ISA || defined(__aarch64__)
		ROWS_CASE(VPT, 3)
		ROWS_CASE(VPT, 4)
#endif
#if KERNEL_ISA
		ROWS_CASE(VPT, 5)
		ROWS_CASE(VPT, 6)
#endif
#if KERNEL_ISA == 512
		ROWS_CASE(VPT, 7)
		ROWS_CASE(VPT, 8)
#endif
	}
}

// All tiles of a group at once, as far as registers allow, because one row is bound by
// memory and needs several streams.
#if KERNEL_ISA == 512
enum { GROUP_NT = LINEAR_BLOCK };
#elif KERNEL_ISA
enum { GROUP_NT = 1 };
#else
enum { GROUP_NT = 0 };
#endif

static TARGET void linear_group(int bf16, int nt, const part *p) {
	switch (nt) {
#if KERNEL_ISA
		ROWS_CASE(LINEAR_TILES * VPT, 1)
#endif
#if KERNEL_ISA == 512
		ROWS_CASE(LINEAR_TILES * VPT, 2)
		ROWS_CASE(LINEAR_TILES * VPT, 3)
		ROWS_CASE(LINEAR_TILES * VPT, 4)
		ROWS_CASE(LINEAR_TILES * VPT, 5)
		ROWS_CASE(LINEAR_TILES * VPT, 6)
#endif
	}
	(void)bf16, (void)p;
}

// Two tiles, for row counts that leave no registers for four.
static TARGET void linear_pair(int bf16, int nt, const part *p) {
	switch (nt) {
#if KERNEL_ISA == 512
		ROWS_CASE(2 * VPT, 7)
		ROWS_CASE(2 * VPT, 8)
#endif
	}
	(void)bf16, (void)p;
}

// nt rows times tiles [t0, t1), through a copy if the last tile extends past the edge of y.
static TARGET void linear_rows(const tandem_op *op, int t0, int t1, int nt, part p) {
	int tiles = t1 - t0, lanes = min_int(tiles * TILE, op->n - t0 * TILE);
	float edge[AMX_ROWS][LINEAR_TILES * TILE], bias[LINEAR_TILES * TILE];
	float *y = p.y;
	size_t ldy = p.ldy;
	if (lanes < tiles * TILE) {
		memset(edge, 0, sizeof edge);
		for (int t = 0; t < nt && !(p.fresh && !p.add); t++)
			memcpy(edge[t], y + t * ldy, lanes * sizeof(float));
		if (p.bias) {
			memset(bias, 0, sizeof bias);
			memcpy(bias, p.bias, lanes * sizeof(float));
			p.bias = bias;
		}
		p.y = edge[0];
		p.ldy = LINEAR_TILES * TILE;
	}
	const int quant = op->bf16 == ELEM_INT8 || op->bf16 == ELEM_INT4;
#if KERNEL_AMX
	if (op->bf16 == ELEM_BF16) {
		amx_rows(tiles, nt, &p);
	} else
#endif
	if (op->bf16 == ELEM_GRID) {
		grid_rows(tiles, nt, p);
	} else if (!quant && tiles == LINEAR_TILES && nt <= GROUP_NT) {
		linear_group(op->bf16, nt, &p);
	} else {
		part q = p;
		for (int t = 0, once = 1; t < tiles; t += once) {
			if (quant) {
				once = tiles - t < quant_tiles(nt) ? 1 : quant_tiles(nt);
				quant_group(op->bf16 == ELEM_INT4, once, nt, &q);
			} else if (nt > LINEAR_BLOCK && tiles - t >= 2) {
				once = 2;
				linear_pair(op->bf16, nt, &q);
			} else {
				once = 1;
				linear_one_tile(op->bf16, nt, &q);
			}
			q.w += once * q.tile;
			q.y += once * TILE;
			if (q.bias)
				q.bias += once * TILE;
		}
	}
	if (lanes < tiles * TILE)
		for (int t = 0; t < nt; t++)
			memcpy(y + t * ldy, edge[t], lanes * sizeof(float));
}

// Tiles [t0, t1) of rows [r0, r1), of a batch of the given size.
static TARGET void linear_item(const tandem_op *op, const tandem_step *st, int t0, int t1, int r0, int r1, int batch,
                               tandem_scratch *s) {
	// One pass over the weights if possible, because memory is slower. Not for int8 and grids,
	// whose registers would then hold only one tile.
	int most = r1 - r0 <= LINEAR_NT && op->bf16 != ELEM_INT8 && op->bf16 != ELEM_GRID ? LINEAR_NT : LINEAR_BLOCK;
	// The parts of a small batch read the weights in order of address, see quant_tiles. With longer
	// rows six at once are faster.
	if (op->bf16 == ELEM_INT8 && (size_t)(r1 - r0) * op->k <= 8 * QUANT_DEPTH && ONE_STREAM_ROWS > 1 && tandem_hardware_prefetch)
		most = ONE_STREAM_ROWS;
#if KERNEL_AMX
	if (op->bf16 == ELEM_BF16 || op->bf16 == ELEM_MXFP4 || op->bf16 == ELEM_FP8)
		most = AMX_ROWS;
#endif
	int blocks = (r1 - r0 + most - 1) / most;
	int fault = st->fault_batch_order && batch > 1 && op->k > 2;
	int depth = blocks > 1 ? LINEAR_DEPTH : op->k;
	if (fault)
		depth = (op->k / 2 + 1) / 2 * 2;
	tandem_op plain = *op;
	if (op->bf16 == ELEM_MXFP4) {
		plain.bf16 = ELEM_BF16;
		depth = LINEAR_DEPTH;
		if (fault)
			depth = min_int(LINEAR_DEPTH, (op->k / 2 + 31) / 32 * 32);
	}
	if (op->bf16 == ELEM_FP8) {
		plain.bf16 = KERNEL_AMX ? ELEM_BF16 : ELEM_F32;
		int most_deep = blocks > 1 ? FP8_DEPTH : FP8_AT_ONCE;
		depth = fault ? min_int(most_deep, (op->k / 2 + 1) / 2 * 2) : most_deep;
	}
	size_t ldq = 0, skip = 0; // bytes of rows in q
#if KERNEL_AMX
	ldq = amx_row(op->k);
#endif
	const tandem_grid *grid = op->bf16 == ELEM_GRID ? op->w : 0;
	if (grid || op->bf16 == ELEM_INT8 || op->bf16 == ELEM_INT4) {
		ldq = quant_layout(op->k).size;
		depth = blocks > 1 ? QUANT_DEPTH : op->k;
		if (fault)
			depth = op->k / 2;
		depth = (depth + QUANT_PAIR - 1) / QUANT_PAIR * QUANT_PAIR;
	}
	for (int k0 = 0; k0 < op->k; k0 += depth) {
		part p = {
		    .w = (const char *)op->w + (grid ? sizeof *grid : 0) + t0 * tile_bytes(op),
		    .tile = tile_bytes(op),
		    .ldx = op->k,
		    .ldq = ldq,
		    .grid = grid,
		    .k = op->k,
		    .ldy = op->n,
		    .k0 = k0,
		    .k1 = min_int(k0 + depth, op->k),
		    .fresh = k0 == 0 || fault,
		    .add = k0 > 0 && fault,
		};
		if (op->bias && p.k1 == op->k)
			p.bias = op->bias + t0 * TILE;
		const float *x = op->a;
		if (op->bf16 == ELEM_MXFP4 || op->bf16 == ELEM_FP8) {
			for (int t = t0; t < t1; t++)
				if (op->bf16 == ELEM_FP8)
					unpack_fp8(op, t, k0, p.k1, (char *)s->unpacked[t - t0]);
				else
					unpack_mxfp4((const uint8_t *)op->w + t * tile_bytes(op), k0 / 32, p.k1 / 32, (uint16_t *)s->unpacked[t - t0]);
			p.w = (const char *)s->unpacked[0];
			p.tile = sizeof s->unpacked[0];
			p.k1 -= k0;
			p.k0 = 0;
			x += k0;
			skip = (size_t)k0 * 2;
		}
		for (int b = 0, r = r0; r < r1; b++) {
			int nt = (r1 - r) / (blocks > b ? blocks - b : 1); // even shares
			if (grid)
				nt = grid_share(r1 - r);
			p.x = x + (size_t)r * op->k;
			p.q = op->q + (size_t)r * ldq + skip;
			p.y = op->dst + (size_t)r * op->n + t0 * TILE;
			linear_rows(&plain, t0, t1, nt, p);
			r += nt;
		}
	}
}

static TARGET void linear(const tandem_op *op, const tandem_step *st, const tandem_split *sp, int item,
                          tandem_scratch *s) {
	int t0 = item / sp->chunks * sp->tiles, t1 = min_int(t0 + sp->tiles, (op->n + TILE - 1) / TILE);
	int r0 = item % sp->chunks * sp->chunk, r1 = min_int(r0 + sp->chunk, sp->rows);
	linear_item(op, st, t0, t1, r0, r1, sp->rows, s);
}
