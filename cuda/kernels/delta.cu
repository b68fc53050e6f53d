#include "delta.cuh"

#include <algorithm>

#include "../runtime/plan.h"

template <int kLanes>
static void run_delta_of(const Run &r, const td_op &o) {
  constexpr int kWidth = kLanes * kDeltaRows, kEach = kMixThreads / 32, kColumns = kDeltaThreads / kLanes;
  constexpr size_t kShared = 2 * sizeof(float) * kDeltaStaged<kWidth> * kDeltaStride<kWidth>;
  int64_t items = int64_t(r.rows(o)) * o.heads * 3;
  TD_LAUNCH(r.stream, int((items + kEach - 1) / kEach), 1, 1, kMixThreads, 0, delta_mix, o, r.step, kWidth);
  TD_LAUNCH(r.stream, std::min(r.rows(o), int(r.step.seqs)), o.kv_heads, (o.from + kColumns - 1) / kColumns, kDeltaThreads, kShared, delta<kLanes>, o, r.step);
}

void run_delta(const Run &r, const td_op &o) {
  if (o.dim <= TD_DELTA_WIDTH) run_delta_of<TD_DELTA_WIDTH / kDeltaRows>(r, o);
  else run_delta_of<TD_DELTA_WIDEST / kDeltaRows>(r, o);
}
