// Products of one or two rows with MXFP4 matrices, on tensor cores. The weights are on the side of
// sixteen rows. A lane reads a block of 32 numbers and its scale at once. The order of a product's
// columns does not matter, so that no lane needs another lane's numbers. Each activation is three
// bf16, in three of the eight columns. The warps of a block split the columns of the matrix.
#pragma once
#include "product.cuh"

constexpr int kFewThreads = 128;
constexpr int kFewWarps = kFewThreads / 32;
constexpr int kFewOut = 32;                 // outputs of a block, in two tiles; gated: 16 of either matrix
constexpr int kFewRows = 2;                 // at once
constexpr int kFewColumns = 3 * kFewRows;   // of 16 bytes: lanes of a quarter of a warp read from different banks
constexpr int kFewAhead = 512;              // bytes of a row that are requested before the wait: of two turns
constexpr int kFewMost = 4096;              // bound on a row, so that it fits into 48 KB

// A weight is computed as 2^-32 of its value, so that scales from 2^-100 to 2^33 are exact.
constexpr int kFewScale = 126 - 32;

// fp4_pair returns numbers i and i+4 of a word of eight times 2^-126, in bf16.
template <int kNumber>
TD_DEVICE uint32_t fp4_pair(uint32_t word) {
  uint32_t top = word << (12 - 4 * kNumber);
  return (top & 0x80008000u) | (top >> 6 & 0x01c001c0u);
}

// few_rows writes rows of activations to shared memory: for each word of eight weights of a block,
// a column of each row and part, with numbers (0, 4), (1, 5), (2, 6) and (3, 7). With order, the
// rows are those of its choices.
TD_DEVICE void few_rows(Vec4 *x, const float *from, const int32_t *order, int top_k, int rows, int k) {
  int blocks = k / 32;
  for (int i = thread_id(); i < rows * (k / 8); i += kFewThreads) {
    int row = i / (k / 8), word = i % (k / 8);
    const Float4 *p = reinterpret_cast<const Float4 *>(from + int64_t(order ? order[row] / top_k : row) * k + word * 8);
    Float4 low = p[0], high = p[1];
    Vec4 *to = x + (word % 4 * blocks + word / 4) * kFewColumns + row * 3;
    uint32_t parts[4][3];
#pragma unroll
    for (int j = 0; j < 4; j++) split_pair(low.v[j], high.v[j], parts[j]);
#pragma unroll
    for (int j = 0; j < 3; j++) to[j] = {{parts[0][j], parts[1][j], parts[2][j], parts[3][j]}};
  }
}

