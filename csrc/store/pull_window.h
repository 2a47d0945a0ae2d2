// A window in shared memory beside which a worker is told where records lie in its arena, to read them there itself.
#pragma once

#include "core/pull.h"
#include "store/shm_window.h"

namespace headgate {

class PullWindow : public ShmWindow {
 public:
  // Over PullLayout{bytes}.memory_bytes().
  PullWindow(int fd, uint64_t bytes);
  void deliver(const uint8_t* const* from, const uint64_t* to, size_t count, uint32_t bytes, bool past_caches) override;
  // In the place of delivering: the record of byte to[i] lies at byte at[i] of the arena, a multiple of 64.
  void name(const uint64_t* to, const uint64_t* at, size_t count);

 private:
  uint32_t* lines_;
};

}  // namespace headgate
