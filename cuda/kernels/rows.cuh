// Operations that treat rows one by one: embedding, norms, rotation, activations.
#pragma once
#include "common.cuh"

constexpr int kRowThreads = 256;

TD_KERNEL(kRowThreads) embed(td_op o, Step s) {
  wait_previous();
  int row = block_x();
  if (row >= live(s, o)) return;
  int id = token_id(s, row) - o.k;
  bool here = id >= 0 && id < o.from;
  float *dst = at<float>(o.dst) + int64_t(row) * o.n;
  for (int i = thread_id(); i < o.n; i += kRowThreads)
    dst[i] = here ? element(at<const char>(o.w), o.type, o.scales, o.from, o.n, id, i) : 0;
}

// norm processes whole rows: first a += b if there is b, then dst = norm(a)·w.
TD_KERNEL(kRowThreads) norm(td_op o, Step s) {
  wait_previous();
  float *scratch = reinterpret_cast<float *>(shared_memory());
  int row = block_x(), n = o.n;
  if (row >= live(s, o)) return;
  float *x = at<float>(o.a) + int64_t(row) * n;
  const float *add = o.b ? at<const float>(o.b) + int64_t(row) * n : nullptr, *w = at<const float>(o.w);
  float sum = 0;
  for (int i = thread_id(); i < n; i += kRowThreads) {
    float v = x[i];
    if (add) x[i] = v = v + add[i];
    sum += v * v;
  }
  float inverse = 1 / sqrtf(block_sum<kRowThreads>(sum, scratch) / n + o.scale);
  for (int i = thread_id(); i < n; i += kRowThreads) put_result(o, int64_t(row) * n + i, x[i] * inverse * (w ? w[i] : 1));
}

constexpr int kNormThreads = 512;

// norm_whole is norm for rows of a multiple of four numbers, at most kFours · 4 · kNormThreads. All
// of its reads start at once, those of the weights first, and nothing is read twice.
template <int kFours>
TD_KERNEL(kNormThreads) norm_whole(td_op o, Step s) {
  float *scratch = reinterpret_cast<float *>(shared_memory());
  int row = block_x(), fours = o.n / 4;
  const Float4 *w = at<const Float4>(o.w), *add = at<const Float4>(o.b);
  Float4 by[kFours], v[kFours], more[kFours];
#pragma unroll
  for (int j = 0; j < kFours; j++) {
    int i = thread_id() + j * kNormThreads;
    by[j] = w && i < fours ? w[i] : Float4{{1, 1, 1, 1}};
  }
  wait_previous();
  if (row >= live(s, o)) return;
  Float4 *x = at<Float4>(o.a) + int64_t(row) * fours;
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kFours; j++) {
    int i = thread_id() + j * kNormThreads;
    v[j] = i < fours ? x[i] : Float4{};
    more[j] = add && i < fours ? add[int64_t(row) * fours + i] : Float4{};
  }
#pragma unroll
  for (int j = 0; j < kFours; j++) {
    int i = thread_id() + j * kNormThreads;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      v[j].v[e] += more[j].v[e];
      sum += v[j].v[e] * v[j].v[e];
    }
    if (add && i < fours) x[i] = v[j];
  }
  float inverse = 1 / sqrtf(block_sum<kNormThreads>(sum, scratch) / o.n + o.scale);
#pragma unroll
  for (int j = 0; j < kFours; j++) {
    int i = thread_id() + j * kNormThreads;
#pragma unroll
    for (int e = 0; e < 4; e++) v[j].v[e] = v[j].v[e] * inverse * by[j].v[e];
    if (i >= fours) continue;
    int64_t to = int64_t(row) * fours + i;
    if (o.halves) at<Vec2>(o.dst)[to] = {{bf16_pack(v[j].v[0], v[j].v[1]), bf16_pack(v[j].v[2], v[j].v[3])}};
    else at<Float4>(o.dst)[to] = v[j];
  }
}

// head_norm processes each head of a row, with a warp per head.
TD_KERNEL(kRowThreads) head_norm(td_op o, Step s) {
  wait_previous();
  int64_t head = int64_t(block_x()) * (kRowThreads / 32) + thread_id() / 32;
  if (head >= int64_t(live(s, o)) * (o.n / o.dim)) return;
  const float *x = at<const float>(o.a) + head * o.dim, *w = at<const float>(o.w);
  float *dst = at<float>(o.dst) + head * o.dim, sum = 0;
  for (int i = lane_id(); i < o.dim; i += 32) sum += x[i] * x[i];
  float inverse = 1 / sqrtf(warp_sum(sum) / o.dim + o.scale);
  for (int i = lane_id(); i < o.dim; i += 32) dst[i] = x[i] * inverse * (w ? w[i] : 1);
}

