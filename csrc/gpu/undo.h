// Steps that are undone in reverse order, also those of a constructor that throws half-way.
#pragma once

#include <functional>
#include <utility>
#include <vector>

namespace headgate {

class Undo {
 public:
  Undo() = default;
  Undo(const Undo&) = delete;
  Undo& operator=(const Undo&) = delete;
  ~Undo() {
    for (; !steps_.empty(); steps_.pop_back()) steps_.back()();
  }
  void add(std::function<void()> step) { steps_.push_back(std::move(step)); }

 private:
  std::vector<std::function<void()>> steps_;
};

}  // namespace headgate
