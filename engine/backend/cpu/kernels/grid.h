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
		float product = scale * (float)(code - zero);
		dst[k] = product - least;
	}
}

// Line i of a group's codes, 4 inputs of each of VL outputs.
FN VI grid_line(const int bits, const char *codes, int i) {
	if (bits == 8)
		return vload_pairs(codes + i * 64);
	VI low = vnibbles(vload_pairs(codes + i % 4 * 64), i / 4);
	if (bits == 5)
		return vhighs(low, vload_pairs(codes + 4 * 64), 4 - i, 0x10);
	if (bits == 6)
		return vhighs(low, vload_pairs(codes + (4 + i / 4) * 64), 4 - i % 4 * 2, 0x30);
	return low;
}

// The scale of a block or group in a line that precedes it, and its least value where kind has one.
FN V grid_scale(const tandem_grid *grid, const char *line) {
	return grid->bfloat ? veven(vload_pairs(line)) : vhalf(vload_pairs(line), 0);
}

FN V grid_least(const int bits, const tandem_grid *grid, const char *line) {
	VI v = vload_pairs(line);
	if (grid->kind == GRID_ZEROS) // less the offset that codes have anyway
		return vmul(grid_scale(grid, line), vadd(vupper(v), vset1(bits == 8 ? -128 : -8)));
	V least = grid->bfloat ? vodd(v) : vhalf(v, 1);
	return grid->kind == GRID_OFFSETS ? vmul(least, vset1(-1)) : least;
}

