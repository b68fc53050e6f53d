// Products of up to eight rows with int4 matrices, on tensor cores. As in few.cuh, the weights are
// on the side of sixteen rows, a lane reads a group of 32 numbers and its scale at once, and each
// activation is three bf16, in three of the columns. A product of fragments then has numbers of
// four groups, so that their sums cannot be scaled afterwards. A number times its scale has eleven
// bits, and a bf16 has eight. So a scale is the sum of two bf16 of four bits each, and a number is
// two weights, both exact.
//
// The warps of a team split the columns of a block, and blocks split those of the matrix. The last
// block with the same outputs adds their sums in order. The order of a row's sums depends on the
// matrix only, not on the other rows.
#pragma once
#include "product.cuh"

constexpr int kInt4Rows = 8;        // at once
constexpr int kInt4ExpertRows = 4;  // of an expert, on average: more are faster by tiles of gemm
constexpr int kInt4Threads = 256;
constexpr int kInt4Warps = 4;       // of a team
constexpr int kInt4TeamOut = 32;    // outputs of a team, in two tiles; gated: 16 of either matrix
constexpr int kInt4Out = kInt4Threads / 32 / kInt4Warps * kInt4TeamOut;  // outputs of a block
constexpr int kInt4Round = kInt4Warps * 4 * 32;                          // columns that a team reads at once
constexpr int kInt4Ahead = kInt4Round;  // bytes of a row that are requested before the wait: of two rounds

template <int kRows>
struct Int4Shape {
  static constexpr int kTiles = (3 * kRows + 7) / 8;           // of eight columns
  static constexpr int kColumns = kTiles * 8;
  static constexpr int kStride = (3 * kRows + 1) / 4 * 4 + 2;  // of 16 bytes: lanes of a quarter of a warp read from different banks
  static constexpr bool kAhead = kRows <= 2;  // weights are read a round ahead, where there are registers for them
  static constexpr int kChunk = (kRows > 2 ? 2 : 4) * kInt4Round;  // columns of activations in shared memory
};

// Int4Lane is what a lane reads at once: a group of each of four rows of weights, and its scale.
struct Int4Lane {
  Vec4 raw[4];
  uint32_t scale[4];
};

// int4_codes returns numbers 2i and 2i + 1 of a word of eight, plus 136, in bf16.
TD_DEVICE uint32_t int4_codes(uint32_t word, int i) { return pick(word >> 4 * i, 0x000f000fu, 0x43004300u); }

// int4_rows writes columns [first, end) of rows of activations to shared memory: for each word of
// eight weights of a group, a column of each row and part, with numbers (0, 1) to (6, 7). Numbers
// from column end on are 0, up to the end of the last round. With weights, the numbers of the only
// row are multiplied by them. int4_rows returns the sum of the squares of the numbers that the
// thread has read.
template <int kRows>
TD_DEVICE float int4_rows(Vec4 *x, const float *from, const float *weights, int rows, int k, int first, int end, int groups) {
  using S = Int4Shape<kRows>;
  constexpr int kWords = S::kChunk / 8;
  int words = (end - first + kInt4Round - 1) / kInt4Round * (kInt4Round / 8);
  float squares = 0;
  for (int i = thread_id(); i < rows * kWords; i += kInt4Threads) {
    int row = i / kWords, word = i % kWords, col = first + word * 8;
    if (word >= words) continue;
    Float4 in[2] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (col + half * 4 >= end) continue;
      in[half] = *reinterpret_cast<const Float4 *>(from + int64_t(row) * k + col + half * 4);
      Float4 by = {{1, 1, 1, 1}};
      if (weights) by = *reinterpret_cast<const Float4 *>(weights + col + half * 4);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        squares = fuse(in[half].v[e], in[half].v[e], squares);
        in[half].v[e] *= by.v[e];
      }
    }
    Vec4 *to = x + (word % 4 * groups + word / 4) * S::kStride + row * 3;
    uint32_t parts[4][3];
#pragma unroll
    for (int j = 0; j < 4; j++) split_pair(in[j / 2].v[j % 2 * 2], in[j / 2].v[j % 2 * 2 + 1], parts[j]);
#pragma unroll
    for (int j = 0; j < 3; j++) to[j] = {{parts[0][j], parts[1][j], parts[2][j], parts[3][j]}};
  }
  return squares;
}

