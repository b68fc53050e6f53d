// Vectors of one instruction set, under the names that body.h uses. There are two widths.
// V is the native register, VL lanes, for the inner loops. v16 always has 16 lanes, whose
// reductions are the same tree everywhere. vfma and v16_fma round once on AVX2, AVX-512
// and NEON, so that these give the same bits.
//
// The constants are how much an inner loop keeps in registers. LINEAR_NT is the number of
// rows, LINEAR_BLOCK that of larger batches. SCORE_NQ x SCORE_NG are queries and groups of
// 16 positions. MIX_NQ x MIX_NV are queries and registers of the output.
#include <stdint.h>
#include <string.h>

#if KERNEL_ISA == 512 && KERNEL_AMX
#include <immintrin.h>
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,amx-tile,amx-bf16,avx2,fma")))
#elif KERNEL_ISA == 512 && KERNEL_VNNI
#include <immintrin.h>
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")))
#elif KERNEL_ISA == 512
#include <immintrin.h>
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#elif KERNEL_ISA == 2 && KERNEL_VNNI
#include <immintrin.h>
#define TARGET __attribute__((target("avx2,fma,f16c,avxvnni")))
#elif KERNEL_ISA == 2
#include <immintrin.h>
#define TARGET __attribute__((target("avx2,fma,f16c")))
#elif KERNEL_ISA == 128
#include <arm_neon.h>
#define TARGET // every 64-bit ARM has it
#else
#define TARGET
#endif

#define FN static inline __attribute__((always_inline, unused)) TARGET

// A 256th of the value of an E4M3 byte.
FN float fp8_at(uint32_t b) {
	uint32_t e = b >> 3 & 15, u;
	float f = (float)((b & 7) | (e ? 8 : 0)) * 0x1p-17f; // of an exponent of 1
	memcpy(&u, &f, 4);
	u += f != 0 && e ? (e - 1) << 23 : 0;
	u |= (b & 128) << 24;
	memcpy(&f, &u, 4);
	return f;
}

// The value of half precision.
FN float half_at(uint32_t h) {
	uint32_t e = h >> 10 & 31, u = (h & 0x8000) << 16 | (e == 31 ? 0x7f800000 : (e + 112) << 23) | (h & 1023) << 13;
	float f;
	memcpy(&f, &u, 4);
	return e ? f : (h & 0x8000 ? -1.0f : 1.0f) * (float)(h & 1023) * 0x1p-24f;
}

#if KERNEL_ISA == 512 || KERNEL_ISA == 2
// The even or the odd bytes, E4M3, as half precision of a 256th.
FN __m256i vhalves(__m256i v, int odd) {
	v = _mm256_srai_epi16(odd ? v : _mm256_slli_epi16(v, 8), 1);
	return _mm256_and_si256(v, _mm256_set1_epi16((short)0xbf80));
}
#endif

#if KERNEL_ISA == 512

enum { VL = 16, LINEAR_NT = 8, LINEAR_BLOCK = 6, SCORE_NQ = 4, SCORE_NG = 4, MIX_NQ = 4, MIX_NV = 4 };
typedef __m512 V;
typedef __m512i VI;
typedef __m512 v16;

FN V vzero(void) { return _mm512_setzero_ps(); }
FN V vset1(float f) { return _mm512_set1_ps(f); }
FN V vload(const float *p) { return _mm512_loadu_ps(p); }
FN void vstore(float *p, V v) { _mm512_storeu_ps(p, v); }
FN V vadd(V a, V b) { return _mm512_add_ps(a, b); }
FN V vfma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
FN VI vload_pairs(const void *p) { return _mm512_loadu_si512(p); }
FN V veven(VI v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
FN V vodd(VI v) { return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000))); }
FN V vload_bf16(const void *p) {
	return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}
FN V vload_fp8(const void *p) {
	return _mm512_cvtph_ps(vhalves(_mm256_cvtepu8_epi16(_mm_loadu_si128(p)), 0));
}

FN V vmul(V a, V b) { return _mm512_mul_ps(a, b); }
FN VI vints(int32_t i) { return _mm512_set1_epi32(i); }
FN V vfloat(VI v) { return _mm512_cvtepi32_ps(v); }
FN V vhalf(VI v, int high) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(high ? _mm512_srli_epi32(v, 16) : v)); }
FN VI vnibbles(VI v, int high) { return _mm512_and_si512(high ? _mm512_srli_epi32(v, 4) : v, _mm512_set1_epi8(15)); }
#if KERNEL_VNNI
// The intrinsic would copy the sum in each product.
FN VI vdot_uint8(VI sum, VI w, VI x) {
	__asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
	return sum;
}
FN VI vdot_uint4(VI sum, VI w, VI x) { return vdot_uint8(sum, w, x); }
#else
FN VI vdot_uint4(VI sum, VI w, VI x) {
	return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1)));
}
FN VI vdot_int8(VI sum, VI w, VI x) {
	w = _mm512_xor_si512(w, _mm512_set1_epi8((char)128));
	x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
	return vdot_uint4(sum, _mm512_abs_epi8(w), x);
}
#endif

