// The vocabulary of kernels. Each function is an intrinsic or a PTX instruction on the
// device, and its emulation on the host twin (TD_TWIN, simt/simt.h). No other file uses
// either. Blocks have one dimension, shared memory is dynamic, and every lane named by a
// mask must call.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef TD_HOST  // the host's part of an object for GPUs: kernels are only named
#define TD_EMULATED
#define TD_KERNEL(threads) inline void
#define TD_KERNEL_OF(threads, blocks) inline void
#endif
#ifdef TD_TWIN
#define TD_EMULATED
#define TD_KERNEL(threads) static void
#define TD_KERNEL_OF(threads, blocks) static void
#endif

#ifdef TD_EMULATED
#include <cmath>

#include "../simt/warp.h"
#define TD_DEVICE static inline
#define TD_HOST_DEVICE static inline
#define TD_CONSTANT(type, name) static const type name
#define TD_SITE simt::Site site = {__builtin_FILE(), __builtin_LINE()}
#define TD_SITE_COMMA , TD_SITE
#define TD_PASS site
#else
#define TD_KERNEL(threads) __global__ void __launch_bounds__(threads, 1)
#define TD_KERNEL_OF(threads, blocks) __global__ void __launch_bounds__(threads, blocks)  // blocks: resident on a multiprocessor
#define TD_DEVICE static __device__ __forceinline__
#define TD_HOST_DEVICE static __host__ __device__ __forceinline__
#define TD_CONSTANT(type, name) static __device__ const type name
#define TD_SITE
#define TD_SITE_COMMA
#define TD_PASS
#endif

constexpr unsigned kAll = 0xffffffffu;

// kArch is the architecture that code is compiled for, 90 for 9.0, and kCuda the compiler's major
// version; 0 for hosts.
#ifdef __CUDA_ARCH__
enum { kArch = __CUDA_ARCH__ / 10, kCuda = __CUDACC_VER_MAJOR__ };
#else
enum { kArch = 0, kCuda = 0 };
#endif

struct alignas(16) Vec4 {
  uint32_t v[4];
};
struct alignas(16) Float4 {
  float v[4];
};
struct alignas(8) Float2 {
  float v[2];
};
struct alignas(8) Vec2 {
  uint32_t v[2];
};

TD_HOST_DEVICE float bits_float(uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  float f;
  memcpy(&f, &u, 4);
  return f;
#endif
}

TD_HOST_DEVICE uint32_t float_bits(float f) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(f);
#else
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
#endif
}

// bf16: two in a word, the first one in the low half.
TD_DEVICE float bf16_low(uint32_t pair) { return bits_float(pair << 16); }
TD_DEVICE float bf16_high(uint32_t pair) { return bits_float(pair & 0xffff0000u); }
TD_DEVICE float bf16_float(uint16_t v) { return bits_float(uint32_t(v) << 16); }

