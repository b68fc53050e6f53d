// Attention of consecutive rows of one sequence over bf16 KV on tensor cores. A block has some rows
// of a head and reads each tile of K and V once, while the previous tile is being computed. A team
// of warps has sixteen rows; each warp of it has a slice of the columns. Queries and weights are in
// registers, rounded to bf16.
//
// Tiles begin at fixed absolute positions, so that the bits of a row do not depend on the rows
// of its block. Sixteen positions must be in one page, so that pages hold a multiple of as many.
#pragma once
#include "attention.cuh"

template <int kDim>
struct TilesShape : Shape<kDim> {
  static constexpr int kRows = Shape<kDim>::kTeams * 16;      // of a block
  static constexpr int kPositions = kDim <= 256 ? 32 : 16;    // of a tile: two of K and V fit into 99 KB
  static constexpr int kChunks = kDim / 8;                    // of 16 bytes in a row of K
  static constexpr int kAtOnce = kMmaThreads / kChunks;       // rows that all threads copy at once
};

template <int kDim>
struct TilesMemory {
  using S = TilesShape<kDim>;
  alignas(16) uint16_t kv[2][2][S::kPositions * S::kStride];               // two tiles of K, V
  float scores[S::kTeam > 1 ? kMmaWarps : 1][16 * S::kPositions];          // parts of a team's products
};

// tiles_fetch starts a thread's copies of sixteen positions of K or V. Both addresses are the
// thread's. ahead is the distance of its first row from the first of count positions. Other
// positions become zero, because a page's bytes beyond its tokens may not be numbers.
template <int kDim>
TD_DEVICE void tiles_fetch(uint16_t *to, const char *from, int ahead, int count) {
  using S = TilesShape<kDim>;
#pragma unroll
  for (int i = 0; i < kTile; i += S::kAtOnce)
    copy_async(to + i * S::kStride, from + i * kDim * 2, unsigned(ahead + i) < unsigned(count) ? 16 : 0);
}

// tiles_queries returns the fragments of a warp's slice of the queries of two rows, times scale.
template <int kSlice>
TD_DEVICE void tiles_queries(uint32_t q[kSlice / 16][4], const float *const from[2], float scale) {
  int two = lane_id() % 4 * 2;
#pragma unroll
  for (int d = 0; d < kSlice / 16; d++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float *p = from[i % 2] + d * 16 + i / 2 * 8 + two;
      q[d][i] = bf16_pack(p[0] * scale, p[1] * scale);
    }
}