FN v16 v16_zero(void) { return vzero(); }
FN v16 v16_fp8(const void *p, int odd) {
	return _mm512_cvtph_ps(vhalves(_mm256_loadu_si256(p), odd));
}
#define V16_FP8_FOUR 1
FN void v16_fp8_four(const void *p, v16 v[4]) {
	const __m512i mask = _mm512_set1_epi16((short)0xbf80), bytes = _mm512_loadu_si512(p);
	__m512i even = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 1), mask);
	__m512i odd = _mm512_and_si512(_mm512_srai_epi16(bytes, 1), mask);
	v[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(even));
	v[1] = _mm512_cvtph_ps(_mm512_castsi512_si256(odd));
	v[2] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(even, 1));
	v[3] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(odd, 1));
}
FN v16 v16_set1(float f) { return vset1(f); }
FN v16 v16_load(const float *p) { return vload(p); }
FN void v16_low_bytes(void *p, v16 v) { _mm_storeu_si128(p, _mm512_cvtepi32_epi8(_mm512_castps_si512(v))); }
FN void v16_store(float *p, v16 v) { vstore(p, v); }
FN v16 v16_loadn(const float *p, int n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
FN void v16_storen(float *p, v16 v, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), v); }
FN v16 v16_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
FN v16 v16_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
FN v16 v16_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
FN v16 v16_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
FN v16 v16_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
FN v16 v16_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
FN v16 v16_min(v16 a, v16 b) { return _mm512_min_ps(a, b); }
// The power of two whose exponent sits in the low bits of t, see v16_exp.
FN v16 v16_pow2(v16 t) {
	return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_castps_si512(t), _mm512_set1_epi32(127)), 23));
}
// v where x is not below lo, else 0.
FN v16 v16_zero_below(v16 v, v16 x, v16 lo) {
	return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, lo, _CMP_NLT_UQ), v);
}
FN v16 v16_where_least(v16 v, v16 x, v16 lo) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, lo, _CMP_GE_OQ), v); }
FN uint32_t v16_above(v16 x, v16 y) { return _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ); }
FN v16 v16_round(v16 x, v16 *n) { return *n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
FN v16 v16_raise(v16 v, v16 n) { return _mm512_scalef_ps(v, n); }
typedef struct {
	__m512d a, b;
} w16;
FN w16 w16_zero(void) { return (w16){_mm512_setzero_pd(), _mm512_setzero_pd()}; }
FN w16 w16_add(w16 x, v16 v) {
	return (w16){_mm512_add_pd(x.a, _mm512_cvtps_pd(_mm512_castps512_ps256(v))),
	             _mm512_add_pd(x.b, _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)))};
}
FN void w16_store(double *p, w16 v) { _mm512_storeu_pd(p, v.a), _mm512_storeu_pd(p + 8, v.b); }

#elif KERNEL_ISA == 2

enum { VL = 8, LINEAR_NT = 6, LINEAR_BLOCK = 6, SCORE_NQ = 2, SCORE_NG = 2, MIX_NQ = 2, MIX_NV = 4 };
typedef __m256 V;
typedef __m256i VI;
typedef struct {
	__m256 a, b;
} v16;

FN V vzero(void) { return _mm256_setzero_ps(); }
FN V vset1(float f) { return _mm256_set1_ps(f); }
FN V vload(const float *p) { return _mm256_loadu_ps(p); }
FN void vstore(float *p, V v) { _mm256_storeu_ps(p, v); }
FN V vadd(V a, V b) { return _mm256_add_ps(a, b); }
FN V vfma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
FN VI vload_pairs(const void *p) { return _mm256_loadu_si256(p); }
FN V veven(VI v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
FN V vodd(VI v) { return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32((int)0xffff0000))); }
FN V vload_bf16(const void *p) {
	return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}
FN V vload_fp8(const void *p) {
	__m128i v = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64(p)), 8);
	return _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(v, 1), _mm_set1_epi16((short)0xbf80)));
}

