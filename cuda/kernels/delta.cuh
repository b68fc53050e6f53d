// The gated delta rule of layers whose memory is a state (backend.DeltaSpec). delta_mix prepares
// the queries, the keys and the factors of all rows, which depend on the qkv of four rows each.
// Then delta computes each sequence's rows one after the other. A column of a matrix depends on no
// other column, so that a block has some columns of one value head, in registers. The order of a
// sum depends on neither the step nor the chunk. Rows that are not live are neither read nor
// written.
//
// A key head's part of a state is as DeltaSpec.State has it: the last rows of qkv, then a matrix
// for each of its value heads.
#pragma once
#include "common.cuh"

constexpr int kMixThreads = 128;
constexpr int kDeltaThreads = 128;
constexpr int kDeltaRows = 32;    // of a matrix, in a lane
constexpr int kDeltaHistory = 3;  // rows of qkv in a state
constexpr float kDeltaEps = 1e-6f;

// delta_record returns the floats that delta_mix writes for a key head of a row: its query and key,
// padded with zeros to width, then decay and beta of each of its value heads.
TD_HOST_DEVICE int64_t delta_record(const td_op &o, int width) { return 2 * width + (2 * (o.kv_heads / o.heads) + 3) / 4 * 4; }

// Delta is a key head's part of a layer's states.
struct Delta {
  const td_state *part;
  int64_t offset;  // of the key head in a page, in floats
  int wide;        // columns of the key head in qkv
};

TD_DEVICE Delta delta_of(const td_op &o, int key) {
  int each = o.heads / o.top_k, values = o.kv_heads / o.heads * o.from, wide = 2 * o.dim + values;
  int64_t unit = int64_t(kDeltaHistory) * wide + int64_t(values) * o.dim;
  return {at<const td_state>(o.table) + key / each, key % each * unit, wide};
}

// page returns the state in a block.
TD_DEVICE float *page(const td_op &o, const Delta &d, int block) {
  return reinterpret_cast<float *>(at<char>(d.part->kv) + int64_t(block) * o.page_bytes) + d.offset;
}

// page_before returns the state after the token before a position, which must not be 0.
TD_DEVICE const float *page_before(const td_op &o, const Step &s, const Delta &d, int span, int position) {
  int place = (position - 1) / o.block_tokens;
  return page(o, d, s.tables[(int64_t(d.part->group) * s.seqs + span) * s.blocks + place]);
}

// block_at returns the block in which a row's state is.
TD_DEVICE int block_at(const td_op &o, const Step &s, const Delta &d, int row) {
  return s.slots[int64_t(d.part->group) * s.tokens + row] / o.block_tokens;
}

TD_DEVICE int span_at(const Step &s, int row) { return s.row_span[row] & ~TD_IN_CHUNK; }

// first_row returns a sequence's first row, or the number of rows after the last sequence.
TD_DEVICE int first_row(const Step &s, int span) {
  int low = 0, high = s.counts[0];
  if (high == s.counts[2]) return span;  // each has one row
  while (low < high) {
    int middle = (low + high) / 2;
    if (span_at(s, middle) < span) low = middle + 1;
    else high = middle;
  }
  return low;
}

// convolved returns one column of a row's convolution, from the oldest input to the newest.
TD_DEVICE float convolved(const float *w, const float x[4]) {
  float y = w[0] * x[0];
#pragma unroll
  for (int i = 1; i < 4; i++) y = fuse(w[i], x[i], y);
  return y / (1 + expf(-y));
}

