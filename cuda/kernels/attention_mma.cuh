// Attention on tensor cores over bf16 KV. A warp multiplies sixteen rows with sixteen
// positions at a time. The rows are the query heads of one token that share a KV head, or
// consecutive tokens of one head. Queries and weights are split into two bf16 each, which
// keeps 16 bits of them; keys and values are used as stored.
#pragma once
#include "attention.cuh"

template <int kDim>
struct DecodeMemory {
  using S = Shape<kDim>;
  alignas(16) uint16_t q[2][kTile * S::kStride];                           // high and low part
  alignas(16) uint16_t kv[2][kMmaWarps][kTile * S::kTileStride];           // K, V of each warp's slice
  float scores[kMmaWarps][kTile * kTile];                                  // parts of a team's products
  float most[kMmaWarps][kTile], total[kMmaWarps][kTile];                   // of each team
};

// fetch starts the copies of a warp's slice of sixteen positions, starting at position.
// Positions outside [c.first, c.end) become zero.
template <int kDim>
TD_DEVICE void fetch_tile(uint16_t *to, const td_op &o, const Context &c, int position, int kv_head, int slice, int64_t offset) {
  using S = Shape<kDim>;
  constexpr int kChunks = S::kSlice / 8;  // of 16 bytes
  for (int i = lane_id(); i < kTile * kChunks; i += 32) {
    int row = i / kChunks, chunk = i % kChunks, t = position + row;
    bool there = t >= c.first && t < c.end;
    const char *from = at<const char>(o.kv);
    if (there) from = page_of(o, c, t) + offset + ((int64_t(kv_head) * o.block_tokens + t % o.block_tokens) * kDim + slice * S::kSlice + chunk * 8) * 2;
    copy_async(to + row * S::kTileStride + chunk * 8, from, there ? 16 : 0);
  }
}

// load_pair loads two neighbouring bf16.
TD_DEVICE uint32_t load_pair(const uint16_t *p) { return *reinterpret_cast<const uint32_t *>(p); }

// scores_of adds this slice's part of the products of sixteen queries with sixteen keys:
// s[n] is the fragment of keys 8n to 8n+7.
template <int kDim, int kSlice>
TD_DEVICE void scores_of(float s[2][4], const uint16_t *q_most, const uint16_t *q_rest, const uint16_t *k, int slice) {
  constexpr int kTileStride = kSlice + kPad;
  int g = lane_id() / 4, two = lane_id() % 4 * 2;
#pragma unroll
  for (int d = 0; d < kSlice; d += 16) {
    uint32_t a[2][4], b[2][2];
    int at_q = g * (kDim + kPad) + slice * kSlice + d + two;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int where = at_q + i % 2 * 8 * (kDim + kPad) + i / 2 * 8;
      a[0][i] = load_pair(q_most + where);
      a[1][i] = load_pair(q_rest + where);
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const uint16_t *row = k + (n * 8 + g) * kTileStride + d + two;
      b[n][0] = load_pair(row);
      b[n][1] = load_pair(row + 8);
      mma(s[n], a[1], b[n]);
      mma(s[n], a[0], b[n]);
    }
  }
}

// add_values adds weights [16 rows, 16 positions] times this slice of the values:
// out[n] is the fragment of columns 8n to 8n+7.
template <int kSlice>
TD_DEVICE void add_values(float out[][4], const float w[2][4], const uint16_t *v) {
  constexpr int kTileStride = kSlice + kPad;
  uint32_t a[2][4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float x = w[i / 2][i % 2 * 2], y = w[i / 2][i % 2 * 2 + 1];
    a[0][i] = bf16_pack(x, y);
    a[1][i] = bf16_pack(x - bf16_low(a[0][i]), y - bf16_high(a[0][i]));
  }
  // Four matrices of 8 positions by 8 columns: positions 0-7 and 8-15 of two groups of columns.
  const uint16_t *row = v + (lane_id() % 16) * kTileStride + lane_id() / 16 * 8;
#pragma unroll
  for (int d = 0; d < kSlice; d += 16) {
    uint32_t b[4];
    load_transposed(b, row + d);
#pragma unroll
    for (int n = 0; n < 2; n++) {
      mma(out[d / 8 + n], a[1], b + 2 * n);
      mma(out[d / 8 + n], a[0], b + 2 * n);
    }
  }
}

