// Attention of every type and size, without tensor cores.
#pragma once
#include "attention.cuh"

constexpr int kPlainThreads = 128;

// attend_plain supports every type and size, for those that attend_split and attend_tiles lack: one
// block for each head of a row, one thread for one of 128 positions at a time. Tiles begin at fixed
// absolute positions, so that sums depend neither on the batch nor on the chunk.
TD_KERNEL(kPlainThreads) attend_plain(td_op o, Step s) {
  wait_previous();
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
    if (d < o.k) put_result(o, int64_t(row) * o.n + head * o.k + d, out[j] / total * (scaled ? at<const float>(o.bias)[kv_head] : 1));
  }
}
