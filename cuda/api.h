// The functions of the shared object that computes on GPUs, and of its twin that
// runs the same kernels on the CPU. The device executes plans: arrays of
// operations over addresses that td_alloc gave. What varies from step to step is
// in the step's memory, which the host writes before td_run: so a plan can be
// recorded as a graph once and repeated.
//
// Nothing here calls back. A device is used by one thread at a time. Functions
// that can fail return 0, or null, when they do; td_error says why.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TD_API __attribute__((visibility("default")))
#define TD_VERSION 10

typedef struct td_device td_device;
typedef struct td_plan td_plan;
typedef uint64_t td_address; // of the device; 0: none

typedef struct {
  int64_t total, free; // bytes of memory
  int32_t capability;  // 90 for 9.0
  int32_t processors;  // multiprocessors
  int32_t twin;        // 1: the CPU plays the device
  int32_t reserved;
  char name[128];
} td_info;

// Limits of every step, and how block tables are laid out.
typedef struct {
  int32_t tokens, outputs, seqs, blocks;
  int32_t one_order; // 1: products add up in one order, however many rows there are
} td_limits;

// How one output is drawn.
typedef struct {
  uint64_t seed;
  uint32_t choice;
  int32_t position;
  float temperature, top_p, min_p;
  int32_t top_k;
  int32_t probs; // 1 and as many best tokens as are wanted of td_probs; 0: nothing is
  int32_t rules; // 1 and the word of td_step.rules where its td_rules begin; 0: none
} td_draw;

// What a request's rules make of its logits before a token is drawn, as engine/sample
// has it. Behind it stand the words of the bitmap of allowed tokens, td_ban of each
// token that must not be drawn, and td_mark of each that is known: of a token there
// is one mark, and of a ban any number.
typedef struct {
  int32_t allowed; // words; -1: all tokens are
  int32_t bans, marks;
  int32_t last;    // the output of the step before whose token is not in the marks yet; -1: none
  float repetition, presence, frequency;
  int32_t follows; // what last adds to its token's mark: 1 it is seen, 2 it counts
} td_rules;

typedef struct {
  int32_t token, after; // only where last has drawn after; -1: always
} td_ban;

typedef struct {
  int32_t token, count; // how often the output has it
  float bias;
  int32_t seen;         // 1: repetition is for it
} td_mark;

// td_rules of an output are not longer than this, with all that stands behind them.
enum { TD_RULE_WORDS = 1 << 13 };

// What a client sees of a drawn token: its log-probability and rank (1 is the best)
// before temperature and masks, and the best tokens.
enum { TD_TOP = 20 };
typedef struct {
  float own;
  int32_t rank;
  int32_t tokens[TD_TOP];
  float probs[TD_TOP];
} td_probs;

// Rows of one sequence that stand together within TD_CHUNK_ROWS rows are marked in
// row_span by the host, in steps of more than TD_FEW: kernels then treat them
// together. Not less than TD_CHUNK_LEAST of them are worth it.
enum { TD_IN_CHUNK = 1 << 30, TD_CHUNK_ROWS = 64, TD_CHUNK_LEAST = 8, TD_FEW = 16 };

// A step's memory on the host, pinned. The device has its own copy, which td_run
// brings up to date; of tables only what td_tables was told of. There are two, so
// that the host fills one while the device works from the other: that of a step is
// free again when the step has ended. Tables are one for both, and the host's: what
// it has told of may be written again at once.
typedef struct {
  int32_t *counts;    // [5] tokens, outputs, spans, sequence number of the step, words of rules
  int32_t *ids;       // [tokens] -1-i: what output i of the last step that was started draws
  int32_t *positions; // [tokens]
  int32_t *row_span;  // [tokens]
  int32_t *adapters;  // [tokens] place of the adapter that the row goes through, from 1 on; 0: none
  int32_t *out_rows;  // [outputs]
  int32_t *slots;     // [groups, tokens] block*block_tokens + offset, where KV goes
  td_draw *draws;     // [outputs]
  uint64_t *rules;    // [outputs, TD_RULE_WORDS], of which as many go to the device as there are
  int32_t *tables;    // [groups, seqs, blocks]
  int32_t *sampled;   // [outputs] written by the device
  td_probs *probs;    // [outputs] written by the device, of outputs that want it
  uint32_t *copied;   // how many calls of td_copy have ended, written by the device
  uint32_t *done;     // sequence number of the last finished step, written by the device
} td_step;

