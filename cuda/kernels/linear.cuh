// Products with weights, dst[row] = a[row]·wᵀ + bias, of all rows or, for experts, of spans of
// slots that share a matrix. For few rows: gemv, a warp for some outputs, bound by the
// weights' bytes. For more: gemm on tensor cores, with the weights on the sixteen-row side.
// Each activation is split into three bf16 whose sum is exact. That costs nothing, because
// the weights' bytes are the limit and not the products.
#pragma once
#include "product.cuh"

constexpr int kGemvThreads = 128;

// Narrow types have scales that need a multiplication of their own.
TD_HOST_DEVICE constexpr bool scaled(int type) { return type == TD_FP8 || type == TD_INT8 || type == TD_INT4; }

TD_HOST_DEVICE constexpr int gemv_outputs(int type, int rows) { return rows == 1 || type == TD_MXFP4 ? 2 : 4; }

// gemv_blocks is how many blocks a multiprocessor runs at once. With more of them, compilers spill
// registers: ptxas 12.9 sooner on 10.0 and 12.0 than before, there also with one row of fp8, and
// ptxas 13.0 with one row of fp8 or int8 on 12.0.
TD_HOST_DEVICE constexpr int gemv_blocks(int type, int rows) {
  if (rows == 1) return kArch >= 120 && (type == TD_FP8 || (kCuda >= 13 && type == TD_INT8)) ? 3 : 4;
  if (kArch >= 100) return type == TD_FP8 ? 2 : 3;
  return type == TD_MXFP4 || type == TD_INT8 || type == TD_INT4 ? 3 : 4;
}

// Lane is the part of a matrix's row that a lane reads at once, widened.
template <int kType>
struct Lane {
  static constexpr int kWidth = kType == TD_MXFP4 || kType == TD_INT4 ? 32 : kType == TD_FP8 || kType == TD_INT8 ? 16 : 8;
  Vec4 raw[kType == TD_F32 ? 2 : 1];
  float scale;
};

template <int kType>
TD_DEVICE void lane_load(Lane<kType> &l, const char *w, td_scales s, int64_t out, int64_t in, int64_t row, int64_t col) {
  int64_t i = row * row_length(kType, in) + col;
  if constexpr (kType == TD_F32) {
    const Vec4 *p = reinterpret_cast<const Vec4 *>(w + i * 4);
    l.raw[0] = load_once(p);
    l.raw[1] = load_once(p + 1);
  } else if constexpr (kType == TD_BF16) {
    l.raw[0] = load_once(reinterpret_cast<const Vec4 *>(w + i * 2));
  } else if constexpr (kType == TD_FP8) {
    l.raw[0] = load_once(reinterpret_cast<const Vec4 *>(w + i));
    l.scale = fp8_scale(w, s, out, in, row, col);
  } else if constexpr (scaled(kType)) {
    l.raw[0] = load_once(reinterpret_cast<const Vec4 *>(w + (kType == TD_INT8 ? i : i / 2)));
    l.scale = group_scale(w, kType, out, in, i);
  } else {
    l.raw[0] = load_once(reinterpret_cast<const Vec4 *>(w + i / 2));
    l.scale = e8m0(static_cast<unsigned char>(w[out * in / 2 + i / 32]));
  }
}

// int8_pair returns numbers 2i and 2i + 1 of a word's four, and int4_pair of its eight, times
// a scale of bf16, without rounding. The stored numbers are 128, or 8, larger, and become
// the low bits of a float, or a bf16, whose unit in the last place is one.
TD_DEVICE void int8_pair(float v[2], uint32_t word, int i, float scale) {
  word ^= 0x80808080u;
  float less = scale * -(32768.0f + 128);
  v[0] = fuse(bits_float(bytes_of(word, 0x47000000u, 0x7504 | (2 * i) << 4)), scale, less);
  v[1] = fuse(bits_float(bytes_of(word, 0x47000000u, 0x7504 | (2 * i + 1) << 4)), scale, less);
}
TD_DEVICE void int4_pair(float v[2], uint32_t word, int i, float scale) {
  uint32_t two = (word >> 4 * i & 0x000f000fu) | 0x43004300u;
  float less = scale * -(128.0f + 8);
  v[0] = fuse(bf16_low(two), scale, less);
  v[1] = fuse(bf16_high(two), scale, less);
}

