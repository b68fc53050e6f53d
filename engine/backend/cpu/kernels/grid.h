// Products with the integers of a checkpoint; part of body.h. Activations are those of quant.h.
//
// A matrix has its own scales, see backend.Grid. A tandem_grid precedes the tiles. A tile is
// blocks of pairs of groups of 32, and a lane of a line of 64 bytes is an output:
//
//   GRID_PLAIN    a pair is codes, then the scales of its groups in a line. A block is a pair.
//   GRID_ZEROS    a block is one group, or half a pair. A line of scale and zero precedes it.
//   GRID_OFFSETS  likewise, of scale and offset, for each half of a pair.
//   GRID_MINS     a line of scale and minimum precedes a block of four pairs. A pair ends with a
//                 line of bytes: the first group's factor on the scale and on the minimum, and
//                 those of the second.
//   GRID_SIGNED   likewise, with a factor on the scale for each half of a group.
//   GRID_FLOATS   as GRID_PLAIN, but the line is bytes, E4M3, for each half of a group. Codes are
//                 E2M1, whose values are twice as large integers.
//
// The codes of a group are the lines of int8 or int4, see quant.h. Behind those of int4, codes of 5
// bits have a line of highest bits, of which bit i belongs to elements 4i to 4i+3, and codes of 6
// bits have two lines, of which bits 2(i%4) and above of line i/4 belong to them.
//
// A group is summed exactly. A chain over the groups adds the product of its sum and scales, then
// that of its least value and the sum of its activations.

// Bytes of the codes of a group.
FN size_t grid_codes(int bits) { return bits * 64; }

// A scale, zero or offset: half `high` of a lane of a line.
FN float grid_half(const tandem_grid *grid, const uint8_t *line, int lane, int high) {
	uint16_t h;
	memcpy(&h, line + lane * 4 + high * 2, 2);
	return grid->bfloat ? bf16_at(&h) : half_at(h);
}

// Row `lane` of a packed tile, [k].
static TARGET void unpack_grid(const tandem_op *op, const uint8_t *tile, int lane, float *dst) {
	const tandem_grid *grid = op->w;
	const int bits = grid->bits, kind = grid->kind;
	for (int k = 0; k < op->k; k++) {
		int pair = k / QUANT_PAIR, h = k / QUANT_GROUP % 2, i = k % QUANT_GROUP / 4;
		const uint8_t *block = tile + (size_t)(pair / grid->pairs) * (grid->head + (size_t)grid->pairs * grid->pair);
		const uint8_t *codes = block + grid->head + (size_t)(pair % grid->pairs) * grid->pair, *sub = codes + 2 * grid_codes(bits);
		codes += h * grid_codes(bits);
		const uint8_t *at = codes + lane * 4 + k % 4, *high = at + 4 * 64;
		int code = bits == 8 ? at[i * 64] : at[i % 4 * 64] >> i / 4 * 4 & 15;
		if (bits == 5)
			code |= (*high >> i & 1) << 4;
		if (bits == 6)
			code |= (high[i / 4 * 64] >> i % 4 * 2 & 3) << 4;
		const uint8_t *line = block + (grid->head > 64 ? h * 64 : 0);
		float scale = grid_half(grid, kind == GRID_PLAIN ? sub : line, lane, kind == GRID_PLAIN ? h : 0), least = 0;
		int zero = 1 << (bits - 1);
		if (kind == GRID_ZEROS)
			zero = line[lane * 4 + 2];
		if (kind == GRID_OFFSETS)
			zero = 0, least = -grid_half(grid, line, lane, 1);
		if (kind == GRID_MINS) {
			zero = 0, least = grid_half(grid, line, lane, 1) * (float)sub[lane * 4 + h * 2 + 1];
			scale *= (float)sub[lane * 4 + h * 2];
		}
		if (kind == GRID_SIGNED)
			scale *= (float)(int8_t)sub[lane * 4 + h * 2 + i / 4];
		if (kind == GRID_FLOATS) {
			scale = 256 * fp8_at(sub[lane * 4 + h * 2 + i / 4]);
			scale = grid->divide ? scale / grid->whole : scale * grid->whole;
		}
		float product = scale * (kind == GRID_FLOATS ? e2m1[code] : (float)(code - zero));
		dst[k] = product - least;
	}
}

