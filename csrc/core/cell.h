// A completion cell is stored and loaded as one aligned 16-byte access, so that a reader without credit never sees a
// sequence with another ticket's status. Other machines store the sequence last and load it first.
#pragma once

#include "core/ring.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace headgate {

struct CellValue {
  uint64_t seq;
  uint32_t status;
  uint32_t aux;
};

inline void store_cell(Cell& cell, CellValue value) {
#if defined(__x86_64__)
  // Aligned 16-byte vector accesses are atomic on every x86 with AVX; a store has release order by itself.
  std::atomic_thread_fence(std::memory_order_release);
  __m128i packed = _mm_set_epi64x(int64_t(uint64_t{value.aux} << 32 | value.status), int64_t(value.seq));
  _mm_store_si128(reinterpret_cast<__m128i*>(&cell), packed);
#else
  cell.status = value.status;
  cell.aux = value.aux;
  cell.seq.store(value.seq, std::memory_order_release);
#endif
}

inline CellValue load_cell(const Cell& cell) {
#if defined(__x86_64__)
  __m128i packed = _mm_load_si128(reinterpret_cast<const __m128i*>(&cell));
  std::atomic_thread_fence(std::memory_order_acquire);
  uint64_t low = uint64_t(_mm_cvtsi128_si64(packed));
  uint64_t high = uint64_t(_mm_cvtsi128_si64(_mm_unpackhi_epi64(packed, packed)));
  return {low, uint32_t(high), uint32_t(high >> 32)};
#else
  uint64_t seq = cell.seq.load(std::memory_order_acquire);
  return {seq, cell.status, cell.aux};
#endif
}

}  // namespace headgate