// Softmax is a lane's running state for its two rows, g and g+8.
struct Softmax {
  float most[2], total[2];
};

// weigh converts a tile's scores to weights, and returns the factor by which earlier sums
// shrink. Rows without any position stay empty.
TD_DEVICE void weigh(Softmax &m, float s[2][4], float keep[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float best = fmaxf(fmaxf(s[0][2 * r], s[0][2 * r + 1]), fmaxf(s[1][2 * r], s[1][2 * r + 1]));
    best = fmaxf(best, shuffle_xor(best, 1));
    best = fmaxf(best, shuffle_xor(best, 2));
    best = fmaxf(best, m.most[r]);
    keep[r] = m.most[r] == -INFINITY ? 0 : exp2_fast(m.most[r] - best);
    float sum = 0;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 2 * r; i < 2 * r + 2; i++) {
        s[n][i] = s[n][i] == -INFINITY ? 0 : exp2_fast(s[n][i] - best);
        sum += s[n][i];
      }
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    m.total[r] = m.total[r] * keep[r] + sum;
    m.most[r] = best;
  }
}

// decode_part is attend_decode for positions [from, to).
template <int kDim>
TD_DEVICE void decode_part(DecodeMemory<kDim> &m, const td_op &o, const Context &c, int from, int to, int kv_head, float *parts, int heads) {
  using S = Shape<kDim>;
  int tid = thread_id(), warp = tid / 32, team = warp / S::kTeam, slice = warp % S::kTeam;
  float out[S::kSlice / 8][4] = {};
  Softmax sum = {{-INFINITY, -INFINITY}, {0, 0}};
  uint16_t *k = m.kv[0][warp], *v = m.kv[1][warp];
  int first = from / kTile * kTile + team * kTile, step = S::kTeams * kTile;
  if (first < to) fetch_tile<kDim>(k, o, c, first, kv_head, slice, 0);
  copy_commit();
  sync();
  // Warps of a team meet within the loop, so that all of them need the same number of iterations.
  for (int base = from / kTile * kTile; base < to; base += step) {
    int t = base + team * kTile;
    if (t < to) fetch_tile<kDim>(v, o, c, t, kv_head, slice, o.v_at);
    copy_commit();
    copy_wait<1>();
    sync_warp();
    float w[2][4] = {};
    if (t < to) scores_of<kDim, S::kSlice>(w, m.q[0], m.q[1], k, slice);
    if constexpr (S::kTeam > 1) {
      sync();  // the parts of the previous iteration have been read
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) m.scores[warp][(n * 4 + i) * 32 + lane_id()] = w[n][i];
      sync();
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          w[n][i] = 0;
          for (int p = 0; p < S::kTeam; p++) w[n][i] += m.scores[team * S::kTeam + p][(n * 4 + i) * 32 + lane_id()];
        }
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int position = t + n * 8 + lane_id() % 4 * 2 + i % 2;
        w[n][i] = position >= c.first && position < to ? w[n][i] * o.scale * kLog2E : -INFINITY;
      }
    float keep[2];
    weigh(sum, w, keep);
    order_warp();  // all lanes have read K
    if (t + step < to) fetch_tile<kDim>(k, o, c, t + step, kv_head, slice, 0);
    copy_commit();
    copy_wait<1>();
    order_warp();  // V of all lanes has arrived; the lanes meet when they read it
