// Low-rank adapters: dst[row] += B·(A·a[row]), with A and B of the row's adapter, in two
// kernels that pass the few numbers between them through memory. Consecutive rows with the
// same adapter are processed together, so that its matrices are read once for all of them.
// Sums depend on a row's columns only, so that a row's bits do not depend on its neighbours.
// The part of a place's rank that its adapter does not use is not read. Rows without an
// adapter are not changed.
#pragma once
#include "common.cuh"

constexpr int kAdaptRows = 8;     // rows processed together
constexpr int kShrinkThreads = 128;
constexpr int kExpandThreads = 128;

// adapt_header returns the bytes before a matrix's A: the rank of each place.
TD_HOST_DEVICE int64_t adapt_header(int places) { return (int64_t(places) * 4 + 255) / 256 * 256; }

// Adapted is one of the joined matrices.
struct Adapted {
  const int32_t *ranks;  // [places]
  const float *a;        // [places, dim, k]
  const float *b;        // [places, dim, n]
  float *low;            // [rows, dim]
  float *dst;            // [rows, n]
  int n;
};

TD_DEVICE Adapted adapted(const td_op &o, int i) {
  td_address w = o.w, bias = o.bias, dst = o.dst;
  int n = o.n;
#pragma unroll
  for (int j = 0; j < 2; j++)
    if (i == j + 1) {
      w = o.more[j].w;
      bias = o.more[j].bias;
      dst = o.more[j].dst;
      n = o.more[j].n;
    }
  return {at<const int32_t>(w), at<const float>(w + adapt_header(o.heads)), at<const float>(bias),
          at<float>(o.extra) + int64_t(i) * o.from * o.dim, at<float>(dst), n};
}

// place_of returns the place of a row's adapter, from 1; 0: none.
TD_DEVICE int place_of(const td_op &o, const Step &s, int row) { return s.adapters[o.outputs ? s.out_rows[row] : row]; }

// run_of returns the number of rows from first, up to end, that have the same adapter.
TD_DEVICE int run_of(const td_op &o, const Step &s, int first, int end, int place) {
  int n = 1;
  while (first + n < end && place_of(o, s, first + n) == place) n++;
  return n;
}

// shrink computes low = A·a. A warp computes one number of each of its rows.
TD_KERNEL(kShrinkThreads) shrink(td_op o, Step s) {
  wait_previous();
  Adapted m = adapted(o, block_z());
  int r = block_y() * (kShrinkThreads / 32) + thread_id() / 32, lane = lane_id();
  int first = block_x() * kAdaptRows, live = s.counts[o.outputs];
  int end = first + kAdaptRows < live ? first + kAdaptRows : live;
  if (r >= o.dim || m.n == 0) return;
  for (int count = 0; first < end; first += count) {
    int place = place_of(o, s, first);
    count = run_of(o, s, first, end, place);
    if (place == 0 || r >= m.ranks[place - 1]) continue;
    const float *w = m.a + (int64_t(place - 1) * o.dim + r) * o.k, *x = at<const float>(o.a) + int64_t(first) * o.k;
    float sum[kAdaptRows] = {};
    int whole = o.k % 4 ? 0 : o.k;
    for (int col = lane * 4; col < whole; col += 128) {
      Float4 a = *reinterpret_cast<const Float4 *>(w + col);
#pragma unroll
      for (int j = 0; j < kAdaptRows; j++)
        if (j < count) {
          Float4 in = *reinterpret_cast<const Float4 *>(x + int64_t(j) * o.k + col);
#pragma unroll
          for (int e = 0; e < 4; e++) sum[j] = fuse(a.v[e], in.v[e], sum[j]);
        }
    }
    for (int col = whole + lane; col < o.k; col += 32)
#pragma unroll
      for (int j = 0; j < kAdaptRows; j++)
        if (j < count) sum[j] = fuse(w[col], x[int64_t(j) * o.k + col], sum[j]);
#pragma unroll
    for (int j = 0; j < kAdaptRows; j++)
      if (j < count) {
        float v = warp_sum(sum[j]);
        if (lane == 0) m.low[int64_t(first + j) * o.dim + r] = v;
      }
  }
}

// expand computes dst += B·low. A thread computes one column of each of its rows.
TD_KERNEL(kExpandThreads) expand(td_op o, Step s) {
  wait_previous();
  Adapted m = adapted(o, block_z());
  int col = block_y() * kExpandThreads + thread_id();
  int first = block_x() * kAdaptRows, live = s.counts[o.outputs];
  int end = first + kAdaptRows < live ? first + kAdaptRows : live;
  if (col >= m.n) return;
  for (int count = 0; first < end; first += count) {
    int place = place_of(o, s, first);
    count = run_of(o, s, first, end, place);
    if (place == 0) continue;
    const float *w = m.b + int64_t(place - 1) * o.dim * m.n + col, *low = m.low + int64_t(first) * o.dim;
    float sum[kAdaptRows] = {};
    for (int r = 0, rank = m.ranks[place - 1]; r < rank; r++) {
      float b = w[int64_t(r) * m.n];
#pragma unroll
      for (int j = 0; j < kAdaptRows; j++)
        if (j < count) sum[j] = fuse(b, low[j * o.dim + r], sum[j]);
    }
#pragma unroll
    for (int j = 0; j < kAdaptRows; j++)
      if (j < count) m.dst[int64_t(first + j) * m.n + col] += sum[j];
  }
}
