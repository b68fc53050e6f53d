#include "rows.cuh"

#include "../runtime/plan.h"

template <int kFours>
static void run_norm(const Run &r, const td_op &o) {
  TD_LAUNCH(r.stream, r.rows(o), 1, 1, kNormThreads, 64, norm_whole<kFours>, o, r.step);
}

void run_rows(const Run &r, const td_op &given) {
  td_op o = r.halved(given);
  int rows = r.rows(o);
  switch (o.kind) {
    case TD_EMBED: TD_LAUNCH(r.stream, rows, 1, 1, kRowThreads, 0, embed, o, r.step); break;
    case TD_NORM:
      if (o.dim < o.n) {
        int heads = rows * (o.n / o.dim), each = kRowThreads / 32;
        TD_LAUNCH(r.stream, (heads + each - 1) / each, 1, 1, kRowThreads, 0, head_norm, o, r.step);
      } else if (int each = (o.n / 4 + kNormThreads - 1) / kNormThreads; o.n % 4 == 0 && each <= 8) {
        if (each <= 1) run_norm<1>(r, o);
        else if (each <= 2) run_norm<2>(r, o);
        else if (each <= 4) run_norm<4>(r, o);
        else run_norm<8>(r, o);
      } else {
        TD_LAUNCH(r.stream, rows, 1, 1, kRowThreads, 64, norm, o, r.step);
      }
      break;
    case TD_ANGLES: TD_LAUNCH(r.stream, rows, 1, 1, kRowThreads, 0, angles, o, r.step); break;
    case TD_ROPE: TD_LAUNCH(r.stream, rows, 1, 1, kRowThreads, 0, rope, o, r.step); break;
    case TD_STORE_KV:
      if (o.type == TD_FP8) TD_LAUNCH(r.stream, rows, 1, 1, kRowThreads, 0, store_kv_fp8, o, r.step);
      else TD_LAUNCH(r.stream, rows, 1, 1, kRowThreads, 0, store_kv, o, r.step);
      break;
    case TD_PLACE: {
      int64_t heads = int64_t(rows) * (o.heads + 2 * o.kv_heads);
      constexpr int each = kRowThreads / 32;
      TD_LAUNCH(r.stream, int((heads + each - 1) / each), 1, 1, kRowThreads, 0, place, o, r.step);
      break;
    }
    default: {
      if (o.kind == TD_UNPACK) o.k = rows;  // a has space for all rows, whether live or not
      int64_t n = int64_t(rows) * o.n;
      TD_LAUNCH(r.stream, int((n + kRowThreads - 1) / kRowThreads), 1, 1, kRowThreads, 0, flat, o, r.step);
    }
  }
}