#pragma unroll
    for (int n = 0; n < S::kSlice / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) out[n][i] *= keep[i / 2];
    if (t < to) add_values<S::kSlice>(out, w, v);
    order_warp();  // all lanes have read V
  }
  // The teams' parts are joined in order, in the memory of K and V.
  int g = lane_id() / 4, two = lane_id() % 4 * 2;
  if (slice == 0 && two == 0)
    for (int r = 0; r < 2; r++) {
      m.most[team][g + r * 8] = sum.most[r];
      m.total[team][g + r * 8] = sum.total[r];
    }
  sync();
  float *joined = reinterpret_cast<float *>(m.kv);  // [16, dim]
  float best[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
  for (int i = 0; i < S::kTeams; i++)
    for (int r = 0; r < 2; r++) best[r] = fmaxf(best[r], m.most[i][g + r * 8]);
  for (int i = 0; i < S::kTeams; i++) {
    float by[2];
    for (int r = 0; r < 2; r++) {
      by[r] = m.most[i][g + r * 8] == -INFINITY ? 0 : exp2_fast(m.most[i][g + r * 8] - best[r]);
      total[r] += m.total[i][g + r * 8] * by[r];
    }
    if (i == team)
#pragma unroll
      for (int n = 0; n < S::kSlice / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          float *to_sum = &joined[(g + e / 2 * 8) * kDim + slice * S::kSlice + n * 8 + two + e % 2];
          *to_sum = out[n][e] * by[e / 2] + (i > 0 ? *to_sum : 0);
        }
    if (i + 1 < S::kTeams) sync();
  }
  sync();
  // [head, part]: the numbers of the part, then its maximum and its total.
  for (int i = tid; i < heads * kDim; i += kMmaThreads) parts[int64_t(i / kDim) * kParts * (kDim + 2) + i % kDim] = joined[i];
  if (warp == 0 && two == 0)
    for (int r = 0; r < 2; r++)
      if (g + r * 8 < heads) {
        float *end = parts + int64_t(g + r * 8) * kParts * (kDim + 2) + kDim;
        end[0] = best[r];
        end[1] = total[r];
      }
  sync();  // joined has been read
}