#ifdef TD_EMULATED
TD_DEVICE uint32_t bf16_round(float f) {
  uint32_t u = float_bits(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return u >> 16 | 0x40;
  return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
TD_DEVICE uint32_t bf16_pack(float low, float high) { return bf16_round(low) | bf16_round(high) << 16; }

TD_DEVICE uint32_t bf16_times(uint32_t a, uint32_t b) { return bf16_pack(bf16_low(a) * bf16_low(b), bf16_high(a) * bf16_high(b)); }
TD_DEVICE uint32_t bf16_fuse(uint32_t a, uint32_t b, uint32_t c) { return bf16_pack(bf16_low(a) * bf16_low(b) + bf16_low(c), bf16_high(a) * bf16_high(b) + bf16_high(c)); }  // with two roundings

TD_DEVICE int thread_id() { return simt::thread(); }
TD_DEVICE int lane_id() { return simt::lane(); }
TD_DEVICE int block_x() { return int(simt::block().x); }
TD_DEVICE int block_y() { return int(simt::block().y); }
TD_DEVICE int block_z() { return int(simt::block().z); }
TD_DEVICE int grid_x() { return int(simt::blocks().x); }
TD_DEVICE int grid_z() { return int(simt::blocks().z); }
TD_DEVICE char *shared_memory() { return simt::shared(); }

// wait_previous lets the next kernel start, as soon as all blocks of this one have, and waits until
// the previous kernel has ended, where launches let kernels overlap. Each thread of a kernel of a
// plan calls it, because a kernel whose threads did not wait could end before the previous one, and
// the next one would read too early. Before the call a thread reads only weights, and writes no
// global memory.
TD_DEVICE void wait_previous(TD_SITE) { simt::wait_previous(site); }

// prefetch requests the 32 bytes around p for L2. It waits for nothing.
TD_DEVICE void prefetch(const void *p) { (void)*static_cast<const volatile char *>(p); }

TD_DEVICE void sync(TD_SITE) { simt::barrier(site); }
TD_DEVICE void sync_warp(unsigned mask = kAll TD_SITE_COMMA) { simt::warp_barrier(mask, site); }

// last_block reports to all threads of a block whether it is the last one of blocks to call, and
// then sets count, which starts at 0, to 0 again. The last block sees what the others wrote
// before their calls. flag is shared memory. The twin runs one block after the other, so that it
// cannot detect a missing order of their writes.
TD_DEVICE bool last_block(int *count, int blocks, int *flag TD_SITE_COMMA) {
  if (simt::thread() == 0) {
    *flag = *count + 1 == blocks;
    *count = *flag ? 0 : *count + 1;
  }
  simt::barrier(site);
  return *flag;
}

// order_warp makes writes of lanes visible to the other lanes of their warp, at a point
// where the lanes have met. So the twin does nothing.
TD_DEVICE void order_warp() {}

template <class T>
struct Shuffled {
  T value;
  int from;
};
template <class T>
T shuffle(T v, int from, unsigned mask = kAll) {
  Shuffled<T> mine = {v, from & 31};
  T got;
  simt::meet(mask, 1, &mine, sizeof mine, &got, sizeof got, [](unsigned, const char *in, char *out) {
    auto *all = reinterpret_cast<const Shuffled<T> *>(in);
    for (int i = 0; i < 32; i++) memcpy(out + i * sizeof(T), &all[all[i].from & 31].value, sizeof(T));
  });
  return got;
}
template <class T>
T shuffle_xor(T v, int with, unsigned mask = kAll) {
  return shuffle(v, simt::lane() ^ with, mask);
}
TD_DEVICE unsigned ballot(bool p, unsigned mask = kAll) {
  char mine = p;
  unsigned got;
  simt::meet(mask, 3, &mine, 1, &got, 4, [](unsigned who, const char *in, char *out) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++)
      if ((who >> i & 1) && in[i]) r |= 1u << i;
    for (int i = 0; i < 32; i++) memcpy(out + i * 4, &r, 4);
  });
  return got;
}

// warp_sum and warp_max are butterflies. On the twin they are one meeting, with the additions
// in the device's order.
TD_DEVICE float warp_sum(float v) {
  float got;
  simt::meet(kAll, 4, &v, 4, &got, 4, simt::butterfly);
  return got;
}
TD_DEVICE float warp_max(float v) {
  float got;
  simt::meet(kAll, 5, &v, 4, &got, 4, [](unsigned, const char *in, char *out) {
    auto *all = reinterpret_cast<const float *>(in);
    float best = all[0];
    for (int i = 1; i < 32; i++) best = fmaxf(best, all[i]);
    for (int i = 0; i < 32; i++) memcpy(out + i * 4, &best, 4);
  });
  return got;
}

// d += a·b, a [16, 16] by rows, b [16, 8] by columns, d [16, 8]; the fragments of
// the PTX manual's m16n8k16.
TD_DEVICE void mma(float d[4], const uint32_t a[4], const uint32_t b[2]) {
  simt::Fragments mine;
  memcpy(mine.a, a, 16);
  memcpy(mine.b, b, 8);
  memcpy(mine.d, d, 16);
  simt::meet(kAll, 6, &mine, sizeof mine, d, 16, simt::multiply);
}

// Four 8x8 matrices of bf16, transposed. Lanes 8i to 8i+7 pass the rows of matrix i, 16 bytes
// each; r[i] is column lane/4, rows lane%4*2 and the next.
TD_DEVICE void load_transposed(uint32_t r[4], const void *row) {
  simt::meet(kAll, 7, &row, sizeof row, r, 16, [](unsigned, const char *in, char *out) {
    auto *rows = reinterpret_cast<const char *const *>(in);
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) memcpy(out + lane * 16 + i * 4 + j * 2, rows[i * 8 + lane % 4 * 2 + j] + lane / 4 * 2, 2);
  });
}