// lane_values returns eight numbers of a Lane, from 8·part on, without MXFP4's common factor.
template <int kType>
TD_DEVICE void lane_values(float v[8], const Lane<kType> &l, int part) {
  if constexpr (kType == TD_FP8) {
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      fp8_four(l.raw[0].v[part * 2 + j / 4], v + j);
#pragma unroll
      for (int e = 0; e < 4; e++) v[j + e] *= l.scale;
    }
  } else if constexpr (kType == TD_INT8) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) int8_pair(v + j, l.raw[0].v[part * 2 + j / 4], j % 4 / 2, l.scale);
  } else if constexpr (kType == TD_INT4) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) int4_pair(v + j, l.raw[0].v[part], j / 2, l.scale);
  } else
#pragma unroll
  for (int j = 0; j < 8; j++) {
    if constexpr (kType == TD_F32) v[j] = bits_float(l.raw[j / 4].v[j % 4]);
    else if constexpr (kType == TD_BF16) v[j] = j % 2 ? bf16_high(l.raw[0].v[j / 2]) : bf16_low(l.raw[0].v[j / 2]);
    else v[j] = fp4_value(l.raw[0].v[part] >> j * 4 & 15);
  }
}

constexpr int kGemvAhead = 1024;  // bytes of a row that gemv requests before it waits: of two turns

// gemv with kGated 1 computes outputs of a gate and of the joined matrix that it gates, and
// writes only the activation of both.
template <int kType, int kRows, int kGated>
TD_KERNEL_OF(kGemvThreads, gemv_blocks(kType, kRows)) gemv(td_op o, Step s) {
  constexpr int kOut = gemv_outputs(kType, kRows), kWidth = Lane<kType>::kWidth, kEach = kGated ? kOut / 2 : kOut;
  Target t = kGated ? whole(o) : target(o, kGemvThreads / 32 * kOut);
  if (kRows == 1 && !o.table) {  // more rows leave no registers for it
    constexpr int kRowsOfBlock = kGemvThreads / 32 * kEach;
    prefetch_weights<kType, kGemvThreads>(t.w, t.n, o.k, t.block * kRowsOfBlock, kRowsOfBlock, 0, kGemvAhead);
    if constexpr (kGated) prefetch_weights<kType, kGemvThreads>(o.more[0].w, o.n, o.k, t.block * kRowsOfBlock, kRowsOfBlock, 0, kGemvAhead);
  }
  wait_previous();
  Part p = part(o, t, s, block_y()), q = p;
  if constexpr (kGated) q = part(o, {o.more[0].w, o.more[0].bias, 0, o.n, 0, 0}, s, block_y());
  int out = (t.block * (kGemvThreads / 32) + thread_id() / 32) * kEach, lane = lane_id();
  if (out >= t.n) return;
  bool aligned = o.k % (kType == TD_BF16 ? 8 : 4) == 0;  // MXFP4 has multiples of 32; other narrow rows are padded
  int whole = aligned ? o.k / kWidth * kWidth : 0;
  for (int row = 0; row < p.count; row += kRows) {
    float sum[kOut][kRows] = {};
    const float *x[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r++) x[r] = at<const float>(o.a) + int64_t(p.first + (row + r < p.count ? row + r : row)) * o.k;
#pragma unroll(kRows > 1 || kType == TD_F32 || kType == TD_MXFP4 ? 1 : kType == TD_BF16 ? 4 : 2)
    for (int col = lane * kWidth; col < whole; col += 32 * kWidth) {
      Lane<kType> w[kOut];
#pragma unroll
      for (int j = 0; j < kOut; j++) lane_load<kType>(w[j], j < kEach ? p.w : q.w, j < kEach ? p.scales : q.scales, t.n, o.k, out + j % kEach < t.n ? out + j % kEach : out, col);
#pragma unroll
      for (int part = 0; part < kWidth / 8; part++) {
        float v[kOut][8];
#pragma unroll
        for (int j = 0; j < kOut; j++) {
          lane_values<kType>(v[j], w[j], part);
          if constexpr (kType == TD_MXFP4)
#pragma unroll
            for (int e = 0; e < 8; e++) v[j][e] *= w[j].scale;
        }
#pragma unroll
        for (int r = 0; r < kRows; r++)
#pragma unroll
          for (int half = 0; half < 8; half += 4) {
            Float4 in = *reinterpret_cast<const Float4 *>(x[r] + col + part * 8 + half);
#pragma unroll
            for (int j = 0; j < kOut; j++)
#pragma unroll
              for (int e = 0; e < 4; e++) sum[j][r] = fuse(v[j][half + e], in.v[e], sum[j][r]);
          }
      }
    }
    for (int col = whole + lane; col < o.k; col += 32)
#pragma unroll
      for (int j = 0; j < kOut; j++)
        if (out + j % kEach < t.n) {
          float v = element(j < kEach ? p.w : q.w, kType, j < kEach ? p.scales : q.scales, t.n, o.k, out + j % kEach, col);
#pragma unroll
          for (int r = 0; r < kRows; r++) sum[j][r] = fuse(v, x[r][col], sum[j][r]);
        }
#pragma unroll
    for (int r = 0; r < kRows; r++)
#pragma unroll
      for (int j = 0; j < kEach; j++) {
        float v = warp_sum(sum[j][r]), u = kGated ? warp_sum(sum[kOut - kEach + j][r]) : 0;
        if (lane == 0 && row + r < p.count && out + j < t.n) {
          v += p.bias ? p.bias[out + j] : 0;
          if constexpr (kGated) v = activate(o.act - 1, v, u + (q.bias ? q.bias[out + j] : 0));
          at<float>(t.dst)[int64_t(p.first + row + r) * t.n + out + j] = v;
        }
      }
  }
}

