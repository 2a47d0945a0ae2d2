// The shim of test builds, for windows: one whose records reach the worker at the last moment that is allowed. A copy
// thread that answered without a fence, or wrote to a window past its interface, would show.
#pragma once

#include <mutex>
#include <vector>

#include "store/mapping.h"
#include "store/window.h"

namespace headgate::shim {

class LateWindow : public Window {
 public:
  LateWindow(int fd, uint64_t bytes) : memory_(fd, bytes, PROT_READ | PROT_WRITE, "window") {}
  void deliver(const uint8_t* const* from, const uint64_t* to, size_t count, uint32_t bytes, bool past_caches) override;
  bool fence() override;
  void answer(Cell& cell, CellValue value) override { store_cell(cell, value); }

 private:
  struct Record {
    uint64_t to;
    std::vector<uint8_t> bytes;
  };

  Mapping memory_;
  std::mutex mutex_;
  std::vector<Record> held_;
};

}  // namespace headgate::shim
