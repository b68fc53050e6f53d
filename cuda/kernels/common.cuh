// The common parts of kernels: their view of a step, and reductions over a block.
#pragma once

#include "../api.h"
#include "ptx.cuh"

// Step is the device's copy of td_step. Kernels read everything that changes between steps
// from it, so that a graph recorded once serves every step of its bucket.
struct Step {
  const int32_t *counts, *ids, *positions, *row_span, *adapters, *out_rows, *slots, *tables;
  const td_draw *draws;
  const uint64_t *rules;
  int32_t *drawn;    // two of [outputs], the draws of even and odd steps, for the next step
  int32_t *sampled;  // host memory: two of [outputs], of even and odd steps
  td_probs *probs;   // host memory: two of [outputs]
  uint32_t *done;    // host memory
  const int32_t *alone;  // the number of rows that attend_tiles does not process, then these rows
  int32_t outputs;   // capacity
  int32_t tokens, seqs, blocks;  // strides
};

constexpr int kSpanSlots = 64;  // bound on the slots of one span of an expert

// live returns the number of rows of an operation in this step.
TD_DEVICE int live(const Step &s, const td_op &o) { return s.counts[o.outputs] * (o.slots > 0 ? o.slots : 1); }

// drawn_of returns the draws of a step by its sequence number.
TD_DEVICE int32_t *drawn_of(const Step &s, int number) { return s.drawn + (number & 1) * s.outputs; }

// token_id returns a row's token: the host's, or one that the previous step has drawn.
TD_DEVICE int token_id(const Step &s, int row) {
  int id = s.ids[row];
  return id < 0 ? drawn_of(s, s.counts[3] - 1)[-1 - id] : id;
}

template <class T>
TD_HOST_DEVICE T *at(td_address a) {
  return reinterpret_cast<T *>(a);
}

// put_result stores number i of an operation's result. put_two stores numbers i and i + 1, for even
// i. halves of an operation that a kernel gets is 1 if dst is bf16, else 0.
TD_DEVICE void put_result(const td_op &o, int64_t i, float v) {
  if (o.halves) at<uint16_t>(o.dst)[i] = uint16_t(bf16_pack(v, 0));
  else at<float>(o.dst)[i] = v;
}
TD_DEVICE void put_two(const td_op &o, int64_t i, float x, float y) {
  if (o.halves) at<uint32_t>(o.dst)[i / 2] = bf16_pack(x, y);
  else *reinterpret_cast<Float2 *>(at<float>(o.dst) + i) = {{x, y}};
}

// order_of returns the choices by their slots, which route_few stores after the slots by choices.
TD_DEVICE int32_t *order_of(const td_op &o, const Step &s) {
  return at<int32_t>(o.slot) + int64_t(o.outputs ? s.outputs : s.tokens) * o.top_k;
}

// block_sum returns the sum over all threads to each of them. scratch is a float per warp,
// which the caller must not reuse before another barrier.
template <int kThreads>
TD_DEVICE float block_sum(float v, float *scratch) {
  v = warp_sum(v);
  if (lane_id() == 0) scratch[thread_id() / 32] = v;
  sync();
  float total = 0;
  for (int i = 0; i < kThreads / 32; i++) total += scratch[i];
  return total;
}

// fp4_value returns one of MXFP4's sixteen numbers.
TD_DEVICE float fp4_value(unsigned code) {
  unsigned e = code >> 1 & 3, m = code & 1, sign = (code & 8) << 28;
  // With e 0: 0 or a half; otherwise 2^(e-1)·(1+m/2).
  return bits_float(sign | (e ? (126 + e) << 23 | m << 22 : m ? 126u << 23 : 0));
}

// e8m0 returns 2^(code-127).
TD_DEVICE float e8m0(unsigned code) { return bits_float(code ? code << 23 : 1u << 22); }

// row_length returns the length of a matrix's rows with their padding.
TD_HOST_DEVICE int64_t row_length(int type, int64_t in) {
  return type == TD_FP8 ? (in + 15) / 16 * 16 : type == TD_INT8 || type == TD_INT4 ? (in + 63) / 64 * 64 : in;
}

// fp8_scale and group_scale return the scale of one number of a matrix, stored after the numbers.
TD_DEVICE float fp8_scale(const char *w, td_scales s, int64_t out, int64_t in, int64_t row, int64_t col) {
  const float *scales = reinterpret_cast<const float *>(w + out * row_length(TD_FP8, in));
  return scales[(row >> s.rows) * (((in - 1) >> s.cols) + 1) + (col >> s.cols)];
}
TD_DEVICE float group_scale(const char *w, int type, int64_t out, int64_t in, int64_t i) {  // of number i of all
  int64_t all = out * row_length(type, in);
  return bf16_float(reinterpret_cast<const uint16_t *>(w + (type == TD_INT8 ? all : all / 2))[i / 32]);
}

// element returns one number of a matrix [out, in] of any type.
TD_DEVICE float element(const char *w, int type, td_scales s, int64_t out, int64_t in, int64_t row, int64_t col) {
  int64_t i = row * in + col;
  if (type == TD_F32) return reinterpret_cast<const float *>(w)[i];
  if (type == TD_BF16) return bf16_float(reinterpret_cast<const uint16_t *>(w)[i]);
  if (type >= TD_FP8) {
    int64_t at = row * row_length(type, in) + col;
    if (type == TD_FP8) {
      float v[4];
      fp8_four(static_cast<unsigned char>(w[at]), v);
      return v[0] * fp8_scale(w, s, out, in, row, col);
    }
    float scale = group_scale(w, type, out, in, at);
    if (type == TD_INT8) return float(static_cast<signed char>(w[at])) * scale;
    uint32_t word = reinterpret_cast<const uint32_t *>(w)[at / 8];
    return float(int(word >> (at % 8 / 2 * 4 + at % 2 * 16) & 15) - 8) * scale;
  }
  unsigned byte = static_cast<unsigned char>(w[i / 2]);
  unsigned scale = static_cast<unsigned char>(w[out * in / 2 + i / 32]);
  return fp4_value(byte >> (i & 1) * 4 & 15) * e8m0(scale);
}

// activate returns a gated MLP's result for a gate and the number that it gates.
TD_DEVICE float activate(int act, float g, float u) {
  switch (act) {
    case 1: return g * 0.5f * (1 + tanhf(0.7978845608028654f * (g + 0.044715f * g * g * g))) * u;
    case 2:
      g = fminf(g, 7.0f);
      u = fminf(fmaxf(u, -7.0f), 7.0f);
      return g / (1 + expf(-1.702f * g)) * (u + 1);
    default: return g / (1 + expf(-g)) * u;
  }
}
