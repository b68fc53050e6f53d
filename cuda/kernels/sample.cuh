// Draws tokens from logits as engine/sample defines it, bit for bit, with a block of threads
// per output. A request's rules (allowed tokens, bans, bias, penalties) and the mask of its
// grammar are applied to a copy of its logits first, with a block per slice of the vocabulary.
#pragma once
#include "common.cuh"

#ifndef TD_SAMPLE_THREADS  // see NarrowTwin in kernels.go
#define TD_SAMPLE_THREADS 256
#endif
constexpr int kSampleThreads = TD_SAMPLE_THREADS;  // a multiple of 32, which changes no token
constexpr int kDigits = 2048;
constexpr double kLog2E = 1.4426950408889634;
constexpr int kSumTokens = 512;                       // tokens of one sum: engine/sample's Block
constexpr int kSumLanes = 16;                         // partial sums of a sum
constexpr int kSumBlocks = kSampleThreads / kSumLanes;  // sums computed at once

// The sums of some blocks, double-buffered, so that one barrier per turn is enough.
struct Sums {
  double sums[2][kSumBlocks];
  int ties[2][kSumBlocks];
};

struct SampleMemory {
  alignas(16) uint64_t mass[kDigits];   // per digit: tokens, or their weights in units of 2^-40
  Sums sums;
  float weights[kSumTokens];            // of the block that contains the draw
  uint32_t prefix;
  uint64_t before;
};