// tiles_span computes rows [row, row+n) of one sequence for a head, n at most the block's rows.
template <int kDim>
TD_DEVICE void tiles_span(TilesMemory<kDim> &m, const td_op &o, const Step &s, int row, int n, int head) {
  using S = TilesShape<kDim>;
  constexpr int kGroups = S::kPositions / 16, kScores = 2 * kGroups;
  int tid = thread_id(), lane = lane_id(), warp = tid / 32, g = lane / 4, two = lane % 4 * 2;
  int mine = warp / S::kTeam * 16, slice = warp % S::kTeam, kv_head = head / (o.heads / o.kv_heads);
  Context c = context(o, s, row);
  int start = c.end - 1, end = start + n;  // of the positions of all rows
  const float *from[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    int there = mine + g + r * 8 < n ? mine + g + r * 8 : n - 1;
    from[r] = at<const float>(o.a) + (int64_t(row + there) * o.heads + head) * kDim + slice * S::kSlice;
  }
  uint32_t q[S::kSlice / 16][4];
  tiles_queries<S::kSlice>(q, from, o.scale * kLog2E);

  // place returns a thread's address in the next sixteen positions' page, and advances by as many.
  int tile = c.first / S::kPositions * S::kPositions, ahead = tid / S::kChunks - c.first, count = end - c.first;
  unsigned block = unsigned(tile) / unsigned(o.block_tokens), inside = unsigned(tile) - block * unsigned(o.block_tokens);
  int position = tile;
  const char *pages = at<const char>(o.kv) + (int64_t(kv_head) * o.block_tokens * kDim + tid / S::kChunks * kDim + tid % S::kChunks * 8) * 2;
  auto place = [&] {
    bool there = position + 16 > c.first && position < end;
    const char *p = pages + (there ? c.table[block] : 0) * o.page_bytes + int(inside) * (kDim * 2);
    position += 16;
    inside += 16;
    if (inside == unsigned(o.block_tokens)) {
      inside = 0;
      block++;
    }
    return p;
  };
  const char *next[kGroups];
  auto fetch = [&](int at_tile, int turn) {
#pragma unroll
    for (int i = 0; i < kGroups; i++) {
      int to = (i * 16 + tid / S::kChunks) * S::kStride + tid % S::kChunks * 8;
      tiles_fetch<kDim>(m.kv[turn][0] + to, next[i], at_tile + i * 16 + ahead, count);
      tiles_fetch<kDim>(m.kv[turn][1] + to, next[i] + o.v_at, at_tile + i * 16 + ahead, count);
    }
  };
  auto look = [&] {
#pragma unroll
    for (int i = 0; i < kGroups; i++) next[i] = place();
  };
  int k_at = (lane % 8 + lane / 16 * 8) * S::kStride + slice * S::kSlice + lane / 8 % 2 * 8;
  int v_at = lane % 16 * S::kStride + slice * S::kSlice + lane / 16 * 8;
  float out[S::kSlice / 8][4] = {}, most[2] = {-INFINITY, -INFINITY}, total[2] = {};
  sync();  // the previous span has read K and V
  look();
  fetch(tile, 0);
  copy_commit();
  look();
#pragma unroll 1
  for (int turn = 0; tile < end; tile += S::kPositions, turn ^= 1) {
    copy_wait<0>();
    sync();  // the tile of all threads has arrived, and the previous one has been read
    if (tile + S::kPositions < end) fetch(tile + S::kPositions, turn ^ 1);
    copy_commit();
    look();
    // No row of this team attends to positions after its last row.
    bool busy = mine < n && tile <= start + mine + 15;
    if (S::kTeam == 1 && !busy) continue;
    float w[kScores][4] = {};
    if (busy)
#pragma unroll
      for (int d = 0; d < S::kSlice / 16; d++)
#pragma unroll
        for (int i = 0; i < kGroups; i++) {
          uint32_t b[4];
          load_matrices(b, m.kv[turn][0] + k_at + i * 16 * S::kStride + d * 16);
          mma(w[2 * i], q[d], b);
          mma(w[2 * i + 1], q[d], b + 2);
        }
    if constexpr (S::kTeam > 1) {
#pragma unroll
      for (int i = 0; i < kScores; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) m.scores[warp][(i * 4 + e) * 32 + lane] = w[i][e];
      sync();
      if (!busy) continue;
#pragma unroll
      for (int i = 0; i < kScores; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          w[i][e] = 0;
#pragma unroll
          for (int p = 0; p < S::kTeam; p++) w[i][e] += m.scores[warp - slice + p][(i * 4 + e) * 32 + lane];
        }
    }
    int newest = start + mine, oldest = o.window > 0 ? newest + 15 - o.window : -1;
    if (tile + S::kPositions - 1 > newest || tile <= oldest)
#pragma unroll
      for (int i = 0; i < kScores; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          int t = tile + i * 8 + two + e % 2, own = newest + g + e / 2 * 8;  // the row's own position
          if (t > own || (o.window > 0 && t <= own - o.window)) w[i][e] = -INFINITY;
        }
    float origin[2], keep[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float best = most[r];
#pragma unroll
      for (int i = 0; i < kScores; i++) best = fmaxf(best, fmaxf(w[i][2 * r], w[i][2 * r + 1]));
      best = fmaxf(best, shuffle_xor(best, 1));
      best = fmaxf(best, shuffle_xor(best, 2));
      origin[r] = best == -INFINITY ? 0 : best;
      keep[r] = exp2_fast(most[r] - origin[r]);
      most[r] = best;
      total[r] *= keep[r];
    }
    if (ballot(keep[0] != 1 || keep[1] != 1, kAll))
#pragma unroll
      for (int i = 0; i < S::kSlice / 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) out[i][e] *= keep[e / 2];
#pragma unroll
    for (int i = 0; i < kGroups; i++) {
      uint32_t a[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float *pair = &w[2 * i + j / 2][j % 2 * 2];
        pair[0] = exp2_fast(pair[0] - origin[j % 2]);
        pair[1] = exp2_fast(pair[1] - origin[j % 2]);
        total[j % 2] += pair[0] + pair[1];
        a[j] = bf16_pack(pair[0], pair[1]);
      }
#pragma unroll
      for (int d = 0; d < S::kSlice; d += 16) {
        uint32_t b[4];
        load_transposed(b, m.kv[turn][1] + v_at + i * 16 * S::kStride + d);
        mma(out[d / 8], a, b);
        mma(out[d / 8 + 1], a, b + 2);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    total[r] += shuffle_xor(total[r], 1);
    total[r] += shuffle_xor(total[r], 2);
    int at_row = mine + g + r * 8;
    if (at_row >= n) continue;
    float sink = o.extra ? at<const float>(o.extra)[head] * kLog2E : -INFINITY, all = fmaxf(sink, most[r]);
    float by = exp2_fast(most[r] - all);
    by /= fuse(total[r], by, exp2_fast(sink - all));
    int64_t to = (int64_t(row + at_row) * o.heads + head) * kDim + slice * S::kSlice + two;
#pragma unroll
    for (int i = 0; i < S::kSlice / 8; i++) put_two(o, to + i * 8, out[i][2 * r] * by, out[i][2 * r + 1] * by);
  }
}

// attend_tiles processes rows of chunks. The blocks of the last rows, which attend to the most
// positions, start first.
template <int kDim>
TD_KERNEL_OF(kMmaThreads, kDim > 64 ? 2 : 3) attend_tiles(td_op o, Step s) {
  wait_previous();
  using S = TilesShape<kDim>;
  TilesMemory<kDim> &m = *reinterpret_cast<TilesMemory<kDim> *>(shared_memory());
  int first = (grid_x() - 1 - block_x()) * S::kRows, rows = live(s, o), head = block_y();
  int end = first + S::kRows < rows ? first + S::kRows : rows;
  for (int row = first; row < end;) {
    int n = 1;
    while (row + n < end && s.row_span[row + n] == s.row_span[row]) n++;
    if (in_chunk(s, row)) tiles_span<kDim>(m, o, s, row, n, head);
    row += n;
  }
}