// A piece of what is copied.
typedef struct {
  td_address device;
  uint64_t host; // an address
  int64_t bytes;
} td_piece;

enum {
  TD_EMBED = 1, // dst[row] = w[ids[row] - k], of from rows; 0 where w has none
  TD_LINEAR,    // dst = a·wᵀ + bias, also of experts: slots, list. act, where not 0, is 1 and an activation: dst = act(dst, more[0].dst)
  TD_NORM,      // dst = norm(a)·w for each dim columns; b: first a += b
  TD_ANGLES,    // dst = cosines and sines [tokens, dim] from w [dim/2] frequencies
  TD_ROPE,      // dst turns by the angles b: of heads of k columns the last dim
  TD_STORE_KV,  // v_at 0: a latent, of which a has the first k columns and b the rest
  TD_ATTENTION, // values have k columns
  TD_GATED_ACT,
  TD_ROWS, // dst[i] = a[out_rows[i]]
  TD_ROUTE,
  TD_GROUP,
  TD_SCATTER,
  TD_COMBINE,
  TD_ADD, // dst = (a + b)·scale·w[0]
  TD_SOFTCAP,
  TD_COLUMNS,
  TD_SAMPLE,  // and, where a draw wants them, log-probabilities of the same a; dst is scratch like a
  TD_ROUTE_GROUPS, // by σ(a) + bias: of heads groups of experts the kv_heads best; weights times scale
  TD_SPLIT,        // dst[head][row] = the first dim of each head's k columns of a; lists the heads' spans
  TD_JOIN,         // dst[row] = each head's dim columns of b[head][row], then what TD_SPLIT left of a's k
  TD_ALL_REDUCE,   // dst = the sum of all ranks' dst
  TD_PACK,         // dst[row] = a's k columns, filled up to n
  TD_ALL_GATHER,   // dst = all ranks' a [rows, n], one behind the other
  TD_UNPACK,       // dst[row] = the columns that each of heads ranks has in a [heads, rows, dim], side by side
  TD_PLACE,        // dst are queries and a keys, both normed by w and bias where normalize is 1, and turned by the angles b; keys and the values extra go to KV
  TD_ADAPT         // dst += what a row's adapter makes of a, of heads places of at most dim numbers between A and B. w: the places' ranks [heads], filled up to 256 bytes, and A [heads, dim, k]; bias: B [heads, dim, n]; extra: scratch [3, from, dim]
};

// Types of a matrix [out, in]. Behind the numbers of the last three stand their
// scales; rows of numbers are filled up with zeros.
enum {
  TD_F32 = 0,
  TD_BF16 = 1,
  TD_MXFP4 = 2,
  TD_FP8 = 3,  // E4M3, rows a multiple of 16 long; scales fp32, one for each td_scales
  TD_INT8 = 4, // rows a multiple of 64 long; scales bf16 [out, in/32], as many as rows have groups of 32
  TD_INT4 = 5  // the same, 8 more than they say: of eight the first two are in bits 0 and 16 of a word, the next in 4 and 20
};

// What shares a scale of TD_FP8: so many rows and columns, as powers of two.
typedef struct {
  int32_t rows, cols;
} td_scales;

// An expert's matrix and bias.
typedef struct {
  td_address w, bias;
  td_scales scales;
} td_expert;

// A matrix of a product that is joined to another's, of the same a and type.
typedef struct {
  td_address w, bias, dst; // w: of experts, their table
  int32_t n, reserved;     // n 0: there is none
} td_joined;

