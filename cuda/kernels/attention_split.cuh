// Attention of single rows over bf16 KV on tensor cores. A block has up to eight heads that share
// a KV head, and some parts of the context. In a product of sixteen rows, row h has the high bf16
// of head h's numbers and row h+8 the rest. So queries and weights keep 16 bits of their fractions,
// with as many products as one bf16 would take. The last block of a row adds the parts.
//
// A tile of sixteen positions must be in one page, so that pages hold a multiple of as many.
#pragma once
#include "attention.cuh"

constexpr int kSplitHeads = 8;
constexpr int kFewPart = 128;  // least part in steps of few rows, which have too few longer parts for a device

template <int kDim>
struct SplitMemory {
  using S = Shape<kDim>;
  alignas(16) uint16_t kv[2][kMmaWarps][kTile * S::kTileStride];  // K, V of each warp's slice
  float scores[kMmaWarps][kSplitHeads * kTile];                    // parts of a team's products
  float most[kMmaWarps][kSplitHeads], total[kMmaWarps][kSplitHeads];
  int last;
};

// split_fetch starts the copies of a warp's slice of a tile. Both addresses are the lane's. ahead
// is the distance of the lane's first row from the first of count positions. Other positions
// become zero, because a page's bytes beyond its tokens may not be numbers.
template <int kDim>
TD_DEVICE void split_fetch(uint16_t *to, const char *from, int ahead, int count) {
  using S = Shape<kDim>;
  constexpr int kAtOnce = 32 * 8 / S::kSlice;  // rows
#pragma unroll
  for (int i = 0; i < kTile; i += kAtOnce)
    copy_async(to + i * S::kTileStride, from + i * kDim * 2, unsigned(ahead + i) < unsigned(count) ? 16 : 0);
}

// split_queries returns the fragments of a warp's slice of the heads' queries, times scale.
template <int kSlice>
TD_DEVICE void split_queries(uint32_t q[kSlice / 16][4], const float *from, float scale, int dim, int heads) {
  int g = lane_id() / 4, two = lane_id() % 4 * 2;
#pragma unroll
  for (int d = 0; d < kSlice / 16; d++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float *p = from + g * dim + d * 16 + half * 8 + two;
      float x = g < heads ? p[0] * scale : 0, y = g < heads ? p[1] * scale : 0;
      uint32_t most = bf16_pack(x, y);
      q[d][2 * half] = most;
      q[d][2 * half + 1] = bf16_pack(x - bf16_low(most), y - bf16_high(most));
    }
}

