#include "warp.h"

namespace simt {
namespace {

// Eight floats are one value, because under the address sanitizer the compiler makes no vector
// instructions from loops over arrays.
typedef float Eight __attribute__((vector_size(32)));
typedef int Places __attribute__((vector_size(32)));

// expand writes two bf16 as floats.
void expand(float *to, uint32_t pair) {
  uint32_t two[2] = {pair << 16, pair & 0xffff0000u};
  memcpy(to, two, sizeof two);
}

}  // namespace

void multiply(unsigned, const char *in, char *out) {
  float x[16][16], y[8][16], z[16][8];
  for (int lane = 0; lane < kWarp; lane++) {
    Fragments f;
    memcpy(&f, in + lane * sizeof f, sizeof f);
    int row = lane / 4, pair = lane % 4 * 2;
    for (int i = 0; i < 4; i++) expand(&x[row + i % 2 * 8][pair + i / 2 * 8], f.a[i]);
    for (int i = 0; i < 2; i++) expand(&y[row][pair + i * 8], f.b[i]);
  }
  Eight columns[16];
  for (int k = 0; k < 16; k++) columns[k] = Eight{y[0][k], y[1][k], y[2][k], y[3][k], y[4][k], y[5][k], y[6][k], y[7][k]};
  for (int row = 0; row < 16; row++) {
    Eight sums = {};
    for (int k = 0; k < 16; k++) sums += x[row][k] * columns[k];
    memcpy(z[row], &sums, sizeof sums);
  }
  for (int lane = 0; lane < kWarp; lane++) {
    Fragments f;
    memcpy(&f, in + lane * sizeof f, sizeof f);
    const float *low = &z[lane / 4][lane % 4 * 2], *high = &z[lane / 4 + 8][lane % 4 * 2];
    float sums[4] = {low[0] + f.d[0], low[1] + f.d[1], high[0] + f.d[2], high[1] + f.d[3]};
    memcpy(out + lane * sizeof sums, sums, sizeof sums);
  }
}

void butterfly(unsigned, const char *in, char *out) {
  Eight all[4];
  memcpy(all, in, sizeof all);
  Eight a = all[0] + all[2], b = all[1] + all[3];  // lanes 0 to 15; 16 to 31 have the same sums
  a += b;
  a += __builtin_shuffle(a, Places{4, 5, 6, 7, 0, 1, 2, 3});
  a += __builtin_shuffle(a, Places{2, 3, 0, 1, 6, 7, 4, 5});
  a += __builtin_shuffle(a, Places{1, 0, 3, 2, 5, 4, 7, 6});
  for (Eight &to : all) to = a;
  memcpy(out, all, sizeof all);
}

}  // namespace simt