// few_mxfp4 may also combine the products of a row's experts. The last of the blocks with the same
// outputs then adds them in the order of their ranks; arrived counts these blocks, from 0.
template <int kGated>
TD_KERNEL_OF(kFewThreads, 4) few_mxfp4(td_op o, Step s, int *arrived) {
  Vec4 *x = reinterpret_cast<Vec4 *>(shared_memory());  // [4, k/32, columns]
  float *sums = reinterpret_cast<float *>(x + o.k / 8 * kFewColumns);  // [warps, outputs, 8]
  constexpr int kEach = kGated ? kFewOut / 2 : kFewOut;
  Target t = kGated ? whole(o) : target(o, kFewOut);
  if (!o.table) {
    prefetch_rows<kFewThreads>(at<const char>(t.w), o.k / 2, t.n, t.block * kEach, kEach, 0, kFewAhead);
    if constexpr (kGated) prefetch_rows<kFewThreads>(at<const char>(o.more[0].w), o.k / 2, t.n, t.block * kEach, kEach, 0, kFewAhead);
  }
  wait_previous();
  Part p = part(o, t, s, block_y()), q = p;
  if constexpr (kGated) q = part(o, {o.more[0].w, o.more[0].bias, 0, o.n, 0, 0}, s, block_y());
  int tid = thread_id(), lane = lane_id(), warp = tid / 32, g = lane / 4, quarter = lane % 4, blocks = o.k / 32, out = t.block * kEach;
  const char *w[2][2];        // of both tiles, rows lane/4 and lane/4 + 8
  const uint8_t *scale[2][2];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const char *base = kGated && j / 2 ? q.w : p.w;
    int64_t row = out + g + j % 2 * 8 + (kGated ? 0 : j / 2 * 16);
    if (row >= t.n) row = t.n - 1;
    w[j / 2][j % 2] = base + row * blocks * 16;
    scale[j / 2][j % 2] = reinterpret_cast<const uint8_t *>(base) + int64_t(t.n) * blocks * 16 + row * blocks;
  }
  for (int first = 0; first < p.count; first += kFewRows) {
    int rows = p.count - first < kFewRows ? p.count - first : kFewRows;
    int slot = p.first + first;
    few_rows(x, at<const float>(o.a) + (o.direct ? 0 : int64_t(slot) * o.k), o.direct ? order_of(o, s) + slot : nullptr, o.top_k, rows, o.k);
    sync();
    const Vec4 *column = x + (g < 3 * rows ? g : 0);
    float sum[2][4] = {};
    for (int i = warp * 4; i < blocks; i += kFewWarps * 4) {
      bool there = i + quarter < blocks;
      int block = there ? i + quarter : blocks - 1;
      Vec4 raw[2][2];
      uint32_t by[2][2];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        raw[j / 2][j % 2] = load_once(reinterpret_cast<const Vec4 *>(w[j / 2][j % 2]) + block);
        by[j / 2][j % 2] = scale[j / 2][j % 2][block];
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        uint32_t exponent = by[j / 2][j % 2] + kFewScale;
        exponent = there ? (exponent < 254 ? exponent : 254) << 7 : 0;
        by[j / 2][j % 2] = exponent | exponent << 16;
      }
#pragma unroll
      for (int word = 0; word < 4; word++) {
        Vec4 b = column[(word * blocks + block) * kFewColumns];
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
          uint32_t low = raw[tile][0].v[word], high = raw[tile][1].v[word], by_low = by[tile][0], by_high = by[tile][1];
          uint32_t a[4] = {bf16_times(fp4_pair<0>(low), by_low), bf16_times(fp4_pair<0>(high), by_high), bf16_times(fp4_pair<1>(low), by_low), bf16_times(fp4_pair<1>(high), by_high)};
          mma(sum[tile], a, b.v);
          uint32_t c[4] = {bf16_times(fp4_pair<2>(low), by_low), bf16_times(fp4_pair<2>(high), by_high), bf16_times(fp4_pair<3>(low), by_low), bf16_times(fp4_pair<3>(high), by_high)};
          mma(sum[tile], c, b.v + 2);
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[(warp * kFewOut + tile * 16 + g + i / 2 * 8) * 8 + quarter * 2 + i % 2] = sum[tile][i];
    sync();
    for (int i = tid; i < kEach * rows; i += kFewThreads) {
      int row = i / kEach, to = i % kEach;
      auto total = [&](int at_out) {
        float all = 0;
#pragma unroll
        for (int part = 2; part >= 0; part--)
#pragma unroll
          for (int from = 0; from < kFewWarps; from++) all += sums[(from * kFewOut + at_out) * 8 + row * 3 + part];
        return all * 0x1p32f;
      };
      if (out + to >= t.n) continue;
      float v = total(to) + (p.bias ? p.bias[out + to] : 0);
      if constexpr (kGated) v = activate(o.act - 1, v, total(16 + to) + (q.bias ? q.bias[out + to] : 0));
      at<float>(t.dst)[int64_t(p.first + first + row) * t.n + out + to] = v;
    }
    // All threads meet before the sums are written again, and have read x.
  }
  if constexpr (!kGated) {
    int *last = reinterpret_cast<int *>(sums + kFewWarps * kFewOut * 8);
    if (!o.b || p.count == 0 || !last_block(arrived + block_x(), at<const int32_t>(o.list)[0], last)) return;
    for (int i = tid; i < kFewOut * s.counts[o.outputs]; i += kFewThreads) {
      int row = i / kFewOut, to = out + i % kFewOut;
      if (to >= o.n) continue;
      float sum = 0, *dst = at<float>(o.b) + int64_t(row) * o.n + to;
      for (int j = 0; j < o.top_k; j++) {
        int64_t choice = int64_t(row) * o.top_k + j;
        sum += at<const float>(o.weights)[choice] * at<const float>(o.dst)[at<const int32_t>(o.slot)[choice] * int64_t(o.n) + to];
      }
      *dst = sum + (o.from ? *dst : 0);
    }
  }
}
