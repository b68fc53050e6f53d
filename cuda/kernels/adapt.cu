#include "adapt.cuh"

#include <algorithm>

#include "../runtime/plan.h"

void run_adapt(const Run &r, const td_op &o) {
  int down = (r.rows(o) + kAdaptRows - 1) / kAdaptRows, matrices = 1, widest = o.n;
  if (down == 0) return;  // a plan without outputs
  for (const td_joined &m : o.more) {
    matrices += m.n > 0;
    widest = std::max(widest, int(m.n));
  }
  constexpr int each = kShrinkThreads / 32;
  TD_LAUNCH(r.stream, down, (o.dim + each - 1) / each, matrices, kShrinkThreads, 0, shrink, o, r.step);
  TD_LAUNCH(r.stream, down, (widest + kExpandThreads - 1) / kExpandThreads, matrices, kExpandThreads, 0, expand, o, r.step);
}
