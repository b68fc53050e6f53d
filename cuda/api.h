// The functions of the shared object that computes on GPUs, and of its twin that
// runs the same kernels on the CPU. The device executes plans: arrays of
// operations over addresses that td_alloc returned. Everything that changes between
// steps is in the step's memory, which the host writes before td_run. So a plan can
// be recorded as a graph once and repeated.
//
// There are no callbacks. A device is used by one thread at a time. Functions that
// can fail return 0, or null, on failure; td_error returns the reason. After a failure for lack of
// memory, and of a recording, later calls can succeed; td_poll returns -1 after all others.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TD_API __attribute__((visibility("default")))
#define TD_VERSION 16

typedef struct td_device td_device;
typedef struct td_plan td_plan;
typedef uint64_t td_address; // on the device; 0: none

typedef struct {
  int64_t total, free; // bytes of memory
  int32_t capability;  // 90 for 9.0
  int32_t processors;  // multiprocessors
  int32_t twin;        // 1: the host twin
  int32_t overlap;     // 1: kernels of graphs start before the previous kernel has ended
  int32_t ptx;         // 1: the driver has compiled the kernels, which have no machine code for the device
  char name[128];
} td_info;

// How tests have tokens drawn. Only slices: token -1 where a single block of threads would draw.
// Alone: a single block of threads draws all.
enum { TD_DRAWS_SLICES = 1, TD_DRAWS_ALONE = 2 };

// Limits of every step, and the layout of block tables.
typedef struct {
  int32_t tokens, outputs, seqs, blocks;
  int32_t one_order; // 1: the order of sums in products does not depend on the number of rows
  int32_t draws;     // for tests: TD_DRAWS_; 0: as fits
} td_limits;

// The sampling parameters of one output.
typedef struct {
  uint64_t seed;
  uint32_t choice;
  int32_t position;
  float temperature, top_p, min_p;
  int32_t top_k;
  int32_t probs; // 1 + the number of best tokens to return in td_probs; 0: no td_probs
  int32_t rules; // 1 + the offset in words of its td_rules in td_step.rules; 0: none
  int32_t mask;  // 1: only tokens of the output's bitmap may be drawn; see TD_SAMPLE
  int32_t reserved;
} td_draw;

// How a request's rules change its logits before a token is drawn, as engine/sample
// defines it. It is followed by the words of the bitmap of allowed tokens, a td_ban for
// each token that must not be drawn, and a td_mark for each token that has been seen. A
// token has at most one mark, and any number of bans.
typedef struct {
  int32_t allowed; // words of the bitmap; -1: all tokens are allowed
  int32_t bans, marks;
  int32_t last;    // the output of the previous step whose token the marks do not include; -1: none
  float repetition, presence, frequency;
  int32_t follows; // what last adds to its token's mark: 1 seen, 2 counted
} td_rules;

typedef struct {
  int32_t token, after; // applies only if last has drawn the token after; -1: always
} td_ban;

typedef struct {
  int32_t token, count; // occurrences in the output
  float bias;
  int32_t seen;         // 1: the repetition penalty applies
} td_mark;

// td_rules of an output are at most this long, with everything that follows them.
enum { TD_RULE_WORDS = 1 << 13 };

// The log-probability and rank (1 is the best) of a drawn token, before temperature and
// masks, and the best tokens, as returned to the client.
enum { TD_TOP = 20 };
typedef struct {
  float own;
  int32_t rank;
  int32_t tokens[TD_TOP];
  float probs[TD_TOP];
} td_probs;

// In steps of more than TD_FEW rows, the host marks in row_span the rows of one sequence
// that are consecutive within TD_CHUNK_ROWS rows; kernels then process them together. The
// host marks at least TD_CHUNK_LEAST of them.
enum { TD_IN_CHUNK = 1 << 30, TD_CHUNK_ROWS = 64, TD_CHUNK_LEAST = 8, TD_FEW = 16 };

// TD_MOE_ROWS is the most rows of a plan whose experts' rows are neither grouped nor copied by
// kernels of their own.
enum { TD_MOE_ROWS = 8 };

// A step's memory on the host, pinned. The device has its own copy, which td_run
// updates; of the tables it updates only the entries that td_tables has announced. There
// are two steps, so that the host fills one while the device works on the other. A step's
// memory is free again when the step has ended. The tables are shared by both steps and
// belong to the host: announced entries may be written again at once.
typedef struct {
  int32_t *counts;    // [5] tokens, outputs, spans, sequence number of the step, words of rules
  int32_t *ids;       // [tokens]; -1-i: the token that output i of the previous step draws
  int32_t *positions; // [tokens]
  int32_t *row_span;  // [tokens]
  int32_t *adapters;  // [tokens] place of the row's adapter, from 1; 0: none
  int32_t *out_rows;  // [outputs]
  int32_t *slots;     // [groups, tokens] block*block_tokens + offset: where KV is written
  td_draw *draws;     // [outputs]
  uint64_t *rules;    // [outputs, TD_RULE_WORDS]; only the used words are copied to the device
  int32_t *tables;    // [groups, seqs, blocks]
  int32_t *sampled;   // [outputs] written by the device
  td_probs *probs;    // [outputs] written by the device, for outputs that request it
  uint32_t *copied;   // number of td_copy calls that have ended, written by the device
  uint32_t *done;     // sequence number of the last finished step, written by the device
} td_step;