FN V vmul(V a, V b) { return _mm256_mul_ps(a, b); }
FN VI vints(int32_t i) { return _mm256_set1_epi32(i); }
FN V vfloat(VI v) { return _mm256_cvtepi32_ps(v); }
FN V vhalf(VI v, int high) {
	v = high ? _mm256_srli_epi32(v, 16) : _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
	v = _mm256_permute4x64_epi64(_mm256_packus_epi32(v, v), 0xd8);
	return _mm256_cvtph_ps(_mm256_castsi256_si128(v));
}
FN VI vnibbles(VI v, int high) { return _mm256_and_si256(high ? _mm256_srli_epi32(v, 4) : v, _mm256_set1_epi8(15)); }
#if KERNEL_VNNI
FN VI vdot_uint8(VI sum, VI w, VI x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
FN VI vdot_uint4(VI sum, VI w, VI x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
#else
FN VI vdot_uint4(VI sum, VI w, VI x) {
	return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
FN VI vdot_int8(VI sum, VI w, VI x) {
	w = _mm256_xor_si256(w, _mm256_set1_epi8((char)128));
	return vdot_uint4(sum, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
}
#endif

FN v16 v16_zero(void) { return (v16){vzero(), vzero()}; }
FN v16 v16_fp8(const void *p, int odd) {
	__m256i h = vhalves(_mm256_loadu_si256(p), odd);
	return (v16){_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
}
FN v16 v16_set1(float f) { return (v16){vset1(f), vset1(f)}; }
FN v16 v16_load(const float *p) { return (v16){vload(p), vload(p + 8)}; }
FN void v16_store(float *p, v16 v) { vstore(p, v.a), vstore(p + 8, v.b); }
FN v16 v16_loadn(const float *p, int n) {
	float t[16] = {0};
	memcpy(t, p, n * sizeof *t);
	return v16_load(t);
}
FN void v16_storen(float *p, v16 v, int n) {
	float t[16];
	v16_store(t, v);
	memcpy(p, t, n * sizeof *t);
}
FN v16 v16_add(v16 x, v16 y) { return (v16){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
FN v16 v16_sub(v16 x, v16 y) { return (v16){_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
FN v16 v16_mul(v16 x, v16 y) { return (v16){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
FN v16 v16_div(v16 x, v16 y) { return (v16){_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
FN v16 v16_fma(v16 x, v16 y, v16 z) { return (v16){vfma(x.a, y.a, z.a), vfma(x.b, y.b, z.b)}; }
FN v16 v16_max(v16 x, v16 y) { return (v16){_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
FN v16 v16_min(v16 x, v16 y) { return (v16){_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
FN void v16_low_bytes(void *p, v16 v) {
	const __m256i low = _mm256_set1_epi32(255);
	__m256i w = _mm256_packus_epi32(_mm256_and_si256(_mm256_castps_si256(v.a), low), _mm256_and_si256(_mm256_castps_si256(v.b), low));
	w = _mm256_permute4x64_epi64(w, 0xd8); // the halves of a, then those of b
	_mm_storeu_si128(p, _mm_packus_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
FN V vpow2(V t) {
	return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(127)), 23));
}
FN v16 v16_pow2(v16 t) { return (v16){vpow2(t.a), vpow2(t.b)}; }
FN v16 v16_zero_below(v16 v, v16 x, v16 lo) {
	return (v16){_mm256_and_ps(v.a, _mm256_cmp_ps(x.a, lo.a, _CMP_NLT_UQ)),
	             _mm256_and_ps(v.b, _mm256_cmp_ps(x.b, lo.b, _CMP_NLT_UQ))};
}
FN v16 v16_where_least(v16 v, v16 x, v16 lo) {
	return (v16){_mm256_and_ps(v.a, _mm256_cmp_ps(x.a, lo.a, _CMP_GE_OQ)),
	             _mm256_and_ps(v.b, _mm256_cmp_ps(x.b, lo.b, _CMP_GE_OQ))};
}
FN uint32_t v16_above(v16 x, v16 y) {
	return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ)) |
	       (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)) << 8;
}
FN v16 v16_round(v16 x, v16 *n) {
	const v16 half = v16_set1(12582912.0f);
	*n = v16_add(x, half);
	return v16_sub(*n, half);
}
FN V vraise(V v, V t) {
	return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}
FN v16 v16_raise(v16 v, v16 t) { return (v16){vraise(v.a, t.a), vraise(v.b, t.b)}; }
typedef struct {
	__m256d a, b, c, d;
} w16;
FN w16 w16_zero(void) { return (w16){_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()}; }
FN w16 w16_add(w16 x, v16 v) {
	return (w16){_mm256_add_pd(x.a, _mm256_cvtps_pd(_mm256_castps256_ps128(v.a))),
	             _mm256_add_pd(x.b, _mm256_cvtps_pd(_mm256_extractf128_ps(v.a, 1))),
	             _mm256_add_pd(x.c, _mm256_cvtps_pd(_mm256_castps256_ps128(v.b))),
	             _mm256_add_pd(x.d, _mm256_cvtps_pd(_mm256_extractf128_ps(v.b, 1)))};
}
FN void w16_store(double *p, w16 v) {
	_mm256_storeu_pd(p, v.a), _mm256_storeu_pd(p + 4, v.b), _mm256_storeu_pd(p + 8, v.c), _mm256_storeu_pd(p + 12, v.d);
}

#elif KERNEL_ISA == 128

enum { VL = 4, LINEAR_NT = 6, LINEAR_BLOCK = 6, SCORE_NQ = 2, SCORE_NG = 2, MIX_NQ = 4, MIX_NV = 4 }; // 32 registers
typedef float32x4_t V;
typedef uint32x4_t VI;
typedef struct {
	float32x4_t a, b, c, d;
} v16;

FN V vzero(void) { return vdupq_n_f32(0); }
FN V vset1(float f) { return vdupq_n_f32(f); }
FN V vload(const float *p) { return vld1q_f32(p); }
FN void vstore(float *p, V v) { vst1q_f32(p, v); }
FN V vadd(V a, V b) { return vaddq_f32(a, b); }
FN V vfma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
FN VI vload_pairs(const void *p) { return vreinterpretq_u32_u8(vld1q_u8(p)); }
FN V veven(VI v) { return vreinterpretq_f32_u32(vshlq_n_u32(v, 16)); }
FN V vodd(VI v) { return vreinterpretq_f32_u32(vandq_u32(v, vdupq_n_u32(0xffff0000))); }
FN V vload_bf16(const void *p) {
	return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
}
FN V vload_fp8(const void *p) {
	uint32_t u;
	memcpy(&u, p, sizeof u);
	int16x4_t v = vreinterpret_s16_u16(vget_low_u16(vmovl_u8(vcreate_u8(u))));
	v = vand_s16(vshr_n_s16(vshl_n_s16(v, 8), 1), vdup_n_s16((int16_t)0xbf80));
	return vcvt_f32_f16(vreinterpret_f16_s16(v));
}

FN V vmul(V a, V b) { return vmulq_f32(a, b); }
FN VI vints(int32_t i) { return vdupq_n_u32((uint32_t)i); }
FN V vfloat(VI v) { return vcvtq_f32_s32(vreinterpretq_s32_u32(v)); }
FN V vhalf(VI v, int high) {
	return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(high ? vshrq_n_u32(v, 16) : v)));
}
FN VI vnibbles(VI v, int high) { return vandq_u32(high ? vshrq_n_u32(v, 4) : v, vdupq_n_u32(0x0f0f0f0f)); }
FN VI vdot_uint4(VI sum, VI w, VI x) { // not above 127, so that a sign makes no difference
	int8x16_t a = vreinterpretq_s8_u32(w), b = vreinterpretq_s8_u32(x);
	int16x8_t pairs = vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b));
	return vreinterpretq_u32_s32(vpadalq_s16(vreinterpretq_s32_u32(sum), pairs));
}
FN VI vdot_int8(VI sum, VI w, VI x) { return vdot_uint4(sum, veorq_u32(w, vdupq_n_u32(0x80808080)), x); }

FN v16 v16_zero(void) { return (v16){vzero(), vzero(), vzero(), vzero()}; }
FN float16x8_t vhalves(const uint8_t *p, int odd) {
	int16x8_t v = vreinterpretq_s16_u8(vld1q_u8(p));
	v = vshrq_n_s16(odd ? v : vshlq_n_s16(v, 8), 1);
	return vreinterpretq_f16_s16(vandq_s16(v, vdupq_n_s16((int16_t)0xbf80)));
}
FN v16 v16_fp8(const void *p, int odd) {
	float16x8_t lo = vhalves(p, odd), hi = vhalves((const uint8_t *)p + 16, odd);
	return (v16){vcvt_f32_f16(vget_low_f16(lo)), vcvt_f32_f16(vget_high_f16(lo)),
	             vcvt_f32_f16(vget_low_f16(hi)), vcvt_f32_f16(vget_high_f16(hi))};
}
FN void v16_low_bytes(void *p, v16 v) {
	uint16x8_t lo = vcombine_u16(vmovn_u32(vreinterpretq_u32_f32(v.a)), vmovn_u32(vreinterpretq_u32_f32(v.b)));
	uint16x8_t hi = vcombine_u16(vmovn_u32(vreinterpretq_u32_f32(v.c)), vmovn_u32(vreinterpretq_u32_f32(v.d)));
	vst1q_u8(p, vcombine_u8(vmovn_u16(lo), vmovn_u16(hi)));
}
FN v16 v16_set1(float f) { return (v16){vset1(f), vset1(f), vset1(f), vset1(f)}; }
FN v16 v16_load(const float *p) { return (v16){vload(p), vload(p + 4), vload(p + 8), vload(p + 12)}; }
FN void v16_store(float *p, v16 v) { vstore(p, v.a), vstore(p + 4, v.b), vstore(p + 8, v.c), vstore(p + 12, v.d); }
FN v16 v16_loadn(const float *p, int n) {
	float t[16] = {0};
	memcpy(t, p, n * sizeof *t);
	return v16_load(t);
}
FN void v16_storen(float *p, v16 v, int n) {
	float t[16];
	v16_store(t, v);
	memcpy(p, t, n * sizeof *t);
}
// The same for each of the four registers of x, y and z.
#define V16_EACH(f) (v16){f(a), f(b), f(c), f(d)}
#define ADD(r) vaddq_f32(x.r, y.r)
#define SUB(r) vsubq_f32(x.r, y.r)
#define MUL(r) vmulq_f32(x.r, y.r)
#define DIV(r) vdivq_f32(x.r, y.r)
#define FMA(r) vfmaq_f32(z.r, x.r, y.r)
#define MAX(r) vbslq_f32(vcgtq_f32(x.r, y.r), x.r, y.r) // for a NaN, y: as on x86
#define MIN(r) vbslq_f32(vcltq_f32(x.r, y.r), x.r, y.r)
#define POW2(r) vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vreinterpretq_s32_f32(x.r), vdupq_n_s32(127)), 23))
#define CLEAR(r) vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x.r), vcltq_f32(y.r, z.r)))
FN v16 v16_add(v16 x, v16 y) { return V16_EACH(ADD); }
FN v16 v16_sub(v16 x, v16 y) { return V16_EACH(SUB); }
FN v16 v16_mul(v16 x, v16 y) { return V16_EACH(MUL); }
FN v16 v16_div(v16 x, v16 y) { return V16_EACH(DIV); }
FN v16 v16_fma(v16 x, v16 y, v16 z) { return V16_EACH(FMA); }
FN v16 v16_max(v16 x, v16 y) { return V16_EACH(MAX); }
FN v16 v16_min(v16 x, v16 y) { return V16_EACH(MIN); }
FN v16 v16_pow2(v16 x) { return V16_EACH(POW2); }
FN v16 v16_zero_below(v16 x, v16 y, v16 z) { return V16_EACH(CLEAR); }
#define WHERE(r) vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x.r), vcgeq_f32(y.r, z.r)))
FN v16 v16_where_least(v16 x, v16 y, v16 z) { return V16_EACH(WHERE); }
FN uint32_t vbits(uint32x4_t mask) {
	const uint32_t bits[4] = {1, 2, 4, 8};
	return vaddvq_u32(vandq_u32(mask, vld1q_u32(bits)));
}
FN uint32_t v16_above(v16 x, v16 y) {
	return vbits(vcgtq_f32(x.a, y.a)) | vbits(vcgtq_f32(x.b, y.b)) << 4 | vbits(vcgtq_f32(x.c, y.c)) << 8 | vbits(vcgtq_f32(x.d, y.d)) << 12;
}
FN v16 v16_round(v16 x, v16 *n) {
	const v16 half = v16_set1(12582912.0f);
	*n = v16_add(x, half);
	return v16_sub(*n, half);
}
#define RAISE(r) vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(x.r), vshlq_n_u32(vreinterpretq_u32_f32(y.r), 23)))
FN v16 v16_raise(v16 x, v16 y) { return V16_EACH(RAISE); }
typedef struct {
	float64x2_t v[8];
} w16;
FN w16 w16_zero(void) {
	w16 z;
	UNROLL for (int i = 0; i < 8; i++)
		z.v[i] = vdupq_n_f64(0);
	return z;
}
FN w16 w16_add(w16 x, v16 v) {
	const V part[4] = {v.a, v.b, v.c, v.d};
	UNROLL for (int i = 0; i < 4; i++) {
		x.v[2 * i] = vaddq_f64(x.v[2 * i], vcvt_f64_f32(vget_low_f32(part[i])));
		x.v[2 * i + 1] = vaddq_f64(x.v[2 * i + 1], vcvt_high_f64_f32(part[i]));
	}
	return x;
}
FN void w16_store(double *p, w16 v) {
	UNROLL for (int i = 0; i < 8; i++)
		vst1q_f64(p + 2 * i, v.v[i]);
}

#else // any processor: 4 lanes, product and sum rounded separately

enum { VL = 4, SCORE_NQ = 2, SCORE_NG = 1, MIX_NQ = 2, MIX_NV = 4 };
#if defined(__aarch64__)
enum { LINEAR_NT = 4, LINEAR_BLOCK = 4 }; // 32 registers
#else
enum { LINEAR_NT = 2, LINEAR_BLOCK = 2 };
#endif
typedef float V __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));
typedef uint32_t VU __attribute__((vector_size(16)));
typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));

FN V vzero(void) { return (V){0}; }
FN V vset1(float f) { return (V){f, f, f, f}; }
FN V vload(const float *p) {
	V v;
	memcpy(&v, p, sizeof v);
	return v;
}
FN void vstore(float *p, V v) { memcpy(p, &v, sizeof v); }
FN V vadd(V a, V b) { return a + b; }
FN V vfma(V a, V b, V c) { return a * b + c; }
FN VI vload_pairs(const void *p) {
	VI v;
	memcpy(&v, p, sizeof v);
	return v;
}
FN V veven(VI v) { return (V)(v << 16); }
FN V vodd(VI v) { return (V)(v & (int32_t)0xffff0000); }
FN V vload_bf16(const void *p) {
	uint16_t u[4];
	memcpy(u, p, sizeof u);
	return (V)((VI){u[0], u[1], u[2], u[3]} << 16);
}

FN V vmul(V a, V b) { return a * b; }
FN VI vints(int32_t i) { return (VI){i, i, i, i}; }
FN V vfloat(VI v) { return __builtin_convertvector(v, V); }
FN V vhalf(VI v, int high) {
	V f;
	for (int i = 0; i < VL; i++)
		f[i] = half_at((uint32_t)v[i] >> (high ? 16 : 0) & 0xffff);
	return f;
}
FN VI vnibbles(VI v, int high) { return (high ? v >> 4 : v) & 0x0f0f0f0f; }
FN VI vdot_uint8(VI sum, VI w, VI x) {
	for (int i = 0; i < 32; i += 8)
		sum += (w >> i & 255) * ((VI)((VU)x << (24 - i)) >> 24);
	return sum;
}
FN VI vdot_uint4(VI sum, VI w, VI x) { return vdot_uint8(sum, w, x); }

FN v16 v16_load(const float *p) {
	v16 v;
	memcpy(&v, p, sizeof v);
	return v;
}
FN void v16_low_bytes(void *p, v16 v) {
	int32_t bits[16];
	memcpy(bits, &v, sizeof bits);
	for (int i = 0; i < 16; i++)
		((uint8_t *)p)[i] = (uint8_t)bits[i];
}
FN void v16_store(float *p, v16 v) { memcpy(p, &v, sizeof v); }
FN v16 v16_zero(void) { return (v16){0}; }
FN v16 v16_fp8(const void *p, int odd) {
	v16 v;
	for (int i = 0; i < 16; i++)
		v[i] = fp8_at(((const uint8_t *)p)[2 * i + odd]);
	return v;
}
FN V vload_fp8(const void *p) {
	V v;
	for (int i = 0; i < VL; i++)
		v[i] = fp8_at(((const uint8_t *)p)[i]);
	return v;
}
FN v16 v16_set1(float f) { return f - (v16){0}; }
FN v16 v16_loadn(const float *p, int n) {
	v16 v = {0};
	memcpy(&v, p, n * sizeof *p);
	return v;
}
FN void v16_storen(float *p, v16 v, int n) { memcpy(p, &v, n * sizeof *p); }
FN v16 v16_add(v16 a, v16 b) { return a + b; }
FN v16 v16_sub(v16 a, v16 b) { return a - b; }
FN v16 v16_mul(v16 a, v16 b) { return a * b; }
FN v16 v16_div(v16 a, v16 b) { return a / b; }
FN v16 v16_fma(v16 a, v16 b, v16 c) { return a * b + c; }
FN v16 v16_select(i16 m, v16 a, v16 b) { return (v16)((m & (i16)a) | (~m & (i16)b)); }
FN v16 v16_max(v16 a, v16 b) { return v16_select(a > b, a, b); }
FN v16 v16_min(v16 a, v16 b) { return v16_select(a < b, a, b); }
FN v16 v16_pow2(v16 t) { return (v16)(((i16)t + 127) << 23); }
FN v16 v16_zero_below(v16 v, v16 x, v16 lo) { return (v16)((i16)v & ~(i16)(x < lo)); }
FN v16 v16_where_least(v16 v, v16 x, v16 lo) { return (v16)((i16)v & (i16)(x >= lo)); }
FN uint32_t v16_bits(i16 mask) {
	uint32_t bits = 0;
	for (int i = 0; i < 16; i++)
		bits |= (uint32_t)(mask[i] & 1) << i;
	return bits;
}
FN uint32_t v16_above(v16 x, v16 y) { return v16_bits(x > y); }
typedef uint32_t u16 __attribute__((vector_size(64)));
FN v16 v16_round(v16 x, v16 *n) {
	*n = x + 12582912.0f;
	return *n - 12582912.0f;
}
FN v16 v16_raise(v16 v, v16 t) { return (v16)((u16)v + ((u16)t << 23)); }
typedef double w16 __attribute__((vector_size(128)));
FN w16 w16_zero(void) { return (w16){0}; }
FN w16 w16_add(w16 x, v16 v) { return x + __builtin_convertvector(v, w16); }
FN void w16_store(double *p, w16 v) { memcpy(p, &v, sizeof v); }

#endif

enum { VPT = 16 / VL }; // registers per tile

// vplus adds lanes of 32 bits, and vleft and vright shift them. vfields shifts to the right and
// keeps the bits of mask, a byte. vmerge returns the lower halves of the bytes of low and the upper
// ones of high. vbyte and vsigned return byte i of each lane, without and with a sign, and vupper
// the upper half of a lane. vhalf reads either half in half precision.
typedef uint32_t lanes __attribute__((vector_size(sizeof(VI))));
typedef int32_t signed_lanes __attribute__((vector_size(sizeof(VI))));
FN VI vplus(VI a, VI b) { return (VI)((lanes)a + (lanes)b); }
FN VI vleft(VI v, int by) { return (VI)((lanes)v << by); }
FN VI vright(VI v, int by) { return (VI)((lanes)v >> by); }
FN VI vfields(VI v, int right, uint32_t mask) { return (VI)((lanes)v >> right & mask * 0x01010101u); }
FN VI vmerge(VI low, VI high) {
#if KERNEL_ISA == 512
	return _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi8(15), 0xe4); // the third selects
#elif KERNEL_ISA == 128
	return vbslq_u32(vdupq_n_u32(0x0f0f0f0f), low, high);
#else
	return (VI)(((lanes)low & 0x0f0f0f0fu) | ((lanes)high & 0xf0f0f0f0u));
#endif
}
// vfp4 returns twice the value of E2M1 and FP4_OFFSET for each byte, which is below 16. vfp8
// returns a 256th of byte i of each lane, E4M3.
enum { FP4_OFFSET = 12 };
#define FP4_BYTES 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0
FN VI vfp4(VI v) {
#if KERNEL_ISA == 512
	return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_setr_epi8(FP4_BYTES)), v);
#elif KERNEL_ISA == 2
	return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_setr_epi8(FP4_BYTES)), v);
#elif KERNEL_ISA == 128
	return vreinterpretq_u32_u8(vqtbl1q_u8((uint8x16_t){FP4_BYTES}, vreinterpretq_u8_u32(v)));
#else
	static const uint8_t bytes[16] = {FP4_BYTES};
	uint8_t b[sizeof v];
	memcpy(b, &v, sizeof v);
	for (int i = 0; i < (int)sizeof v; i++)
		b[i] = bytes[b[i]];
	memcpy(&v, b, sizeof v);
	return v;
#endif
}
typedef int16_t short_lanes __attribute__((vector_size(sizeof(VI))));
FN V vfp8(VI v, int i) {
	short_lanes h = i % 2 ? (short_lanes)v : (short_lanes)((lanes)v << 8);
	return vhalf((VI)(h >> 1 & (int16_t)0xbf80), i / 2);
}
FN V vbyte(VI v, int i) { return vfloat((VI)((lanes)v >> 8 * i & 255u)); }
FN V vsigned(VI v, int i) { return vfloat((VI)((signed_lanes)((lanes)v << (24 - 8 * i)) >> 24)); }
FN V vupper(VI v) { return vfloat((VI)((lanes)v >> 16)); }

