// Draws as sample.cuh does, to the same token, with several blocks of threads per output: each
// has a slice of the vocabulary, and the last one to end continues alone with what all of them
// have written.
//
//   - rule writes the best logit of each slice, and of each thread's logits in it.
//   - weigh computes the sums of engine/sample's blocks. The last block draws. With top_k only
//     the tokens near and above the k-th logit are listed, and the last block draws from the
//     list. With top_p alone the slices also count weights by size, from which the last block
//     finds the interval that has the threshold.
//   - edge, with top_p alone, sums up the weights above the interval and lists those within it.
//     The last block finds the threshold and draws.
//
// Weights of at least 2^-20 are multiples of 2^-43, so that their sums are exact in any order. A
// smaller threshold, a list that is too long, or a vocabulary of more than kMostSlices is left to a
// single block and sample.cuh.
#pragma once
#include "sample.cuh"

constexpr int kMostSlices = 40;                       // of a vocabulary that is drawn from by slices
constexpr int kMostBlocks = kMostSlices * kSumBlocks; // engine/sample's blocks
constexpr int kSliceList = 1024;                      // bound on the listed tokens of a slice
constexpr int kList = 2048;                           // bound on the listed tokens of an output
constexpr int kEdgeShift = 17;                        // weights of an interval share the bits above
constexpr uint32_t kEdgeLeast = 107u << 23;           // the bits of 2^-20
constexpr uint32_t kOneBits = 127u << 23;
constexpr int kEdges = int((kOneBits - kEdgeLeast) >> kEdgeShift) + 1;  // intervals; the last one is of the weight 1
constexpr int kEdgesEach = (kEdges + kSampleThreads - 1) / kSampleThreads;

static_assert(kSlice == kSumBlocks * kSumTokens, "a slice is what block_sums computes at once");

// SliceMemory is the shared memory of weigh and edge.
struct SliceMemory {
  union {
    SampleMemory alone;
    uint64_t mass[kEdges];
    struct {  // of a slice
      int token[kSliceList];
      float value[kSliceList];
    } found;
    struct {  // of the last block
      int token[kList];     // ascending
      float value[kList];
      double above[kMostBlocks];
      double sums[kMostBlocks];
      int16_t start[kMostBlocks + 1];  // place of the first token of each block
      float weights[kSumTokens];
    } list;
  };
  double part[2][kSampleThreads / 32];
  int count[2][kSampleThreads / 32];
  uint64_t scan[kSampleThreads / 32];
  float lowest;
  int found_count, last, at, total;
  int offset[kMostSlices + 1];
};

// row_logits returns the logits of an output after rules and mask.
TD_DEVICE const float *row_logits(const td_op &o, const td_draw &how, int row) {
  return (how.rules || how.mask ? at<const float>(o.dst) : at<const float>(o.a)) + int64_t(row) * o.n;
}

// row_best returns the best of an output's logits and its token, the first of equals; 0 if there
// is none. Each warp computes it.
TD_DEVICE int row_best(const Slices &t, int row, float &best) {
  int where = 0x7fffffff;
  best = -INFINITY;
  for (int i = lane_id(); i < t.slices; i += 32) {
    float v = t.best[row * t.slices + i];
    int place = t.at[row * t.slices + i];
    if (v > best || (v == best && place < where)) {
      best = v;
      where = place;
    }
  }
  for (int with = 16; with; with /= 2) {
    float other = shuffle_xor(best, with);
    int place = shuffle_xor(where, with);
    if (other > best || (other == best && place < where)) {
      best = other;
      where = place;
    }
  }
  return best > -INFINITY ? where : 0;
}

// put_token stores the token of an output. One thread calls it.
TD_DEVICE void put_token(const Step &s, int row, int token) {
  drawn_of(s, s.counts[3])[row] = token;
  s.sampled[(s.counts[3] & 1) * s.outputs + row] = token;
}

