// The part of cuBLASLt that products of many rows need, opened at run time because the
// library is 500 MB and GPU machines have it. Types and numbers are those of cublasLt.h
// of its versions 12 and 13.
#pragma once
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <string>

namespace blaslt {

using Handle = void *;
using Object = void *;  // a description, a layout, a preference
struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};
enum { kFloat32 = 0, kBfloat16 = 14, kCompute32F = 68, kTransposed = 1, kTransA = 3, kMaxWorkspace = 1, kBatchCount = 5, kBatchStride = 6 };

struct Library {
  void *opened = nullptr;
  size_t (*version)() = nullptr;
  int (*create)(Handle *) = nullptr;
  int (*destroy)(Handle) = nullptr;
  int (*descCreate)(Object *, int compute, int scale) = nullptr;
  int (*descDestroy)(Object) = nullptr;
  int (*descSet)(Object, int attribute, const void *, size_t) = nullptr;
  int (*layoutCreate)(Object *, int type, uint64_t rows, uint64_t cols, int64_t stride) = nullptr;
  int (*layoutSet)(Object, int attribute, const void *, size_t) = nullptr;
  int (*layoutDestroy)(Object) = nullptr;
  int (*preferenceCreate)(Object *) = nullptr;
  int (*preferenceDestroy)(Object) = nullptr;
  int (*preferenceSet)(Object, int attribute, const void *, size_t) = nullptr;
  int (*heuristic)(Handle, Object desc, Object a, Object b, Object c, Object d, Object preference, int wanted, Heuristic *, int *got) = nullptr;
  int (*matmul)(Handle, Object desc, const void *alpha, const void *a, Object, const void *b, Object, const void *beta, const void *c, Object, void *d, Object,
                const Algorithm *, void *workspace, size_t, void *stream) = nullptr;

  // open returns an error, or an empty string. Without a path it searches for the library
  // where programs do.
  std::string open(const char *path) {
    const char *names[] = {path, "libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"};
    for (const char *name : names)
      if (name && *name && !opened) {
        opened = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (path && *path) break;
      }
    if (!opened) return dlerror();
    bool all = find(version, "cublasLtGetVersion") && find(create, "cublasLtCreate") && find(destroy, "cublasLtDestroy") &&
               find(descCreate, "cublasLtMatmulDescCreate") && find(descDestroy, "cublasLtMatmulDescDestroy") && find(descSet, "cublasLtMatmulDescSetAttribute") &&
               find(layoutCreate, "cublasLtMatrixLayoutCreate") && find(layoutSet, "cublasLtMatrixLayoutSetAttribute") &&
               find(layoutDestroy, "cublasLtMatrixLayoutDestroy") &&
               find(preferenceCreate, "cublasLtMatmulPreferenceCreate") && find(preferenceDestroy, "cublasLtMatmulPreferenceDestroy") &&
               find(preferenceSet, "cublasLtMatmulPreferenceSetAttribute") && find(heuristic, "cublasLtMatmulAlgoGetHeuristic") && find(matmul, "cublasLtMatmul");
    return all ? "" : "it lacks functions of cublasLt.h";
  }
  template <class F>
  bool find(F &f, const char *name) {
    f = reinterpret_cast<F>(dlsym(opened, name));
    return f != nullptr;
  }
};

// Product is dst [rows, out] = x [rows, in]·wᵀ + beta·dst of one shape, with the
// algorithm chosen for it. With two matrices it is a batch of two such products of one x.
struct Product {
  int rows, out, in, matrices;
  bool usable = false;
  Object desc = nullptr, w = nullptr, x = nullptr, dst = nullptr;
  Heuristic chosen{};
};

// distances sets how far the second matrix and the second result are from the first ones, in
// elements. They may be anywhere, so that the distances are set for each call. It returns a status.
inline int distances(Library &l, Product &p, int64_t w, int64_t dst) {
  int status = l.layoutSet(p.w, kBatchStride, &w, sizeof w);
  return status ? status : l.layoutSet(p.dst, kBatchStride, &dst, sizeof dst);
}

// batch describes a product's two matrices, if it has two, as if they were neighbours. The stride
// of x stays 0, so that both products read the same numbers.
inline bool batch(Library &l, Product &p) {
  int32_t two = 2;
  if (p.matrices == 1) return true;
  for (Object o : {p.w, p.x, p.dst})
    if (l.layoutSet(o, kBatchCount, &two, sizeof two)) return false;
  return !distances(l, p, int64_t(p.out) * p.in, int64_t(p.out) * p.rows);
}

// make describes a product and requests an algorithm. In the library's column-major
// order, it is dst [out, rows] = wᵀ [in, out]ᵀ·x [in, rows].
inline void make(Library &l, Handle h, Product &p, size_t workspace) {
  int transposed = kTransposed, got = 0;
  uint64_t most = workspace;
  Object preference = nullptr;
  p.usable = !l.descCreate(&p.desc, kCompute32F, kFloat32) && !l.descSet(p.desc, kTransA, &transposed, sizeof transposed) &&
             !l.layoutCreate(&p.w, kBfloat16, uint64_t(p.in), uint64_t(p.out), p.in) && !l.layoutCreate(&p.x, kBfloat16, uint64_t(p.in), uint64_t(p.rows), p.in) &&
             !l.layoutCreate(&p.dst, kFloat32, uint64_t(p.out), uint64_t(p.rows), p.out) && batch(l, p) && !l.preferenceCreate(&preference) &&
             !l.preferenceSet(preference, kMaxWorkspace, &most, sizeof most) &&
             !l.heuristic(h, p.desc, p.w, p.x, p.dst, p.dst, preference, 1, &p.chosen, &got) && got == 1 && p.chosen.status == 0 && p.chosen.workspace <= workspace;
  if (preference) l.preferenceDestroy(preference);
}

inline void forget(Library &l, Product &p) {
  if (p.desc) l.descDestroy(p.desc);
  for (Object o : {p.w, p.x, p.dst})
    if (o) l.layoutDestroy(o);
}

}  // namespace blaslt
