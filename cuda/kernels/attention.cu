#include "attention_plain.cuh"

#include "../runtime/plan.h"

void run_attention(const Run &r, const td_op &given) {
  td_op o = r.halved(given);
  bool chunked = r.rows(o) > TD_FEW;  // smaller steps have no chunks
  if (o.type == TD_BF16 && o.v_at != 0 && o.cap == 0 && o.block_tokens % kTile == 0)
    if ((!chunked || run_tiles(r, o)) && run_split(r, o, chunked)) return;
  size_t shared = (8 + kPlainThreads + size_t(o.dim)) * 4;
  TD_LAUNCH(r.stream, r.rows(o), o.heads, 1, kPlainThreads, shared, attend_plain, o, r.step);
}