// One piece of a copy.
typedef struct {
  td_address device;
  uint64_t host; // host address
  int64_t bytes;
} td_piece;

enum {
  TD_EMBED = 1, // dst[row] = w[ids[row] - k], for ids within from rows; 0 for other ids
  // dst = a·wᵀ + bias; for experts with slots and list. act 1: dst = act(dst, more[0].dst). In plans
  // of one row, for int4 without experts: normalize 1: a is normed,
  // with weights extra and scale as of TD_NORM; from 1: the product is added to dst. In plans of
  // TD_MOE_ROWS rows, for MXFP4 with list: direct 1: a has the rows, not their slots; b: the rows'
  // sums, as of TD_COMBINE, go there, and are added with from 1.
  TD_LINEAR,
  TD_NORM,      // dst = norm(a)·w for each dim columns; with b: first a += b
  TD_ANGLES,    // dst = cosines and sines [tokens, dim] from w [dim/2] frequencies
  TD_ROPE,      // rotates dst by the angles b: the last dim columns of each head of k columns
  TD_STORE_KV,  // v_at 0: a latent; its first k columns are in a, the others in b
  TD_ATTENTION, // values have k columns
  TD_GATED_ACT,
  TD_ROWS, // dst[i] = a[out_rows[i]]
  TD_ROUTE, // with direct 1, in plans of TD_MOE_ROWS rows, TD_GROUP as well
  TD_GROUP,
  TD_SCATTER,
  TD_COMBINE,
  TD_ADD, // dst = (a + b)·scale·w[0]
  TD_SOFTCAP,
  TD_COLUMNS,
  // Draws and, where a td_draw requests them, log-probabilities of a. dst is scratch, as is
  // a. b: bitmaps of tokens, in memory of td_host, [2, outputs, k] words of 64 bits, of even
  // and odd steps. After the rules of an output with a mask, tokens outside its bitmap are
  // excluded.
  TD_SAMPLE,
  TD_ROUTE_GROUPS, // as TD_ROUTE, by σ(a) + bias: the kv_heads best of heads groups of experts; weights times scale
  TD_SPLIT,        // dst[head][row] = the first dim of each head's k columns of a; lists the heads' spans
  TD_JOIN,         // dst[row] = each head's dim columns of b[head][row], then those of a that TD_SPLIT left
  TD_ALL_REDUCE,   // dst = the sum of all ranks' dst
  TD_PACK,         // dst[row] = a's k columns, padded to n
  TD_ALL_GATHER,   // dst = all ranks' a [rows, n], concatenated
  TD_UNPACK,       // dst[row] = the columns of each of heads ranks in a [heads, rows, dim], concatenated
  // dst are queries and a keys. Both are normed by w and bias if normalize is 1, and
  // rotated by the angles b. Keys and the values extra go to KV.
  TD_PLACE,
  // dst += the row's adapter applied to a, of heads places of rank at most dim. w: the
  // places' ranks [heads], padded to 256 bytes, and A [heads, dim, k]; bias: B [heads,
  // dim, n]; extra: scratch [3, from, dim].
  TD_ADAPT,
  TD_GATE, // dst = a times the logistic function of b, whose heads columns each have as many of a's n
  // The gated delta rule (backend.DeltaSpec) of heads key heads of dim columns and kv_heads value
  // heads of from columns. a: queries, keys and values, k columns; b: beta; extra: alpha; w: weights
  // of the convolution [k, 4]; weights and bias: decay and bias [kv_heads]; table: td_state of each
  // of top_k parts. list: scratch, for each key head of each token twice the width and two floats
  // for each of its value heads, padded to four.
  TD_DELTA
};

// The width of TD_DELTA for up to so many columns of a key, and for more.
enum { TD_DELTA_WIDTH = 128, TD_DELTA_WIDEST = 512 };

// The pages of a part of a layer's states.
typedef struct {
  td_address kv; // of the region
  int32_t group, reserved;
} td_state;

// Types of a matrix [out, in]. The scales of the last three types follow their numbers.
// Rows of numbers are padded with zeros.
enum {
  TD_F32 = 0,
  TD_BF16 = 1,
  TD_MXFP4 = 2,
  TD_FP8 = 3,  // E4M3, rows a multiple of 16 long; scales fp32, one for each td_scales
  TD_INT8 = 4, // rows a multiple of 64 long; scales bf16 [out, in/32], one for each 32 numbers of a row
  // As TD_INT8, stored plus 8. Of eight numbers, the first two are at bits 0 and 16 of a
  // word, the next two at 4 and 20.
  TD_INT4 = 5
};

// The rows and columns that share a scale of TD_FP8, as powers of two.
typedef struct {
  int32_t rows, cols;
} td_scales;

// An expert's matrix and bias.
typedef struct {
  td_address w, bias;
  td_scales scales;
} td_expert;

