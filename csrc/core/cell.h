// A completion cell is stored and loaded as one aligned 16-byte access on x86, so that a reader without credit never
// sees a sequence with another ticket's status. Elsewhere, devices included, the sequence is stored last and loaded
// first, which is enough for a reader that keeps credit.
#pragma once

#include "core/host_device.h"
#include "core/ring.h"

#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
#include <emmintrin.h>
#endif

namespace headgate {

struct CellValue {
  uint64_t seq;
  uint32_t status;
  uint32_t aux;
};

HEADGATE_HD inline void store_cell(Cell& cell, CellValue value) {
#if defined(__CUDA_ARCH__)
  cell.status = value.status;
  cell.aux = value.aux;
  __nv_atomic_store_n(&cell.seq, value.seq, __NV_ATOMIC_RELEASE, __NV_THREAD_SCOPE_SYSTEM);
#elif defined(__x86_64__)
  // Aligned 16-byte vector accesses are atomic on every x86 with AVX; a store has release order by itself.
  __atomic_thread_fence(__ATOMIC_RELEASE);
  __m128i packed = _mm_set_epi64x(int64_t(uint64_t{value.aux} << 32 | value.status), int64_t(value.seq));
  _mm_store_si128(reinterpret_cast<__m128i*>(&cell), packed);
#else
  cell.status = value.status;
  cell.aux = value.aux;
  __atomic_store_n(&cell.seq, value.seq, __ATOMIC_RELEASE);
#endif
}

HEADGATE_HD inline CellValue load_cell(const Cell& cell) {
#if defined(__CUDA_ARCH__)
  auto* word = const_cast<uint64_t*>(&cell.seq);  // which is how nvcc declares it
  uint64_t seq = __nv_atomic_load_n(word, __NV_ATOMIC_ACQUIRE, __NV_THREAD_SCOPE_SYSTEM);
  return {seq, cell.status, cell.aux};
#elif defined(__x86_64__)
  __m128i packed = _mm_load_si128(reinterpret_cast<const __m128i*>(&cell));
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  uint64_t low = uint64_t(_mm_cvtsi128_si64(packed));
  uint64_t high = uint64_t(_mm_cvtsi128_si64(_mm_unpackhi_epi64(packed, packed)));
  return {low, uint32_t(high), uint32_t(high >> 32)};
#else
  uint64_t seq = __atomic_load_n(&cell.seq, __ATOMIC_ACQUIRE);
  return {seq, cell.status, cell.aux};
#endif
}

}  // namespace headgate
