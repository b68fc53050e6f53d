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

// digest computes the checksum of a piece, whose bytes are a multiple of four, in one warp,
// and writes it to the host.
TD_KERNEL(32) digest(Pieces all) {
  const td_piece &p = all.at[block_x()];
  int64_t words = p.bytes / 4, each = (words + 31) / 32, first = each * lane_id(), end = first + each;
  if (first > words) first = words;
  if (end > words) end = words;
  const uint32_t *in = at<const uint32_t>(p.device);
  uint32_t crc = 0;
  for (int64_t i = first; i < end; i++) {
    crc ^= in[i];
    for (int bit = 0; bit < 32; bit++) crc = crc >> 1 ^ (crc & 1 ? kCastagnoli : 0);
  }
  crc = field_product(field_power((words - end) * 4), crc);
  for (int with = 16; with; with /= 2) crc ^= shuffle_xor(crc, with);
  if (lane_id() == 0) *at<uint32_t>(p.host) = ~(crc ^ field_product(field_power(p.bytes), ~0u));
}
