// An emulation of cuBLASLt on the CPU: the functions that blaslt.h calls, for bf16 times
// bf16 into fp32. It is a library of its own, which tests make the twin open.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

namespace {
struct Desc {
  int compute, scale, transposed;
};
struct Layout {
  int type;
  uint64_t rows, cols;
  int64_t stride;
  int32_t batch;
  int64_t next;  // from one matrix of a batch to the next
};
struct Preference {
  uint64_t workspace;
};
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
constexpr uint64_t kMagic = 0x5eed;
enum { kOk = 0, kInvalid = 7 };
int alive = 0;  // objects that have not been destroyed

float widen(const uint16_t *p) {
  uint32_t bits = uint32_t(*p) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
template <class T>
int made(void **to, T value) {
  *to = new T(value);
  alive++;
  return kOk;
}
template <class T>
int gone(void *p) {
  delete static_cast<T *>(p);
  alive--;
  return kOk;
}
}  // namespace

API size_t cublasLtGetVersion() { return getenv("TANDEM_STUB_LT_OLD") ? 110000 : 130002; }
API int cublasLtCreate(void **h) { return made<int>(h, 1); }
API int cublasLtDestroy(void *h) { return gone<int>(h); }
API int cublasLtMatmulDescCreate(void **d, int compute, int scale) { return made(d, Desc{compute, scale, 0}); }
API int cublasLtMatmulDescDestroy(void *d) { return gone<Desc>(d); }
API int cublasLtMatmulDescSetAttribute(void *d, int attribute, const void *v, size_t n) {
  if (attribute != 3 || n != 4) return kInvalid;
  memcpy(&static_cast<Desc *>(d)->transposed, v, 4);
  return kOk;
}
API int cublasLtMatrixLayoutCreate(void **l, int type, uint64_t rows, uint64_t cols, int64_t stride) { return made(l, Layout{type, rows, cols, stride, 1, 0}); }
API int cublasLtMatrixLayoutSetAttribute(void *l, int attribute, const void *v, size_t n) {
  auto *to = static_cast<Layout *>(l);
  if (attribute == 5 && n == 4) memcpy(&to->batch, v, 4);
  else if (attribute == 6 && n == 8) memcpy(&to->next, v, 8);
  else return kInvalid;
  return kOk;
}
API int cublasLtMatrixLayoutDestroy(void *l) { return gone<Layout>(l); }
API int cublasLtMatmulPreferenceCreate(void **p) { return made(p, Preference{0}); }
API int cublasLtMatmulPreferenceDestroy(void *p) { return gone<Preference>(p); }
API int cublasLtMatmulPreferenceSetAttribute(void *p, int attribute, const void *v, size_t n) {
  if (attribute != 1 || n != 8) return kInvalid;
  memcpy(&static_cast<Preference *>(p)->workspace, v, 8);
  return kOk;
}
API int cublasLtMatmulAlgoGetHeuristic(void *, void *d, void *a, void *b, void *, void *to, void *p, int wanted, Heuristic *all, int *got) {
  auto *desc = static_cast<Desc *>(d);
  auto *w = static_cast<Layout *>(a), *x = static_cast<Layout *>(b), *dst = static_cast<Layout *>(to);
  *got = 0;
  if (wanted < 1 || desc->compute != 68 || desc->scale != 0 || desc->transposed != 1 || w->type != 14 || x->type != 14 || dst->type != 0 || w->rows != x->rows ||
      dst->rows != w->cols || dst->cols != x->cols || w->stride % 8 || !static_cast<Preference *>(p)->workspace || w->batch != x->batch || w->batch != dst->batch)
    return kInvalid;
  // With TANDEM_STUB_LT_BATCH there are algorithms for batches of as many only; 0: of any number.
  if (const char *batch = getenv("TANDEM_STUB_LT_BATCH"); batch && atoi(batch) != 0 && atoi(batch) != w->batch) return kInvalid;
  *all = Heuristic{};
  all->algorithm.data[0] = kMagic;
  all->algorithm.data[1] = x->cols;
  all->algorithm.data[2] = uint64_t(w->batch);
  all->workspace = 4096;
  *got = 1;
  return kOk;
}
API int cublasLtMatmul(void *, void *, const void *alpha, const void *a, void *al, const void *b, void *bl, const void *beta, const void *, void *, void *d, void *dl,
                       const Algorithm *algorithm, void *workspace, size_t bytes, void *) {
  auto *w = static_cast<Layout *>(al), *x = static_cast<Layout *>(bl), *dst = static_cast<Layout *>(dl);
  if (algorithm->data[0] != kMagic || algorithm->data[1] != x->cols || algorithm->data[2] != uint64_t(w->batch) || bytes < 4096) return kInvalid;
  if (w->batch > 1 && (w->next <= 0 || dst->next <= 0 || w->next % 8 || dst->next % 4)) return kInvalid;
  memset(workspace, 0xff, 4096);  // exposes callers that keep data there
  float one = *static_cast<const float *>(alpha), old = *static_cast<const float *>(beta);
  auto rows = int64_t(dst->cols), outs = int64_t(dst->rows);
  for (int64_t nth = 0; nth < w->batch; nth++)
    for (int64_t i = 0; i < rows * outs; i++) {
      int64_t row = i / outs, out = i % outs;
      float sum = 0, &to = static_cast<float *>(d)[nth * dst->next + row * dst->stride + out];
      const uint16_t *from = static_cast<const uint16_t *>(a) + nth * w->next + out * w->stride, *in = static_cast<const uint16_t *>(b) + nth * x->next + row * x->stride;
      for (uint64_t j = 0; j < w->rows; j++) sum += widen(from + j) * widen(in + j);
      to = one * sum + (old != 0 ? old * to : 0);
    }
  return kOk;
}
// Functions that the real library does not have.
API int tandem_stub_alive() { return alive; }