// v16_where_least returns v where x is at least lo, else 0, also for a NaN. v16_above has
// a bit for each lane. v16_round returns the nearest integer to x, ties to even, and stores
// in n the input of v16_raise, which multiplies v by two to the power of that integer. v and
// the result must be normal numbers. w16 has 16 lanes of double precision.

// v16_fp8 reads every other one of 32 bytes as E4M3 and returns exactly a 256th of their
// values: their bits in half precision, whose exponent is one bit longer. v16_fp8_four
// takes 64 bytes. vload_fp8 reads VL bytes, one after the other.
#if !V16_FP8_FOUR
FN void v16_fp8_four(const void *p, v16 v[4]) {
	UNROLL for (int i = 0; i < 4; i++)
		v[i] = v16_fp8((const char *)p + i / 2 * 32, i % 2);
}
#endif

// vfetch fetches lines of 64 bytes from p on into the cache. In the order of their addresses and
// before they are used, lines come at nearly the speed of memory: instructions that wait for a line
// keep the next ones from being requested, and loads out of order hide the stream.
FN void vfetch(const char *p, const int lines) {
	__asm__("" : "+r"(p)); // else GCC keeps the sum of each line's offset and p's in a register
	_Pragma("GCC unroll 17") for (int i = 0; i < lines; i++)
		__builtin_prefetch(p + i * 64);
}

