#include "slices.cuh"

#include "../runtime/plan.h"

namespace {
// slices_of returns the places of draws by slices from n logits in memory, and its size. Memory of
// null gives the size alone.
Slices slices_of(char *memory, int outputs, int n, int64_t &bytes, int64_t &zeros) {
  Slices t{};
  int slices = (n + kSlice - 1) / kSlice, blocks = (n + kSumTokens - 1) / kSumTokens;
  bytes = 0;
  auto carve = [&](int64_t size) {
    char *p = memory + bytes;
    bytes += (size * outputs + 255) / 256 * 256;
    return p;
  };
  t.arrived = reinterpret_cast<int *>(carve(4));
  t.mass = reinterpret_cast<uint64_t *>(carve(8 * kEdges));
  zeros = bytes;
  t.edge = reinterpret_cast<int *>(carve(4));
  t.target = reinterpret_cast<double *>(carve(8));
  t.best = reinterpret_cast<float *>(carve(4 * slices));
  t.at = reinterpret_cast<int *>(carve(4 * slices));
  t.threads = reinterpret_cast<float *>(carve(4 * slices * kSampleThreads));
  t.sums = reinterpret_cast<double *>(carve(8 * blocks));
  t.counts = reinterpret_cast<int *>(carve(4 * slices));
  t.tokens = reinterpret_cast<int *>(carve(4 * int64_t(slices) * kSliceList));
  t.values = reinterpret_cast<float *>(carve(4 * int64_t(slices) * kSliceList));
  t.slices = slices;
  return t;
}
}  // namespace

int64_t slices_bytes(int outputs, int n, int64_t &zeros) {
  int64_t bytes;
  slices_of(nullptr, outputs, n, bytes, zeros);
  return bytes;
}

void run_sample(const Run &r, const td_op &o) {
  int64_t bytes, zeros;
  Slices t = slices_of(r.slices, r.step.outputs, o.n, bytes, zeros);
  t.only = r.draws == TD_DRAWS_SLICES;
  t.alone = r.draws == TD_DRAWS_ALONE || t.slices > kMostSlices;
  TD_LAUNCH(r.stream, r.outputs, t.slices, 1, kSampleThreads, sizeof(RuleMemory), rule, o, r.step, t);
  TD_LAUNCH(r.stream, r.outputs, t.slices, 1, kSampleThreads, sizeof(SliceMemory), weigh, o, r.step, t);
  TD_LAUNCH(r.stream, r.outputs, t.slices, 1, kSampleThreads, sizeof(SliceMemory), edge, o, r.step, t);
  TD_LAUNCH(r.stream, r.outputs, 1, 1, kSampleThreads, sizeof(ProbsMemory), logprobs, o, r.step);
}

bool kernels_wait(Stream &s) { return TD_WAITS(s, finish); }

void run_finish(Stream &s, const Step &step) { TD_LAUNCH(s, 1, 1, 1, 32, 0, finish, step); }

void run_write_host(Stream &s, uint32_t *to, uint32_t number) { TD_LAUNCH(s, 1, 1, 1, 32, 0, write_host, to, number); }

void run_op(const Run &r, const td_op &o) {
  switch (o.kind) {
    case TD_LINEAR: return run_linear(r, o);
    case TD_ADAPT: return run_adapt(r, o);
    case TD_DELTA: return run_delta(r, o);
    case TD_ATTENTION: return run_attention(r, o);
    case TD_ROUTE:
    case TD_GROUP:
    case TD_SCATTER:
    case TD_ROUTE_GROUPS:
    case TD_SPLIT:
    case TD_JOIN:
    case TD_COMBINE: return run_moe(r, o);
    case TD_SAMPLE: return run_sample(r, o);
    case TD_ALL_REDUCE:
    case TD_ALL_GATHER: return run_ranks(r, o);
    default: return run_rows(r, o);
  }
}