// Line i of a group's codes, 4 inputs of each of VL outputs.
FN VI grid_line(const int bits, const char *codes, int i) {
	if (bits == 8)
		return vload_pairs(codes + i * 64);
	VI low = vload_pairs(codes + i % 4 * 64);
	if (bits == 4)
		return vnibbles(low, i / 4);
	// Of 6 bits, a line of highest bits has those of four lines, else of eight. Two of these lines
	// share what vfields returns, one in the lower and one in the upper half of the bytes.
	const int two = bits == 6, upper = two ? i % 4 / 2 : i / 4;
	const char *bits_of = codes + (4 + (two ? i / 4 : 0)) * 64;
	VI high = vfields(vload_pairs(bits_of), two ? i % 2 * 2 : i % 4, two ? 0x33 : 0x11);
	return vmerge(vright(low, i / 4 * 4), upper ? high : vleft(high, 4));
}

// The scale of a block or group in a line that precedes it, and its least value where kind has one.
FN V grid_scale(const tandem_grid *grid, const char *line) {
	return grid->bfloat ? veven(vload_pairs(line)) : vhalf(vload_pairs(line), 0);
}

FN V grid_least(const int bits, const int kind, const tandem_grid *grid, const char *line) {
	VI v = vload_pairs(line);
	if (kind == GRID_ZEROS) // less the offset that codes have anyway
		return vmul(grid_scale(grid, line), vadd(vupper(v), vset1(bits == 8 ? -128 : -8)));
	V least = grid->bfloat ? vodd(v) : vhalf(v, 1);
	return kind == GRID_OFFSETS ? vmul(least, vset1(-1)) : least;
}

// The sums of a product, and the scales and least values of a block for each half of a pair.
typedef struct {
	V acc[LINEAR_NT][LINEAR_TILES * VPT], scales[2][LINEAR_TILES * VPT], leasts[2][LINEAR_TILES * VPT];
} grid_sums;

// Adds half h of the pair at w. x is its activations, and g the number of the group. floats, a
// constant, is whether kind is GRID_FLOATS.
FN void grid_half_pair(const int bits, const int kind, const int floats, const int nv, const int nt, const part *p, grid_sums *s, const char *w, const uint8_t *x, int g, int h) {
	const tandem_grid *grid = p->grid;
	const size_t tile = p->tile, ldq = p->ldq;
	const quant_row at = quant_layout(p->k);
	const int by_half = bits == 6 || floats; // a scale for each half of the group
	// Sums start at less the offset that codes have.
	const int offset = bits == 4 ? kind == GRID_PLAIN || kind == GRID_ZEROS || floats : bits == 8 ? DOT_OFFSET : bits == 6;
	const uint8_t *start = p->q + (by_half ? at.less32 : bits == 4 ? at.less8 : at.less128);
	const int half = kind == GRID_MINS || by_half ? 0 : h & (grid->head > 64); // of the scales that a block has
	const char *lines = w + h * grid_codes(bits), *sub = w + 2 * grid_codes(bits);
	VI sum[LINEAR_NT][LINEAR_TILES * VPT];
	V ws[LINEAR_TILES * VPT];
	UNROLL for (int f = 0; f < 2; f++) {
		if (f == 0 || by_half)
			UNROLL for (int t = 0; t < nt; t++) {
				int32_t from = 0;
				if (offset)
					memcpy(&from, start + t * ldq + (by_half ? 2 * g + f : g) * 4, 4);
				if (floats)
					from = from / 32 * FP4_OFFSET;
				UNROLL for (int v = 0; v < nv; v++)
					sum[t][v] = vints(from);
			}
		// One row has a sum for each half, because eight dots in a chain wait for each other.
		const int second = f && !by_half && nt == 1;
		VI before[LINEAR_TILES * VPT];
		if (second)
			UNROLL for (int v = 0; v < nv; v++) {
				before[v] = sum[0][v];
				sum[0][v] = vints(0);
			}
		if (second && bits == 4) { // without a shift for each line
			VI xs[4];
			UNROLL for (int i = 0; i < 4; i++)
				xs[i] = vinputs(x + (4 + i) * 4);
			UNROLL for (int v = 0; v < nv; v++) {
				VI line[4];
				UNROLL for (int i = 0; i < 4; i++)
					line[i] = vload_pairs(lines + v / VPT * tile + v % VPT * (VL * 4) + i * 64);
				sum[0][v] = vdot_uppers(sum[0][v], line, xs);
			}
		} else
			UNROLL for (int i = 4 * f; i < 4 * f + 4; i++) {
				VI wv[LINEAR_TILES * VPT];
				UNROLL for (int v = 0; v < nv; v++) {
					wv[v] = grid_line(bits, lines + v / VPT * tile + v % VPT * (VL * 4), i);
					if (floats)
						wv[v] = vfp4(wv[v]);
				}
				UNROLL for (int t = 0; t < nt; t++) {
					VI xv = vinputs(x + t * ldq + i * 4);
					UNROLL for (int v = 0; v < nv; v++)
						sum[t][v] = bits == 8 ? vdot_int8(sum[t][v], wv[v], xv) : vdot_uint4(sum[t][v], wv[v], xv);
				}
			}
		if (second)
			UNROLL for (int v = 0; v < nv; v++)
				sum[0][v] = vplus(sum[0][v], before[v]);
		if (f == 0 && !by_half)
			continue;
		UNROLL for (int v = 0; v < nv; v++) {
			const char *line = sub + v / VPT * tile + v % VPT * (VL * 4);
			if (kind == GRID_PLAIN && grid->bfloat)
				ws[v] = h ? vodd(vload_pairs(line)) : veven(vload_pairs(line));
			else if (kind == GRID_PLAIN)
				ws[v] = vhalf(vload_pairs(line), h);
			else if (floats)
				ws[v] = vfp8(vload_pairs(line), 2 * h + f);
			else if (bits == 6)
				ws[v] = vmul(s->scales[0][v], vsigned(vload_pairs(line), 2 * h + f));
			else if (kind == GRID_MINS)
				ws[v] = vmul(s->scales[0][v], vbyte(vload_pairs(line), 2 * h));
			else
				ws[v] = s->scales[half][v];
		}
		UNROLL for (int t = 0; t < nt; t++) {
			float scale;
			memcpy(&scale, p->q + at.scale + t * ldq + g * 4, 4);
			if (floats)
				scale *= grid->factor;
			UNROLL for (int v = 0; v < nv; v++)
				s->acc[t][v] = vfma(vfloat(sum[t][v]), vmul(ws[v], vset1(scale)), s->acc[t][v]);
		}
	}
	if (by_half || (kind == GRID_PLAIN && bits != 5))
		return;
	UNROLL for (int v = 0; v < nv; v++) {
		V least = s->leasts[half][v];
		if (kind == GRID_PLAIN)
			least = vmul(ws[v], vset1(16));
		else if (kind == GRID_MINS)
			least = vmul(least, vbyte(vload_pairs(sub + v / VPT * tile + v % VPT * (VL * 4)), 2 * h + 1));
		UNROLL for (int t = 0; t < nt; t++) {
			float less;
			memcpy(&less, p->q + at.less + t * ldq + g * 4, 4);
			s->acc[t][v] = vfma(least, vset1(less), s->acc[t][v]);
		}
	}
}

