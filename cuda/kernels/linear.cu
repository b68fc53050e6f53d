#include "linear.cuh"

#include <algorithm>

#include "../runtime/plan.h"

// kGemvRows is the largest number of rows for which reading each activation separately is
// cheaper than a tile of them.
constexpr int kGemvRows = 4;

// blocks returns the number of blocks for the outputs of all matrices. Each matrix begins a new
// block.
static int blocks(const td_op &o, int each) {
  int n = (o.n + each - 1) / each;
  for (const td_joined &m : o.more) n += (m.n + each - 1) / each;
  return n;
}

template <int kType, int kRows>
static void run_gemv(const Run &r, const td_op &o, int spans) {
  constexpr int each = kGemvThreads / 32 * gemv_outputs(kType, kRows);
  if (o.act) TD_LAUNCH(r.stream, (2 * o.n + each - 1) / each, spans, 1, kGemvThreads, 0, (gemv<kType, kRows, 1>), o, r.step);
  else TD_LAUNCH(r.stream, blocks(o, each), spans, 1, kGemvThreads, 0, (gemv<kType, kRows, 0>), o, r.step);
}

template <int kType>
static void run_gemvs(const Run &r, const td_op &o, int rows, int spans) {
  if (rows <= 1) run_gemv<kType, 1>(r, o, spans);
  else run_gemv<kType, 4>(r, o, spans);
}

// run_fused launches a product of one row of int4 that is normed, added to dst, or both.
static void run_fused(const Run &r, const td_op &o) {
  if (r.rows(o) == 1 && int4_fits(o, 1)) run_int4(r, o, 1, 1);
  else if (r.stream.error.empty()) r.stream.error = "a norm or a sum within a product that does not support it";
}

template <int kType>
static void run_gemm(const Run &r, const td_op &o, int rows, int spans) {
  int outs = blocks(o, kTileOut), all = all_outputs(o), tiles = (o.k + kDepth - 1) / kDepth;
  int down = o.table ? spans : (rows + kTileRows - 1) / kTileRows, splits = 1;
  if (!o.table) {
    // Enough blocks for the device, each with enough work, and all parts within the workspace.
    int64_t part = int64_t(rows) * all * 4;
    splits = std::min({(2 * r.processors + outs * down - 1) / (outs * down), tiles / 8, int(std::min<int64_t>(r.workspace_bytes / part, 16))});
    splits = r.one_order ? 1 : std::max(splits, 1);
  }
  TD_LAUNCH(r.stream, outs, down, splits, kGemmThreads, sizeof(GemmStage<kType>) * kStages, gemm<kType>, o, r.step, splits, r.workspace, rows);
  if (splits > 1) TD_LAUNCH(r.stream, int((int64_t(rows) * all + 255) / 256), 1, 1, 256, 0, split_sum, o, r.step, splits, (const float *)r.workspace, rows);
}

template <int kType>
static const uint16_t *run_widen(const Run &r, const td_op &o) {
  constexpr int width = Lane<kType>::kWidth;
  int64_t all = (o.k + width - 1) / width * int64_t(o.n);
  TD_LAUNCH(r.stream, int((all + 255) / 256), 1, 1, 256, 0, widen<kType>, o, r.blas->widened);
  return r.blas->widened;
}

// wide returns the address of a matrix in bf16.
static const uint16_t *wide(const Run &r, const td_op &o) {
  switch (o.type) {
    case TD_FP8: return run_widen<TD_FP8>(r, o);
    case TD_INT8: return run_widen<TD_INT8>(r, o);
    case TD_INT4: return run_widen<TD_INT4>(r, o);
    default: return at<const uint16_t>(o.w);
  }
}

// run_narrow converts a product's activations to bf16, unless a previous operation has.
static void run_narrow(const Run &r, const td_op &o, int rows) {
  int64_t in = int64_t(rows) * o.k;
  if (r.narrowed != o.a) TD_LAUNCH(r.stream, int((in / 2 + 255) / 256), 1, 1, 256, 0, narrow, o, r.step, r.blas->narrowed, in);
  r.narrowed = o.a;
}

// run_spread stores a product's bias, if any, in its result.
static void run_spread(const Run &r, const td_op &o, int rows) {
  int64_t out = int64_t(rows) * o.n;
  if (o.bias) TD_LAUNCH(r.stream, int((out + 255) / 256), 1, 1, 256, 0, spread, o, out);
}

// run_blas calls cuBLASLt to add a product to its bias.
static void run_blas(const Run &r, const td_op &o, int rows, blaslt::Product *p) {
  run_narrow(r, o, rows);
  run_spread(r, o, rows);
  Stream *s = &r.stream;
  Blas *b = r.blas;
  const uint16_t *x = b->narrowed, *w = wide(r, o);  // reallocated when a larger plan is recorded
  device_call(r.stream, [s, b, p, o, x, w](void *stream) {
    float one = 1, beta = o.bias ? 1 : 0;
    float *dst = at<float>(o.dst);
    int status = b->library.matmul(b->handle, p->desc, &one, w, p->w, x, p->x, &beta, dst, p->dst, dst, p->dst, &p->chosen.algorithm,
                                   b->workspace, size_t(kBlasWorkspace), stream);
    if (status && s->error.empty()) s->error = "cublasLtMatmul: status " + std::to_string(status);
  });
}