// block_count and block_sum64 return the sum over all threads, to each. turn alternates between
// calls, so that one barrier is enough.
TD_DEVICE int block_count(int v, int &turn, SliceMemory &m) {
  turn ^= 1;
  for (int with = 16; with; with /= 2) v += shuffle_xor(v, with);
  if (lane_id() == 0) m.count[turn][thread_id() / 32] = v;
  sync();
  v = 0;
  for (int i = 0; i < kSampleThreads / 32; i++) v += m.count[turn][i];
  return v;
}
TD_DEVICE double block_sum64(double v, int &turn, SliceMemory &m) {
  turn ^= 1;
  for (int with = 16; with; with /= 2) v = add_rn(v, shuffle_xor(v, with));
  if (lane_id() == 0) m.part[turn][thread_id() / 32] = v;
  sync();
  v = 0;
  for (int i = 0; i < kSampleThreads / 32; i++) v = add_rn(v, m.part[turn][i]);
  return v;
}

TD_DEVICE float key_value(uint32_t key) { return bits_float(key & 1u << 31 ? key ^ 1u << 31 : ~key); }

// pivot returns a number that at least k logits reach, and not many more; -Inf if there may be
// fewer logits. It counts the best logits of threads instead of logits.
TD_DEVICE float pivot(const Slices &t, int row, int k, float most, int &turn, SliceMemory &m) {
  const float *best = t.threads + int64_t(row) * t.slices * kSampleThreads;
  uint32_t low = order_key(-INFINITY), high = order_key(most) + 1;
#pragma unroll 1
  while (high - low > 1) {
    uint32_t middle = low + (high - low) / 2;
    float least = key_value(middle);
    int n = 0;
    for (int i = 0; i < t.slices; i++) n += best[i * kSampleThreads + thread_id()] >= least;
    n = block_count(n, turn, m);
    if (n < k) {
      high = middle;
      continue;
    }
    low = middle;
    if (n <= k + k / 4 + 16) break;
  }
  return key_value(low);
}

// collect lists a token of a slice.
TD_DEVICE void collect(SliceMemory &m, int token, float value) {
  int at = atomic_add(&m.found_count, 1);
  if (at < kSliceList) {
    m.found.token[at] = token;
    m.found.value[at] = value;
  }
}

// put_list writes the list of a slice to t, by token.
TD_DEVICE void put_list(const Slices &t, int row, int slice, SliceMemory &m) {
  sync();
  int n = m.found_count, place = row * t.slices + slice;
  if (thread_id() == 0) t.counts[place] = n;
  if (n > kSliceList) return;
  for (int i = thread_id(); i < n; i += kSampleThreads) {
    int token = m.found.token[i], rank = 0;
    for (int j = 0; j < n; j++) rank += m.found.token[j] < token;
    t.tokens[int64_t(place) * kSliceList + rank] = token;
    t.values[int64_t(place) * kSliceList + rank] = m.found.value[i];
  }
}

// get_list reads the lists of all slices. It returns the number of tokens, or -1 if they are
// too many. starts sets list.start, which needs a barrier after get_list.
TD_DEVICE int get_list(const Slices &t, int row, SliceMemory &m) {
  if (thread_id() == 0) {
    int sum = 0;
    for (int i = 0; i < t.slices; i++) {
      int n = t.counts[row * t.slices + i];
      m.offset[i] = sum;
      sum = n > kSliceList || sum < 0 || sum + n > kList ? -1 : sum + n;
    }
    m.total = sum;
  }
  sync();
  int total = m.total;
  if (total < 0) return -1;
  for (int slice = 0; slice < t.slices; slice++) {
    int from = m.offset[slice], n = (slice + 1 < t.slices ? m.offset[slice + 1] : total) - from;
    int64_t place = int64_t(row * t.slices + slice) * kSliceList;
    for (int i = thread_id(); i < n; i += kSampleThreads) {
      m.list.token[from + i] = t.tokens[place + i];
      m.list.value[from + i] = t.values[place + i];
    }
  }
  return total;
}
TD_DEVICE void starts(int listed, int blocks, SliceMemory &m) {
  for (int b = thread_id(); b <= blocks; b += kSampleThreads) {
    int low = 0, high = listed;
    while (low < high) {
      int middle = (low + high) / 2;
      if (m.list.token[middle] < b * kSumTokens) low = middle + 1;
      else high = middle;
    }
    m.list.start[b] = int16_t(low);
  }
}

