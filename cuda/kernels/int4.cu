#include "int4.cuh"

#include <algorithm>

#include "../runtime/plan.h"

template <int kGated, int kRows>
static void run_int4_of(const Run &r, const td_op &o, int spans) {
  using S = Int4Shape<kRows>;
  constexpr int each = kGated ? kInt4Out / 2 : kInt4Out;
  int blocks = (o.n + each - 1) / each, rounds = (o.k + kInt4Round - 1) / kInt4Round;
  if (!kGated)
    for (const td_joined &m : o.more) blocks += (m.n + each - 1) / each;
  // Few outputs are split along their columns, so that there are as many blocks as the device runs at
  // once, each with two rounds at least. There is memory for the parts of so few blocks.
  int parts = o.table ? 1 : std::max(std::min(2 * r.processors / blocks, rounds / 2), 1);
  int columns = (rounds + parts - 1) / parts * kInt4Round;
  parts = (o.k + columns - 1) / columns;
  size_t shared = size_t(std::min(columns, S::kChunk)) / 8 * S::kStride * 16 + kInt4Threads / 32 * kInt4TeamOut * S::kColumns * 4 + (kInt4Threads / 32 + 1) * 4;
  TD_LAUNCH(r.stream, blocks, spans, parts, kInt4Threads, shared, (few_int4<kGated, kRows>), o, r.step, columns, r.workspace, r.arrived);
}

template <int kRows>
static void run_int4_rows(const Run &r, const td_op &o, int spans) {
  if (o.act) run_int4_of<1, kRows>(r, o, spans);
  else run_int4_of<0, kRows>(r, o, spans);
}

void run_int4(const Run &r, const td_op &o, int rows, int spans) {
  if (rows <= 2) run_int4_rows<2>(r, o, spans);
  else run_int4_rows<kInt4Rows>(r, o, spans);
}

bool int4_fits(const td_op &o, int rows) {
  int64_t groups = std::max({o.n, o.more[0].n, o.more[1].n}) * (row_length(TD_INT4, o.k) / 32);
  return o.type == TD_INT4 && o.k % 4 == 0 && !o.direct && !o.b && groups <= INT32_MAX && rows <= (o.table ? kInt4ExpertRows : kInt4Rows);
}
