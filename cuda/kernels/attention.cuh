// Attention over paged KV, causal, with windows and sinks. Pages are K [kv_heads,
// block_tokens, dim], then V the same; of a latent [block_tokens, dim], whose first
// columns are the values.
#pragma once
#include "common.cuh"

// in_chunk reports whether attend_chunk processes the row.
TD_DEVICE bool in_chunk(const Step &s, int row) { return s.row_span[row] & TD_IN_CHUNK; }

// Context is the part of the KV that a row attends to: positions [first, end) of its block table.
struct Context {
  const int32_t *table;
  int first, end;
};

TD_DEVICE Context context(const td_op &o, const Step &s, int row) {
  Context c;
  c.table = s.tables + (int64_t(o.group) * s.seqs + (s.row_span[row] & ~TD_IN_CHUNK)) * s.blocks;
  c.end = s.positions[row] + 1;
  c.first = o.window > 0 && c.end > o.window ? c.end - o.window : 0;
  return c;
}

// place returns the offset of K of a position and a head, in elements; V is v_at further.
TD_DEVICE const char *page_of(const td_op &o, const Context &c, int position) {
  return at<const char>(o.kv) + int64_t(c.table[position / o.block_tokens]) * o.page_bytes;
}

// kv_number returns element i of keys or values, of FP8 without its scale.
TD_DEVICE float kv_number(int type, const char *page, int64_t i) {
  if (type == TD_BF16) return bf16_float(reinterpret_cast<const uint16_t *>(page)[i]);
  if (type == TD_FP8) {
    float v[4];
    fp8_four(static_cast<unsigned char>(page[i]), v);
    return v[0];
  }
  return reinterpret_cast<const float *>(page)[i];
}

constexpr int kPlainThreads = 128;

// attend_plain supports every type and size: one block for each head of a row, one thread for
// one of 128 positions at a time. Tiles begin at fixed absolute positions, so that sums
// depend neither on the batch nor on the chunk.
TD_KERNEL(kPlainThreads) attend_plain(td_op o, Step s) {
  float *scratch = reinterpret_cast<float *>(shared_memory());  // [8]
  float *p = scratch + 8, *q = p + kPlainThreads;                // [128], [dim]
  int row = block_x(), head = block_y(), tid = thread_id();
  if (row >= live(s, o)) return;
  Context c = context(o, s, row);
  int64_t kv_head = head / (o.heads / o.kv_heads);
  const float *from = at<const float>(o.a) + (int64_t(row) * o.heads + head) * o.dim;
  for (int d = tid; d < o.dim; d += kPlainThreads) q[d] = from[d];
  bool scaled = o.type == TD_FP8;
  float scale = o.scale * (scaled ? at<const float>(o.w)[kv_head] : 1);
  float sink = o.extra ? at<const float>(o.extra)[head] : 0;
  float most = o.extra ? sink : -INFINITY, total = o.extra ? 1 : 0, out[4] = {};
  sync();
  for (int tile = c.first / kPlainThreads * kPlainThreads; tile < c.end; tile += kPlainThreads) {
    int t = tile + tid;
    float score = -INFINITY;
    if (t >= c.first && t < c.end) {
      const char *page = page_of(o, c, t);
      int64_t k = (kv_head * o.block_tokens + t % o.block_tokens) * o.dim;
      float sum = 0;
      for (int d = 0; d < o.dim; d++)
        sum = fuse(q[d], kv_number(o.type, page, k + d), sum);
      score = sum * scale;
      if (o.cap > 0) score = o.cap * tanhf(score / o.cap);
    }
    float best = warp_max(score);
    if (lane_id() == 0) scratch[tid / 32] = best;
    sync();
    best = fmaxf(fmaxf(scratch[0], scratch[1]), fmaxf(scratch[2], scratch[3]));
    best = fmaxf(best, most);
    float weight = score == -INFINITY ? 0 : expf(score - best), keep = most == -INFINITY ? 0 : expf(most - best);
    p[tid] = weight;
    total = total * keep + block_sum<kPlainThreads>(weight, scratch + 4);
    most = best;
    int lo = c.first > tile ? c.first - tile : 0, hi = c.end - tile < kPlainThreads ? c.end - tile : kPlainThreads;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int d = tid + j * kPlainThreads;
      if (d >= o.k) continue;
      float sum = 0;
      for (int i = lo; i < hi; i++) {
        const char *page = page_of(o, c, tile + i) + o.v_at;
        int64_t v = (kv_head * o.block_tokens + (tile + i) % o.block_tokens) * o.dim + d;
        sum = fuse(p[i], kv_number(o.type, page, v), sum);
      }
      out[j] = out[j] * keep + sum;
    }
    // All threads meet at the first barrier above before p is written again.
  }
#pragma unroll
  for (int j = 0; j < 4; j++) {
    int d = tid + j * kPlainThreads;
    if (d < o.k) at<float>(o.dst)[int64_t(row) * o.n + head * o.k + d] = out[j] / total * (scaled ? at<const float>(o.bias)[kv_head] : 1);
  }
}