TD_DEVICE bool keeps(const Kept &k, float w, int token) { return w > k.least || (w == k.least && token <= k.last); }

// list_sum sets list.sums to the sums of blocks of the listed weights that are kept, and those
// above, and returns the sum of them in order.
TD_DEVICE double list_sum(int blocks, const Kept &k, SliceMemory &m) {
  int lane = thread_id() % kSumLanes;
  sync();
#pragma unroll 1
  for (int from = 0; from < blocks; from += kSumBlocks) {
    int b = from + thread_id() / kSumLanes;
    double sum = 0;
    if (b < blocks) {
      sum = lane == 0 ? m.list.above[b] : 0;
      for (int i = m.list.start[b]; i < m.list.start[b + 1]; i++) {
        int token = m.list.token[i];
        float w = m.list.value[i];
        if (token % kSumLanes == lane && keeps(k, w, token)) sum = add_rn(sum, double(w));
      }
    }
    for (int with = kSumLanes / 2; with; with /= 2) sum = add_rn(sum, shuffle_xor(sum, with));
    if (lane == 0 && b < blocks) m.list.sums[b] = sum;
  }
  sync();
  double total = 0;
  for (int b = 0; b < blocks; b++) total = add_rn(total, m.list.sums[b]);
  return total;
}

// list_top_p is engine/sample's top_p for a list, whose threshold has its bits in [low, high).
// found is false if it has not. Weights outside the list are above, or zero.
TD_DEVICE Kept list_top_p(int listed, int blocks, double target, uint32_t low, uint32_t high, int &turn, bool &found, SliceMemory &m) {
  double others = 0;
  for (int b = thread_id(); b < blocks; b += kSampleThreads) others = add_rn(others, m.list.above[b]);
  others = block_sum64(others, turn, m);
  uint32_t below = low, guess = low, until = high;
#pragma unroll 1
  while (until - guess > 1) {  // with sums in another order
    uint32_t middle = guess + (until - guess) / 2;
    float least = bits_float(middle);
    double sum = 0;
    for (int i = thread_id(); i < listed; i += kSampleThreads) sum = add_rn(sum, double(m.list.value[i] >= least ? m.list.value[i] : 0));
    if (add_rn(others, block_sum64(sum, turn, m)) >= target) guess = middle;
    else until = middle;
  }
  uint32_t reaches = below - 1, misses = high + 1, probe = guess + 1;
  double above = 0;
  int none = 0x7fffffff;
#pragma unroll 1
  while (misses - reaches > 1) {
    if (probe <= reaches || probe >= misses) probe = reaches + (misses - reaches) / 2;
    double sum = list_sum(blocks, {bits_float(probe), none}, m);
    if (sum >= target) {
      reaches = probe;
    } else {
      misses = probe;
      above = sum;
      probe = guess;
    }
  }
  found = reaches >= below && misses <= high;
  Kept k = {bits_float(reaches), none};
  if (!found) return k;
  int ties = 0;
  for (int i = thread_id(); i < listed; i += kSampleThreads) ties += m.list.value[i] == k.least;
  ties = block_count(ties, turn, m);
  double stay = ceil(add_rn(target, -above) / double(k.least));
  if (!(stay < ties)) return k;
  int left = int(stay);
  for (int i = 0; i < listed; i++)  // each thread finds the same
    if (m.list.value[i] == k.least && --left == 0) {
      k.last = m.list.token[i];
      break;
    }
  return k;
}

// find_block returns the block of sums in which the draw is, and what the blocks before it
// leave of the draw.
TD_DEVICE int find_block(const double *sums, int blocks, double &rest) {
  int last = 0;
  for (int b = 0; b < blocks; b++) {
    double sum = sums[b];
    if (rest < sum) return b;
    rest = add_rn(rest, -sum);
    if (sum > 0) last = b;
  }
  rest = INFINITY;  // rounding moved the draw past the end
  return last;
}