TD_DEVICE double uniform(uint64_t seed, uint32_t choice, uint32_t position) {
  uint32_t c0 = choice, c1 = position, c2 = 0, c3 = 0, k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int i = 0; i < 10; i++) {
    uint32_t h0 = mul_high(0xD2511F53u, c0), l0 = 0xD2511F53u * c0, h1 = mul_high(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
    c0 = h1 ^ c1 ^ k0;
    c1 = l1;
    c2 = h0 ^ c3 ^ k1;
    c3 = l0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return double(uint64_t(c0 >> 5) << 26 | uint64_t(c1 >> 6)) * (1.0 / 9007199254740992.0);
}

TD_DEVICE uint32_t order_key(float v) {
  uint32_t b = v == 0 ? 0 : float_bits(v);
  return b ^ (uint32_t(int32_t(b) >> 31) | 1u << 31);
}

// best_of sets best and where to the best of all threads, the lowest place of equals. It uses a
// number per warp of both arrays.
TD_DEVICE void best_of(float &best, int &where, float *bests, int *places) {
  for (int with = 16; with; with /= 2) {
    float other = shuffle_xor(best, with);
    int place = shuffle_xor(where, with);
    if (other > best || (other == best && place < where)) {
      best = other;
      where = place;
    }
  }
  if (lane_id() == 0) {
    bests[thread_id() / 32] = best;
    places[thread_id() / 32] = where;
  }
  sync();
  for (int w = 0; w < kSampleThreads / 32; w++)
    if (bests[w] > best || (bests[w] == best && places[w] < where)) {
      best = bests[w];
      where = places[w];
    }
}

// Draw holds the parameters of a row's weights.
struct Draw {
  const float *logits;
  int n;
  float max, scale, lowest, min_p;
};

// weight_of returns 2^((v - max) * scale), or zero.
TD_DEVICE float weight_of(const Draw &d, float v) {
  float x = mul_rn(add_rn(v, -d.max), d.scale);
  if (!(x >= -90.0f) || !(v >= d.lowest)) return 0;
  float t = add_rn(x, 12582912.0f), f = add_rn(x, -add_rn(t, -12582912.0f));
  float p = add_rn(mul_rn(0.0001545316294214853f, f), 0.001339086336464892f);
  p = add_rn(mul_rn(p, f), 0.009618082557285924f);
  p = add_rn(mul_rn(p, f), 0.05550357114219124f);
  p = add_rn(mul_rn(p, f), 0.24022650760568087f);
  p = add_rn(mul_rn(p, f), 0.6931471880262288f);
  p = add_rn(mul_rn(p, f), 1.0f);
  p = bits_float(float_bits(p) + (float_bits(t) << 23));
  return p >= d.min_p ? p : 0;
}

TD_DEVICE float token_weight(const Draw &d, int i) { return weight_of(d, d.logits[i]); }

constexpr int kTogether = 8;  // logits that a thread reads before it uses them

// each_weight calls f with each token of a block of sums that belongs to the lane, in order, and
// its weight.
template <class F>
TD_DEVICE void each_weight(const Draw &d, int block, F f) {
  int end = (block + 1) * kSumTokens < d.n ? (block + 1) * kSumTokens : d.n;
#pragma unroll 1
  for (int from = block * kSumTokens + thread_id() % kSumLanes; from < end; from += kTogether * kSumLanes) {
    float v[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; j++) v[j] = from + j * kSumLanes < end ? d.logits[from + j * kSumLanes] : -INFINITY;
#pragma unroll
    for (int j = 0; j < kTogether; j++)
      if (from + j * kSumLanes < end) f(from + j * kSumLanes, weight_of(d, v[j]));
  }
}

// Kept is the set of tokens that top_p keeps: those whose weight is above least, and those
// with weight least up to token last.
struct Kept {
  float least;
  int last;
};

TD_DEVICE float kept_weight(const Draw &d, const Kept &k, int i) {
  float w = token_weight(d, i);
  return w > k.least || (w == k.least && i <= k.last) ? w : 0;
}

// block_sums writes to m the sums of kSumBlocks blocks, from first on, and how many of their
// weights equal k.least. Turns alternate between calls.
TD_DEVICE void block_sums(const Draw &d, const Kept &k, int first, int turn, Sums &m) {
  int part = thread_id() / kSumLanes, ties = 0;
  double sum = 0;
  each_weight(d, first + part, [&](int i, float w) {
    ties += w == k.least;
    sum = add_rn(sum, double(w > k.least || (w == k.least && i <= k.last) ? w : 0));
  });
  for (int with = kSumLanes / 2; with; with /= 2) {
    sum = add_rn(sum, shuffle_xor(sum, with));
    ties += shuffle_xor(ties, with);
  }
  if (thread_id() % kSumLanes == 0) {
    m.sums[turn][part] = sum;
    m.ties[turn][part] = ties;
  }
  sync();
}

// row_sum returns the sum of the blocks, in order, and the number of weights equal to k.least.
TD_DEVICE double row_sum(const Draw &d, const Kept &k, int &ties, int &turn, Sums &m) {
  double total = 0;
  ties = 0;
#pragma unroll 1
  for (int first = 0; first * kSumTokens < d.n; first += kSumBlocks) {
    turn ^= 1;
    block_sums(d, k, first, turn, m);
    for (int i = 0; i < kSumBlocks; i++) {  // sums after the last block are zero
      total = add_rn(total, m.sums[turn][i]);
      ties += m.ties[turn][i];
    }
  }
  return total;
}

constexpr double kUnits = 1099511627776.0;  // units of a weight of one: 2^40

// select finds the key at which the count of the larger keys plus its own reaches target, with
// eleven bits a pass. It counts tokens by their logits or, if d is given, their weights. The
// results are the key in m.prefix and the count of the larger keys in m.before. A caller needs
// a barrier between reading the results and another call.
TD_DEVICE void select(const float *logits, int n, const Draw *d, uint64_t target, SampleMemory &m) {
  if (thread_id() == 0) {
    m.prefix = 0;
    m.before = 0;
  }
#pragma unroll 1
  for (int pass = 0; pass < 3; pass++) {
    int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, width = pass == 2 ? 10 : 11;
    for (int i = thread_id(); i < kDigits; i += kSampleThreads) m.mass[i] = 0;
    sync();
    for (int i = thread_id(); i < n; i += kSampleThreads) {
      float v = d ? token_weight(*d, i) : logits[i];
      if (v != v) continue;
      uint32_t key = d ? float_bits(v) : order_key(v);
      if (uint64_t(key) >> (shift + width) != m.prefix) continue;
      uint64_t mass = d ? uint64_t(double(v) * kUnits) : 1;
      if (mass) atomic_add64(&m.mass[key >> shift & ((1u << width) - 1)], mass);
    }
    sync();
    if (thread_id() == 0) {
      int digit = (1 << width) - 1, lowest = digit;
      uint64_t before = m.before;
      for (;; digit--) {
        if (m.mass[digit]) {
          lowest = digit;
          if (before + m.mass[digit] >= target) break;
          before += m.mass[digit];
        }
        if (digit == 0) {  // the total is less than the target
          before -= m.mass[lowest];
          digit = lowest;
          break;
        }
      }
      m.prefix = m.prefix << width | uint32_t(digit);
      m.before = before;
    }
    sync();
  }
}

// top_p is engine/sample's. It finds the threshold in units of 2^-40, checks it against the
// sums of blocks, and if it differs searches by bisection.
TD_DEVICE Kept top_p(const Draw &d, double share, int &turn, SampleMemory &m) {
  int ties = 0, count;
  double total = row_sum(d, {0, d.n}, count, turn, m.sums), target = mul_rn(share, total), above = 0;
  if (total == 0) return {0, d.n};
  select(d.logits, d.n, &d, uint64_t(target * kUnits), m);
  uint32_t low = 0, high = (127u << 23) + 1, guess = m.prefix, probe = guess + 1;
#pragma unroll 1
  while (high - low > 1) {
    if (probe <= low || probe >= high) probe = low + (high - low) / 2;
    double sum = row_sum(d, {bits_float(probe), d.n}, count, turn, m.sums);
    if (sum >= target) {
      low = probe;
      ties = count;
    } else {
      high = probe;
      above = sum;
      probe = guess;
    }
  }
  Kept k = {bits_float(low), d.n};
  double stay = ceil(add_rn(target, -above) / double(k.least));
  if (!(stay < ties)) return k;
  int left = int(stay);
#pragma unroll 1
  for (int first = 0;; first += kSumBlocks) {
    turn ^= 1;
    block_sums(d, k, first, turn, m.sums);
    for (int b = 0; b < kSumBlocks; b++) {
      if (left > m.sums.ties[turn][b]) {
        left -= m.sums.ties[turn][b];
        continue;
      }
      for (k.last = (first + b) * kSumTokens;; k.last++)
        if (token_weight(d, k.last) == k.least && --left == 0) return k;
    }
  }
}

// draw_token searches the blocks, in order, for the first whose sum exceeds the rest of the
// draw, and then its tokens. Only thread 0 returns the token.
TD_DEVICE int draw_token(const Draw &d, const Kept &k, double u, int best, int &turn, SampleMemory &m) {
  int ties, last = 0, at = -1;
  double rest = mul_rn(u, row_sum(d, k, ties, turn, m.sums));
#pragma unroll 1
  for (int first = 0; at < 0 && first * kSumTokens < d.n; first += kSumBlocks) {
    turn ^= 1;
    block_sums(d, k, first, turn, m.sums);
    for (int b = 0; b < kSumBlocks; b++) {
      double sum = m.sums.sums[turn][b];
      if (rest < sum) {
        at = first + b;
        break;
      }
      rest = add_rn(rest, -sum);
      if (sum > 0) last = first + b;
    }
  }
  if (at < 0) {  // rounding moved the draw past the end
    at = last;
    rest = INFINITY;
  }
  for (int i = thread_id(); i < kSumTokens; i += kSampleThreads)
    m.weights[i] = at * kSumTokens + i < d.n ? kept_weight(d, k, at * kSumTokens + i) : 0;
  sync();
  if (thread_id() == 0) {
    for (int i = 0; i < kSumTokens; i++) {
      double w = m.weights[i];
      if (w == 0) continue;
      best = at * kSumTokens + i;
      if (rest < w) break;
      rest = add_rn(rest, -w);
    }
  }
  return best;
}

// marked returns a logit with its token's mark applied, as engine/sample does, bit for bit.
TD_DEVICE float marked(float v, const td_rules &r, const td_mark &k) {
  v = add_rn(v, k.bias);
  if (k.seen) v = v > 0 ? v / r.repetition : mul_rn(v, r.repetition);
  if (k.count > 0) v = add_rn(v, -add_rn(mul_rn(r.frequency, float(k.count)), r.presence));
  return v;
}

// last_mark returns the mark of the token that the marks do not include yet, combined with
// its mark if there is one.
TD_DEVICE td_mark last_mark(td_mark k, const td_rules &r) {
  if (r.follows & 1) k.seen = 1;
  if (r.follows & 2) k.count++;
  return k;
}

// kSlice is the number of tokens of a block of rule: 8,192. Their part of a bitmap is a KB.
constexpr int kSlice = kSumBlocks * kSumTokens;

// Bitmaps of a slice: the mask, and with it the tokens that the rules allow.
struct RuleMemory {
  uint64_t mask[kSlice / 64];
  uint64_t keep[kSlice / 64];
  float best[kSampleThreads / 32];
  int at[kSampleThreads / 32];
};

// has reports whether a bitmap has token i. Lanes with tokens of one word read it together.
TD_DEVICE bool has(const uint64_t *bits, int i) { return reinterpret_cast<const uint32_t *>(bits)[i / 32] >> i % 32 & 1; }

// Slices is the device's memory for draws by slices: see slices.cuh.
struct Slices {
  int slices;      // of an output
  int alone;       // 1: a single block of threads draws
  int only;        // 1, for tests: draws that are left to a single block are token -1
  int *arrived;    // [outputs] blocks that have ended; 0 between kernels
  int *edge;       // [outputs] the interval of the threshold of top_p; -1: drawn
  double *target;  // [outputs] the sum that top_p keeps
  float *best;     // [outputs, slices] the best logit
  int *at;         // [outputs, slices] its token
  float *threads;  // [outputs, slices, kSampleThreads] the best logit of each thread
  double *sums;    // [outputs, blocks of sums]
  uint64_t *mass;  // [outputs, kEdges] sums of the weights in each interval; 0 between kernels
  int *counts;     // [outputs, slices] listed tokens
  int *tokens;     // [outputs, slices, kSliceList]
  float *values;   // [outputs, slices, kSliceList]
};

// slice_best writes the best logit of a slice and of each thread, the first of equals.
TD_DEVICE void slice_best(const float *logits, int n, int row, const Slices &t, RuleMemory &m) {
  int place = row * t.slices + block_y(), where = n;
  float best = -INFINITY;
#pragma unroll 1
  for (int from = thread_id(); from < n; from += kTogether * kSampleThreads) {
    float v[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; j++) v[j] = from + j * kSampleThreads < n ? logits[from + j * kSampleThreads] : -INFINITY;
#pragma unroll
    for (int j = 0; j < kTogether; j++)
      if (v[j] > best) {
        best = v[j];
        where = from + j * kSampleThreads;
      }
  }
  t.threads[int64_t(place) * kSampleThreads + thread_id()] = best;
  best_of(best, where, m.best, m.at);
  if (thread_id() == 0) {
    t.best[place] = best;
    t.at[place] = block_y() * kSlice + where;
  }
}

// rule writes to o.dst the logits of an output that has rules or a mask. Tokens outside the
// mask or the allowed ones become -Inf. Then the logits with marks, which are of different
// tokens, are written again, and then those of banned tokens, whatever their mark. No mark
// changes a token outside the mask. Blocks of one output have different slices. Each also writes
// the best logits of its slice and of each thread.
TD_KERNEL(kSampleThreads) rule(td_op o, Step s, Slices t) {
  wait_previous();
  RuleMemory &m = *reinterpret_cast<RuleMemory *>(shared_memory());
  int row = block_x(), first = block_y() * kSlice, n = o.n - first < kSlice ? o.n - first : kSlice;
  if (row >= s.counts[1]) return;
  td_draw how = s.draws[row];
  const float *logits = at<const float>(o.a) + int64_t(row) * o.n + first;
  if (!how.rules && !how.mask) {
    slice_best(logits, n, row, t, m);
    return;
  }
  float *to = at<float>(o.dst) + int64_t(row) * o.n + first;
  const uint64_t *mask = at<const uint64_t>(o.b) + (int64_t(s.counts[3] & 1) * s.outputs + row) * o.k + first / 64;
  td_rules r = {-1, 0, 0, -1, 1, 0, 0, 0};
  const uint64_t *words = s.rules;
  if (how.rules) {
    r = *reinterpret_cast<const td_rules *>(s.rules + how.rules - 1);
    words += how.rules - 1 + int(sizeof(td_rules) / 8);
  }
  const uint64_t *allowed = words + first / 64;
  const td_ban *bans = reinterpret_cast<const td_ban *>(words + (r.allowed > 0 ? r.allowed : 0));
  const td_mark *marks = reinterpret_cast<const td_mark *>(bans + r.bans);
  int drawn = r.last < 0 ? -1 : drawn_of(s, s.counts[3] - 1)[r.last], last = drawn - first;
  for (int i = thread_id(); i < kSlice / 64; i += kSampleThreads) {
    uint64_t word = !how.mask ? ~uint64_t(0) : first / 64 + i < o.k ? mask[i] : 0;
    m.mask[i] = word;
    m.keep[i] = r.allowed < 0 ? word : first / 64 + i < r.allowed ? word & allowed[i] : 0;
  }
  sync();
#pragma unroll 1
  for (int from = thread_id(); from < n; from += kTogether * kSampleThreads) {
    float v[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      int i = from + j * kSampleThreads;
      v[j] = i < n && has(m.keep, i) ? logits[i] : -INFINITY;
    }
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      int i = from + j * kSampleThreads;
      if (i < n) to[i] = v[j];
    }
  }
  if (last >= 0 && last < n && last % kSampleThreads == thread_id() && has(m.mask, last))  // by the thread that wrote it
    to[last] = marked(has(m.keep, last) ? logits[last] : -INFINITY, r, last_mark({last, 0, 0, 0}, r));
  sync();
#pragma unroll 1
  for (int i = thread_id(); i < r.marks; i += kSampleThreads) {
    td_mark k = marks[i];
    int token = k.token - first;
    if (token < 0 || token >= n || !has(m.mask, token)) continue;
    if (token == last) k = last_mark(k, r);
    to[token] = marked(has(m.keep, token) ? logits[token] : -INFINITY, r, k);
  }
  sync();
#pragma unroll 1
  for (int i = thread_id(); i < r.bans; i += kSampleThreads) {
    td_ban b = bans[i];
    int token = b.token - first;
    if (token >= 0 && token < n && (b.after < 0 || b.after == drawn)) to[token] = -INFINITY;
  }
  sync();
  slice_best(to, n, row, t, m);
}