// few_int4 computes products of up to kRows rows at once. Each of the grid's z blocks has columns
// of its own, a multiple of kInt4Round; without experts there may be several, if all rows are
// processed at once. partial is [z, x, kRows, kInt4Out], and with a norm [z, x] sums of squares
// follow; arrived counts the blocks of the same outputs, from 0.
template <int kGated, int kRows>
TD_KERNEL_OF(kInt4Threads, 2) few_int4(td_op o, Step s, int columns, float *partial, int *arrived) {
  using S = Int4Shape<kRows>;
  constexpr int kEach = kGated ? kInt4Out / 2 : kInt4Out;
  int chunk = columns < S::kChunk ? columns : S::kChunk, groups = chunk / 32;
  Vec4 *x = reinterpret_cast<Vec4 *>(shared_memory());                     // [4, groups, kStride]
  float *sums = reinterpret_cast<float *>(x + groups * 4 * S::kStride);   // [warps, kInt4TeamOut, kColumns]
  float *squares = sums + kInt4Threads / 32 * kInt4TeamOut * S::kColumns;  // [warps]
  int *last = reinterpret_cast<int *>(squares + kInt4Threads / 32);
  Target t = kGated ? whole(o) : target(o, kInt4Out);
  if (!o.table) {
    int first = block_z() * columns / 2;  // bytes
    prefetch_weights<TD_INT4, kInt4Threads>(t.w, t.n, o.k, t.block * kEach, kEach, first, kInt4Ahead);
    if constexpr (kGated) prefetch_weights<TD_INT4, kInt4Threads>(o.more[0].w, o.n, o.k, t.block * kEach, kEach, first, kInt4Ahead);
  }
  wait_previous();
  Part p = part(o, t, s, block_y()), q = p;
  if constexpr (kGated) q = part(o, {o.more[0].w, o.more[0].bias, 0, o.n, 0, 0}, s, block_y());
  int tid = thread_id(), lane = lane_id(), warp = tid / 32, team = warp / kInt4Warps, g = lane / 4, quarter = lane % 4, out = t.block * kEach;
  int all = int(row_length(TD_INT4, o.k) / 32);  // groups of a row
  int before[4];  // groups before those of both tiles' rows lane/4 and lane/4 + 8
#pragma unroll
  for (int j = 0; j < 4; j++) {
    int row = out + (kGated ? team * 16 : team * kInt4TeamOut + j / 2 * 16) + g + j % 2 * 8;
    before[j] = (row < t.n ? row : t.n - 1) * all;
  }
  int from = block_z() * columns, to = from + columns < o.k ? from + columns : o.k, end = (to + 31) / 32;
  auto fetch = [&](Int4Lane &l, int group) {  // groups after the last one are multiplied by 0
    group = group + quarter < all ? group + quarter : all - 1;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const char *w = kGated && j / 2 ? q.w : p.w;
      l.raw[j] = load_once(reinterpret_cast<const Vec4 *>(w) + (before[j] + group));
      l.scale[j] = load_short(reinterpret_cast<const uint16_t *>(w + int64_t(t.n) * all * 16) + (before[j] + group));
    }
  };
  if (tid == 0) *last = 0;  // a barrier that last_block lacked would be noticed
  for (int first = 0; first < p.count; first += kRows) {
    int rows = p.count - first < kRows ? p.count - first : kRows;
    int column[S::kTiles];
#pragma unroll
    for (int n = 0; n < S::kTiles; n++) column[n] = n * 8 + g < 3 * rows ? n * 8 + g : 0;
    float sum[2][S::kTiles][4] = {};
    int i = from / 32 + warp % kInt4Warps * 4;
    float own = 0;  // squares
    Int4Lane next = {};
    if (S::kAhead && i < end) fetch(next, i);
    for (int begin = from; begin < to; begin += chunk) {
      int until = begin + chunk < to ? begin + chunk : to;
      if (begin > from) sync();  // all threads have read the previous columns
      own += int4_rows<kRows>(x, at<const float>(o.a) + int64_t(p.first + first) * o.k, o.normalize ? at<const float>(o.extra) : nullptr, rows, o.k, begin, until, groups);
      sync();
      for (; i * 32 < until; i += kInt4Round / 32) {
        Int4Lane l = next;
        if (!S::kAhead) fetch(l, i);
        else if (i + kInt4Round / 32 < end) fetch(next, i + kInt4Round / 32);
        int group = i + quarter - begin / 32;
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
          uint32_t by[2][2], less[2][2];  // both parts of the rows' scales, and 136 times as much
#pragma unroll
          for (int j = 0; j < 2; j++) {
            uint32_t both = l.scale[tile * 2 + j] * 0x10001u;
            by[j][0] = both & 0xfff0fff0u;
            by[j][1] = bf16_fuse(by[j][0], 0xbf80bf80u, both);
            less[j][0] = bf16_times(by[j][0], 0xc308c308u);
            less[j][1] = bf16_times(by[j][1], 0xc308c308u);
          }
#pragma unroll
          for (int word = 0; word < 4; word++) {
            Vec4 b[S::kTiles];
#pragma unroll
            for (int n = 0; n < S::kTiles; n++) b[n] = x[(word * groups + group) * S::kStride + column[n]];
#pragma unroll
            for (int half = 0; half < 2; half++) {
              uint32_t codes[4];
#pragma unroll
              for (int e = 0; e < 4; e++) codes[e] = int4_codes(l.raw[tile * 2 + e % 2].v[word], half * 2 + e / 2);
#pragma unroll
              for (int scales = 1; scales >= 0; scales--) {
                uint32_t a[4];
#pragma unroll
                for (int e = 0; e < 4; e++) a[e] = bf16_fuse(codes[e], by[e % 2][scales], less[e % 2][scales]);
#pragma unroll
                for (int n = 0; n < S::kTiles; n++) mma(sum[tile][n], a, b[n].v + half * 2);
              }
            }
          }
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
#pragma unroll
      for (int n = 0; n < S::kTiles; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[(warp * kInt4TeamOut + tile * 16 + g + e / 2 * 8) * S::kColumns + n * 8 + quarter * 2 + e % 2] = sum[tile][n][e];
    if (o.normalize) {
      own = warp_sum(own);
      if (lane == 0) squares[warp] = own;
    }
    sync();
    auto of_block = [&](int row, int at_out) {
      float all = 0;
#pragma unroll
      for (int part = 2; part >= 0; part--)
#pragma unroll
        for (int of = 0; of < kInt4Warps; of++) all += sums[((at_out / kInt4TeamOut * kInt4Warps + of) * kInt4TeamOut + at_out % kInt4TeamOut) * S::kColumns + row * 3 + part];
      return all;
    };
    auto squares_of_block = [&] {
      float all = 0;
#pragma unroll
      for (int of = 0; of < kInt4Threads / 32; of++) all += squares[of];
      return all;
    };
    int64_t each = int64_t(grid_x()) * (kRows * kInt4Out);
    float *mine = partial + int64_t(block_x()) * (kRows * kInt4Out), *norms = partial + grid_z() * each + block_x();
    if (grid_z() > 1) {
      for (int j = tid; j < rows * kInt4Out; j += kInt4Threads) mine[block_z() * each + j] = of_block(j / kInt4Out, j % kInt4Out);
      if (tid == 0 && o.normalize) norms[block_z() * grid_x()] = squares_of_block();
      if (!last_block(arrived + block_x(), grid_z(), last)) return;
    }
    auto total = [&](int row, int at_out) {
      if (grid_z() == 1) return of_block(row, at_out);
      float all = 0;
      for (int z = 0; z < grid_z(); z++) all += mine[z * each + row * kInt4Out + at_out];
      return all;
    };
    float inverse = 1;
    if (o.normalize) {
      float all = grid_z() == 1 ? squares_of_block() : 0;
      for (int z = 0; z < grid_z() && grid_z() > 1; z++) all += norms[z * grid_x()];
      inverse = 1 / sqrtf(all / o.k + o.scale);
    }
    for (int j = tid; j < kEach * rows; j += kInt4Threads) {
      int row = j / kEach, to_out = j % kEach, at_out = kGated ? to_out / 16 * 32 + to_out % 16 : to_out;
      if (out + to_out >= t.n) continue;
      float v = total(row, at_out) * inverse + (p.bias ? p.bias[out + to_out] : 0), *dst = at<float>(t.dst) + int64_t(p.first + first + row) * t.n + out + to_out;
      if constexpr (kGated) v = activate(o.act - 1, v, total(row, at_out + 16) * inverse + (q.bias ? q.bias[out + to_out] : 0));
      *dst = v + (o.from ? *dst : 0);
    }
    // All threads meet before the sums are written again, and have read x.
  }
}