// gemm: a block computes kTileOut outputs of kTileRows rows, a warp 16 of the outputs.
constexpr int kGemmThreads = 128;
constexpr int kTileOut = 64;
constexpr int kTileRows = 64;
constexpr int kDepth = 32;   // of a stage
constexpr int kStages = 3;
constexpr int kPadded = kDepth + 8;  // so that lanes read from different banks

// A row's bytes of a stage, and the stride of rows, such that lanes read from different banks.
TD_HOST_DEVICE constexpr int stage_bytes(int type) { return type == TD_BF16 ? kDepth * 2 : type == TD_FP8 || type == TD_INT8 ? kDepth : kDepth / 2; }
TD_HOST_DEVICE constexpr int stage_stride(int type) { return stage_bytes(type) + (stage_bytes(type) > 16 ? 16 : 0); }

template <int kType>
struct GemmStage {
  alignas(16) char w[kTileOut * stage_stride(kType)];
  alignas(16) float x[kTileRows * kPadded];
};

template <int kType>
TD_DEVICE void gemm_fetch(GemmStage<kType> &st, const td_op &o, const Part &p, int n, int out, int first, int count, int k) {
  constexpr int kChunks = stage_bytes(kType) / 16, kNumbers = kDepth / kChunks;
  int64_t length = row_length(kType, o.k);
  for (int i = thread_id(); i < kTileOut * kChunks; i += kGemmThreads) {
    int row = i / kChunks, chunk = i % kChunks;
    int64_t from = int64_t(out + row < n ? out + row : out) * length;
    int col = k + chunk * kNumbers;
    bool there = col < length;
    copy_async(st.w + row * stage_stride(kType) + chunk * 16, p.w + (from + (there ? col : 0)) * stage_bytes(kType) / kDepth, there ? 16 : 0);
  }
  for (int i = thread_id(); i < kTileRows * (kDepth / 4); i += kGemmThreads) {
    int row = i / (kDepth / 4), col = k + i % (kDepth / 4) * 4;
    bool there = row < count && col < o.k;
    copy_async(&st.x[row * kPadded + i % (kDepth / 4) * 4], at<const float>(o.a) + int64_t(p.first + first + (there ? row : 0)) * o.k + (there ? col : 0), there ? 16 : 0);
  }
}

