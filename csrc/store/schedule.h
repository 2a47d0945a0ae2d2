// Who is served next: fair by cost among owners, among an owner's workers, and among a worker's rings.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace headgate {

// A node of a tree of fair rounds. Of the children that have work the one that was charged least is next; one that
// begins to have work again starts level with the one that was chosen last, so waiting saves nothing up and a newcomer
// is served at once. Decisions only: no memory of its own beyond the list, no clock. Not thread-safe.
class FairNode {
 public:
  explicit FairNode(FairNode* parent = nullptr) : parent_(parent) {
    if (parent) parent->expect_child();
  }
  ~FairNode() { rest(); }
  FairNode(const FairNode&) = delete;
  FairNode& operator=(const FairNode&) = delete;

  // A leaf has work, and so have the nodes above it.
  void wake() {
    for (FairNode* n = this; n->parent_ && n->index_ == kResting; n = n->parent_) {
      n->charged_ = std::max(n->charged_, n->parent_->clock_);
      n->index_ = uint32_t(n->parent_->busy_.size());
      n->parent_->busy_.push_back(n);
    }
  }

  // A leaf has none any more; nor have the nodes above it that had no other.
  void rest() {
    for (FairNode* n = this; n->parent_ && n->index_ != kResting && n->busy_.empty(); n = n->parent_) {
      auto& siblings = n->parent_->busy_;
      siblings.back()->index_ = n->index_;
      siblings[n->index_] = siblings.back();
      siblings.pop_back();
      n->index_ = kResting;
    }
  }

  // This node will not wake again. The node above it must still be there, and may go afterwards.
  void part() {
    rest();
    --parent_->children_;
  }

  bool busy() const { return !busy_.empty() || index_ != kResting; }

  // The leaf under this root that is to be served; null if none has work.
  FairNode* next() {
    FairNode* n = this;
    while (!n->busy_.empty()) {
      FairNode* least = *std::min_element(n->busy_.begin(), n->busy_.end(), [](const FairNode* a, const FairNode* b) {
        return a->charged_ < b->charged_;
      });
      n->clock_ = std::max(n->clock_, least->charged_);
      n = least;
    }
    return n == this ? nullptr : n;
  }

  // What serving this leaf has cost, in bytes; counts for every node above it.
  void charge(uint64_t bytes) {
    for (FairNode* n = this; n->parent_; n = n->parent_) n->charged_ += bytes;
  }

 private:
  static constexpr uint32_t kResting = UINT32_MAX;

  // Waking a child must not fail for want of memory.
  void expect_child() {
    if (busy_.capacity() <= children_) busy_.reserve(std::max<size_t>(4, 2 * busy_.capacity()));
    ++children_;
  }

  FairNode* const parent_;
  uint64_t charged_ = 0;
  uint64_t clock_ = 0;  // the charge of the child that was chosen last, or more
  uint32_t index_ = kResting;
  uint32_t children_ = 0;  // that have not parted
  std::vector<FairNode*> busy_;
};

}  // namespace headgate
