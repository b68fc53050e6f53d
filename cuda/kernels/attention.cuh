// Attention over paged KV, causal, with windows and sinks. Pages are K [kv_heads,
// block_tokens, dim], then V the same; of a latent [block_tokens, dim], whose first
// columns are the values.
#pragma once
#include "common.cuh"

// in_chunk reports whether attend_tiles processes the row, if it has its size.
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

// For kernels on tensor cores.
constexpr int kTile = 16;          // positions of a tile
constexpr int kMmaThreads = 128;
constexpr int kMmaWarps = kMmaThreads / 32;
constexpr int kPad = 8;            // bf16 after each row, so that lanes read from different banks

// A team of warps shares a tile. Each warp has a slice of the columns.
template <int kDim>
struct Shape {
  static constexpr int kSlice = kDim < 128 ? kDim : 128;
  static constexpr int kTeam = kDim / kSlice;
  static constexpr int kTeams = kMmaWarps / kTeam;
  static constexpr int kStride = kDim + kPad;       // of queries
  static constexpr int kTileStride = kSlice + kPad;
};

constexpr float kLog2E = 1.4426950408889634f;

// A part is a range of positions of a context. Long contexts are cut at multiples of a size that
// depends on the row's position, and not on the other rows of the step.
constexpr int kPart = 512;
constexpr int kParts = 32;  // bound on the parts; longer contexts have longer parts

// part_size returns a multiple of least.
TD_HOST_DEVICE int part_size(int end, int least) {
  int size = (end + kParts - 1) / kParts;
  return size <= least ? least : (size + least - 1) / least * least;
}