// delta_mix has a warp for each query, for each key and for the factors of each key head.
TD_KERNEL(kMixThreads) delta_mix(td_op o, Step s, int width) {
  int64_t item = int64_t(block_x()) * (kMixThreads / 32) + thread_id() / 32;
  int what = int(item % 3), key = int(item / 3 % o.heads), row = int(item / 3 / o.heads), lane = lane_id();
  wait_previous();
  if (row >= live(s, o)) return;
  float *to = at<float>(o.list) + (int64_t(row) * o.heads + key) * delta_record(o, width);
  if (what == 2) {
    to += 2 * width;
    for (int j = lane, group = o.kv_heads / o.heads; j < group; j += 32) {
      int head = key * group + j;
      int64_t from = int64_t(row) * o.kv_heads + head;
      float x = at<const float>(o.extra)[from] + at<const float>(o.bias)[head];
      float softplus = x > 20 ? x : log1pf(expf(x));
      to[2 * j] = expf(-expf(at<const float>(o.weights)[head]) * softplus);
      to[2 * j + 1] = 1 / (1 + expf(-at<const float>(o.b)[from]));
    }
    return;
  }
  to += what * width;
  int first = (what * o.heads + key) * o.dim, position = s.positions[row], span = span_at(s, row), before = 1;
  const float *x = at<const float>(o.a) + int64_t(row) * o.k + first, *w = at<const float>(o.w) + 4 * int64_t(first);
  while (before < 4 && row - before >= 0 && span_at(s, row - before) == span) before++;
  const float *from[kDeltaHistory];  // the inputs before, from the oldest one on; null: zeros
  Delta d = delta_of(o, key);
#pragma unroll
  for (int i = 0; i < kDeltaHistory; i++) {
    int back = kDeltaHistory - i;
    from[i] = back < before ? x - int64_t(back) * o.k : nullptr;
    if (back >= before && back <= position)
      from[i] = page_before(o, s, d, span, position - before + 1) + (position - back) % kDeltaHistory * d.wide + what * o.dim;
  }
  float sum = 0;
  for (int i = lane; i < width; i += 32) {
    float y = 0;
    if (i < o.dim) {
      float in[4] = {from[0] ? from[0][i] : 0, from[1] ? from[1][i] : 0, from[2] ? from[2][i] : 0, x[i]};
      y = convolved(w + 4 * i, in);
    }
    to[i] = y;
    sum = fuse(y, y, sum);
  }
  float by = (what ? 1 : 1 / sqrtf(float(o.dim))) / sqrtf(warp_sum(sum) + kDeltaEps);
  for (int i = lane; i < o.dim; i += 32) to[i] *= by;
}

// kDeltaStride is the floats of a row in shared memory: its query, its key and the factors of two
// value heads. kDeltaStaged is the rows in each of two buffers.
template <int kWidth>
constexpr int kDeltaStride = 2 * kWidth + 4;
template <int kWidth>
constexpr int kDeltaStaged = 1024 / kWidth;

