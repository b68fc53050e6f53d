// Types and functions that Go, the thread pool and the kernels of each instruction set
// share. All memory that these structs point to is mapped by Go outside of its heap and
// valid until the backend is closed. Bounds are checked before C is called.
#ifndef TANDEM_KERNELS_H
#define TANDEM_KERNELS_H

#include <stdint.h>

enum {
	OP_EMBED = 1, // the numbers of plan.go
	OP_LINEAR,
	OP_RMSNORM,
	OP_ROPE,
	OP_STOREKV,
	OP_ATTENTION,
	OP_GATEDACT,
	OP_ROWS,
	OP_ROUTE, // the parts of a mixture of experts, see moe.h
	OP_GROUP,
	OP_SCATTER,
	OP_EXPERTS,
	OP_COMBINE,
	OP_ADD,
	OP_SOFTCAP,
	OP_COLUMNS,
	OP_SPLIT, // of HeadLinear, see moe.h
	OP_JOIN,
	OP_ADAPT, // dst += a in rows that have an adapter
	OP_QUANTIZE, // rows of a to q, see quant.h, or amx.h for ELEM_BF16
	OP_DELTA,    // see delta.h
	OP_GATE,
	OP_PACK,     // not in plans: row-major matrix a to packed w
};

// Element types of weights; fields named bf16 hold one of them.
enum { ELEM_F32, ELEM_BF16, ELEM_MXFP4, ELEM_INT8, ELEM_INT4, ELEM_FP8, ELEM_GRID };

// Kinds of scales of ELEM_GRID, the numbers of backend.GridKind.
enum { GRID_PLAIN, GRID_ZEROS, GRID_OFFSETS, GRID_MINS, GRID_SIGNED, GRID_FLOATS };

// Activations, the numbers of backend.Act.
enum { ACT_SILU, ACT_GELU_TANH, ACT_CLAMPED_SWISH };

// One matrix of OP_EXPERTS.
typedef struct {
	void *w; // packed
	int64_t bf16;
	const float *bias;    // or null
	const int32_t *order; // as tandem_op's
} tandem_expert;

// The head of a packed matrix of ELEM_FP8, see fp8.h.
typedef struct {
	int32_t cols, from; // columns of a block of one scale; columns of the first block before the matrix
	int32_t across;     // blocks in a row
	int32_t lanes;      // scales of a tile and block: one, or one for each output
	int64_t scales;     // offset of the scales in bytes
	int64_t unused[5];
} tandem_fp8;

// The head of a packed matrix of ELEM_GRID, see grid.h.
typedef struct {
	int32_t kind, bits;
	int32_t bfloat;     // scales are bf16, else half precision
	int32_t pairs;      // of groups of 32, in a block
	int32_t head, pair; // bytes of a tile's block before its pairs, and of a pair
	int64_t tile;       // bytes of a tile
	float whole;        // of GRID_FLOATS: the scale of the matrix
	float factor;       // of GRID_FLOATS: 128 times what it multiplies with
	int32_t divide;     // of GRID_FLOATS: whole divides
	int32_t unused[5];
} tandem_grid;

// One part of the states of OP_DELTA.
typedef struct {
	uint8_t *kv;           // [blocks, page_bytes]
	const int32_t *tables; // [spans, table_stride]
} tandem_state;

