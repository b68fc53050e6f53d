#include "few.cuh"

#include "../runtime/plan.h"

void run_few(const Run &r, const td_op &o, int spans) {
  size_t shared = size_t(o.k) / 8 * kFewColumns * 16 + kFewWarps * kFewOut * 8 * 4 + 16;
  int blocks = 0, each = o.act ? kFewOut / 2 : kFewOut;
  for (int n : {int(o.n), o.act ? 0 : int(o.more[0].n), o.act ? 0 : int(o.more[1].n)}) blocks += (n + each - 1) / each;
  if (o.act) TD_LAUNCH(r.stream, blocks, spans, 1, kFewThreads, shared, few_mxfp4<1>, o, r.step, r.arrived);
  else TD_LAUNCH(r.stream, blocks, spans, 1, kFewThreads, shared, few_mxfp4<0>, o, r.step, r.arrived);
}

bool few_fits(const td_op &o, int rows) { return o.type == TD_MXFP4 && o.k % 32 == 0 && o.k <= kFewMost && rows <= kFewRows; }
