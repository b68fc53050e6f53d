// A plan, and how its operations become launches.
#pragma once
#include "../kernels/common.cuh"
#include "device.h"
#include "nccl.h"

struct td_plan {
  std::vector<td_op> ops;
  int tokens = 0, outputs = 0;  // the most rows that it serves
  Graph graph{};
};

// Run is what a launch needs to know.
struct Run {
  Stream &stream;
  const Step &step;
  int tokens, outputs, processors;
  float *workspace;
  int64_t workspace_bytes;
  const Nccl &nccl;

  int rows(const td_op &o) const { return (o.outputs ? outputs : tokens) * (o.slots > 0 ? o.slots : 1); }
};

void run_op(const Run &r, const td_op &o);
void run_finish(const Run &r);
void run_ranks(const Run &r, const td_op &o);
void run_tell(Stream &s, uint32_t *to, uint32_t number);

// By file of kernels.
void run_rows(const Run &r, const td_op &o);
void run_linear(const Run &r, const td_op &o);
void run_attention(const Run &r, const td_op &o);
void run_moe(const Run &r, const td_op &o);
void run_sample(const Run &r, const td_op &o);
