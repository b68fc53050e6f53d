// CRC32C (Castagnoli) of pages in device memory, as kvtransfer computes it.
//
// A checksum with initial value zero is linear. That of a page is the sum (xor) of the
// threads' checksums of their slices, each shifted by the number of bytes after the slice,
// which is a product in the field of the polynomial. Numbers are reflected: bit 31 is x^0.
#pragma once
#include "common.cuh"

constexpr uint32_t kCastagnoli = 0x82f63b78;
constexpr int kPiecesAtOnce = 128;  // as many as fit into a launch's arguments

struct Pieces {
  td_piece at[kPiecesAtOnce];
};

// field_product returns a·b.
TD_DEVICE uint32_t field_product(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
  for (int i = 0; i < 32; i++) {
    sum ^= a & 0x80000000u ? b : 0;
    a <<= 1;
    b = b >> 1 ^ (b & 1 ? kCastagnoli : 0);
  }
  return sum;
}

// field_power returns x to the power of the bits of the given bytes.
TD_DEVICE uint32_t field_power(int64_t bytes) {
  uint32_t power = 0x80000000u, square = 0x00800000u;
  for (; bytes > 0; bytes >>= 1) {
    if (bytes & 1) power = field_product(power, square);
    square = field_product(square, square);
  }
  return power;
}

constexpr int kDigestThreads = 256;

// digest computes the checksum of a piece, whose bytes are a multiple of four, in one block, and
// writes it to the host. A thread has every kDigestThreads-th word, the last one of them near the
// end, and multiplies its sum by the words in between with a table for each byte.
TD_KERNEL(kDigestThreads) digest(Pieces all) {
  uint32_t *table = reinterpret_cast<uint32_t *>(shared_memory());  // [4, 256]
  uint32_t *parts = table + 4 * 256;                                 // of each warp
  const td_piece &p = all.at[block_x()];
  int tid = thread_id();
  uint32_t skip = field_power(kDigestThreads * 4), crc = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) table[i * 256 + tid] = field_product(uint32_t(tid) << 8 * i, skip);
  sync();
  int64_t words = p.bytes / 4, rounds = (words + kDigestThreads - 1) / kDigestThreads, ahead = rounds * kDigestThreads - words;
  const uint32_t *in = at<const uint32_t>(p.device);
  for (int64_t i = tid - ahead; i < words; i += kDigestThreads) {
    uint32_t next = i < 0 ? 0 : in[i];
    crc = next ^ table[crc & 255] ^ table[256 + (crc >> 8 & 255)] ^ table[512 + (crc >> 16 & 255)] ^ table[768 + (crc >> 24)];
  }
  crc = field_product(field_power((kDigestThreads - tid) * 4), crc);
  for (int with = 16; with; with /= 2) crc ^= shuffle_xor(crc, with);
  if (lane_id() == 0) parts[tid / 32] = crc;
  sync();
  if (tid > 0) return;
  for (int i = 1; i < kDigestThreads / 32; i++) crc ^= parts[i];
  *at<uint32_t>(p.host) = ~(crc ^ field_product(field_power(p.bytes), ~0u));
}