// angles computes, once a step, the angles of all layers with the same rotation: cosines,
// then sines. The angle is rounded to float first, as in the reference implementations.
TD_KERNEL(kRowThreads) angles(td_op o, Step s) {
  wait_previous();
  int row = block_x(), half = o.dim / 2;
  if (row >= live(s, o)) return;
  float *dst = at<float>(o.dst) + int64_t(row) * o.dim;
  float scale = o.scale;
  if (o.cap != 0) scale *= 1 + o.cap * logf(float(1 + s.positions[row] / o.from));
  for (int i = thread_id(); i < half; i += kRowThreads) {
    float angle = float(s.positions[row]) * at<const float>(o.w)[i];
    dst[i] = cosf(angle) * scale;
    dst[half + i] = sinf(angle) * scale;
  }
}

// turn rotates pair i of a head.
TD_DEVICE void turn(float *x, const float *angle, int i, int half) {
  float a = x[i], b = x[i + half], c = angle[i], d = angle[i + half];
  x[i] = mul_rn(a, c) - mul_rn(b, d);
  x[i + half] = mul_rn(b, c) + mul_rn(a, d);
}

TD_KERNEL(kRowThreads) rope(td_op o, Step s) {
  wait_previous();
  int row = block_x(), half = o.dim / 2;
  if (row >= live(s, o)) return;
  const float *angle = at<const float>(o.b) + int64_t(row) * o.dim;
  for (int i = thread_id(); i < o.n / o.k * half; i += kRowThreads)
    turn(at<float>(o.dst) + int64_t(row) * o.n + (i / half + 1) * o.k - o.dim, angle, i % half, half);
}

// e4m3 returns the byte of the value nearest to f, of two the even one, within +-448.
TD_DEVICE uint8_t e4m3(float f) {
  uint32_t u = float_bits(f), sign = u >> 24 & 0x80, most = 0x43e00000;  // 448
  u &= 0x7fffffff;
  if (u > 0x7f800000) return uint8_t(sign | 0x7f);
  if (u > most) u = most;
  // Below 2^-6 the steps are 2^-9, as those of a float from 2^14 on.
  if (u < 0x3c800000) return uint8_t(sign | (float_bits(bits_float(u) + 16384.0f) - 0x46800000));
  u += 0x7ffff + (u >> 20 & 1);
  return uint8_t(sign | ((u >> 20) - (120 << 3)));
}

TD_DEVICE void put_pair(char *page, int type, int64_t to, float a, float b) {
  if (type == TD_BF16) {
    reinterpret_cast<uint32_t *>(page)[to / 2] = bf16_pack(a, b);
  } else {
    reinterpret_cast<float *>(page)[to] = a;
    reinterpret_cast<float *>(page)[to + 1] = b;
  }
}

// store_row writes a row's keys and values to its slot: pages are K [kv_heads,
// block_tokens, dim], then V the same; of a latent [block_tokens, dim] for both.
// Heads are of even size. kScaled: they are TD_FP8, divided by the scales of their heads.
template <bool kScaled>
TD_DEVICE void store_row(const td_op &o, const Step &s) {
  int row = block_x();
  if (row >= live(s, o)) return;
  int slot = s.slots[o.group * s.tokens + row];
  char *page = at<char>(o.kv) + int64_t(slot / o.block_tokens) * o.page_bytes;
  const float *k = at<const float>(o.a), *v = at<const float>(o.b);
  auto put = [&](char *half, int64_t to, const float *from, td_address scales, int head) {
    if constexpr (kScaled) {
      float scale = at<const float>(scales)[head];
      half[to] = char(e4m3(from[0] / scale));
      half[to + 1] = char(e4m3(from[1] / scale));
    } else {
      put_pair(half, o.type, to, from[0], from[1]);
    }
  };
  for (int i = thread_id() * 2; i < o.n; i += kRowThreads * 2) {
    int64_t to = (int64_t(i / o.dim) * o.block_tokens + slot % o.block_tokens) * o.dim + i % o.dim;
    if (o.v_at == 0) {
      put(page, to, i < o.k ? k + int64_t(row) * o.k + i : v + int64_t(row) * (o.n - o.k) + i - o.k, o.w, 0);
    } else {
      int64_t from = int64_t(row) * o.n + i;
      put(page, to, k + from, o.w, i / o.dim);
      put(page + o.v_at, to, v + from, o.bias, i / o.dim);
    }
  }
}

