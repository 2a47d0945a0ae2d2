#include "store/gather.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headgate {
namespace {

constexpr size_t kAhead = 16;  // records; the memory's latency is this many copies long
constexpr uint32_t kLine = 64;

inline void prefetch(const uint8_t* record, uint32_t bytes) {
  for (uint32_t at = 0; at < bytes; at += kLine) __builtin_prefetch(record + at, 0, 2);
}

#if defined(__x86_64__)

__attribute__((target("avx512f"))) void copy_avx512(const uint8_t* const* from, uint8_t* base, const uint64_t* to,
                                                    size_t count, uint32_t bytes) {
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) prefetch(from[i + kAhead], bytes);
    for (uint32_t at = 0; at < bytes; at += kLine)
      _mm512_storeu_si512(base + to[i] + at, _mm512_loadu_si512(from[i] + at));
  }
}

// Stores past the caches, for `to` aligned to a line: no line is read before it is overwritten.
__attribute__((target("avx512f"))) void stream_avx512(const uint8_t* const* from, uint8_t* base, const uint64_t* to,
                                                      size_t count, uint32_t bytes) {
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) prefetch(from[i + kAhead], bytes);
    for (uint32_t at = 0; at < bytes; at += kLine)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(base + to[i] + at), _mm512_loadu_si512(from[i] + at));
  }
}

__attribute__((target("avx2"))) void copy_avx2(const uint8_t* const* from, uint8_t* base, const uint64_t* to,
                                               size_t count, uint32_t bytes) {
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) prefetch(from[i + kAhead], bytes);
    for (uint32_t at = 0; at < bytes; at += 32) {
      __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from[i] + at));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(base + to[i] + at), half);
    }
  }
}

__attribute__((target("avx2"))) void stream_avx2(const uint8_t* const* from, uint8_t* base, const uint64_t* to,
                                                 size_t count, uint32_t bytes) {
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) prefetch(from[i + kAhead], bytes);
    for (uint32_t at = 0; at < bytes; at += 32) {
      __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from[i] + at));
      _mm256_stream_si256(reinterpret_cast<__m256i*>(base + to[i] + at), half);
    }
  }
}

#endif

void copy_portable(const uint8_t* const* from, uint8_t* base, const uint64_t* to, size_t count, uint32_t bytes) {
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) prefetch(from[i + kAhead], bytes);
    std::memcpy(base + to[i], from[i], bytes);
  }
}

using Copy = void (*)(const uint8_t* const*, uint8_t*, const uint64_t*, size_t, uint32_t);
struct Copies {
  Copy cached;
  Copy streaming;
};

Copies best_copies() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {copy_avx512, stream_avx512};
  if (__builtin_cpu_supports("avx2")) return {copy_avx2, stream_avx2};
#endif
  return {copy_portable, copy_portable};
}

}  // namespace

void copy_records(const uint8_t* const* from, uint8_t* base, const uint64_t* to, size_t count, uint32_t bytes,
                  bool past_caches) {
  static const Copies copies = best_copies();
  if (count == 0) return;
  for (size_t i = 0; i < kAhead && i < count; ++i) prefetch(from[i], bytes);
  bool aligned = reinterpret_cast<uintptr_t>(base + to[0]) % kLine == 0;  // then all are: records are whole lines
  (aligned && past_caches ? copies.streaming : copies.cached)(from, base, to, count, bytes);
}

}  // namespace headgate