// delta computes a sequence's rows for some columns of one value head. kLanes lanes share a column:
// each has kDeltaRows rows of the matrix, in groups of four.
template <int kLanes>
TD_KERNEL_OF(kDeltaThreads, kLanes > 4 || kArch >= 100 ? 3 : 4) delta(td_op o, Step s) {
  constexpr int kRows = kDeltaRows, kWidth = kLanes * kRows, kColumns = 32 / kLanes;  // columns of a warp
  constexpr int kStaged = kDeltaStaged<kWidth>, kStride = kDeltaStride<kWidth>, kPieces = kStride / 4;
  float *staged = reinterpret_cast<float *>(shared_memory());  // [2, kStaged, kStride]
  int span = block_x(), head = block_y(), tile = block_z(), tid = thread_id(), lane = lane_id();
  wait_previous();
  if (span >= s.counts[2]) return;
  int first = first_row(s, span), end = first_row(s, span + 1), start = s.positions[first];
  int group = o.kv_heads / o.heads, key = head / group, j = head % group;
  int col = (tile * (kDeltaThreads / 32) + tid / 32) * kColumns + lane % kColumns, share = lane / kColumns;
  bool in = col < o.from;
  Delta d = delta_of(o, key);
  int64_t matrix = int64_t(kDeltaHistory) * d.wide + int64_t(j) * o.dim * o.from + col;
  int inputs = 2 * o.dim + j * o.from + col;  // the column's place in a row of a state
  auto index = [&](int i) { return i / 4 * (4 * kLanes) + share * 4 + i % 4; };
  auto sum_of = [&](const float parts[4]) {  // of a column
    float sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
#pragma unroll
    for (int with = kColumns; with < 32; with *= 2) sum += shuffle_xor(sum, with);
    return sum;
  };

  // The state before the first row, and the column's inputs before it, the newest one first.
  const float *before = start > 0 ? page_before(o, s, d, span, start) : nullptr;
  float m[kRows], old[kDeltaHistory];
#pragma unroll
  for (int i = 0; i < kRows; i++) m[i] = before && in && index(i) < o.dim ? before[matrix + int64_t(index(i)) * o.from] : 0;
#pragma unroll
  for (int i = 0; i < kDeltaHistory; i++) old[i] = in && i < start ? before[(start - 1 - i) % kDeltaHistory * d.wide + inputs] : 0;

  // save writes the state after a row to its block.
  auto save = [&](int row, int position) {
    float *to = page(o, d, block_at(o, s, d, row));
    if (in) {
#pragma unroll
      for (int i = 0; i < kRows; i++)
        if (index(i) < o.dim) to[matrix + int64_t(index(i)) * o.from] = m[i];
      if (share == 0)
#pragma unroll
        for (int i = 0; i < kDeltaHistory; i++) to[(position + kDeltaHistory - i) % kDeltaHistory * d.wide + inputs] = old[i];
    }
    if (j > 0 || tile > 0) return;
    for (int c = tid; c < 2 * o.dim; c += kDeltaThreads) {  // of the query and the key
      const float *x = at<const float>(o.a) + (c < o.dim ? key * o.dim + c : (o.heads + key - 1) * o.dim + c);
#pragma unroll
      for (int i = 0; i < kDeltaHistory; i++) {
        int at = (position + kDeltaHistory - i) % kDeltaHistory * d.wide + c;
        to[at] = row - i >= first ? x[int64_t(row - i) * o.k] : i <= position ? before[at] : 0;
      }
    }
  };
  // stage starts the copies of some rows from row on.
  int64_t record = delta_record(o, kWidth);
  const float *records = at<const float>(o.list) + key * record;
  auto stage = [&](int row) {
    float *to = staged + (row - first) / kStaged % 2 * (kStaged * kStride);
    for (int i = tid; i < kStaged * kPieces; i += kDeltaThreads) {
      int r = i / kPieces, piece = i % kPieces;
      if (row + r >= end) break;
      const float *from = records + int64_t(row + r) * o.heads * record + (piece < kPieces - 1 ? 4 * piece : 2 * kWidth + j / 2 * 4);
      copy_async(to + r * kStride + 4 * piece, from);
    }
    copy_commit();
  };

  const float *x = at<const float>(o.a) + 2 * o.heads * o.dim + head * o.from + col;
  float w[4], next = in ? x[int64_t(first) * o.k] : 0;
#pragma unroll
  for (int i = 0; i < 4; i++) w[i] = in ? at<const float>(o.w)[4 * (2 * int64_t(o.heads) * o.dim + head * o.from + col) + i] : 0;
  int edge = first + o.block_tokens - start % o.block_tokens;  // the first row of the next place
  stage(first);
  for (int from = first; from < end; from += kStaged) {
    copy_wait<0>();
    sync();
    if (from + kStaged < end) stage(from + kStaged);
    const float *q = staged + (from - first) / kStaged % 2 * (kStaged * kStride);
    for (int row = from; row < end && row < from + kStaged; row++, q += kStride) {
      const float *k = q + kWidth, *factors = k + kWidth + j % 2 * 2;
      float input = next, in4[4] = {old[2], old[1], old[0], input};
      next = in && row + 1 < end ? x[int64_t(row + 1) * o.k] : 0;
      float v = convolved(w, in4), sums[4] = {}, decay = factors[0];
#pragma unroll
      for (int i = 0; i < kRows; i += 4) {
        Float4 four = *reinterpret_cast<const Float4 *>(k + index(i));
#pragma unroll
        for (int e = 0; e < 4; e++) sums[e] = fuse(m[i + e], four.v[e], sums[e]);
      }
      float more = (v - decay * sum_of(sums)) * factors[1];  // the part of v that the matrix does not return for k
#pragma unroll
      for (int e = 0; e < 4; e++) sums[e] = 0;
#pragma unroll
      for (int i = 0; i < kRows; i += 4) {
        Float4 by = *reinterpret_cast<const Float4 *>(k + index(i)), four = *reinterpret_cast<const Float4 *>(q + index(i));
#pragma unroll
        for (int e = 0; e < 4; e++) {
          m[i + e] = fuse(by.v[e], more, m[i + e] * decay);
          sums[e] = fuse(m[i + e], four.v[e], sums[e]);
        }
      }
      float out = sum_of(sums);
      if (in && share == 0) at<float>(o.dst)[int64_t(row) * o.n + head * o.from + col] = out;
      old[2] = old[1];
      old[1] = old[0];
      old[0] = input;
      bool last = row + 1 == end, crosses = row + 1 == edge;
      if (crosses) edge += o.block_tokens;
      if (last || (crosses && block_at(o, s, d, row + 1) != block_at(o, s, d, row))) save(row, start + row - first);
    }
  }
}
