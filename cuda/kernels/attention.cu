#include "attention.cuh"

#include "../runtime/plan.h"

void run_attention(const Run &r, const td_op &o) {
  size_t shared = (8 + kPlainThreads + size_t(o.dim)) * 4;
  TD_LAUNCH(r.stream, r.rows(o), o.heads, 1, kPlainThreads, shared, attend_plain, o, r.step);
}
