#include "sample.cuh"

#include "../runtime/plan.h"

void run_sample(const Run &r, const td_op &o) {
  TD_LAUNCH(r.stream, r.outputs, 1, 1, kSampleThreads, sizeof(SampleMemory), sample, o, r.step);
  TD_LAUNCH(r.stream, r.outputs, 1, 1, kSampleThreads, sizeof(ProbsMemory), logprobs, o, r.step);
}

void run_finish(const Run &r) { TD_LAUNCH(r.stream, 1, 1, 1, 32, 0, finish, r.step); }

void run_write_host(Stream &s, uint32_t *to, uint32_t number) { TD_LAUNCH(s, 1, 1, 1, 32, 0, write_host, to, number); }

void run_op(const Run &r, const td_op &o) {
  switch (o.kind) {
    case TD_LINEAR: return run_linear(r, o);
    case TD_ADAPT: return run_adapt(r, o);
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
