// Mixtures of experts: the experts that a row uses, and the order of the products. A choice,
// row and rank, has a slot. Slots are sorted by expert, and within an expert by row and rank,
// so that an expert's matrices are read once for all its rows, and the order is always the
// same.
#pragma once
#include "common.cuh"

constexpr int kRouteThreads = 32;
constexpr int kGroupThreads = 1024;


// best_expert returns the expert with the largest score, of equals the one with the lowest
// number, except the j chosen ones and those of dropped groups of size neighbours. A NaN
// ranks after all numbers.
TD_DEVICE int best_expert(const float *score, int experts, const int32_t *chosen, int j, const int32_t *dropped, int size) {
  float v = 0;
  int best = -1;
  for (int e = lane_id(); e < experts; e += 32) {
    bool taken = dropped && dropped[e / size];
    for (int t = 0; t < j; t++) taken |= chosen[t] == e;
    if (!taken && (best < 0 || score[e] > v || (v != v && score[e] == score[e]))) {
      v = score[e];
      best = e;
    }
  }
  for (int with = 16; with; with /= 2) {
    float other = shuffle_xor(v, with);
    int place = shuffle_xor(best, with);
    bool number = v == v, others = other == other;
    bool better = other > v || (others && !number) || ((other == v || (!others && !number)) && place < best);
    if (place >= 0 && (best < 0 || better)) {
      v = other;
      best = place;
    }
  }
  return best;
}

// route_row selects a row's experts, of equals the first, and weighs them, by a warp. score has
// route_floats.
TD_DEVICE void route_row(const td_op &o, int row, float *score) {
  int lane = lane_id();
  const float *from = at<const float>(o.a) + int64_t(row) * o.experts;
  int32_t *chosen = at<int32_t>(o.chosen) + int64_t(row) * o.top_k;
  float *weights = at<float>(o.weights) + int64_t(row) * o.top_k;
  float best = -INFINITY;
  for (int e = lane; e < o.experts; e += 32) {
    score[e] = from[e];
    best = fmaxf(best, from[e]);
  }
  best = warp_max(best);
  float total = 0;
  for (int e = lane; e < o.experts; e += 32) total += expf(score[e] - best);
  total = warp_sum(total);
  order_warp();
  float kept = 0;
  for (int j = 0; j < o.top_k; j++) {
    int at_expert = best_expert(score, o.experts, chosen, j, nullptr, 1);
    float e = expf(score[at_expert] - best);
    kept += e;
    if (lane == 0) {
      chosen[j] = at_expert;
      weights[j] = e;
    }
    sync_warp();
  }
  float by = 1 / (o.normalize ? kept : total);
  if (lane == 0)
    for (int j = 0; j < o.top_k; j++) weights[j] *= by * (o.extra ? at<const float>(o.extra)[chosen[j]] : 1);
}

// route_row_groups is route_row for groups of neighbouring experts. Only the groups with the
// largest sum of their two best scores take part, and scores are σ(a) + bias. Without a bias the
// scores are the softmax of a, and a group's score is that of its best expert.
TD_DEVICE void route_row_groups(const td_op &o, int row, float *p) {  // p: [experts] σ
  float *score = p + o.experts;                                        // [experts]
  float *together = score + o.experts;                                 // [groups]
  int32_t *dropped = reinterpret_cast<int32_t *>(together + o.heads);
  int lane = lane_id(), size = o.experts / o.heads;
  const float *from = at<const float>(o.a) + int64_t(row) * o.experts;
  int32_t *chosen = at<int32_t>(o.chosen) + int64_t(row) * o.top_k;
  float *weights = at<float>(o.weights) + int64_t(row) * o.top_k;
  float most = -INFINITY, total = 0;
  if (!o.bias) {
    for (int e = lane; e < o.experts; e += 32) most = fmaxf(most, from[e]);
    most = warp_max(most);
    for (int e = lane; e < o.experts; e += 32) total += expf(from[e] - most);
    total = warp_sum(total);
  }
  for (int e = lane; e < o.experts; e += 32) {
    p[e] = o.bias ? 1 / (1 + expf(-from[e])) : expf(from[e] - most) / total;
    score[e] = p[e] + (o.bias ? at<const float>(o.bias)[e] : 0);
  }
  sync_warp();
  for (int g = lane; g < o.heads; g += 32) {
    float first = -INFINITY, second = -INFINITY;
    for (int e = g * size; e < (g + 1) * size; e++) {
      float v = score[e];
      if (v > first) {
        second = first;
        first = v;
      } else if (v > second) {
        second = v;
      }
    }
    together[g] = size > 1 && o.bias ? first + second : first;
    dropped[g] = 1;
  }
  sync_warp();
  if (lane == 0)
    for (int i = 0; i < o.kv_heads; i++) {
      int best = -1;
      for (int g = 0; g < o.heads; g++)
        if (dropped[g] && (best < 0 || together[g] > together[best])) best = g;
      dropped[best] = 0;
    }
  sync_warp();
  float sum = 0;
  for (int j = 0; j < o.top_k; j++) {
    int e = best_expert(score, o.experts, chosen, j, dropped, size);
    sum += p[e];
    if (lane == 0) {
      chosen[j] = e;
      weights[j] = p[e];
    }
    sync_warp();
  }
  float by = o.scale / (o.normalize ? sum + 1e-20f : 1);
  if (lane == 0)
    for (int j = 0; j < o.top_k; j++) weights[j] *= by;
}