// The inner loop, as quant_block; k0 and k1 are multiples of 64. known is the matrix's kind, or -1.
FN void grid_block(const int bits, const int known, const int nv, const int nt, const part *p) {
	const int ahead = nt == 1 && tandem_hardware_prefetch ? 0 : 2048; // bytes of prefetch in each tile's stream
	const tandem_grid *grid = p->grid;
	const int kind = known >= 0 ? known : grid->kind, halves = known < 0 && grid->head > 64;
	const int floats = known == GRID_FLOATS, pairs = floats ? 1 : known >= 0 ? 4 : grid->pairs;
	const size_t pair = grid->pair, head = grid->head, tile = p->tile, codes = grid_codes(bits);
	grid_sums s;
	UNROLL for (int t = 0; t < nt; t++)
		UNROLL for (int v = 0; v < nv; v++)
			s.acc[t][v] = p->fresh ? vzero() : vload(p->y + t * p->ldy + v * VL);

	int first = p->k0 / QUANT_PAIR, left = 0;
	const char *next = p->w + (size_t)(first / pairs) * (head + pairs * pair), *w = 0; // of the next block and pair
	for (int k = p->k0; k < p->k1; k += QUANT_PAIR, w += pair, left--) {
		if (left == 0) {
			if (kind != GRID_PLAIN && !floats)
				for (int h = 0; h <= halves; h++)
					UNROLL for (int v = 0; v < nv; v++) {
						const char *line = next + h * 64 + v / VPT * tile + v % VPT * (VL * 4);
						s.scales[h][v] = grid_scale(grid, line);
						s.leasts[h][v] = grid_least(bits, kind, grid, line);
					}
			left = pairs - first % pairs;
			w = next + head + (size_t)(first % pairs) * pair;
			next += head + pairs * pair;
			first = 0;
		}
		UNROLL for (int v = 0; v < nv; v += VPT)
			vfetch(w + v / VPT * tile + ahead, 2 * codes / 64 + 1);
		const uint8_t *x = p->q + k;
		if (nt == 1) { // with constants for h
			grid_half_pair(bits, kind, floats, nv, nt, p, &s, w, x, k / QUANT_GROUP, 0);
			grid_half_pair(bits, kind, floats, nv, nt, p, &s, w, x + QUANT_GROUP, k / QUANT_GROUP + 1, 1);
		} else
			for (int h = 0; h < 2; h++)
				grid_half_pair(bits, kind, floats, nv, nt, p, &s, w, x + h * QUANT_GROUP, k / QUANT_GROUP + h, h);
	}
	UNROLL for (int t = 0; t < nt; t++)
		UNROLL for (int v = 0; v < nv; v++)
			part_store(p, t, v, s.acc[t][v]);
}

