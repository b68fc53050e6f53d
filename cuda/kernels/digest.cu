#include "digest.cuh"

#include "../runtime/plan.h"

void run_digest(Stream &s, const td_piece *pieces, int n) {
  for (int at = 0; at < n; at += kPiecesAtOnce) {
    int some = n - at < kPiecesAtOnce ? n - at : kPiecesAtOnce;
    Pieces p = {};
    for (int i = 0; i < some; i++) p.at[i] = pieces[at + i];
    TD_LAUNCH(s, some, 1, 1, kDigestThreads, (4 * 256 + kDigestThreads / 32) * 4, digest, p);
  }
}