// split_part computes positions [from, to) of the heads. It leaves the sums of each warp's slice in
// its memory of K, and each team's greatest score (to base two) and sum of weights.
template <int kDim>
TD_DEVICE void split_part(SplitMemory<kDim> &m, const td_op &o, const Context &c, const uint32_t q[][4], int from, int to, int64_t lane_at) {
  using S = Shape<kDim>;
  int lane = lane_id(), warp = thread_id() / 32, team = warp / S::kTeam, g = lane / 4, two = lane % 4 * 2;
  constexpr int kChunks = S::kSlice / 8, step = S::kTeams * kTile;
  uint16_t *k = m.kv[0][warp], *v = m.kv[1][warp];
  int copied = lane / kChunks * S::kTileStride + lane % kChunks * 8, start = from - lane / kChunks, count = to - from;
  const uint16_t *k_at = k + (lane % 8 + lane / 16 * 8) * S::kTileStride + lane / 8 % 2 * 8;
  const uint16_t *v_at = v + lane % 16 * S::kTileStride + lane / 16 * 8;
  const char *pages = at<const char>(o.kv) + lane_at;
  auto tile = [&](int t) {
    unsigned block = unsigned(t) / unsigned(o.block_tokens);
    return pages + c.table[block] * o.page_bytes + int(t - block * o.block_tokens) * (kDim * 2);
  };
  float out[S::kSlice / 8][4] = {}, most = -INFINITY, total = 0;
  int base = from / kTile * kTile;
  const char *at_tile = base + team * kTile < to ? tile(base + team * kTile) : nullptr;
  if (at_tile) split_fetch<kDim>(k + copied, at_tile, base + team * kTile - start, count);
  copy_commit();
  // Warps of a team meet within the loop, so that all of them need the same number of iterations.
  for (; base < to; base += step) {
    int t = base + team * kTile;
    bool mine = t < to, edge = t < from || t + kTile > to;
    if (mine) split_fetch<kDim>(v + copied, at_tile + o.v_at, t - start, count);
    copy_commit();
    if (t + step < to) at_tile = tile(t + step);
    copy_wait<1>();
    order_warp();  // K of all lanes has arrived; the lanes meet when they read it
    float s[2][4] = {}, w[2][2];
    if (mine)
#pragma unroll
      for (int d = 0; d < S::kSlice / 16; d++) {
        uint32_t b[4];
        load_matrices(b, k_at + d * 16);
        mma(s[0], q[d], b);
        mma(s[1], q[d], b + 2);
      }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) w[n][i] = s[n][i] + s[n][i + 2];
    if constexpr (S::kTeam > 1) {
      sync();  // the parts of the previous iteration have been read
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) m.scores[warp][(n * 2 + i) * 32 + lane] = w[n][i];
      sync();
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          w[n][i] = 0;
          for (int p = 0; p < S::kTeam; p++) w[n][i] += m.scores[team * S::kTeam + p][(n * 2 + i) * 32 + lane];
        }
    }
    if (edge)
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          int position = t + n * 8 + two + i;
          if (position < from || position >= to) w[n][i] = -INFINITY;
        }
    float best = fmaxf(fmaxf(w[0][0], w[0][1]), fmaxf(w[1][0], w[1][1]));
    best = fmaxf(best, shuffle_xor(best, 1));
    best = fmaxf(best, shuffle_xor(best, 2));
    best = fmaxf(best, most);
    float origin = best == -INFINITY ? 0 : best, keep = exp2_fast(most - origin);
    most = best;
    total *= keep;
    uint32_t a[4];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float x = exp2_fast(w[n][0] - origin), y = exp2_fast(w[n][1] - origin);
      total += x + y;
      a[2 * n] = bf16_pack(x, y);
      a[2 * n + 1] = bf16_pack(x - bf16_low(a[2 * n]), y - bf16_high(a[2 * n]));
    }
    order_warp();  // all lanes have read K
    if (t + step < to) split_fetch<kDim>(k + copied, at_tile, t + step - start, count);
    copy_commit();
    if (ballot(keep != 1, kAll))
#pragma unroll
      for (int n = 0; n < S::kSlice / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[n][i] *= keep;
    copy_wait<1>();
    order_warp();  // V of all lanes has arrived; the lanes meet when they read it
    if (mine)
#pragma unroll
      for (int d = 0; d < S::kSlice; d += 16) {
        uint32_t b[4];
        load_transposed(b, v_at + d);
        mma(out[d / 8], a, b);
        mma(out[d / 8 + 1], a, b + 2);
      }
    order_warp();  // all lanes have read V
  }
  total += shuffle_xor(total, 1);
  total += shuffle_xor(total, 2);
  if (two == 0) {
    m.most[warp][g] = most;
    m.total[warp][g] = total;
  }
  float *sums = reinterpret_cast<float *>(k);  // [heads, slice]
#pragma unroll
  for (int n = 0; n < S::kSlice / 8; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) sums[g * S::kSlice + n * 8 + two + i] = out[n][i] + out[n][i + 2];
}

// split_join adds parts [p0, p1) of the heads in order, and the sink. The sums are numbers to and
// following of the result. mine are the parts of the first head.
template <int kDim>
TD_DEVICE void split_join(SplitMemory<kDim> &m, const td_op &o, const float *mine, int64_t to, int p0, int p1, int head, int heads) {
  float *factor = reinterpret_cast<float *>(m.kv);  // [heads, kParts]
  int lane = lane_id(), p = p0 + lane;
  for (int h = thread_id() / 32; h < heads; h += kMmaWarps) {
    const float *end = mine + (int64_t(h) * kParts + p) * (kDim + 2) + kDim;
    float sink = o.extra ? at<const float>(o.extra)[head + h] * kLog2E : -INFINITY;
    float most = p < p1 ? end[0] : -INFINITY, best = fmaxf(warp_max(most), sink), by = exp2_fast(most - best);
    float total = warp_sum(p < p1 ? end[1] * by : 0) + exp2_fast(sink - best);
    factor[h * kParts + lane] = by / total;
  }
  sync();
  for (int i = thread_id(); i < heads * kDim; i += kMmaThreads) {
    int h = i / kDim;
    const float *from = mine + (int64_t(h) * kParts + p0) * (kDim + 2) + i % kDim;
    float sum = 0;
#pragma unroll 8
    for (int j = 0; j < p1 - p0; j++) sum = fuse(from[int64_t(j) * (kDim + 2)], factor[h * kParts + j], sum);
    put_result(o, to + i, sum);
  }
}