typedef struct {
  int32_t kind;
  int32_t outputs;       // 1: rows are outputs, else tokens
  int32_t n, k;          // columns of dst, of a
  int32_t heads, kv_heads, dim;
  int32_t window, group, block_tokens;
  int32_t type;          // of w, or of KV
  int32_t act, from;
  int32_t slots;         // rows per row, of operations on experts; 0: 1
  int32_t top_k, experts, normalize;
  float scale;
  float cap;             // of TD_ATTENTION: scores are cap tanh(score / cap); of TD_ANGLES: growth over positions of from each; 0: none
  td_address dst, a, b, w, bias, extra; // extra: sinks, or factors of experts
  td_address kv;         // the region's pages
  int64_t page_bytes, v_at;
  td_address chosen, weights, slot, list, table; // routing; table: td_expert of each
  td_joined more[2];     // of TD_LINEAR and TD_ADAPT
  td_scales scales;      // of w and of what is joined; those of experts are in table
} td_op;

TD_API int td_version(void);
// td_count is how many devices there are; -1: none can be, and error says why.
TD_API int td_count(char *error, int n);
TD_API td_device *td_open(int ordinal, td_limits limits, char *error, int n);
// td_blas opens cuBLASLt, at path or where that is empty wherever programs find it,
// for products of bf16 matrices with many rows in plans that are recorded later.
// Returns its version, or 0 and says why not; then kernels of this object do it.
TD_API int64_t td_blas(td_device *d, const char *path, char *error, int n);
TD_API void td_close(td_device *d);
TD_API const char *td_error(td_device *d);
TD_API void td_describe(td_device *d, td_info *info);

TD_API td_address td_alloc(td_device *d, int64_t bytes);
// td_host is memory of the host that td_copy reaches: memory, which then must stay
// until td_close, or where that is null some of its own.
TD_API void *td_host(td_device *d, void *memory, int64_t bytes);

TD_API int td_upload(td_device *d, td_address dst, const void *src, int64_t bytes);
TD_API int td_download(td_device *d, void *dst, td_address src, int64_t bytes);

// td_groups makes the two steps' memory, once, for so many groups of KV.
TD_API int td_groups(td_device *d, int groups, td_step *steps);
// td_tables says that places [from, from+n) of a sequence's table have changed for
// the step that is filled.
TD_API int td_tables(td_device *d, int which, int group, int seq, int from, int n);

// td_record makes a plan for steps of at most so many rows. Recorded plans are
// graphs, which run as a whole.
TD_API td_plan *td_record(td_device *d, const td_op *ops, int n, int tokens, int outputs, int graph);
// td_run starts operations [from, to) of a plan over one of the two steps' memory,
// behind all that was started before. With 0 as from that memory goes first; with
// all of them as to, done and sampled are written last. The number of a step over
// memory 1 is odd, over memory 0 even.
TD_API int td_run(td_device *d, td_plan *p, int which, int from, int to);
// td_copy copies between the device and memory of td_host, beside what td_run
// starts. To the host, as the device has it when all that was started so far has
// ended; to the device, before anything that is started later. Copies end in
// order; how many have been told of is written to copied at their end.
TD_API int td_copy(td_device *d, const td_piece *pieces, int n, int to_device);
// td_digest writes the CRC32C of pieces of the device's memory, whose bytes are
// multiples of four, to where in memory of td_host(null) each says: before the copies
// of the next td_copy end, of the memory as td_copy would have it.
TD_API int td_digest(td_device *d, const td_piece *pieces, int n);
// td_nccl_id makes the name of a group of ranks, of 128 bytes, which rank 0 gives to
// the others; nccl is the path of NCCL.
TD_API int td_nccl_id(const char *nccl, char *id, char *error, int n);
// td_ranks has the device meet those of the other ranks; it waits for all of them.
TD_API int td_ranks(td_device *d, const char *nccl, const char *id, int rank, int ranks);
// td_leave ends the meeting of ranks for good, also one that is under way.
TD_API void td_leave(td_device *d);
// td_poll says whether all that was started has ended: 1 it has, 0 not yet, -1 failed.
TD_API int td_poll(td_device *d);
TD_API int td_wait(td_device *d);

#ifdef __cplusplus
}
#endif
