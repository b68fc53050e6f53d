// A plan, and the launches of its operations.
#pragma once
#include "../kernels/common.cuh"
#include "blaslt.h"
#include "device.h"
#include "nccl.h"

struct td_plan {
  std::vector<td_op> ops;
  int tokens = 0, outputs = 0;  // bounds on the rows of its steps
  Graph graph{};
};

constexpr int64_t kBlasWorkspace = 32 << 20;

constexpr int kBlasRows = 9;  // the fewest rows for which cuBLASLt is used

// Blas is cuBLASLt, if it was found, and the algorithms chosen before plans were recorded.
struct Blas {
  blaslt::Library library;
  blaslt::Handle handle = nullptr;
  std::vector<blaslt::Product> products;
  char *workspace = nullptr;
  uint16_t *narrowed = nullptr;  // activations in bf16
  int64_t room = 0;              // capacity of narrowed, in numbers
  uint16_t *widened = nullptr;   // a matrix of a narrower type, in bf16
  int64_t widest = 0;            // capacity of widened, in numbers

  // find returns the product of a shape with one matrix or two, or null if cuBLASLt has none.
  blaslt::Product *find(int rows, int out, int in, int matrices = 1) {
    for (auto &p : products)
      if (p.rows == rows && p.out == out && p.in == in && p.matrices == matrices) return p.usable ? &p : nullptr;
    return nullptr;
  }
};
// blas_fits reports whether cuBLASLt computes an operation over rows.
// Matrices of narrow types are widened for it each time, except those of a vocabulary,
// whose rows are outputs.
inline bool blas_fits(const td_op &o, int rows) {
  bool narrow = !o.outputs && (o.type == TD_FP8 || o.type == TD_INT8 || o.type == TD_INT4);
  return o.kind == TD_LINEAR && (o.type == TD_BF16 || narrow) && !o.table && o.slots <= 1 && rows >= kBlasRows && o.k % 8 == 0 && o.n % 8 == 0;
}

// pairs reports whether cuBLASLt may compute a gate and the matrix that it gates by one call.
inline bool pairs(const td_op &o) { return o.act && o.type == TD_BF16 && o.more[0].n == o.n && !o.bias == !o.more[0].bias; }

// alone returns matrix i of the joined ones; n is 0 if there is none.
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

constexpr int kArrivals = 1 << 16;  // counters of blocks that have ended, for each launch

// Run holds the parameters of a launch.
struct Run {
  Stream &stream;
  const Step &step;
  int tokens, outputs, processors;
  float *workspace;
  int64_t workspace_bytes;
  const Nccl &nccl;
  Blas *blas;       // null: none
  bool one_order;   // the order of sums does not depend on the number of rows
  char *slices;     // memory of draws by slices
  int draws;        // see td_limits
  int *arrived;     // [kArrivals], 0 between launches
  int alone = -1;   // rows of Step::alone in this step; -1: not known
  mutable td_address narrowed = 0;  // the activations that blas->narrowed holds
  bool halves = false;              // of the operation that is launched: see td_op

  int rows(const td_op &o) const { return (o.outputs ? outputs : tokens) * (o.slots > 0 ? o.slots : 1); }

  // halved returns an operation as its kernel gets it. If halves is true, its result goes to
  // blas->narrowed in bf16. Rows that are not live keep the numbers that are there, which no live
  // row is computed from.
  td_op halved(const td_op &o) const {
    td_op to = o;
    to.halves = halves;
    if (!halves) return to;
    to.dst = reinterpret_cast<td_address>(blas->narrowed);
    narrowed = o.dst;
    return to;
  }
};

void run_op(const Run &r, const td_op &o);
void run_finish(Stream &s, const Step &step);
// kernels_wait reports whether the machine code of kernels has wait_previous.
bool kernels_wait(Stream &s);
void run_ranks(const Run &r, const td_op &o);
void run_write_host(Stream &s, uint32_t *to, uint32_t number);
void run_digest(Stream &s, const td_piece *pieces, int n);

// slices_bytes returns the memory that draws from n logits by slices take, of which the first
// zeros bytes must be zero.
int64_t slices_bytes(int outputs, int n, int64_t &zeros);

// Launch functions, by file of kernels.
void run_rows(const Run &r, const td_op &o);
void run_linear(const Run &r, const td_op &o);
void run_attention(const Run &r, const td_op &o);
// run_few computes products of few rows of a matrix, for which few_fits returns true.
void run_few(const Run &r, const td_op &o, int spans);
bool few_fits(const td_op &o, int rows);
// run_int4 computes products of rows with an int4 matrix, or of rows of each expert on average, for
// which int4_fits returns true.
void run_int4(const Run &r, const td_op &o, int rows, int spans);
bool int4_fits(const td_op &o, int rows);
// run_split processes rows of no chunk if chunked, else all rows. run_tiles processes the rows of
// chunks. Both return false for sizes of heads that they do not support.
bool run_split(const Run &r, const td_op &o, bool chunked);
bool run_tiles(const Run &r, const td_op &o);
void run_moe(const Run &r, const td_op &o);
void run_adapt(const Run &r, const td_op &o);
void run_delta(const Run &r, const td_op &o);
void run_sample(const Run &r, const td_op &o);
