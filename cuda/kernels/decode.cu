#include "attention_split.cuh"

#include <algorithm>

#include "../runtime/plan.h"

template <int kDim>
static bool run_split_of(const Run &r, const td_op &o, bool chunked) {
  static const int resident = TD_RESIDENT(r.stream, attend_split<kDim>, kMmaThreads, sizeof(SplitMemory<kDim>));
  int group = o.heads / o.kv_heads, packs = (group + kSplitHeads - 1) / kSplitHeads, each = o.kv_heads * packs, rows = r.rows(o);
  if (chunked && r.alone >= 0) rows = r.alone;
  int64_t parts = int64_t(o.heads) * kParts * (kDim + 2) * 4;
  // The rows whose parts and counters there is memory for.
  int most = std::max(std::min(int(r.workspace_bytes / parts), kArrivals / each), 1);
  int least = r.one_order || rows * each >= r.processors ? kPart : kFewPart;
  for (int from = 0; from < rows; from += most) {
    int n = std::min(most, rows - from);
    // As many blocks as the device runs at a time; each processes every z-th part.
    int z = std::clamp(resident * r.processors / (n * each), 1, kParts);
    TD_LAUNCH(r.stream, n, each, z, kMmaThreads, sizeof(SplitMemory<kDim>), attend_split<kDim>, o, r.step, from, int(chunked), least, r.workspace, r.arrived);
  }
  return true;
}

bool run_split(const Run &r, const td_op &o, bool chunked) {
  switch (o.dim) {
    case 64: return run_split_of<64>(r, o, chunked);
    case 128: return run_split_of<128>(r, o, chunked);
    case 256: return run_split_of<256>(r, o, chunked);
    case 512: return run_split_of<512>(r, o, chunked);
  }
  return false;
}