// load_matrices is load_transposed without the transposition: r[i] is row lane/4, columns
// lane%4*2 and the next.
TD_DEVICE void load_matrices(uint32_t r[4], const void *row) {
  simt::meet(kAll, 8, &row, sizeof row, r, 16, [](unsigned, const char *in, char *out) {
    auto *rows = reinterpret_cast<const char *const *>(in);
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4; i++) memcpy(out + lane * 16 + i * 4, rows[i * 8 + lane / 4] + lane % 4 * 4, 4);
  });
}

// copy_async copies 16 bytes to shared memory; bytes beyond valid become zero. The wait is
// for all but the newest groups of the calling thread.
TD_DEVICE void copy_async(void *dst, const void *src, int valid = 16) { simt::copy_async(dst, src, valid, 16); }
TD_DEVICE void copy_commit() { simt::copy_commit(); }
template <int kNewest>
void copy_wait(TD_SITE) { simt::copy_wait(kNewest, site); }

TD_DEVICE Vec4 load_once(const Vec4 *p) { return *p; }
TD_DEVICE uint32_t load_short(const uint16_t *p) { return *p; }
TD_DEVICE uint32_t pick(uint32_t a, uint32_t mask, uint32_t more) { return (a & mask) | more; }
TD_DEVICE float exp2_fast(float x) { return exp2f(x); }
TD_DEVICE float fuse(float a, float b, float c) { return a * b + c; }  // with two roundings
TD_DEVICE int atomic_add(int *p, int v) { int old = *p; *p += v; return old; }
TD_DEVICE uint64_t atomic_add64(uint64_t *p, uint64_t v) { uint64_t old = *p; *p += v; return old; }
TD_DEVICE void publish(volatile uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
TD_DEVICE double mul_rn(double a, double b) { volatile double r = a * b; return r; }
TD_DEVICE double add_rn(double a, double b) { volatile double r = a + b; return r; }
TD_DEVICE float mul_rn(float a, float b) { volatile float r = a * b; return r; }
TD_DEVICE float add_rn(float a, float b) { volatile float r = a + b; return r; }
TD_DEVICE uint32_t mul_high(uint32_t a, uint32_t b) { return uint32_t(uint64_t(a) * b >> 32); }
TD_DEVICE double bits_double(uint64_t u) { double d; memcpy(&d, &u, 8); return d; }

// fp8_four converts four E4M3, the first one in the lowest byte.
TD_DEVICE void fp8_four(uint32_t word, float v[4]) {
  for (int i = 0; i < 4; i++, word >>= 8) v[i] = bits_float((word & 0x80) << 24 | (word & 0x7f) << 20) * 0x1p120f;
}
// bytes_of combines bytes of a and b: each four bits of which select one, 0 to 3 of a, 4 to 7 of b.
TD_DEVICE uint32_t bytes_of(uint32_t a, uint32_t b, uint32_t which) {
  uint32_t r = 0;
  for (int i = 0; i < 4; i++) r |= uint32_t((uint64_t(b) << 32 | a) >> (which >> i * 4 & 7) * 8 & 0xff) << i * 8;
  return r;
}

#else

TD_DEVICE uint32_t bf16_pack(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// bf16_fuse returns a·b + c, of two numbers each.
TD_DEVICE uint32_t bf16_fuse(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

// bf16_times multiplies two numbers by two. Unlike mul.bf16x2, fma.bf16x2 exists before 9.0.
TD_DEVICE uint32_t bf16_times(uint32_t a, uint32_t b) { return bf16_fuse(a, b, 0x80008000u); }

TD_DEVICE int thread_id() { return threadIdx.x; }
TD_DEVICE int lane_id() { return threadIdx.x & 31; }
TD_DEVICE int block_x() { return blockIdx.x; }
TD_DEVICE int block_y() { return blockIdx.y; }
TD_DEVICE int block_z() { return blockIdx.z; }
TD_DEVICE int grid_x() { return gridDim.x; }
TD_DEVICE int grid_z() { return gridDim.z; }
TD_DEVICE char *shared_memory() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}

TD_DEVICE void wait_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
#endif
}
TD_DEVICE void prefetch(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

TD_DEVICE void sync() { __syncthreads(); }
TD_DEVICE void sync_warp(unsigned mask = kAll) { __syncwarp(mask); }
TD_DEVICE void order_warp() { __syncwarp(); }
TD_DEVICE bool last_block(int *count, int blocks, int *flag) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    *flag = atomicAdd(count, 1) + 1 == blocks;
    if (*flag) *count = 0;
  }
  __syncthreads();
  __threadfence();
  return *flag;
}
template <class T>
static __device__ __forceinline__ T shuffle(T v, int from, unsigned mask = kAll) { return __shfl_sync(mask, v, from); }
template <class T>
static __device__ __forceinline__ T shuffle_xor(T v, int with, unsigned mask = kAll) { return __shfl_xor_sync(mask, v, with); }
TD_DEVICE unsigned ballot(bool p, unsigned mask = kAll) { return __ballot_sync(mask, p); }