#define GRID_CASE(bits, known, tiles, nt) \
	case ((known) == GRID_FLOATS) * 8192 + ((known) == GRID_MINS) * 4096 + (bits) * 256 + (tiles) * 16 + nt: \
		grid_block(bits, known, (tiles) * VPT, nt, p); \
		break;
#define GRID_CASES(tiles, nt) \
	GRID_CASE(4, -1, tiles, nt) GRID_CASE(4, GRID_FLOATS, tiles, nt) GRID_CASE(5, -1, tiles, nt) GRID_CASE(6, GRID_SIGNED, tiles, nt) GRID_CASE(8, -1, tiles, nt)
// The kind of K-quants is a constant for one row, whose product is to be bound by memory alone.
#define GRID_ROW_CASES(tiles) GRID_CASES(tiles, 1) GRID_CASE(4, GRID_MINS, tiles, 1) GRID_CASE(5, GRID_MINS, tiles, 1)

#if KERNEL_ISA == 512
enum { GRID_NT = 4, GRID_TILES = 4 }; // most rows of a tile, and tiles of one row
#elif KERNEL_ISA == 2
enum { GRID_NT = 4, GRID_TILES = 2 };
#elif KERNEL_ISA
enum { GRID_NT = 4, GRID_TILES = 1 };
#else
enum { GRID_NT = 2, GRID_TILES = 1 };
#endif

// Returns how many of so many rows are taken next: six or four, for which grid_rows has loops.
FN int grid_share(int rows) {
	const int most = KERNEL_ISA == 512 ? 6 : GRID_NT;
	return most == 6 && (rows == 7 || rows == 8) ? 4 : min_int(most, rows);
}

// nt rows, as grid_rows divides them, times tiles tiles.
static TARGET void grid_group(int bits, int tiles, int nt, const part *p) {
	const int mins = nt == 1 && p->grid->kind == GRID_MINS, floats = p->grid->kind == GRID_FLOATS;
	switch (floats * 8192 + mins * 4096 + bits * 256 + tiles * 16 + nt) {
		GRID_ROW_CASES(1)
		GRID_CASES(1, 2)
#if KERNEL_ISA
		GRID_CASES(1, 4)
#endif
#if KERNEL_ISA == 512
		GRID_CASES(2, 4)
		GRID_CASES(2, 6)
		GRID_ROW_CASES(4)
#elif KERNEL_ISA == 2
		GRID_ROW_CASES(2)
#endif
	}
}

// nt rows times tiles tiles. Tiles stay in the cache for all rows.
static TARGET void grid_rows(int tiles, int nt, part p) {
	for (int t = 0, once; t < tiles; t += once) {
		once = 1;
		if (nt == 1 && tiles - t >= GRID_TILES && !tandem_hardware_prefetch)
			once = GRID_TILES;
		else if (KERNEL_ISA == 512 && nt >= 4 && tiles - t >= 2)
			once = 2;
		for (int r = 0, n; r < nt; r += n) {
			n = once == 2 && nt - r >= 6 ? 6 : nt - r >= GRID_NT ? GRID_NT : nt - r >= 2 ? 2 : 1;
			const int together = nt == 1 || n >= 4 ? once : 1; // few rows take tile by tile
			for (int i = 0; i < once; i += together) {
				part q = p;
				q.w += i * p.tile;
				q.q += r * p.ldq;
				q.y += r * p.ldy + i * TILE;
				if (q.bias)
					q.bias += i * TILE;
				grid_group(p.grid->bits, together, n, &q);
			}
		}
		p.w += once * p.tile;
		p.y += once * TILE;
		if (p.bias)
			p.bias += once * TILE;
	}
}