// gemm_weights returns a fragment of 16 outputs and 16 columns, from column k of the stage.
// Narrow numbers are not scaled yet, so that each is a bf16.
template <int kType>
TD_DEVICE void gemm_weights(uint32_t a[4], const GemmStage<kType> &st, int k, float low, float high) {
  int g = thread_id() / 32 * 16 + lane_id() / 4, q = lane_id() % 4;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int row = g + i % 2 * 8, col = k + 2 * q + i / 2 * 8;
    if constexpr (kType == TD_BF16) {
      a[i] = *reinterpret_cast<const uint32_t *>(st.w + row * stage_stride(kType) + col * 2);
    } else if constexpr (kType == TD_FP8 || kType == TD_INT8) {
      uint32_t two = *reinterpret_cast<const uint16_t *>(st.w + row * stage_stride(kType) + col);
      float v[4];
      if constexpr (kType == TD_FP8) fp8_four(two, v);
      else int8_pair(v, two, 0, 1);
      a[i] = bf16_pack(v[0], v[1]);
    } else if constexpr (kType == TD_INT4) {
      float v[2];
      int4_pair(v, *reinterpret_cast<const uint32_t *>(st.w + row * stage_stride(kType) + col / 8 * 4), col % 8 / 2, 1);
      a[i] = bf16_pack(v[0], v[1]);
    } else {
      unsigned two = static_cast<unsigned char>(st.w[row * 16 + col / 2]);
      float by = i % 2 ? high : low;
      a[i] = bf16_pack(fp4_value(two & 15) * by, fp4_value(two >> 4) * by);
    }
  }
}

// gemm_scale returns the scale of a stage's numbers of an output, from column col on.
template <int kType>
TD_DEVICE float gemm_scale(const Part &p, int64_t n, int64_t in, int row, int col) {
  if (row >= n || col >= in) return 0;
  if constexpr (kType == TD_FP8) return fp8_scale(p.w, p.scales, n, in, row, col);
  else if constexpr (scaled(kType)) return group_scale(p.w, kType, n, in, row * row_length(kType, in) + col);
  else return e8m0(static_cast<unsigned char>(p.w[n * in / 2 + row * (in / 32) + col / 32]));
}

template <int kType>
TD_KERNEL(kGemmThreads) gemm(td_op o, Step s, int splits, float *partial, int partial_rows) {
  GemmStage<kType> *stages = reinterpret_cast<GemmStage<kType> *>(shared_memory());
  Target into = target(o, kTileOut);
  int first = o.table ? 0 : block_y() * kTileRows, out = into.block * kTileOut;
  int tiles = (o.k + kDepth - 1) / kDepth;
  int from = int(int64_t(tiles) * block_z() / splits), to = int(int64_t(tiles) * (block_z() + 1) / splits);
  if (!o.table) prefetch_weights<kType, kGemmThreads>(into.w, into.n, o.k, out, kTileOut, int64_t(from) * stage_bytes(kType), (kStages - 1) * stage_bytes(kType));
  wait_previous();
  Part p = part(o, into, s, o.table ? block_y() : 0);
  int count = p.count - first;
  if (count <= 0) return;
  count = count < kTileRows ? count : kTileRows;
  float sum[kTileRows / 8][4] = {};
  int g = lane_id() / 4, q = lane_id() % 4, warp_out = out + thread_id() / 32 * 16;
  for (int i = 0; i < kStages - 1; i++) {
    if (from + i < to) gemm_fetch<kType>(stages[i], o, p, into.n, out, first, count, (from + i) * kDepth);
    copy_commit();
  }
  for (int t = from; t < to; t++) {
    float scale[kDepth / 16][2];  // of rows lane/4 and lane/4 + 8; twice the same for groups of 32
    if constexpr (kType != TD_BF16)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (kType != TD_FP8 && i >= 2) scale[1][i % 2] = scale[0][i % 2];
        else scale[i / 2][i % 2] = gemm_scale<kType>(p, into.n, o.k, warp_out + g + i % 2 * 8, t * kDepth + i / 2 * 16);
      }
    copy_wait<kStages - 2>();
    sync();
    int next = t + kStages - 1;
    if (next < to) gemm_fetch<kType>(stages[(next - from) % kStages], o, p, into.n, out, first, count, next * kDepth);
    copy_commit();
    const GemmStage<kType> &st = stages[(t - from) % kStages];
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t a[4];
      gemm_weights<kType>(a, st, k, scale[k / 16][0], scale[k / 16][1]);
#pragma unroll
      for (int n = 0; n < kTileRows / 8; n++) {
        if (n * 8 >= count) continue;
        const float *x = &st.x[(n * 8 + g) * kPadded + k + 2 * q];
        uint32_t low[3], high[3];
        split_pair(x[0], x[1], low);
        split_pair(x[8], x[9], high);
        float own[4] = {};  // sums of narrow numbers, before scaling
#pragma unroll
        for (int part = 2; part >= 0; part--) {
          uint32_t b[2] = {low[part], high[part]};
          mma(scaled(kType) ? own : sum[n], a, b);
        }
        if constexpr (scaled(kType))
#pragma unroll
          for (int i = 0; i < 4; i++) sum[n][i] = fuse(own[i], scale[k / 16][i / 2], sum[n][i]);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kTileRows / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int row = n * 8 + 2 * q + i % 2, to_out = warp_out + g + i / 2 * 8;
      if (row >= count || to_out >= into.n) continue;
      int64_t to_row = p.first + first + row;
      if (splits > 1) partial[(int64_t(block_z()) * partial_rows + to_row) * all_outputs(o) + into.before + to_out] = sum[n][i];
      else at<float>(into.dst)[to_row * into.n + to_out] = sum[n][i] + (p.bias ? p.bias[to_out] : 0);
    }
}

