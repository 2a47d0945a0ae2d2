// The memory of one worker that selected records are copied into, and the way of its answers. What memory that is, and
// how it is reached, nobody else knows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
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
  // Orders all that this thread has delivered before every answer that it gives from here on. False: nobody knows what
  // of it the worker sees, nor of anything later.
  [[nodiscard]] virtual bool fence() = 0;
  // Stores the cell of a terminal run.
  virtual void answer(Cell& cell, CellValue value) = 0;
  // A new descriptor by which the worker maps it, the caller's; -1 if it lies in memory that the worker has already.
  virtual int descriptor() const { return -1; }
  // Whether what the worker sees can be read back; and what it is, behind a fence of this thread. False: nobody knows.
  virtual bool readable() const { return false; }
  [[nodiscard]] virtual bool read(uint64_t, uint8_t*, uint64_t) { return false; }
};

struct WindowSettings {
  std::string kind = "shm";  // of window_kinds(), or "auto": all that can be had
  std::string cuda_library = "libcuda.so.1", gdr_library = "libgdrapi.so.2";
  int gpu = 0;
  uint32_t threads = 1;      // that deliver at once
  uint64_t arena_bytes = 0;  // of an owner's arena, which `pull` needs
};

// The kinds of windows that there are, the best one first, and those of them that lie in a device's memory.
const std::vector<std::string>& window_kinds();
const std::vector<std::string>& device_window_kinds();

// The kinds that a data plane has, decided at its start.
class Windows {
 public:
  // INVALID_ARGUMENT: no such kind. FAILED_PRECONDITION: it cannot be had on this machine.
  explicit Windows(const WindowSettings& settings);

  // The best one first; never none.
  std::vector<std::string> kinds() const;
  // The host's memory that each window of a kind holds pinned, in bytes.
  uint64_t pinned_bytes(const std::string& kind) const;
  // With `auto`: those that cannot be had, and why.
  const std::vector<std::pair<std::string, std::string>>& refused() const { return refused_; }
  // The UUID of the device that windows of device_window_kinds() lie in; empty where none was found.
  const std::string& gpu() const { return gpu_; }
  // Of `bytes` bytes: over the memory `fd`, or in a device's (fd is ignored). kind: one of kinds(), or "" for the best.
  // INVALID_ARGUMENT if the memory is smaller; RESOURCE_EXHAUSTED if the device has no more.
  std::unique_ptr<Window> make(const std::string& kind, int fd, uint64_t bytes) const;

 private:
  using Make = std::function<std::unique_ptr<Window>(int fd, uint64_t bytes)>;

  const uint32_t threads_;
  std::vector<std::pair<std::string, Make>> made_;
  std::vector<std::pair<std::string, std::string>> refused_;
  std::string gpu_;
};

}  // namespace headgate
