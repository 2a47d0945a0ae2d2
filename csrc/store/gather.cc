#include "store/gather.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headgate {
namespace {

size_t asked_ahead(uint32_t bytes) { return std::max(1u, kAskedBytes / bytes); }

#if defined(__x86_64__)

// kBytes: of a record, where the compiler knows it; otherwise 0. kStream: past the caches, for `to` aligned to a line:
// no line is read before it is overwritten.
template <bool kStream, uint32_t kBytes>
__attribute__((target("avx512f"))) void copy_avx512(const uint8_t* const* from, uint8_t* base, const uint64_t* to,
                                                    size_t count, uint32_t bytes) {
  const uint32_t end = kBytes > 0 ? kBytes : bytes;
  const size_t ahead = asked_ahead(end);
  for (size_t i = 0; i < count; ++i) {
    if (i + ahead < count) prefetch_record(from[i + ahead], end);
    const uint8_t* record = from[i];
    uint8_t* place = base + to[i];
#pragma GCC unroll 8
    for (uint32_t at = 0; at < end; at += kLineBytes) {
      const __m512i line = _mm512_loadu_si512(record + at);
      if constexpr (kStream) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(place + at), line);
      } else {
        _mm512_storeu_si512(place + at, line);
      }
    }
  }
}

template <bool kStream, uint32_t kBytes>
__attribute__((target("avx2"))) void copy_avx2(const uint8_t* const* from, uint8_t* base, const uint64_t* to,
                                               size_t count, uint32_t bytes) {
  const uint32_t end = kBytes > 0 ? kBytes : bytes;
  const size_t ahead = asked_ahead(end);
  for (size_t i = 0; i < count; ++i) {
    if (i + ahead < count) prefetch_record(from[i + ahead], end);
    const uint8_t* record = from[i];
    uint8_t* place = base + to[i];
#pragma GCC unroll 16
    for (uint32_t at = 0; at < end; at += 32) {
      const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(record + at));
      if constexpr (kStream) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(place + at), half);
      } else {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(place + at), half);
      }
    }
  }
}

#endif

void copy_portable(const uint8_t* const* from, uint8_t* base, const uint64_t* to, size_t count, uint32_t bytes) {
  for (size_t i = 0; i < count; ++i) std::memcpy(base + to[i], from[i], bytes);
}

using Copy = void (*)(const uint8_t* const*, uint8_t*, const uint64_t*, size_t, uint32_t);

// By whether it goes through the caches, and by what is known of the size.
struct Copies {
  Copy any[2], of_512[2];
};

Copies best_copies() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f"))
    return {{copy_avx512<false, 0>, copy_avx512<true, 0>}, {copy_avx512<false, 512>, copy_avx512<true, 512>}};
  if (__builtin_cpu_supports("avx2"))
    return {{copy_avx2<false, 0>, copy_avx2<true, 0>}, {copy_avx2<false, 512>, copy_avx2<true, 512>}};
#endif
  return {{copy_portable, copy_portable}, {copy_portable, copy_portable}};
}

const Copies copies = best_copies();

}  // namespace

void copy_records(const uint8_t* const* from, uint8_t* base, const uint64_t* to, size_t count, uint32_t bytes,
                  bool past_caches) {
  if (count == 0) return;
  for (size_t i = 0; i < std::min(asked_ahead(bytes), count); ++i) prefetch_record(from[i], bytes);
  const bool aligned = reinterpret_cast<uintptr_t>(base + to[0]) % kLineBytes == 0;  // then all are: whole lines
  (bytes == 512 ? copies.of_512 : copies.any)[aligned && past_caches](from, base, to, count, bytes);
}

}  // namespace headgate
