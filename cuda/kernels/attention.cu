#include "attention_mma.cuh"
#include "attention_plain.cuh"

#include <algorithm>

#include "../runtime/plan.h"

template <int kDim>
static void run_decode(const Run &r, const td_op &o, bool chunked) {
  int group = o.heads / o.kv_heads, packs = (group + kTile - 1) / kTile, rows = r.rows(o);
  int64_t each = int64_t(o.heads) * kParts * (kDim + 2) * 4;
  int most = int(std::max<int64_t>(r.workspace_bytes / each, 1));  // rows whose parts fit into the workspace
  for (int from = 0; from < rows; from += most) {
    int n = std::min(most, rows - from);
    // As many blocks as the device runs at a time; each processes every n-th part.
    int z = std::clamp(4 * r.processors / (n * o.kv_heads * packs), 1, kParts);
    TD_LAUNCH(r.stream, n, o.kv_heads * packs, z, kMmaThreads, sizeof(DecodeMemory<kDim>), attend_decode<kDim>, o, r.step, from, int(chunked), r.workspace);
    TD_LAUNCH(r.stream, n, o.heads, 1, kMmaThreads, 0, attend_join, o, r.step, from, int(chunked), (const float *)r.workspace);
  }
}

// run_mma launches attention of chunks, if there is a kernel for their size, and of all other rows.
template <int kDim>
static void run_mma(const Run &r, const td_op &o) {
  int rows = r.rows(o);
  bool chunked = rows > TD_FEW;  // smaller steps have no chunks
  if (chunked && !((r.tried.chunk || r.tried.chunk16) && run_tiles(r, o))) {
    if constexpr (kChunked<kDim>) TD_LAUNCH(r.stream, (rows + kChunkRows - 1) / kChunkRows, o.heads, 1, kMmaThreads, sizeof(ChunkMemory<kDim>), attend_chunk<kDim>, o, r.step);
    else chunked = false;
  }
  if (!r.tried.attention || !run_split_attention(r, o, chunked)) run_decode<kDim>(r, o, chunked);
}

void run_attention(const Run &r, const td_op &given) {
  td_op o = r.halved(given);
  if (o.type == TD_BF16 && o.v_at != 0 && o.cap == 0) {
    switch (o.dim) {
      case 64: return run_mma<64>(r, o);
      case 128: return run_mma<128>(r, o);
      case 256: return run_mma<256>(r, o);
      case 512: return run_mma<512>(r, o);
    }
  }
  size_t shared = (8 + kPlainThreads + size_t(o.dim)) * 4;
  TD_LAUNCH(r.stream, r.rows(o), o.heads, 1, kPlainThreads, shared, attend_plain, o, r.step);
}