TD_KERNEL(kRowThreads) store_kv(td_op o, Step s) {
  wait_previous();
  store_row<false>(o, s);
}
TD_KERNEL(kRowThreads) store_kv_fp8(td_op o, Step s) {
  wait_previous();
  store_row<true>(o, s);
}

// place computes the input of attention from a row's products, with a warp per head. It
// norms queries and keys if there are norms, rotates them, and stores keys and values in
// their slot. It replaces two head_norm, two rope and store_kv, with the same bits.
TD_KERNEL(kRowThreads) place(td_op o, Step s) {
  wait_previous();
  int all = o.heads + 2 * o.kv_heads;
  int64_t item = int64_t(block_x()) * (kRowThreads / 32) + thread_id() / 32;
  int row = int(item / all), head = int(item % all);
  if (row >= live(s, o)) return;
  bool query = head < o.heads, value = head >= o.heads + o.kv_heads;
  int kv = query ? 0 : (head - o.heads) % o.kv_heads;
  float *x = query ? at<float>(o.dst) + (int64_t(row) * o.heads + head) * o.dim
                   : at<float>(value ? o.extra : o.a) + (int64_t(row) * o.kv_heads + kv) * o.dim;
  const float *w = value ? nullptr : at<const float>(query ? o.w : o.bias);
  float inverse = 1;
  if (o.normalize && !value) {
    float sum = 0;
    for (int i = lane_id(); i < o.dim; i += 32) sum += x[i] * x[i];
    inverse = 1 / sqrtf(warp_sum(sum) / o.dim + o.scale);
  }
  char *page = nullptr;
  int64_t to = 0;
  if (!query) {
    int slot = s.slots[o.group * s.tokens + row];
    page = at<char>(o.kv) + int64_t(slot / o.block_tokens) * o.page_bytes + (value ? o.v_at : 0);
    to = (int64_t(kv) * o.block_tokens + slot % o.block_tokens) * o.dim;
  }
  auto read = [&](int i) { return x[i] * inverse * (w ? w[i] : 1); };
  auto put = [&](int i, float v) {
    if (!value) x[i] = v;
    if (query) return;
    if (o.type == TD_BF16) reinterpret_cast<uint16_t *>(page)[to + i] = uint16_t(bf16_pack(v, 0));
    else reinterpret_cast<float *>(page)[to + i] = v;
  };
  int half = value ? 0 : o.from / 2, still = o.dim - 2 * half;
  const float *angle = at<const float>(o.b) + int64_t(row) * o.from;
  for (int i = lane_id(); i < still; i += 32) put(i, read(i));
  for (int i = lane_id(); i < half; i += 32) {
    float a = read(still + i), b = read(still + half + i), c = angle[i], d = angle[half + i];
    put(still + i, mul_rn(a, c) - mul_rn(b, d));
    put(still + half + i, mul_rn(b, c) + mul_rn(a, d));
  }
}

// flat runs operations that process numbers one by one.
TD_KERNEL(kRowThreads) flat(td_op o, Step s) {
  wait_previous();
  int64_t i = int64_t(block_x()) * kRowThreads + thread_id();
  if (i >= int64_t(live(s, o)) * o.n) return;
  float *dst = at<float>(o.dst);
  const float *a = at<const float>(o.a), *b = at<const float>(o.b);
  switch (o.kind) {
    case TD_GATED_ACT: put_result(o, i, activate(o.act, a[i], b[i])); break;
    case TD_ADD: dst[i] = (a[i] + (b ? b[i] : 0)) * o.scale * (o.w ? at<const float>(o.w)[0] : 1); break;
    case TD_SOFTCAP: dst[i] = o.scale * tanhf(a[i] / o.scale); break;
    case TD_GATE: dst[i] = a[i] / (1 + expf(-b[i / (o.n / o.heads)])); break;
    case TD_COLUMNS: dst[i] = a[i / o.n * o.k + o.from + i % o.n]; break;
    case TD_PACK: dst[i] = i % o.n < o.k ? a[i / o.n * o.k + i % o.n] : 0; break;
    case TD_UNPACK: {
      int row = int(i / o.n), col = int(i % o.n), rank = int((int64_t(col + 1) * o.heads - 1) / o.n);
      dst[i] = a[(int64_t(rank) * o.k + row) * o.dim + col - int(int64_t(rank) * o.n / o.heads)];
      break;
    }
    case TD_ROWS: dst[i] = a[int64_t(s.out_rows[i / o.n]) * o.n + i % o.n]; break;
  }
}