// One recorded operation. Unused fields are zero.
typedef struct {
	int32_t kind;
	int32_t output_rows; // 1: live rows are outputs, 0: tokens
	int32_t n, k;        // columns of dst, columns of a
	int32_t heads, kv_heads, dim;
	int32_t latent;    // of OP_STOREKV and OP_ATTENTION: columns of a latent that are values; 0: none
	int32_t groups, keep; // of OP_ROUTE by the logistic function; 0: by softmax
	int32_t bf16;      // element type of w
	float scale;       // of scores, or epsilon
	float cap;         // of OP_ATTENTION: scores become cap tanh(score / cap); 0: not bounded
	int32_t window;    // positions that a row attends to, 0 all
	int32_t act;       // of OP_GATEDACT
	int32_t from;      // of OP_COLUMNS; of OP_EMBED the token of w's first row; of OP_PACK the element type of a
	int32_t w_rows;    // of OP_EMBED: tokens in w
	const float *sinks;  // [heads] of OP_ATTENTION, or null
	const float *scales; // [n_experts] of OP_ROUTE, or null; [kv_heads] of OP_DELTA, DeltaSpec's Decay
	int32_t value_dim, parts;   // of OP_DELTA; heads are its key heads, kv_heads its value heads
	const tandem_state *states; // [parts]
	const float *alpha;         // [tokens, kv_heads] of OP_DELTA; b is beta, w the convolution
	int32_t slots;     // if rows are slots, their number per live row; else 0

	int32_t top_k, normalize, n_experts; // of the parts of a mixture of experts
	int32_t *chosen;                     // [rows, top_k] experts, the best first
	float *weights;                      // [rows, top_k]
	int32_t *slot;                       // [rows, top_k] slot of each selection, sorted by expert
	int32_t *list;                       // number of spans, then expert, first slot, slots of each
	int32_t *count;                      // [n_experts + 1] of OP_GROUP
	const tandem_expert *experts;        // [n_experts]
	float *dst;        // [rows, n]
	float *a, *b;      // [rows, k]; for OP_PACK a is the checkpoint's bytes
	uint8_t *q;        // a in 8 bits, see quant.h, or rounded, see amx.h: of OP_QUANTIZE, and of products
	const int32_t *order; // [k] of OP_QUANTIZE: the column of a that each number of q is; null: the same
	void *w;           // packed matrix, or a vector of n fp32
	const float *bias; // [n] or null
	uint8_t *kv;       // [blocks, page_bytes] of the layer
	int32_t block_tokens;    // of the layer's KV group, as the next three
	int64_t v_at;            // offset of V in a page, bytes
	const int32_t *slots_kv; // [tokens] slot for each row's KV
	const int32_t *tables;   // [spans, table_stride]
	const float *k_scales, *v_scales; // [kv_heads] of ELEM_FP8: 256 times the scales; else null
	const float *cs;   // [tokens, dim] cosines, then sines
} tandem_op;

// The live step, rewritten by Go before each run.
typedef struct {
	int32_t tokens, outputs;
	const int32_t *ids, *positions, *row_span; // [tokens]
	const int32_t *output_rows;                // [outputs]
	int32_t spans;
	const int32_t *span_rows; // [spans + 1] first row of each span, and the row after the last one
	int32_t table_stride;
	int32_t kv_elem; // element type of KV
	int64_t page_bytes;
	int32_t fault_batch_order;
} tandem_step;

// The division of one operation into items for one step. It depends on batch and thread
// count; results do not.
typedef struct {
	int32_t items;
	int32_t rows;   // live
	int32_t tiles;  // OP_LINEAR, OP_EXPERTS: tiles of 16 outputs per item
	int32_t chunks; // OP_LINEAR: row chunks; OP_EXPERTS: spans
	int32_t chunk;  // rows per item, OP_LINEAR and OP_ATTENTION
} tandem_split;

enum {
	TILE = 16,            // outputs per packed tile, lanes of every reduction
	LINEAR_TILES = 4,     // tiles, and so streams from memory, in one item
	LINEAR_ROWS = 96,     // rows in one item
	AMX_ROWS = 16,        // rows of one AMX product,
	AMX_DEPTH = 32,       // and its elements of the reduction
	LINEAR_DEPTH = 1024,  // of the reduction, so that a group of tiles stays in L2
	SEGMENT = 256,        // most positions per attention segment
	QUERIES = 16,         // query vectors that share one pass over K and V
	MAX_HEAD_DIM = 512,
	MAX_KEY_DIM = 576, // of a latent
	MAX_EXPERTS = 1024,
	MXFP4_GROUP = 16 * 17, // bytes of 32 inputs of a tile: 16 blocks, 16 exponents
	QUANT_GROUP = 32,      // of the reduction, with one scale
	QUANT_PAIR = 2 * QUANT_GROUP,
	QUANT_DEPTH = 2048,    // as LINEAR_DEPTH, of ELEM_INT8, ELEM_INT4 and ELEM_GRID
	INT8_PAIR = 17 * 64,   // bytes of 64 inputs of a tile: weights, then a line of scales
	INT4_PAIR = 9 * 64,
	FP8_DEPTH = 512,       // as LINEAR_DEPTH, of ELEM_FP8: unpacked it is four times as large,
	FP8_AT_ONCE = 128,     // and for few rows, so that it stays in L1
	SAMPLE_BLOCK = 512,    // tokens per sum of weights, engine/sample's Block
};