// A matrix of a product that is joined to another product with the same a and type.
typedef struct {
  td_address w, bias, dst; // w: of experts, their table
  int32_t n, reserved;     // n 0: none
} td_joined;

typedef struct {
  int32_t kind;
  int32_t outputs;       // 1: rows are outputs, else tokens
  int32_t n, k;          // columns of dst, of a
  int32_t heads, kv_heads, dim;
  int32_t window, group, block_tokens;
  int32_t type;          // of w, or of KV. KV of TD_FP8 has scales [kv_heads]: of keys in w, of values in bias
  int32_t act, from;
  int32_t slots;         // for experts: slots per row; 0: 1
  int32_t top_k, experts, normalize, direct;
  // Of TD_NORM, TD_ATTENTION, TD_GATED_ACT and TD_LINEAR with act: the number of operations up to the
  // last one that reads dst, if only products without a table read it, no other product precedes
  // that one, and a later operation writes dst; else 0. dst is not written if
  // cuBLASLt computes all of them: they read the result in bf16. td_run starts all of them with it.
  int32_t halves;
  float scale;
  float cap;             // of TD_ATTENTION: scores become cap tanh(score / cap); 0: not bounded.
                         // of TD_ANGLES: growth over positions of from each; 0: none
  td_address dst, a, b, w, bias, extra; // extra: sinks, or factors of experts
  td_address kv;         // the region's pages
  int64_t page_bytes, v_at;
  td_address chosen, weights, slot, list, table; // routing; table: td_expert of each
  td_joined more[2];     // of TD_LINEAR and TD_ADAPT
  td_scales scales;      // of w and the joined matrices; those of experts are in table
} td_op;

TD_API int td_version(void);
// td_count returns the number of devices; -1: none can be used, and error has the reason.
TD_API int td_count(char *error, int n);
TD_API td_device *td_open(int ordinal, td_limits limits, char *error, int n);
// td_blas opens cuBLASLt, at path or, if that is empty, where programs find it. Plans
// that are recorded later use it for products of bf16 matrices with many rows. It returns
// the version, or 0 with the reason; then kernels of this object compute them.
TD_API int64_t td_blas(td_device *d, const char *path, char *error, int n);
TD_API void td_close(td_device *d);
TD_API const char *td_error(td_device *d);
TD_API void td_describe(td_device *d, td_info *info);

TD_API td_address td_alloc(td_device *d, int64_t bytes);
// td_host returns host memory that td_copy can access: memory, which must then exist until
// td_close, or newly allocated memory if that is null.
TD_API void *td_host(td_device *d, void *memory, int64_t bytes);

TD_API int td_upload(td_device *d, td_address dst, const void *src, int64_t bytes);
TD_API int td_download(td_device *d, void *dst, td_address src, int64_t bytes);

// td_groups allocates the two steps' memory, once, for the given number of KV groups.
TD_API int td_groups(td_device *d, int groups, td_step *steps);
// td_tables announces that entries [from, from+n) of a sequence's table have changed for
// the step that is being filled.
TD_API int td_tables(td_device *d, int which, int group, int seq, int from, int n);

// td_record creates a plan for steps of at most the given rows. With graph 1 the plan is a graph,
// which runs as a whole.
TD_API td_plan *td_record(td_device *d, const td_op *ops, int n, int tokens, int outputs, int graph);
// td_run starts operations [from, to) of a plan over one of the two steps' memory, after
// everything started before. With from 0, it first updates the device's copy of that
// memory. With to at the end, done and sampled are written last. The sequence number of a
// step is odd over memory 1, and even over memory 0.
TD_API int td_run(td_device *d, td_plan *p, int which, int from, int to);
// td_copy copies between the device and memory of td_host, concurrently with td_run.
// Copies to the host see the device's memory after everything started so far. Copies to
// the device precede everything started after td_follow; nothing that runs may use their memory.
// Copies end in order; at the end of a call, the number of calls that succeeded so far is written
// to copied.
TD_API int td_copy(td_device *d, const td_piece *pieces, int n, int to_device);
// td_follow makes everything started later wait for the copies to the device.
TD_API int td_follow(td_device *d);
// td_digest writes the CRC32C of pieces of the device's memory to the address in memory of
// td_host(null) that each piece names, before the copies of the next td_copy end. It sees
// the memory as td_copy would. A piece's bytes are a multiple of four.
TD_API int td_digest(td_device *d, const td_piece *pieces, int n);
// td_nccl_id writes the id of a group of ranks, of 128 bytes, which rank 0 passes to
// the others; nccl is the path of NCCL.
TD_API int td_nccl_id(const char *nccl, char *id, char *error, int n);
// td_ranks connects the device to those of the other ranks. It waits for all of them.
TD_API int td_ranks(td_device *d, const char *nccl, const char *id, int rank, int ranks);
// td_leave disconnects the ranks for good, also while td_ranks waits.
TD_API void td_leave(td_device *d);
// td_poll returns 1 if everything started has ended, 0 if not yet, and -1 on failure.
TD_API int td_poll(td_device *d);
TD_API int td_wait(td_device *d);

#ifdef __cplusplus
}
#endif
