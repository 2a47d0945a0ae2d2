#include "store/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace headgate {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables t{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kPolynomial : 0);
    t[0][b] = crc;
  }
  for (uint32_t b = 0; b < 256; ++b)
    for (size_t i = 1; i < 8; ++i) t[i][b] = t[i - 1][b] >> 8 ^ t[0][t[i - 1][b] & 0xff];
  return t;
}
constexpr Tables kTables = make_tables();

#if defined(__x86_64__)

// Three independent streams hide the three cycles that a crc32 instruction takes: 4096 = 3 * 1344 + 64.
constexpr size_t kStream = 1344;
using Shift = std::array<std::array<uint32_t, 256>, 4>;

// Tables that advance a CRC over kStream zero bytes, one per byte of the CRC (the operation is linear).
Shift make_shift() {
  Shift shift{};
  for (size_t byte = 0; byte < 4; ++byte) {
    for (uint32_t bit = 0; bit < 8; ++bit) {
      uint32_t crc = 1u << (8 * byte + bit);
      for (size_t i = 0; i < kStream; ++i) crc = crc >> 8 ^ kTables[0][crc & 0xff];
      for (uint32_t low = 0; low < 1u << bit; ++low) shift[byte][1u << bit | low] = shift[byte][low] ^ crc;
    }
  }
  return shift;
}

uint32_t advance(const Shift& shift, uint32_t crc) {
  return shift[0][crc & 0xff] ^ shift[1][crc >> 8 & 0xff] ^ shift[2][crc >> 16 & 0xff] ^ shift[3][crc >> 24];
}

uint64_t load64(const uint8_t* p) {
  uint64_t v;
  std::memcpy(&v, p, 8);
  return v;
}

__attribute__((target("sse4.2"))) uint32_t crc32c_sse42(uint32_t crc, const uint8_t* p, size_t bytes) {
  static const Shift shift = make_shift();
  uint64_t a = ~crc;
  for (; bytes >= 3 * kStream; p += 3 * kStream, bytes -= 3 * kStream) {
    uint64_t b = 0, c = 0;
    for (size_t i = 0; i < kStream; i += 8) {
      a = _mm_crc32_u64(a, load64(p + i));
      b = _mm_crc32_u64(b, load64(p + kStream + i));
      c = _mm_crc32_u64(c, load64(p + 2 * kStream + i));
    }
    a = advance(shift, advance(shift, uint32_t(a)) ^ uint32_t(b)) ^ uint32_t(c);
  }
  for (; bytes >= 8; p += 8, bytes -= 8) a = _mm_crc32_u64(a, load64(p));
  for (; bytes > 0; ++p, --bytes) a = _mm_crc32_u8(uint32_t(a), *p);
  return ~uint32_t(a);
}

#endif

}  // namespace

uint32_t crc32c_portable(uint32_t crc, const void* data, size_t bytes) {
  const uint8_t* p = static_cast<const uint8_t*>(data);
  crc = ~crc;
  for (; bytes >= 8; p += 8, bytes -= 8) {
    uint32_t low = crc ^ (p[0] | p[1] << 8 | p[2] << 16 | uint32_t(p[3]) << 24);
    crc = kTables[7][low & 0xff] ^ kTables[6][low >> 8 & 0xff] ^ kTables[5][low >> 16 & 0xff] ^ kTables[4][low >> 24] ^
          kTables[3][p[4]] ^ kTables[2][p[5]] ^ kTables[1][p[6]] ^ kTables[0][p[7]];
  }
  for (; bytes > 0; ++p, --bytes) crc = crc >> 8 ^ kTables[0][(crc ^ *p) & 0xff];
  return ~crc;
}

uint32_t crc32c(uint32_t crc, const void* data, size_t bytes) {
#if defined(__x86_64__)
  static const bool hardware = __builtin_cpu_supports("sse4.2");
  if (hardware) return crc32c_sse42(crc, static_cast<const uint8_t*>(data), bytes);
#endif
  return crc32c_portable(crc, data, bytes);
}

}  // namespace headgate