// run_pair calls cuBLASLt once for a gate and the matrix that it gates. Distances are positive: the
// first product has the lower matrix and the lower result. So run_pair may exchange the places of
// the two results, which only the activation reads.
static void run_pair(const Run &r, td_op &o, int rows, blaslt::Product *p) {
  if ((o.dst > o.more[0].dst) != (o.w > o.more[0].w)) std::swap(o.dst, o.more[0].dst);
  run_narrow(r, o, rows);
  td_op first = alone(o, 0), second = alone(o, 1);
  if (first.w > second.w) std::swap(first, second);
  run_spread(r, first, rows);
  run_spread(r, second, rows);
  Stream *s = &r.stream;
  Blas *b = r.blas;
  const uint16_t *x = b->narrowed;
  device_call(r.stream, [s, b, p, first, second, x](void *stream) {
    float one = 1, beta = first.bias ? 1 : 0;
    float *dst = at<float>(first.dst);
    int64_t w_to = int64_t(second.w - first.w) / 2, dst_to = int64_t(second.dst - first.dst) / 4;
    int status = blaslt::distances(b->library, *p, w_to, dst_to);
    if (!status) status = b->library.matmul(b->handle, p->desc, &one, at<void>(first.w), p->w, x, p->x, &beta, dst, p->dst, dst, p->dst, &p->chosen.algorithm,
                                            b->workspace, size_t(kBlasWorkspace), stream);
    if (status && s->error.empty()) s->error = "cublasLtMatmul of two matrices: status " + std::to_string(status);
  });
}

// run_gated computes a gate, the matrix that it gates, and the activation of both, one after the
// other.
static void run_gated(const Run &r, const td_op &o) {
  td_op products = o, act = o;
  int rows = r.rows(o);
  products.act = 0;
  blaslt::Product *pair = r.blas && pairs(o) && blas_fits(o, rows) ? r.blas->find(rows, o.n, o.k, 2) : nullptr;
  if (pair) run_pair(r, products, rows, pair);
  else run_linear(r, products);
  act.kind = TD_GATED_ACT;
  act.act = o.act - 1;
  act.a = products.dst;
  act.b = products.more[0].dst;
  run_rows(r, act);
}

template <int kType>
static void run_either(const Run &r, const td_op &o, bool few, int rows, int each, int spans) {
  if (few) run_gemvs<kType>(r, o, each, spans);
  else run_gemm<kType>(r, o, rows, spans);
}

void run_linear(const Run &r, const td_op &o) {
  int rows = r.rows(o), spans = 1, each = rows;
  if (rows == 0) return;  // a plan without outputs
  if (!o.table && (o.normalize || o.from)) return run_fused(r, o);
  if (r.blas && o.act && blas_fits(o, rows)) return run_gated(r, o);
  if (r.blas && o.more[0].n && blas_fits(o, rows)) {
    for (int i = 0; i < 3; i++)
      if (td_op one = alone(o, i); one.n) run_linear(r, one);
    return;
  }
  if (r.blas && blas_fits(o, rows))
    if (blaslt::Product *p = r.blas->find(rows, o.n, o.k)) return run_blas(r, o, rows, p);
  if (o.table) {
    spans = std::min(rows, o.experts) + rows / kSpanSlots;  // of rows of heads: the same number for each
    each = (rows + o.experts - 1) / o.experts;
    if (rows == o.slots) each = 1;  // a row's experts differ
  }
  bool few = each <= kGemvRows && !r.one_order;
  if (few && few_fits(o, each)) return run_few(r, o, spans);
  if (!r.one_order && int4_fits(o, each)) return run_int4(r, o, each, spans);
  if (o.direct || o.b) {
    if (r.stream.error.empty()) r.stream.error = "rows or a sum of experts within a product that does not support it";
    return;
  }
  if (o.act && !few) return run_gated(r, o);
  switch (o.type) {
    case TD_F32: return run_gemvs<TD_F32>(r, o, each, spans);
    case TD_BF16: return run_either<TD_BF16>(r, o, few || o.k % 8, rows, each, spans);
    case TD_FP8: return run_either<TD_FP8>(r, o, few || o.k % 4, rows, each, spans);
    case TD_INT8: return run_either<TD_INT8>(r, o, few || o.k % 4, rows, each, spans);
    case TD_INT4: return run_either<TD_INT4>(r, o, few || o.k % 4, rows, each, spans);
    default: return run_either<TD_MXFP4>(r, o, few, rows, each, spans);
  }
}