// attend_split processes single rows. A block has a row, up to kSplitHeads heads of one KV head,
// and every n-th part of the context, whose length is at least least. arrived counts the blocks of
// a row and its heads that have ended; it starts at 0. With listed 1 the rows are those of s.alone.
template <int kDim>
TD_KERNEL_OF(kMmaThreads, kDim > 128 ? 2 : 3) attend_split(td_op o, Step s, int row_from, int listed, int least, float *parts, int *arrived) {
  wait_previous();
  using S = Shape<kDim>;
  SplitMemory<kDim> &m = *reinterpret_cast<SplitMemory<kDim> *>(shared_memory());
  int row = row_from + block_x(), group = o.heads / o.kv_heads, packs = (group + kSplitHeads - 1) / kSplitHeads;
  if (row >= (listed ? s.alone[0] : live(s, o))) return;
  if (listed) row = s.alone[1 + row];
  Context c = context(o, s, row);
  int size = part_size(c.end, least), p0 = c.first / size, p1 = (c.end + size - 1) / size;
  if (block_z() >= p1 - p0) return;
  int kv_head = block_y() / packs, head = kv_head * group + block_y() % packs * kSplitHeads;
  int heads = (kv_head + 1) * group - head;
  heads = heads < kSplitHeads ? heads : kSplitHeads;
  int tid = thread_id(), lane = lane_id(), slice = tid / 32 % S::kTeam;
  constexpr int kChunks = S::kSlice / 8;
  if (tid == 0) m.last = 0;  // a barrier that last_block lacked would be noticed
  uint32_t q[S::kSlice / 16][4];
  split_queries<S::kSlice>(q, at<const float>(o.a) + (int64_t(row) * o.heads + head) * kDim + slice * S::kSlice, o.scale * kLog2E, kDim, heads);
  int64_t lane_at = (int64_t(kv_head) * o.block_tokens * kDim + slice * S::kSlice + lane / kChunks * kDim + lane % kChunks * 8) * 2;
  auto mine = [&] { return parts + (int64_t(block_x()) * o.heads + head) * kParts * (kDim + 2); };
  int64_t result = (int64_t(row) * o.heads + head) * kDim;
  for (int part = p0 + block_z(); part < p1; part += grid_z()) {
    int from = part * size, to = from + size < c.end ? from + size : c.end;
    split_part<kDim>(m, o, c, q, from > c.first ? from : c.first, to, lane_at);
    sync();
    for (int i = tid; i < heads * kDim; i += kMmaThreads) {
      int h = i / kDim, d = i % kDim;
      float best = -INFINITY, total = 0, sum = 0;
#pragma unroll
      for (int team = 0; team < S::kTeams; team++) best = fmaxf(best, m.most[team * S::kTeam][h]);
#pragma unroll
      for (int team = 0; team < S::kTeams; team++) {
        int warp = team * S::kTeam;
        float by = exp2_fast(m.most[warp][h] - best);
        total = fuse(m.total[warp][h], by, total);
        sum = fuse(reinterpret_cast<const float *>(m.kv[0][warp + d / S::kSlice])[h * S::kSlice + d % S::kSlice], by, sum);
      }
      if (p1 - p0 > 1) {
        float *to_part = mine() + (int64_t(h) * kParts + part) * (kDim + 2);
        to_part[d] = sum;
        if (d == 0) {
          to_part[kDim] = best;
          to_part[kDim + 1] = total;
        }
        continue;
      }
      float sink = o.extra ? at<const float>(o.extra)[head + h] * kLog2E : -INFINITY, all = fmaxf(best, sink);
      float by = exp2_fast(best - all);
      put_result(o, result + i, sum * by / fuse(total, by, exp2_fast(sink - all)));
    }
    sync();  // the sums have been read
  }
  if (p1 - p0 == 1) return;
  int blocks = p1 - p0 < grid_z() ? p1 - p0 : grid_z();
  if (last_block(arrived + int64_t(block_x()) * (o.kv_heads * packs) + block_y(), blocks, &m.last)) split_join<kDim>(m, o, mine(), result, p0, p1, head, heads);
}