// find_token draws a token of a block. Only thread 0 returns it.
TD_DEVICE int find_token(const Draw &d, const Kept &k, int block, double rest, int best, float *weights) {
  for (int i = thread_id(); i < kSumTokens; i += kSampleThreads)
    weights[i] = block * kSumTokens + i < d.n ? kept_weight(d, k, block * kSumTokens + i) : 0;
  sync();
  if (thread_id() > 0) return best;
  for (int i = 0; i < kSumTokens; i += 8) {
    double w[8];
#pragma unroll
    for (int j = 0; j < 8; j++) w[j] = weights[i + j];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      if (w[j] == 0) continue;
      best = block * kSumTokens + i + j;
      if (rest < w[j]) return best;
      rest = add_rn(rest, -w[j]);
    }
  }
  return best;
}

// draw_listed draws from a list of weights, all others of which are zero.
TD_DEVICE int draw_listed(const Draw &d, const td_draw &how, int listed, int best, int &turn, SliceMemory &m) {
  int blocks = (d.n + kSumTokens - 1) / kSumTokens;
  Kept k = {0, d.n};
  for (int b = thread_id(); b < blocks; b += kSampleThreads) m.list.above[b] = 0;
  starts(listed, blocks, m);
  double total = list_sum(blocks, k, m);
  if (how.top_p > 0 && how.top_p < 1 && total > 0) {
    bool found;
    k = list_top_p(listed, blocks, mul_rn(double(how.top_p), total), 1, kOneBits + 1, turn, found, m);
    total = list_sum(blocks, k, m);
  }
  double rest = mul_rn(uniform(how.seed, how.choice, uint32_t(how.position)), total);
  int block = find_block(m.list.sums, blocks, rest);
  return find_token(d, k, block, rest, best, m.list.weights);
}

// draw_alone draws with one block of threads. Before its first barrier it writes only sums,
// prefix and before, which no thread reads as a part of something else at its calls.
TD_DEVICE int draw_alone(const Slices &t, Draw d, const td_draw &how, int best, SampleMemory &m) {
  if (t.only) return -1;
  if (how.top_k > 0 && how.top_k < d.n) {
    select(d.logits, d.n, nullptr, uint64_t(how.top_k), m);
    d.lowest = key_value(m.prefix);
  }
  Kept all = {0, d.n};
  int turn = 0;
  if (how.top_p > 0 && how.top_p < 1) all = top_p(d, how.top_p, turn, m);
  return draw_token(d, all, uniform(how.seed, how.choice, uint32_t(how.position)), best, turn, m);
}

// edge_units returns a weight of at least 2^-20 in units of 2^-43, exactly.
TD_DEVICE uint64_t edge_units(float w) { return uint64_t(double(w) * 8796093022208.0); }

// find_edge returns the interval, counted from the least, in which the sum of m.mass from the
// largest weight on reaches target, or -1.
TD_DEVICE int find_edge(uint64_t target, SliceMemory &m) {
  int top = kEdges - 1 - thread_id() * kEdgesEach, lane = lane_id(), warp = thread_id() / 32;
  uint64_t mine = 0;
  for (int j = 0; j < kEdgesEach && top - j >= 0; j++) mine += m.mass[top - j];
  uint64_t sum = mine;
  for (int d = 1; d < 32; d *= 2) {
    uint64_t other = shuffle(sum, lane >= d ? lane - d : lane);
    if (lane >= d) sum += other;
  }
  if (lane == 31) m.scan[warp] = sum;
  if (thread_id() == 0) m.at = -1;
  sync();
  for (int i = 0; i < warp; i++) sum += m.scan[i];
  if (sum >= target && sum - mine < target) {
    uint64_t before = sum - mine;
    for (int j = 0;; j++) {
      before += m.mass[top - j];
      if (before >= target) {
        m.at = top - j;
        break;
      }
    }
  }
  sync();
  return m.at;
}