// vdot_uint8 and vdot_uint4 add to each lane four products of unsigned bytes of w, or four
// bits of them, with signed bytes of x. vdot_int8 takes w less 128, and overflows if a byte
// of x is -128.
#if KERNEL_VNNI || !KERNEL_ISA
enum { DOT_OFFSET = 1 }; // int8 weights are multiplied with their offset of 128
FN VI vdot_int8(VI sum, VI w, VI x) { return vdot_uint8(sum, w, x); }
#else
enum { DOT_OFFSET = 0 };
#endif

// Four bytes, in each lane.
FN VI vinputs(const uint8_t *x) {
	int32_t bytes;
	memcpy(&bytes, x, 4);
	return vints(bytes);
}

// vdot_uppers adds the products of the upper four bits of each byte of four lines.
FN VI vdot_uppers(VI sum, const VI w[4], const VI x[4]) {
#if KERNEL_VNNI
	VI wide = vints(0); // sixteen times as much
	UNROLL for (int i = 0; i < 4; i++)
		wide = vdot_uint8(wide, (VI)((lanes)w[i] & 0xf0f0f0f0u), x[i]);
	return vplus(sum, (VI)((signed_lanes)wide >> 4));
#else
	UNROLL for (int i = 0; i < 4; i++)
		sum = vdot_uint4(sum, vnibbles(w[i], 1), x[i]);
	return sum;
#endif
}