// attend_decode processes single rows. A block has a row, up to sixteen heads of one KV
// head, and every n-th part of the context. It writes a part's output before division, and
// for each head the greatest score (to base two) and the sum of weights. With chunked 1, rows of
// chunks are not processed.
template <int kDim>
TD_KERNEL(kMmaThreads) attend_decode(td_op o, Step s, int row_from, int chunked, float *parts) {
  wait_previous();
  using S = Shape<kDim>;
  DecodeMemory<kDim> &m = *reinterpret_cast<DecodeMemory<kDim> *>(shared_memory());
  int row = row_from + block_x(), group = o.heads / o.kv_heads, packs = (group + kTile - 1) / kTile;
  if (row >= live(s, o) || (chunked && in_chunk(s, row))) return;
  int kv_head = block_y() / packs, head = kv_head * group + block_y() % packs * kTile;
  int heads = (kv_head + 1) * group - head;
  heads = heads < kTile ? heads : kTile;
  Context c = context(o, s, row);
  int tid = thread_id();
  const float *q = at<const float>(o.a) + (int64_t(row) * o.heads + head) * kDim;
  for (int i = tid * 2; i < kTile * kDim; i += kMmaThreads * 2) {
    int r = i / kDim, d = i % kDim;
    float x = r < heads ? q[r * kDim + d] : 0, y = r < heads ? q[r * kDim + d + 1] : 0;
    uint32_t most = bf16_pack(x, y);
    *reinterpret_cast<uint32_t *>(&m.q[0][r * S::kStride + d]) = most;
    *reinterpret_cast<uint32_t *>(&m.q[1][r * S::kStride + d]) = bf16_pack(x - bf16_low(most), y - bf16_high(most));
  }
  int size = part_size(c.end, kPart);
  for (int part = block_z(); part * size < c.end; part += grid_z()) {
    int to = (part + 1) * size < c.end ? (part + 1) * size : c.end, from = part * size;
    if (to > c.first) decode_part<kDim>(m, o, c, from > c.first ? from : c.first / kTile * kTile, to, kv_head, parts + ((int64_t(block_x()) * o.heads + head) * kParts + part) * (kDim + 2), heads);
  }
}
// attend_join adds the parts of a row's head, in order, and the sink.
TD_KERNEL(kMmaThreads) attend_join(td_op o, Step s, int row_from, int chunked, const float *parts) {
  wait_previous();
  int row = row_from + block_x(), head = block_y();
  if (row >= live(s, o) || (chunked && in_chunk(s, row))) return;
  Context c = context(o, s, row);
  int size = part_size(c.end, kPart), from = c.first / size, to = (c.end + size - 1) / size, dim = o.dim;
  const float *mine = parts + (int64_t(block_x()) * o.heads + head) * kParts * (dim + 2);
  float sink = o.extra ? at<const float>(o.extra)[head] * kLog2E : -INFINITY, best = sink;
  for (int p = from; p < to; p++) best = fmaxf(best, mine[p * (dim + 2) + dim]);
  float total = o.extra ? exp2_fast(sink - best) : 0;
  for (int p = from; p < to; p++) total += mine[p * (dim + 2) + dim + 1] * exp2_fast(mine[p * (dim + 2) + dim] - best);
  for (int d = thread_id(); d < dim; d += kMmaThreads) {
    float sum = 0;
    for (int p = from; p < to; p++) sum += mine[p * (dim + 2) + d] * exp2_fast(mine[p * (dim + 2) + dim] - best);
    put_result(o, (int64_t(row) * o.heads + head) * dim + d, sum / total);
  }
}

// attend_chunk processes consecutive tokens of one sequence. A block has kChunkRows rows of
// a head, a warp sixteen of them, and all share the tiles of K and V.
constexpr int kChunkRows = TD_CHUNK_ROWS;
constexpr int kChunkTile = 32;  // positions of a tile

template <int kDim>
struct ChunkMemory {
  static constexpr int kStride = kDim + kPad;
  alignas(16) uint16_t q[2][kChunkRows * kStride];
  alignas(16) uint16_t kv[2][2][kChunkTile * kStride];  // K, V; two tiles each
};

template <int kDim>
TD_DEVICE void fetch_chunk(uint16_t *to, const td_op &o, const Context &c, int position, int kv_head, int64_t offset) {
  constexpr int kChunks = kDim / 8;
  for (int i = thread_id(); i < kChunkTile * kChunks; i += kMmaThreads) {
    int row = i / kChunks, chunk = i % kChunks, t = position + row;
    bool there = t >= c.first && t < c.end;
    const char *from = at<const char>(o.kv);
    if (there) from = page_of(o, c, t) + offset + ((int64_t(kv_head) * o.block_tokens + t % o.block_tokens) * kDim + chunk * 8) * 2;
    copy_async(to + row * (kDim + kPad) + chunk * 8, from, there ? 16 : 0);
  }
}

