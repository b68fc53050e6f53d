#include "attention_tiles.cuh"

#include "../runtime/plan.h"

template <int kDim>
static bool run_tiles_of(const Run &r, const td_op &o) {
  using S = TilesShape<kDim>;
  int blocks = (r.rows(o) + S::kRows - 1) / S::kRows;
  TD_LAUNCH(r.stream, blocks, o.heads, 1, kMmaThreads, sizeof(TilesMemory<kDim>), attend_tiles<kDim>, o, r.step);
  return true;
}

bool run_tiles(const Run &r, const td_op &o) {
  switch (o.dim) {
    case 64: return run_tiles_of<64>(r, o);
    case 128: return run_tiles_of<128>(r, o);
    case 256: return run_tiles_of<256>(r, o);
    case 512: return run_tiles_of<512>(r, o);
  }
  return false;
}