// route and route_groups choose the experts of each row.
TD_KERNEL(kRouteThreads) route(td_op o, Step s) {
  wait_previous();
  if (block_x() < live(s, o)) route_row(o, block_x(), reinterpret_cast<float *>(shared_memory()));
}
TD_KERNEL(kRouteThreads) route_groups(td_op o, Step s) {
  wait_previous();
  if (block_x() < live(s, o)) route_row_groups(o, block_x(), reinterpret_cast<float *>(shared_memory()));
}

// route_floats returns the numbers of shared memory that a row's choice takes.
TD_HOST_DEVICE int route_floats(const td_op &o) { return o.kind == TD_ROUTE ? o.experts : 2 * (o.experts + o.heads); }

// route_few is route, or route_groups, and group for at most TD_MOE_ROWS rows, in one block with a
// warp per row. It also stores the order of the choices. As a row's experts differ, no expert has
// more choices than there are rows, which is one span.
template <int kGroups>
TD_KERNEL(TD_MOE_ROWS * 32) route_few(td_op o, Step s) {
  wait_previous();
  float *scores = reinterpret_cast<float *>(shared_memory());  // [rows, route_floats]
  int32_t *chosen = reinterpret_cast<int32_t *>(scores + TD_MOE_ROWS * route_floats(o));  // [rows, top_k]
  int32_t *first = chosen + TD_MOE_ROWS * o.top_k;             // [rows, top_k] 1: of its expert's choices
  int tid = thread_id(), row = tid / 32, rows = live(s, o), n = rows * o.top_k;
  if (row < rows) {
    if constexpr (kGroups) route_row_groups(o, row, scores + row * route_floats(o));
    else route_row(o, row, scores + row * route_floats(o));
    const int32_t *from = at<const int32_t>(o.chosen) + row * o.top_k;
    for (int j = lane_id(); j < o.top_k; j += 32) chosen[row * o.top_k + j] = from[j];
  }
  sync();
  for (int i = tid; i < n; i += TD_MOE_ROWS * 32) {
    int same = 0;
    for (int j = 0; j < i; j++) same += chosen[j] == chosen[i];
    first[i] = same == 0;
  }
  sync();
  int32_t *slot = at<int32_t>(o.slot), *order = order_of(o, s), *list = at<int32_t>(o.list);
  for (int i = tid; i < n; i += TD_MOE_ROWS * 32) {
    int before = 0, spans = 0, count = 0, all = 0;
    for (int j = 0; j < n; j++) {
      bool less = chosen[j] < chosen[i], equal = chosen[j] == chosen[i];
      before += less || (equal && j < i);
      spans += less && first[j];
      count += equal;
      all += first[j];
    }
    slot[i] = before;
    order[before] = i;
    if (first[i]) {
      list[1 + 3 * spans] = chosen[i];
      list[2 + 3 * spans] = before;
      list[3 + 3 * spans] = count;
    }
    if (i == 0) list[0] = all;
  }
  if (tid == 0 && n == 0) list[0] = 0;
}