// Row is what the kernels of slices know of an output.
struct Row {
  td_draw how;
  Draw d;
  int best;
  bool greedy, top_k, top_p;
};

TD_DEVICE Row row_of(const td_op &o, const Step &s, const Slices &t, int row) {
  Row r;
  r.how = s.draws[row];
  float most;
  r.best = row_best(t, row, most);
  r.d = {row_logits(o, r.how, row), o.n, most, float(kLog2E / double(r.how.temperature)), -INFINITY, r.how.min_p};
  r.greedy = !(r.how.temperature > 0) || !(most - most == 0) || !(r.d.scale - r.d.scale == 0);
  r.top_k = r.how.top_k > 0 && r.how.top_k < o.n;
  r.top_p = r.how.top_p > 0 && r.how.top_p < 1;
  return r;
}

// draw_top_k draws from the lists of the slices. It returns false if they are too long.
TD_DEVICE bool draw_top_k(Row &r, const Slices &t, int row, int &turn, int &token, SliceMemory &m) {
  int listed = get_list(t, row, m);
  if (listed < 0) return false;
  sync();
  int k = r.how.top_k;
  if (listed >= k) {
    for (int i = thread_id(); i < listed; i += kSampleThreads) {
      float v = m.list.value[i];
      int above = 0, same = 0;
      for (int j = 0; j < listed; j++) {
        above += m.list.value[j] > v;
        same += m.list.value[j] == v;
      }
      if (above < k && above + same >= k) m.lowest = v;  // the same in each such thread
    }
    sync();
    r.d.lowest = m.lowest;
  }
  for (int i = thread_id(); i < listed; i += kSampleThreads) m.list.value[i] = weight_of(r.d, m.list.value[i]);
  token = draw_listed(r.d, r.how, listed, r.best, turn, m);
  return true;
}

TD_KERNEL(kSampleThreads) weigh(td_op o, Step s, Slices t) {
  wait_previous();
  SliceMemory &m = *reinterpret_cast<SliceMemory *>(shared_memory());
  int row = block_x(), slice = block_y(), first = slice * kSlice, turn = 0;
  if (row >= s.counts[1]) return;
  Row r = row_of(o, s, t, row);
  if (r.greedy) {
    if (slice == 0 && thread_id() == 0) put_token(s, row, r.best);
    return;
  }
  if (t.alone && slice > 0) return;
  int blocks = (o.n + kSumTokens - 1) / kSumTokens;
  double *sums = t.sums + int64_t(row) * blocks;
  uint64_t *mass = t.mass + int64_t(row) * kEdges;
  if (r.top_k && !t.alone) {
    if (thread_id() == 0) m.found_count = 0;
    float least = pivot(t, row, r.how.top_k, r.d.max, turn, m);  // with a barrier
    int end = o.n - first < kSlice ? o.n : first + kSlice;
#pragma unroll 1
    for (int from = first + thread_id(); from < end; from += kTogether * kSampleThreads) {
      float v[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; j++) v[j] = from + j * kSampleThreads < end ? r.d.logits[from + j * kSampleThreads] : -INFINITY;
#pragma unroll
      for (int j = 0; j < kTogether; j++)
        if (v[j] >= least && v[j] > -INFINITY) collect(m, from + j * kSampleThreads, v[j]);
    }
    put_list(t, row, slice, m);
  } else if (!t.alone) {
    if (r.top_p) {
      for (int i = thread_id(); i < kEdges; i += kSampleThreads) m.mass[i] = 0;
      sync();
    }
    int block = slice * kSumBlocks + thread_id() / kSumLanes;
    double sum = 0;
    each_weight(r.d, block, [&](int, float w) {
      sum = add_rn(sum, double(w));
      if (r.top_p && float_bits(w) >= kEdgeLeast) atomic_add64(&m.mass[(float_bits(w) - kEdgeLeast) >> kEdgeShift], edge_units(w));
    });
    for (int with = kSumLanes / 2; with; with /= 2) sum = add_rn(sum, shuffle_xor(sum, with));
    if (thread_id() % kSumLanes == 0 && block < blocks) sums[block] = sum;
    if (r.top_p) {
      sync();
      for (int i = thread_id(); i < kEdges; i += kSampleThreads)
        if (m.mass[i]) atomic_add64(mass + i, m.mass[i]);
    }
  }
  if (!t.alone && !last_block(t.arrived + row, t.slices, &m.last)) return;
  int token = r.best;
  bool drawn = false;
  if (r.top_k && !t.alone) {
    drawn = draw_top_k(r, t, row, turn, token, m);
  } else if (!t.alone) {
    for (int b = thread_id(); b < blocks; b += kSampleThreads) m.list.sums[b] = sums[b];
    if (r.top_p)
      for (int i = thread_id(); i < kEdges; i += kSampleThreads) {
        m.mass[i] = mass[i];
        mass[i] = 0;
      }
    sync();
    double total = 0;
    for (int b = 0; b < blocks; b++) total = add_rn(total, m.list.sums[b]);
    if (r.top_p && total > 0) {
      double target = mul_rn(double(r.how.top_p), total);
      int edge = find_edge(uint64_t(target * 8796093022208.0), m);
      if (thread_id() == 0) {
        t.edge[row] = edge;
        t.target[row] = target;
      }
      if (edge >= 0) return;
    } else {
      if (thread_id() == 0) t.edge[row] = -1;
      double rest = mul_rn(uniform(r.how.seed, r.how.choice, uint32_t(r.how.position)), total);
      int block = find_block(m.list.sums, blocks, rest);
      token = find_token(r.d, {0, o.n}, block, rest, r.best, m.list.weights);
      drawn = true;
    }
  }
  if (!drawn) token = draw_alone(t, r.d, r.how, r.best, m.alone);
  if (thread_id() == 0) put_token(s, row, token);
}