struct ProbsMemory {
  Sums sums;
  float best[kSampleThreads / 32];
  int at[kSampleThreads / 32];
  int rank[kSampleThreads / 32];
};

// Better reports whether token i with value v ranks before j with w.
TD_DEVICE bool better(float v, int i, float w, int j) { return v > w || (v == w && i < j); }

// block_best returns the best token of those that rank after (after, behind), by the rounded
// log-probability, so that ties are the ones that a client sees.
TD_DEVICE int block_best(const float *logits, int n, double norm, float after, int behind, float &best, ProbsMemory &m) {
  int where = n;
  best = -INFINITY;
  for (int i = thread_id(); i < n; i += kSampleThreads) {
    float v = logits[i], lp = v != v ? -INFINITY : float(add_rn(double(v), -norm));
    if (better(after, behind, lp, i) && better(lp, i, best, where)) {
      best = lp;
      where = i;
    }
  }
  for (int with = 16; with; with /= 2) {
    float other = shuffle_xor(best, with);
    int place = shuffle_xor(where, with);
    if (better(other, place, best, where)) {
      best = other;
      where = place;
    }
  }
  sync();
  if (lane_id() == 0) {
    m.best[thread_id() / 32] = best;
    m.at[thread_id() / 32] = where;
  }
  sync();
  for (int w = 0; w < kSampleThreads / 32; w++)
    if (better(m.best[w], m.at[w], best, where)) {
      best = m.best[w];
      where = m.at[w];
    }
  return where;
}

