// The memory of one worker that selected records are copied into, and the way of its answers. What memory that is, and
// how it is reached, nobody else knows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/cell.h"

namespace headgate {

// Used by every copy thread that serves a ring of the worker, at once; no two of them deliver to one place.
class Window {
 public:
  virtual ~Window() = default;

  // Copies records of `bytes` bytes (a multiple of 64) from from[i] to byte to[i] of the window, places of one lane.
  // past_caches: they are part of more than a cache holds. Called for many records at a time.
  virtual void deliver(const uint8_t* const* from, const uint64_t* to, size_t count, uint32_t bytes,
                       bool past_caches) = 0;
  // Orders all that this thread has delivered before every answer that it gives from here on.
  virtual void fence() = 0;
  // Stores the cell of a terminal run.
  virtual void answer(Cell& cell, CellValue value) = 0;
};

// Of `bytes` bytes, which the worker has as `fd`. INVALID_ARGUMENT if the memory is smaller.
using MakeWindow = std::unique_ptr<Window> (*)(int fd, uint64_t bytes);

// The best one first.
const std::vector<std::string>& window_kinds();
// INVALID_ARGUMENT for another kind than these.
MakeWindow window_maker(const std::string& kind);

}  // namespace headgate