TD_KERNEL(kSampleThreads) edge(td_op o, Step s, Slices t) {
  wait_previous();
  SliceMemory &m = *reinterpret_cast<SliceMemory *>(shared_memory());
  int row = block_x(), slice = block_y(), turn = 0;
  if (row >= s.counts[1]) return;
  Row r = row_of(o, s, t, row);
  if (r.greedy || t.alone || r.top_k || !r.top_p || t.edge[row] < 0) return;
  int blocks = (o.n + kSumTokens - 1) / kSumTokens;
  uint32_t low = kEdgeLeast + (uint32_t(t.edge[row]) << kEdgeShift), high = low + (1u << kEdgeShift);
  double *above = t.sums + int64_t(row) * blocks, sum = 0;
  if (thread_id() == 0) m.found_count = 0;
  sync();
  int block = slice * kSumBlocks + thread_id() / kSumLanes;
  each_weight(r.d, block, [&](int token, float w) {
    if (float_bits(w) >= high) sum += double(w);
    else if (float_bits(w) >= low) collect(m, token, w);
  });
  for (int with = kSumLanes / 2; with; with /= 2) sum += shuffle_xor(sum, with);
  if (thread_id() % kSumLanes == 0 && block < blocks) above[block] = sum;
  put_list(t, row, slice, m);
  if (!last_block(t.arrived + row, t.slices, &m.last)) return;
  int token = r.best, listed = get_list(t, row, m);
  bool found = false;
  if (listed >= 0) {
    for (int b = thread_id(); b < blocks; b += kSampleThreads) m.list.above[b] = above[b];
    sync();
    starts(listed, blocks, m);
    Kept k = list_top_p(listed, blocks, t.target[row], low, high, turn, found, m);
    if (found) {
      double rest = mul_rn(uniform(r.how.seed, r.how.choice, uint32_t(r.how.position)), list_sum(blocks, k, m));
      int at = find_block(m.list.sums, blocks, rest);
      token = find_token(r.d, k, at, rest, r.best, m.list.weights);
    }
  }
  if (!found) token = draw_alone(t, r.d, r.how, r.best, m.alone);
  if (thread_id() == 0) put_token(s, row, token);
}
