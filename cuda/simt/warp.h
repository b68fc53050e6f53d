// Operations of a warp for simt::meet: each computes the results of all lanes from what the lanes
// brought.
#pragma once

#include "simt.h"

namespace simt {

// Fragments are a lane's parts of the matrices of multiply, those of the PTX manual's m16n8k16.
struct Fragments {
  uint32_t a[4], b[2];  // bf16, two in a word
  float d[4];
};

// multiply returns d + a·b to lanes that brought Fragments: a [16, 16] by rows, b [16, 8] by
// columns, d [16, 8].
void multiply(unsigned mask, const char *in, char *out);

// butterfly returns to each lane the sum of 32 floats, added in the order of a butterfly of
// shuffles.
void butterfly(unsigned mask, const char *in, char *out);

}  // namespace simt
