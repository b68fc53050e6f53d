// Draws tokens from logits by the rules of engine/sample: a block for an output. What
// a request's own rules change (masks, bias, penalties) is changed in a copy.
// The generator, the weights and the order of tokens are the same, so the same
// request draws the same token on either side; sums are added in another order,
// which decides only where a draw falls within 1e-12 of an edge.
#pragma once
#include "common.cuh"

constexpr int kSampleThreads = 256;
constexpr int kDigits = 2048;

struct SampleMemory {
  alignas(16) uint64_t mass[kDigits];   // per digit: tokens, or their weights in units of 2^-44
  double sums[kSampleThreads];          // weight of each thread's tokens
  float best[kSampleThreads / 32];
  int at[kSampleThreads / 32];
  int counts[kSampleThreads];           // of a thread's tokens: those that tie with the last kept
  uint32_t prefix;
  uint64_t before;
  int token;
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

// exp2_table is 2^(j/32), by bits.
TD_CONSTANT(uint64_t, exp2_table[32]) = {
    0x3ff0000000000000, 0x3ff059b0d3158574, 0x3ff0b5586cf9890f, 0x3ff11301d0125b51, 0x3ff172b83c7d517b,
    0x3ff1d4873168b9aa, 0x3ff2387a6e756238, 0x3ff29e9df51fdee1, 0x3ff306fe0a31b715, 0x3ff371a7373aa9cb,
    0x3ff3dea64c123422, 0x3ff44e086061892d, 0x3ff4bfdad5362a27, 0x3ff5342b569d4f82, 0x3ff5ab07dd485429,
    0x3ff6247eb03a5585, 0x3ff6a09e667f3bcd, 0x3ff71f75e8ec5f74, 0x3ff7a11473eb0187, 0x3ff82589994cce13,
    0x3ff8ace5422aa0db, 0x3ff93737b0cdc5e5, 0x3ff9c49182a3f090, 0x3ffa5503b23e255d, 0x3ffae89f995ad3ad,
    0x3ffb7f76f2fb5e47, 0x3ffc199bdd85529c, 0x3ffcb720dcef9069, 0x3ffd5818dcfba487, 0x3ffdfc97337b9b5f,
    0x3ffea4afa2a490da, 0x3fff50765b6e4540};

// weight_of is e^x for x <= 0: engine/sample's polynomial, bit for bit.
TD_DEVICE double weight_of(double x) {
  if (!(x >= -60)) return 0;
  int64_t k = int64_t(add_rn(mul_rn(x, 46.16624130844683), -0.5));
  double f = double(k);
  double r = add_rn(add_rn(x, -mul_rn(f, 0.02166084938653512)), -mul_rn(f, 5.9631716539705866e-12));
  double p = add_rn(mul_rn(r, 1.0 / 120), 1.0 / 24);
  p = add_rn(mul_rn(p, r), 1.0 / 6);
  p = add_rn(mul_rn(p, r), 0.5);
  p = add_rn(mul_rn(p, r), 1);
  p = add_rn(mul_rn(p, r), 1);
  return mul_rn(mul_rn(p, bits_double(exp2_table[k & 31])), bits_double(uint64_t(1023 + (k >> 5)) << 52));
}

TD_DEVICE uint32_t order_key(float v) {
  uint32_t b = v == 0 ? 0 : float_bits(v);
  return b ^ (uint32_t(int32_t(b) >> 31) | 1u << 31);
}

// block_argmax is the largest logit and its place, of several the first; 0 where
// there is none.
TD_DEVICE int block_argmax(const float *logits, int n, SampleMemory &m) {
  float best = -INFINITY;
  int where = n;
  for (int i = thread_id(); i < n; i += kSampleThreads)
    if (logits[i] > best) {
      best = logits[i];
      where = i;
    }
  for (int with = 16; with; with /= 2) {
    float other = shuffle_xor(best, with);
    int place = shuffle_xor(where, with);
    if (other > best || (other == best && place < where)) {
      best = other;
      where = place;
    }
  }
  if (lane_id() == 0) {
    m.best[thread_id() / 32] = best;
    m.at[thread_id() / 32] = where;
  }
  sync();
  for (int w = 0; w < kSampleThreads / 32; w++)
    if (m.best[w] > best || (m.best[w] == best && m.at[w] < where)) {
      best = m.best[w];
      where = m.at[w];
    }
  return where < n ? where : 0;
}

// Draw is what a row's tokens are weighed by.
struct Draw {
  const float *logits;
  int n;
  float max, lowest;
  double inverse, min_p;
};

TD_DEVICE double token_weight(const Draw &d, int i) {
  float v = d.logits[i];
  if (!(v >= d.lowest)) return 0;
  double w = weight_of(mul_rn(add_rn(double(v), -double(d.max)), d.inverse));
  return w >= d.min_p ? w : 0;
}

// select finds the key at which what lies above it and its own reach target, by
// eleven bits a pass: tokens are counted, or weighed where d is given. It leaves
// the key in m.prefix and what lies above it in m.before. Who calls it again has a
// barrier between reading those and that.
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
      float v = logits[i];
      if (v != v) continue;
      uint32_t key = order_key(v);
      if (uint64_t(key) >> (shift + width) != m.prefix) continue;
      uint64_t mass = 1;
      if (d) mass = uint64_t(token_weight(*d, i) * 17592186044416.0);
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
        if (digit == 0) {  // there is less than the target
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

// Cut is which tokens top_p leaves: those above key, and the first so many of key.
struct Cut {
  uint32_t key;
  int ties;
};

TD_DEVICE double kept_weight(const Draw &d, const Cut &c, int i, int &ties) {
  double w = token_weight(d, i);
  if (w == 0) return 0;
  uint32_t key = order_key(d.logits[i]);
  if (key < c.key) return 0;
  if (key == c.key && ties++ >= c.ties) return 0;
  return w;
}

TD_DEVICE Cut cut(const Draw &d, double top_p, double total, SampleMemory &m) {
  if (!(top_p > 0 && top_p < 1)) return {0, d.n};
  select(d.logits, d.n, &d, uint64_t(mul_rn(top_p, total) * 17592186044416.0), m);
  // Of the tokens that tie at the edge as many stay as reach the target.
  uint64_t target = uint64_t(mul_rn(top_p, total) * 17592186044416.0), ties = 1;
  uint32_t key = m.prefix;
  uint32_t bits = key & 1u << 31 ? key ^ 1u << 31 : ~key;
  float v = bits_float(bits);
  uint64_t one = uint64_t(weight_of(mul_rn(add_rn(double(v), -double(d.max)), d.inverse)) * 17592186044416.0);
  if (one && target > m.before) ties = (target - m.before + one - 1) / one;
  return {key, int(ties < uint64_t(d.n) ? ties : uint64_t(d.n))};
}

// draw_token walks the tokens in order, each thread a stretch of them, to the first
// at which the weights so far exceed the draw.
TD_DEVICE int draw_token(const Draw &d, const Cut &c, double u, SampleMemory &m) {
  int each = (d.n + kSampleThreads - 1) / kSampleThreads, tid = thread_id();
  int lo = tid * each < d.n ? tid * each : d.n, hi = lo + each < d.n ? lo + each : d.n;
  int ties = 0;
  for (int i = lo; i < hi; i++) ties += token_weight(d, i) > 0 && order_key(d.logits[i]) == c.key;
  m.counts[tid] = ties;
  sync();
  int before = 0;
  for (int t = 0; t < tid; t++) before += m.counts[t];
  double sum = 0;
  ties = before;
  for (int i = lo; i < hi; i++) sum = add_rn(sum, kept_weight(d, c, i, ties));
  m.sums[tid] = sum;
  sync();
  double total = 0, start = 0;
  int last = 0;
  for (int t = 0; t < kSampleThreads; t++) {
    if (t == tid) start = total;
    total = add_rn(total, m.sums[t]);
    if (m.sums[t] > 0) last = t;
  }
  double rest = mul_rn(u, total);
  if (sum > 0 && rest >= start && (rest < add_rn(start, sum) || tid == last)) {
    rest = add_rn(rest, -start);
    int token = lo;
    ties = before;
    for (int i = lo; i < hi; i++) {
      double w = kept_weight(d, c, i, ties);
      if (w == 0) continue;
      token = i;
      if (rest < w) break;
      rest = add_rn(rest, -w);
    }
    m.token = token;
  }
  sync();
  return m.token;
}

// marked is a logit as its token's mark has it: engine/sample's, bit for bit.
TD_DEVICE float marked(float v, const td_rules &r, const td_mark &k) {
  v = add_rn(v, k.bias);
  if (k.seen) v = v > 0 ? v / r.repetition : mul_rn(v, r.repetition);
  if (k.count > 0) v = add_rn(v, -add_rn(mul_rn(r.frequency, float(k.count)), r.presence));
  return v;
}

// last_mark is the mark of a token that the marks know nothing of yet, with what there
// is in them.
TD_DEVICE td_mark last_mark(td_mark k, const td_rules &r) {
  if (r.follows & 1) k.seen = 1;
  if (r.follows & 2) k.count++;
  return k;
}

// allowed_logit is token i's, where the bitmap of words behind the rules has it.
TD_DEVICE float allowed_logit(const float *logits, const td_rules &r, const uint64_t *allowed, int i) {
  return r.allowed < 0 || (i / 64 < r.allowed && (allowed[i / 64] >> i % 64 & 1)) ? logits[i] : -INFINITY;
}

// rule writes to what rules make of n logits: all, then again those with marks, which
// are of different tokens, then those that are banned, whatever their mark.
TD_DEVICE void rule(const float *logits, float *to, int n, const td_rules &r, const Step &s) {
  const uint64_t *allowed = reinterpret_cast<const uint64_t *>(&r + 1);
  const td_ban *bans = reinterpret_cast<const td_ban *>(allowed + (r.allowed > 0 ? r.allowed : 0));
  const td_mark *marks = reinterpret_cast<const td_mark *>(bans + r.bans);
  int last = r.last < 0 ? -1 : drawn_of(s, s.counts[3] - 1)[r.last];
  for (int i = thread_id(); i < n; i += kSampleThreads) {
    float v = allowed_logit(logits, r, allowed, i);
    to[i] = i == last ? marked(v, r, last_mark({last, 0, 0, 0}, r)) : v;
  }
  sync();
  for (int i = thread_id(); i < r.marks; i += kSampleThreads) {
    td_mark k = marks[i];
    if (k.token == last) k = last_mark(k, r);
    if (k.token >= 0 && k.token < n) to[k.token] = marked(allowed_logit(logits, r, allowed, k.token), r, k);
  }
  sync();
  for (int i = thread_id(); i < r.bans; i += kSampleThreads) {
    td_ban b = bans[i];
    if (b.token >= 0 && b.token < n && (b.after < 0 || b.after == last)) to[b.token] = -INFINITY;
  }
  sync();
}

TD_KERNEL(kSampleThreads) sample(td_op o, Step s) {
  SampleMemory &m = *reinterpret_cast<SampleMemory *>(shared_memory());
  int row = block_x();
  if (row >= s.counts[1]) return;
  const float *logits = at<const float>(o.a) + int64_t(row) * o.n;
  td_draw how = s.draws[row];
  if (how.rules) {
    float *to = at<float>(o.dst) + int64_t(row) * o.n;
    rule(logits, to, o.n, *reinterpret_cast<const td_rules *>(s.rules + how.rules - 1), s);
    logits = to;
  }
  int best = block_argmax(logits, o.n, m), token = best;
  Draw d = {logits, o.n, logits[best], -INFINITY, 1 / double(how.temperature), how.min_p};
  bool greedy = !(how.temperature > 0) || !(d.max - d.max == 0) || !(d.inverse - d.inverse == 0);
  if (!greedy) {
    if (how.top_k > 0 && how.top_k < o.n) {
      select(logits, o.n, nullptr, uint64_t(how.top_k), m);
      uint32_t key = m.prefix;
      d.lowest = bits_float(key & 1u << 31 ? key ^ 1u << 31 : ~key);
    }
    Cut all = {0, o.n};
    double total = 0;
    if (how.top_p > 0 && how.top_p < 1) {
      int tid = thread_id();
      double sum = 0;
      for (int i = tid; i < o.n; i += kSampleThreads) sum += token_weight(d, i);
      m.sums[tid] = sum;
      sync();
      for (int t = 0; t < kSampleThreads; t++) total += m.sums[t];
      all = cut(d, how.top_p, total, m);
    }
    token = draw_token(d, all, uniform(how.seed, how.choice, uint32_t(how.position)), m);
  }
  if (thread_id() == 0) {
    drawn_of(s, s.counts[3])[row] = token;
    s.sampled[(s.counts[3] & 1) * s.outputs + row] = token;
  }
}

struct ProbsMemory {
  double sums[kSampleThreads / 32];
  float best[kSampleThreads / 32];
  int at[kSampleThreads / 32];
  int rank[kSampleThreads / 32];
};

// Better says whether token i with value v comes before j with w.
TD_DEVICE bool better(float v, int i, float w, int j) { return v > w || (v == w && i < j); }

// block_best is the best token of those that are behind (after, behind), by
// log-probability as it is told: rounded, so that ties are the ones that a client sees.
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

// logprobs is what engine/sample's LogProbs tells of the drawn token.
TD_KERNEL(kSampleThreads) logprobs(td_op o, Step s) {
  ProbsMemory &m = *reinterpret_cast<ProbsMemory *>(shared_memory());
  int row = block_x(), n = o.n, warp = thread_id() / 32;
  if (row >= s.counts[1] || s.draws[row].probs == 0) return;
  const float *logits = at<const float>(o.a) + int64_t(row) * n;
  td_probs *to = s.probs + (s.counts[3] & 1) * s.outputs + row;
  int token = drawn_of(s, s.counts[3])[row], wanted = s.draws[row].probs - 1;
  float most;
  block_best(logits, n, 0, INFINITY, -1, most, m);
  if (!(most - most == 0)) {  // nothing to compare, or one that is infinitely likely
    if (thread_id() == 0) {
      to->own = -INFINITY;
      to->rank = -1;  // the host looks for itself
    }
    return;
  }
  float mine = logits[token] != logits[token] ? -INFINITY : logits[token];
  double sum = 0;
  int rank = 0;
  for (int i = thread_id(); i < n; i += kSampleThreads) {
    float v = logits[i] != logits[i] ? -INFINITY : logits[i];
    sum = add_rn(sum, weight_of(add_rn(double(v), -double(most))));
    rank += better(v, i, mine, token);
  }
  for (int with = 16; with; with /= 2) {
    sum = add_rn(sum, shuffle_xor(sum, with));
    rank += shuffle_xor(rank, with);
  }
  if (lane_id() == 0) {
    m.sums[warp] = sum;
    m.rank[warp] = rank;
  }
  sync();
  sum = 0;
  rank = 1;
  for (int w = 0; w < kSampleThreads / 32; w++) {
    sum = add_rn(sum, m.sums[w]);
    rank += m.rank[w];
  }
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

// finish tells the host that the step with this number has ended.
TD_KERNEL(32) finish(Step s) {
  if (thread_id() == 0) publish(s.done, uint32_t(s.counts[3]));
}

// tell writes a number to the host.
TD_KERNEL(32) tell(uint32_t *to, uint32_t number) {
  if (thread_id() == 0) publish(to, number);
}