// chunk_span is rows [row, row+n) of one sequence, n at most kChunkRows.
template <int kDim>
TD_DEVICE void chunk_span(ChunkMemory<kDim> &m, const td_op &o, const Step &s, int row, int n, int head) {
  int tid = thread_id(), warp = tid / 32, g = lane_id() / 4, two = lane_id() % 4 * 2;
  int kv_head = head / (o.heads / o.kv_heads), mine = warp * 16;
  Context c = context(o, s, row), last = context(o, s, row + n - 1);
  int start = c.end - 1;  // position of the first row
  c.end = last.end;       // the end of the positions of all rows
  sync();                 // the previous span has read q
  for (int i = tid * 2; i < kChunkRows * kDim; i += kMmaThreads * 2) {
    int r = i / kDim, d = i % kDim;
    const float *q = at<const float>(o.a) + (int64_t(row + (r < n ? r : 0)) * o.heads + head) * kDim + d;
    uint32_t most = bf16_pack(q[0], q[1]);
    *reinterpret_cast<uint32_t *>(&m.q[0][r * (kDim + kPad) + d]) = most;
    *reinterpret_cast<uint32_t *>(&m.q[1][r * (kDim + kPad) + d]) = bf16_pack(q[0] - bf16_low(most), q[1] - bf16_high(most));
  }
  float out[kDim / 8][4] = {};
  Softmax sum = {{-INFINITY, -INFINITY}, {0, 0}};
  int tile = c.first / kChunkTile * kChunkTile;
  fetch_chunk<kDim>(m.kv[0][0], o, c, tile, kv_head, 0);
  fetch_chunk<kDim>(m.kv[1][0], o, c, tile, kv_head, o.v_at);
  copy_commit();
  for (int turn = 0; tile < c.end; tile += kChunkTile, turn ^= 1) {
    copy_wait<0>();
    sync();  // the tile has arrived, and the previous one has been read
    if (tile + kChunkTile < c.end) {
      fetch_chunk<kDim>(m.kv[0][turn ^ 1], o, c, tile + kChunkTile, kv_head, 0);
      fetch_chunk<kDim>(m.kv[1][turn ^ 1], o, c, tile + kChunkTile, kv_head, o.v_at);
    }
    copy_commit();
#pragma unroll 1
    for (int half = 0; half < kChunkTile; half += 16) {
      // No row of this warp attends to positions after its last row.
      if (mine >= n || tile + half > start + mine + 15) continue;
      float w[2][4] = {}, keep[2];
      scores_of<kDim, kDim>(w, m.q[0] + mine * (kDim + kPad), m.q[1] + mine * (kDim + kPad), m.kv[0][turn] + half * (kDim + kPad), 0);
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          int t = tile + half + i * 8 + two + e % 2, end = start + mine + g + e / 2 * 8;  // the row's own position
          bool seen = t <= end && t < c.end && (o.window == 0 || t > end - o.window);
          w[i][e] = seen ? w[i][e] * o.scale * kLog2E : -INFINITY;
        }
      weigh(sum, w, keep);
#pragma unroll
      for (int i = 0; i < kDim / 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) out[i][e] *= keep[e / 2];
      add_values<kDim>(out, w, m.kv[1][turn] + half * (kDim + kPad));
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    int at_row = mine + g + r * 8;
    if (at_row >= n) continue;
    float by = 1;
    if (o.extra) {
      float sink = at<const float>(o.extra)[head] * kLog2E, best = fmaxf(sink, sum.most[r]);
      by = exp2_fast(sum.most[r] - best);
      sum.total[r] = sum.total[r] * by + exp2_fast(sink - best);
    }
    by /= sum.total[r];
    int64_t to = (int64_t(row + at_row) * o.heads + head) * kDim + two;
#pragma unroll
    for (int i = 0; i < kDim / 8; i++) put_two(o, to + i * 8, out[i][2 * r] * by, out[i][2 * r + 1] * by);
  }
}

template <int kDim>
TD_KERNEL(kMmaThreads) attend_chunk(td_op o, Step s) {
  wait_previous();
  ChunkMemory<kDim> &m = *reinterpret_cast<ChunkMemory<kDim> *>(shared_memory());
  int first = block_x() * kChunkRows, rows = live(s, o), head = block_y();
  int end = first + kChunkRows < rows ? first + kChunkRows : rows;
  for (int row = first; row < end;) {
    int n = 1;
    while (row + n < end && s.row_span[row + n] == s.row_span[row]) n++;
    if (in_chunk(s, row)) chunk_span<kDim>(m, o, s, row, n, head);
    row += n;
  }
}