// logprobs computes engine/sample's LogProbs of the drawn token.
TD_KERNEL(kSampleThreads) logprobs(td_op o, Step s) {
  wait_previous();
  ProbsMemory &m = *reinterpret_cast<ProbsMemory *>(shared_memory());
  int row = block_x(), n = o.n, warp = thread_id() / 32;
  if (row >= s.counts[1] || s.draws[row].probs == 0) return;
  const float *logits = at<const float>(o.a) + int64_t(row) * n;
  td_probs *to = s.probs + (s.counts[3] & 1) * s.outputs + row;
  int token = drawn_of(s, s.counts[3])[row], wanted = s.draws[row].probs - 1;
  float most;
  block_best(logits, n, 0, INFINITY, -1, most, m);
  if (!(most - most == 0)) {  // nothing to compare, or an infinite logit
    if (thread_id() == 0) {
      to->own = -INFINITY;
      to->rank = -1;  // the host computes them
    }
    return;
  }
  float mine = logits[token] != logits[token] ? -INFINITY : logits[token];
  int rank = 0;
  for (int i = thread_id(); i < n; i += kSampleThreads) {
    float v = logits[i] != logits[i] ? -INFINITY : logits[i];
    rank += better(v, i, mine, token);
  }
  for (int with = 16; with; with /= 2) rank += shuffle_xor(rank, with);
  if (lane_id() == 0) m.rank[warp] = rank;
  int ties, turn = 0;
  Draw d = {logits, n, most, float(kLog2E), -INFINITY, 0};
  double sum = row_sum(d, {0, n}, ties, turn, m.sums);  // its barrier also follows the ranks
  rank = 1;
  for (int w = 0; w < kSampleThreads / 32; w++) rank += m.rank[w];
  double norm = add_rn(double(most), log(sum));
  if (thread_id() == 0) {
    to->own = float(add_rn(double(mine), -norm));
    to->rank = rank;
  }
  float after = INFINITY;
  int behind = -1;
  for (int i = 0; i < wanted; i++) {
    float best;
    behind = block_best(logits, n, norm, after, behind, best, m);
    after = best;
    if (thread_id() == 0) {
      to->tokens[i] = behind;
      to->probs[i] = best;
    }
  }
}

// finish reports to the host that the step with this number has ended.
TD_KERNEL(32) finish(Step s) {
  wait_previous();
  if (thread_id() == 0) publish(s.done, uint32_t(s.counts[3]));
}

// write_host writes a number to host memory.
TD_KERNEL(32) write_host(uint32_t *to, uint32_t number) {
  if (thread_id() == 0) publish(to, number);
}