// group assigns every choice its slot and lists the spans: their number, then expert, first
// slot and slots of each. It runs in one block; thread e handles expert e.
TD_KERNEL(kGroupThreads) group(td_op o, Step s) {
  wait_previous();
  int32_t *first = reinterpret_cast<int32_t *>(shared_memory());  // [experts] counts, then first slots
  int32_t *spans = first + kGroupThreads;                         // [experts]
  int e = thread_id(), n = s.counts[o.outputs] * o.top_k;
  const int32_t *chosen = at<const int32_t>(o.chosen);
  int32_t *slot = at<int32_t>(o.slot), *list = at<int32_t>(o.list);
  int count = 0;
  if (e < o.experts)
    for (int i = 0; i < n; i++) count += chosen[i] == e;
  first[e] = count;
  spans[e] = (count + kSpanSlots - 1) / kSpanSlots;
  sync();
  int before = 0, spans_before = 0;
  for (int i = 0; i < e && i < o.experts; i++) {
    before += first[i];
    spans_before += spans[i];
  }
  if (e == o.experts - 1) list[0] = spans_before + spans[e];
  if (count == 0) return;
  for (int i = 0; i < spans[e]; i++) {
    int left = count - i * kSpanSlots;
    list[1 + 3 * (spans_before + i)] = e;
    list[2 + 3 * (spans_before + i)] = before + i * kSpanSlots;
    list[3 + 3 * (spans_before + i)] = left < kSpanSlots ? left : kSpanSlots;
  }
  for (int i = 0, next = before; i < n; i++)
    if (chosen[i] == e) slot[i] = next++;
}

// scatter copies a row to its slots.
TD_KERNEL(256) scatter(td_op o, Step s) {
  wait_previous();
  int row = block_x();
  if (row >= s.counts[o.outputs]) return;
  for (int j = 0; j < o.top_k; j++) {
    int64_t slot = at<const int32_t>(o.slot)[int64_t(row) * o.top_k + j];
    for (int i = thread_id(); i < o.k; i += 256) at<float>(o.dst)[slot * o.k + i] = at<const float>(o.a)[int64_t(row) * o.k + i];
  }
}

// combine adds a row's slots in the order of their ranks.
TD_KERNEL(256) combine(td_op o, Step s) {
  wait_previous();
  int row = block_x();
  if (row >= s.counts[o.outputs]) return;
  for (int i = thread_id(); i < o.n; i += 256) {
    float sum = 0;
    for (int j = 0; j < o.top_k; j++) {
      int64_t choice = int64_t(row) * o.top_k + j;
      sum += at<const float>(o.weights)[choice] * at<const float>(o.a)[at<const int32_t>(o.slot)[choice] * int64_t(o.n) + i];
    }
    at<float>(o.dst)[int64_t(row) * o.n + i] = sum;
  }
}

// split copies the first dim columns of a row's heads to their slots, which are grouped by
// head, and lists the spans: the same number for each head.
TD_KERNEL(256) split(td_op o, Step s) {
  wait_previous();
  int row = block_x(), rows = s.counts[o.outputs], each = (rows + kSpanSlots - 1) / kSpanSlots;
  if (row == 0) {
    int32_t *list = at<int32_t>(o.list);
    if (thread_id() == 0) list[0] = o.heads * each;
    for (int i = thread_id(); i < o.heads * each; i += 256) {
      int first = i % each * kSpanSlots;
      list[1 + 3 * i] = i / each;
      list[2 + 3 * i] = i / each * rows + first;
      list[3 + 3 * i] = rows - first < kSpanSlots ? rows - first : kSpanSlots;
    }
  }
  if (row >= rows) return;
  for (int i = thread_id(); i < o.heads * o.dim; i += 256) {
    int head = i / o.dim, col = i % o.dim;
    at<float>(o.dst)[(int64_t(head) * rows + row) * o.dim + col] = at<const float>(o.a)[(int64_t(row) * o.heads + head) * o.k + col];
  }
}

// join concatenates a row's heads, from their slots and the columns that split did not copy.
TD_KERNEL(256) join(td_op o, Step s) {
  wait_previous();
  int row = block_x(), rows = s.counts[o.outputs], width = o.n / o.heads, left = width - o.dim;
  if (row >= rows) return;
  for (int i = thread_id(); i < o.n; i += 256) {
    int head = i / width, col = i % width;
    at<float>(o.dst)[int64_t(row) * o.n + i] = col < o.dim ? at<const float>(o.b)[(int64_t(head) * rows + row) * o.dim + col]
                                                            : at<const float>(o.a)[(int64_t(row) * o.heads + head + 1) * o.k - left + col - o.dim];
  }
}