// How logits become weights: engine/sample's Weighing.
typedef struct {
	float max, scale, lowest, min_p;
} tandem_weighing;

// Scratch of one thread, 64-byte aligned.
typedef struct {
	float scores[QUERIES][SEGMENT + TILE];
	float part[QUERIES][MAX_HEAD_DIM]; // output of one segment
	float out[QUERIES][MAX_HEAD_DIM];  // output of the segments so far
	float tile[MAX_KEY_DIM][TILE];     // K of up to 16 positions, unpacked
	const uint8_t *v[SEGMENT];         // V row of each position of the segment
	uint8_t unpacked[LINEAR_TILES][LINEAR_DEPTH / 2 * 64]; // MXFP4 tiles as bf16 tiles, FP8 tiles as fp32 tiles
} tandem_scratch;

// Kernels of one instruction set.
typedef struct {
	void (*item)(const tandem_op *, const tandem_step *, const tandem_split *, int item, tandem_scratch *);

	// engine/sample's Kernels, documented there.
	int64_t (*argmax)(const float *, int64_t n);
	void (*weigh)(float *weights, double *sums, const float *, int64_t n, const tandem_weighing *);
	void (*mass)(double *sums, const float *weights, int64_t n, float least);
	int64_t (*between)(float *dst, int32_t *counts, double *above, const float *weights, int64_t n, float least, float limit);
	int64_t (*first_above)(const float *, int64_t n, int64_t from, float than);
	int64_t (*count_above)(const float *, int64_t n, float than);
} tandem_kernels;

extern const tandem_kernels tandem_generic;

// Whether a pass over the weights for few rows leaves prefetching to the processor. AMD's
// processors do it well for one stream of quantized weights. With prefetch instructions, or
// with four streams at once, a thread reads a quarter less (Zen 4;
// bench/results/engine.md).
extern int tandem_hardware_prefetch;

#if defined(__x86_64__)
extern const tandem_kernels tandem_avx2, tandem_avxvnni, tandem_avx512, tandem_avx512vnni, tandem_amx;
#elif defined(__aarch64__)
extern const tandem_kernels tandem_neon;
#endif

typedef struct tandem_pool tandem_pool;

// Whether the processor converts half precision, which golang.org/x/sys/cpu does not
// report. The AVX2 kernels of fp8.h need it.
int tandem_has_f16c(void);

// Variant 0 is generic, 1 avx2, 2 avx512, 3 neon, 4 avxvnni, 5 avx512vnni, 6 amx. The
// processor must support it. Returns null if threads or memory are short. The caller of
// tandem_run is one of the threads.
tandem_pool *tandem_pool_new(int threads, int variant);
void tandem_pool_free(tandem_pool *);

// Runs operations [0, count) one after the other.
void tandem_run(tandem_pool *, const tandem_op *ops, int count, const tandem_step *);

// Packs a row-major matrix [op.n, op.k] of any alignment into op.w.
void tandem_pack(tandem_pool *, tandem_op op, const void *matrix, const tandem_step *);

// The kernels of a variant over rows of logits and weights. Any thread may call them.
int64_t tandem_argmax(int variant, const float *, int64_t n);
void tandem_weigh(int variant, float *weights, double *sums, const float *, int64_t n, const tandem_weighing *);
void tandem_mass(int variant, double *sums, const float *weights, int64_t n, float least);
int64_t tandem_between(int variant, float *dst, int32_t *counts, double *above, const float *weights, int64_t n, float least, float limit);
int64_t tandem_first_above(int variant, const float *, int64_t n, int64_t from, float than);
int64_t tandem_count_above(int variant, const float *, int64_t n, float than);

// Divides an operation into items.
tandem_split tandem_cut(const tandem_op *, const tandem_step *, int threads);

#endif