// split_sum adds the parts of products that were split along their columns, in order.
TD_KERNEL(256) split_sum(td_op o, Step s, int splits, const float *partial, int partial_rows) {
  wait_previous();
  int64_t i = int64_t(block_x()) * 256 + thread_id(), all = all_outputs(o);
  if (i >= int64_t(live(s, o)) * all) return;
  float sum = 0;
  for (int z = 0; z < splits; z++) sum += partial[int64_t(z) * partial_rows * all + i];
  int64_t row = i / all, n = o.n;
  int col = int(i % all);
  td_address dst = o.dst, bias = o.bias;
#pragma unroll
  for (int j = 0; j < 2; j++)
    if (o.more[j].n > 0 && col >= n) {
      col -= int(n);
      n = o.more[j].n;
      dst = o.more[j].dst;
      bias = o.more[j].bias;
    }
  at<float>(dst)[row * n + col] = sum + (bias ? at<const float>(bias)[col] : 0);
}

// narrow converts rows of activations to bf16. Rows that are not live become zeros, so that
// they stay finite.
TD_KERNEL(256) narrow(td_op o, Step s, uint16_t *to, int64_t all) {
  wait_previous();
  int64_t i = (int64_t(block_x()) * 256 + thread_id()) * 2;
  if (i >= all) return;
  bool there = i / o.k < live(s, o);
  const float *from = at<const float>(o.a) + i;
  reinterpret_cast<uint32_t *>(to)[i / 2] = there ? bf16_pack(from[0], from[1]) : 0;
}

// widen converts a matrix of narrow numbers to bf16, with one rounding each.
template <int kType>
TD_KERNEL(256) widen(td_op o, uint16_t *to) {
  wait_previous();
  constexpr int kWidth = Lane<kType>::kWidth;
  const char *w = at<const char>(o.w);
  int64_t i = int64_t(block_x()) * 256 + thread_id(), each = (o.k + kWidth - 1) / kWidth, row = i / each;
  int col = int(i % each) * kWidth;
  if (row >= o.n) return;
  to += row * o.k + col;
  if (col + kWidth > o.k) {
    for (int j = 0; col + j < o.k; j++) to[j] = uint16_t(bf16_pack(element(w, kType, o.scales, o.n, o.k, row, col + j), 0));
    return;
  }
  Lane<kType> l;
  lane_load<kType>(l, w, o.scales, o.n, o.k, row, col);
#pragma unroll
  for (int part = 0; part < kWidth / 8; part++) {
    float v[8];
    lane_values<kType>(v, l, part);
    reinterpret_cast<Vec4 *>(to)[part] = {{bf16_pack(v[0], v[1]), bf16_pack(v[2], v[3]), bf16_pack(v[4], v[5]), bf16_pack(v[6], v[7])}};
  }
}

// spread stores the bias in every row.
TD_KERNEL(256) spread(td_op o, int64_t all) {
  wait_previous();
  int64_t i = int64_t(block_x()) * 256 + thread_id();
  if (i < all) at<float>(o.dst)[i] = at<const float>(o.bias)[i % o.n];
}
