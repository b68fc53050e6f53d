// What kernels of products have in common: which matrix and which rows a block works on.
#pragma once
#include "common.cuh"

// Target is the matrix that a block works on, of those that are joined. Blocks process
// one matrix after the other.
struct Target {
  td_address w, bias, dst;  // w: of experts, their table
  int n;                    // outputs
  int block;                // of this matrix
  int before;               // outputs of the previous matrices
};

// whole returns the first matrix as the target of all blocks.
TD_DEVICE Target whole(const td_op &o) { return {o.table ? o.table : o.w, o.bias, o.dst, o.n, block_x(), 0}; }

TD_DEVICE Target target(const td_op &o, int each) {
  int blocks = (o.n + each - 1) / each;
  Target t = whole(o);
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (o.more[i].n > 0 && t.block >= blocks) {
      t = {o.more[i].w, o.more[i].bias, o.more[i].dst, o.more[i].n, t.block - blocks, t.before + t.n};
      blocks = (t.n + each - 1) / each;
    }
  return t;
}

TD_HOST_DEVICE int all_outputs(const td_op &o) { return o.n + o.more[0].n + o.more[1].n; }

// Part is the rows that a block works on, and their matrix.
struct Part {
  const char *w;
  const float *bias;
  int first, count;
  td_scales scales;
};

// part returns span i of an operation on experts, or all rows.
TD_DEVICE Part part(const td_op &o, const Target &t, const Step &s, int i) {
  if (!o.table) return {at<const char>(t.w), at<const float>(t.bias), 0, s.counts[o.outputs], o.scales};
  const int32_t *list = at<const int32_t>(o.list);
  if (i >= list[0]) return {nullptr, nullptr, 0, 0, {}};
  const td_expert &e = at<const td_expert>(t.w)[list[1 + 3 * i]];
  return {at<const char>(e.w), at<const float>(e.bias), list[2 + 3 * i], list[3 + 3 * i], e.scales};
}

// prefetch_rows requests some bytes of rows [row, row+rows) of those of a matrix, each from a
// distance on, by the threads of a block. Bytes and rows beyond the matrix are left out.
template <int kThreads>
TD_DEVICE void prefetch_rows(const char *w, int64_t row_bytes, int of, int row, int rows, int64_t from, int bytes) {
  int each = bytes / 32;
  for (int i = thread_id(); i < rows * each; i += kThreads) {
    int64_t at_row = row + i / each, at_byte = from + i % each * 32;
    if (at_row < of && at_byte < row_bytes) prefetch(w + at_row * row_bytes + at_byte);
  }
}

// number_bits returns the bits of a number of a matrix.
TD_HOST_DEVICE constexpr int number_bits(int type) { return type == TD_F32 ? 32 : type == TD_BF16 ? 16 : type == TD_FP8 || type == TD_INT8 ? 8 : 4; }

// prefetch_weights requests some bytes of each of a matrix's rows, and the scales of groups of
// their numbers.
template <int kType, int kThreads>
TD_DEVICE void prefetch_weights(td_address w, int64_t out, int64_t in, int row, int rows, int64_t from, int bytes) {
  constexpr int kBits = number_bits(kType), kScale = kType == TD_MXFP4 ? 1 : 2;
  int64_t length = row_length(kType, in);
  prefetch_rows<kThreads>(at<const char>(w), length * kBits / 8, int(out), row, rows, from, bytes);
  if constexpr (kBits < 16 && kType != TD_FP8) {
    int64_t numbers = 8 / kBits, scales = length / 32 * kScale;
    int few = int(bytes * numbers / 32 * kScale + 31) / 32 * 32;
    prefetch_rows<kThreads>(at<const char>(w) + out * length * kBits / 8, scales, int(out), row, rows, from * numbers / 32 * kScale, few);
  }
}

// split_pair splits each of two numbers into three bf16 whose sum is the number.
TD_DEVICE void split_pair(float a, float b, uint32_t to[3]) {
#pragma unroll
  for (int i = 0; i < 3; i++) {
    to[i] = bf16_pack(a, b);
    a -= bf16_low(to[i]);
    b -= bf16_high(to[i]);
  }
}