// The inner loop, as quant_block; k0 and k1 are multiples of 64.
FN void grid_block(const int bits, const int nv, const int nt, const part *p) {
	const int ahead = nt == 1 && tandem_hardware_prefetch ? 0 : 2048; // bytes of prefetch in each tile's stream
	const tandem_grid *grid = p->grid;
	const int kind = grid->kind, pairs = grid->pairs, halves = grid->head > 64; // each half of a pair has a header
	const size_t pair = grid->pair, head = grid->head, tile = p->tile, ldq = p->ldq, codes = grid_codes(bits);
	const quant_row at = quant_layout(p->k);
	// Sums start at less the offset that codes have.
	const int offset = bits == 4 ? kind == GRID_PLAIN || kind == GRID_ZEROS : bits == 8 ? DOT_OFFSET : bits == 6;
	const uint8_t *start = p->q + (bits == 4 ? at.less8 : bits == 8 ? at.less128 : at.less32);
	V acc[LINEAR_NT][LINEAR_TILES * VPT], scales[2][LINEAR_TILES * VPT], leasts[2][LINEAR_TILES * VPT];
	UNROLL for (int t = 0; t < nt; t++)
		UNROLL for (int v = 0; v < nv; v++)
			acc[t][v] = p->fresh ? vzero() : vload(p->y + t * p->ldy + v * VL);

	int first = p->k0 / QUANT_PAIR, left = 0;
	const char *next = p->w + (size_t)(first / pairs) * (head + pairs * pair), *w = 0; // of the next block and pair
	for (int k = p->k0; k < p->k1; k += QUANT_PAIR, w += pair, left--) {
		if (left == 0) {
			if (kind != GRID_PLAIN)
				for (int h = 0; h <= halves; h++)
					UNROLL for (int v = 0; v < nv; v++) {
						const char *line = next + h * 64 + v / VPT * tile + v % VPT * (VL * 4);
						scales[h][v] = grid_scale(grid, line);
						leasts[h][v] = grid_least(bits, grid, line);
					}
			left = pairs - first % pairs;
			w = next + head + (size_t)(first % pairs) * pair;
			next += head + pairs * pair;
			first = 0;
		}
		for (int h = 0; h < 2; h++) {
			const int g = k / QUANT_GROUP + h;
			const char *lines = w + h * codes, *sub = w + 2 * codes;
			const uint8_t *x = p->q + k + h * QUANT_GROUP;
			VI sum[LINEAR_NT][LINEAR_TILES * VPT];
			V ws[LINEAR_TILES * VPT];
			UNROLL for (int s = 0; s < 2; s++) {
				if (s == 0 || bits == 6)
					UNROLL for (int t = 0; t < nt; t++) {
						int32_t from = 0;
						if (offset)
							memcpy(&from, start + t * ldq + (bits == 6 ? 2 * g + s : g) * 4, 4);
						UNROLL for (int v = 0; v < nv; v++)
							sum[t][v] = vints(from);
					}
				UNROLL for (int j = 0; j < 4; j++) {
					const int i = 4 * s + j;
					VI wv[LINEAR_TILES * VPT];
					UNROLL for (int v = 0; v < nv; v++) {
						const char *line = lines + v / VPT * tile + v % VPT * (VL * 4);
						if (v % VPT == 0 && i < bits)
							__builtin_prefetch(line + i * 64 + ahead);
						wv[v] = grid_line(bits, line, i);
					}
					UNROLL for (int t = 0; t < nt; t++) {
						int32_t bytes;
						memcpy(&bytes, x + t * ldq + i * 4, 4);
						VI xv = vints(bytes);
						UNROLL for (int v = 0; v < nv; v++)
							sum[t][v] = bits == 8 ? vdot_int8(sum[t][v], wv[v], xv) : vdot_uint4(sum[t][v], wv[v], xv);
					}
				}
				if (s == 0 && bits != 6)
					continue;
				UNROLL for (int v = 0; v < nv; v++) {
					const char *line = sub + v / VPT * tile + v % VPT * (VL * 4);
					if (kind == GRID_PLAIN && grid->bfloat)
						ws[v] = h ? vodd(vload_pairs(line)) : veven(vload_pairs(line));
					else if (kind == GRID_PLAIN)
						ws[v] = vhalf(vload_pairs(line), h);
					else if (bits == 6)
						ws[v] = vmul(scales[0][v], vsigned(vload_pairs(line), 2 * h + s));
					else if (kind == GRID_MINS)
						ws[v] = vmul(scales[0][v], vbyte(vload_pairs(line), 2 * h));
					else
						ws[v] = scales[halves & h][v];
				}
				UNROLL for (int t = 0; t < nt; t++) {
					float scale;
					memcpy(&scale, p->q + at.scale + t * ldq + g * 4, 4);
					UNROLL for (int v = 0; v < nv; v++)
						acc[t][v] = vfma(vfloat(sum[t][v]), vmul(ws[v], vset1(scale)), acc[t][v]);
				}
			}
			if (bits == 6 || (kind == GRID_PLAIN && bits != 5))
				continue;
			UNROLL for (int v = 0; v < nv; v++) {
				V least = leasts[halves & h][v];
				if (kind == GRID_PLAIN)
					least = vmul(ws[v], vset1(16));
				else if (kind == GRID_MINS)
					least = vmul(least, vbyte(vload_pairs(sub + v / VPT * tile + v % VPT * (VL * 4)), 2 * h + 1));
				UNROLL for (int t = 0; t < nt; t++) {
					float less;
					memcpy(&less, p->q + at.less + t * ldq + g * 4, 4);
					acc[t][v] = vfma(least, vset1(less), acc[t][v]);
				}
			}
		}
	}
	UNROLL for (int t = 0; t < nt; t++)
		UNROLL for (int v = 0; v < nv; v++)
			part_store(p, t, v, acc[t][v]);
}

#define GRID_CASE(bits, tiles, nt) \
	case (bits) * 256 + (tiles) * 16 + nt: \
		grid_block(bits, (tiles) * VPT, nt, p); \
		break;
#define GRID_CASES(tiles, nt) GRID_CASE(4, tiles, nt) GRID_CASE(5, tiles, nt) GRID_CASE(6, tiles, nt) GRID_CASE(8, tiles, nt)

#if KERNEL_ISA == 512
enum { GRID_NT = 4, GRID_TILES = 4 }; // most rows of a tile, and tiles of one row
#elif KERNEL_ISA == 2
enum { GRID_NT = 4, GRID_TILES = 2 };
#elif KERNEL_ISA
enum { GRID_NT = 4, GRID_TILES = 1 };
#else
enum { GRID_NT = 2, GRID_TILES = 1 };
#endif

// nt rows, as grid_rows divides them, times tiles tiles.
static TARGET void grid_group(int bits, int tiles, int nt, const part *p) {
	switch (bits * 256 + tiles * 16 + nt) {
		GRID_CASES(1, 1)
		GRID_CASES(1, 2)
#if KERNEL_ISA
		GRID_CASES(1, 4)
#endif
#if KERNEL_ISA == 512
		GRID_CASES(2, 4)
		GRID_CASES(2, 6)
		GRID_CASES(4, 1)
#elif KERNEL_ISA == 2
		GRID_CASES(2, 1)
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
