// A window in shared memory: a memfd that the worker maps as well.
#pragma once

#include "store/mapping.h"
#include "store/window.h"

namespace headgate {

class ShmWindow : public Window {
 public:
  ShmWindow(int fd, uint64_t bytes) : memory_(fd, bytes, PROT_READ | PROT_WRITE, "window") {}
  void deliver(const uint8_t* const* from, const uint64_t* to, size_t count, uint32_t bytes, bool past_caches) override;
  bool fence() override;
  void answer(Cell& cell, CellValue value) override { store_cell(cell, value); }
  bool readable() const override { return true; }
  bool read(uint64_t from, uint8_t* to, uint64_t bytes) override;

 protected:
  uint8_t* data() const { return memory_.data(); }

 private:
  Mapping memory_;
};

}  // namespace headgate