// Sum of the lanes, always as the same tree.
FN float v16_sum(v16 v) {
	float t[16];
	v16_store(t, v);
	for (int half = 8; half; half /= 2)
		for (int i = 0; i < half; i++)
			t[i] += t[i + half];
	return t[0];
}

FN float v16_hmax(v16 v) {
	float t[16];
	v16_store(t, v);
	for (int half = 8; half; half /= 2)
		for (int i = 0; i < half; i++)
			t[i] = t[i] > t[i + half] ? t[i] : t[i + half];
	return t[0];
}

// exp within 2 units in the last place on [-87.33, 88.37]; 0 below, clamped above. A NaN
// stays a NaN. x = n·ln2 + r with |r| <= ln2/2; n is in the low bits of
// x·log2e + 1.5·2^23.
FN v16 v16_exp(v16 x) {
	const v16 lo = v16_set1(-87.33654f), magic = v16_set1(12582912.0f);
	v16 c = v16_max(lo, v16_min(v16_set1(88.37626f), x));
	v16 t = v16_add(v16_mul(c, v16_set1(1.44269504f)), magic);
	v16 n = v16_sub(t, magic);
	v16 r = v16_fma(n, v16_set1(-0.693359375f), c);
	r = v16_fma(n, v16_set1(2.12194440e-4f), r);
	v16 p = v16_set1(1.9875691500e-4f);
	p = v16_fma(p, r, v16_set1(1.3981999507e-3f));
	p = v16_fma(p, r, v16_set1(8.3334519073e-3f));
	p = v16_fma(p, r, v16_set1(4.1665795894e-2f));
	p = v16_fma(p, r, v16_set1(1.6666665459e-1f));
	p = v16_fma(p, r, v16_set1(5.0000001201e-1f));
	p = v16_add(v16_fma(p, v16_mul(r, r), r), v16_set1(1.0f));
	return v16_zero_below(v16_mul(p, v16_pow2(t)), x, lo);
}