TD_DEVICE float warp_sum(float v) {
#pragma unroll
  for (int with = 16; with; with /= 2) v += __shfl_xor_sync(kAll, v, with);
  return v;
}
TD_DEVICE float warp_max(float v) {
#pragma unroll
  for (int with = 16; with; with /= 2) v = fmaxf(v, __shfl_xor_sync(kAll, v, with));
  return v;
}

TD_DEVICE void mma(float d[4], const uint32_t a[4], const uint32_t b[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

TD_DEVICE void load_transposed(uint32_t r[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(uint32_t(__cvta_generic_to_shared(row)))
               : "memory");
}

TD_DEVICE void load_matrices(uint32_t r[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(uint32_t(__cvta_generic_to_shared(row)))
               : "memory");
}

TD_DEVICE void copy_async(void *dst, const void *src, int valid = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(dst))), "l"(src), "r"(valid) : "memory");
}
TD_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kNewest>
static __device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory"); }

// load_once reads data that is read once, such as weights, without allocating it in L1.
TD_DEVICE Vec4 load_once(const Vec4 *p) {
  Vec4 r;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3]) : "l"(p));
  return r;
}
// load_short reads a number of weights' scales.
TD_DEVICE uint32_t load_short(const uint16_t *p) {
  uint16_t r;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(r) : "l"(p));
  return r;
}
// pick returns a & mask | more by one instruction. The compiler takes two for two constants.
TD_DEVICE uint32_t pick(uint32_t a, uint32_t mask, uint32_t more) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(mask), "r"(more));
  return r;
}
TD_DEVICE float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
TD_DEVICE float fuse(float a, float b, float c) { return fmaf(a, b, c); }
TD_DEVICE int atomic_add(int *p, int v) { return atomicAdd(p, v); }
TD_DEVICE uint64_t atomic_add64(uint64_t *p, uint64_t v) { return atomicAdd(reinterpret_cast<unsigned long long *>(p), static_cast<unsigned long long>(v)); }
TD_DEVICE void publish(volatile uint32_t *p, uint32_t v) {
  __threadfence_system();
  *p = v;
}
TD_DEVICE double mul_rn(double a, double b) { return __dmul_rn(a, b); }
TD_DEVICE double add_rn(double a, double b) { return __dadd_rn(a, b); }
TD_DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }
TD_DEVICE float add_rn(float a, float b) { return __fadd_rn(a, b); }
TD_DEVICE uint32_t mul_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }
TD_DEVICE uint32_t bytes_of(uint32_t a, uint32_t b, uint32_t which) { return __byte_perm(a, b, which); }
TD_DEVICE void fp8_four(uint32_t word, float v[4]) {
#if __CUDA_ARCH__ >= 890
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(word >> i * 16)));
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}" : "=f"(v[2 * i]), "=f"(v[2 * i + 1]) : "r"(halves));
  }
#else
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = bits_float((word << (24 - 8 * i) & 0x80000000u) | (word >> 8 * i & 0x7f) << 20) * 0x1p120f;
#endif
}
TD_DEVICE double bits_double(uint64_t u) { return __longlong_as_double(static_cast<long long>(u)); }
#endif
