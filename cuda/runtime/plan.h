// A plan, and how its operations become launches.
#pragma once
#include "../kernels/common.cuh"
#include "blaslt.h"
#include "device.h"
#include "nccl.h"

struct td_plan {
  std::vector<td_op> ops;
  int tokens = 0, outputs = 0;  // the most rows that it serves
  Graph graph{};
};

// Blas is cuBLASLt, where it was found, and what was chosen before plans were recorded.
struct Blas {
  blaslt::Library library;
  blaslt::Handle handle = nullptr;
  std::vector<blaslt::Product> products;
  char *workspace = nullptr;
  uint16_t *narrowed = nullptr;  // activations in bf16
  int64_t room = 0;              // of them, in numbers
  uint16_t *widened = nullptr;   // a matrix that is of narrower numbers, in bf16
  int64_t widest = 0;            // of them, in numbers

  // find is the product of a shape, if there is one that can be used.
  blaslt::Product *find(int rows, int out, int in) {
    for (auto &p : products)
      if (p.rows == rows && p.out == out && p.in == in) return p.usable ? &p : nullptr;
    return nullptr;
  }
};
constexpr int64_t kBlasWorkspace = 32 << 20;
constexpr int kBlasRows = 65;  // the fewest for which it is asked

// blas_fits says whether an operation over so many rows is one for cuBLASLt. Matrices
// of narrow numbers are widened for it each time, but those of a vocabulary, whose
// rows are outputs.
inline bool blas_fits(const td_op &o, int rows) {
  bool narrow = !o.outputs && (o.type == TD_FP8 || o.type == TD_INT8 || o.type == TD_INT4);
  return o.kind == TD_LINEAR && (o.type == TD_BF16 || narrow) && !o.table && o.slots <= 1 && rows >= kBlasRows && o.k % 8 == 0 && o.n % 8 == 0;
}

// alone is matrix i of those that are joined; n is 0 where there is none.
inline td_op alone(const td_op &o, int i) {
  td_op one = o;
  for (td_joined &m : one.more) m = td_joined{};
  if (i == 0) return one;
  const td_joined &m = o.more[i - 1];
  (o.table ? one.table : one.w) = m.w;
  one.bias = m.bias;
  one.dst = m.dst;
  one.n = m.n;
  return one;
}

// Run is what a launch needs to know.
struct Run {
  Stream &stream;
  const Step &step;
  int tokens, outputs, processors;
  float *workspace;
  int64_t workspace_bytes;
  const Nccl &nccl;
  Blas *blas;       // null: none
  bool one_order;   // of sums, whatever the number of rows
  mutable td_address narrowed = 0;  // whose rows blas->narrowed has

  int rows(const td_op &o) const { return (o.outputs ? outputs : tokens) * (o.slots > 0 ? o.slots : 1); }
};

void run_op(const Run &r, const td_op &o);
void run_finish(const Run &r);
void run_ranks(const Run &r, const td_op &o);
void run_tell(Stream &s, uint32_t *to, uint32_t number);
void run_digest(Stream &s, const td_piece *pieces, int n);

// By file of kernels.
void run_rows(const Run &r, const td_op &o);
void run_linear(const Run &r, const td_op &o);
void run_attention(const Run &r, const td_op &o);
void run_moe(const Run &r, const td_op &o);
void run_adapt(const Run &r, const td_op &o);
void run_sample(const Run &r, const td_op &o);
