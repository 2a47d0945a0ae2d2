// Frames in a circle, in the order in which they are looked at.
#pragma once

#include <cstdint>
#include <vector>

namespace headgate {

class FrameList;

struct FrameLink {
  uint32_t before = 0, after = 0;
  FrameList* list = nullptr;  // that it is in
};

// Its links are those of one side, by frame. Stays where it is.
class FrameList {
 public:
  FrameList() = default;
  FrameList(const FrameList&) = delete;
  FrameList& operator=(const FrameList&) = delete;

  uint32_t size() const { return size_; }
  uint32_t first() const { return first_; }  // while there is one

  // As the last one.
  void push(std::vector<FrameLink>& links, uint32_t frame) {
    if (size_++ == 0) links[first_ = frame].before = frame;
    FrameLink& link = links[frame];
    link = {links[first_].before, first_, this};
    links[link.before].after = frame;
    links[first_].before = frame;
  }
  void push_first(std::vector<FrameLink>& links, uint32_t frame) {
    push(links, frame);
    first_ = frame;
  }
  void remove(std::vector<FrameLink>& links, uint32_t frame) {
    const FrameLink link = links[frame];
    links[link.before].after = link.after;
    links[link.after].before = link.before;
    if (first_ == frame) first_ = link.after;
    links[frame] = {};
    --size_;
  }
  // The first one becomes the last; returns it.
  uint32_t turn(const std::vector<FrameLink>& links) {
    const uint32_t frame = first_;
    first_ = links[frame].after;
    return frame;
  }

 private:
  uint32_t first_ = 0;
  uint32_t size_ = 0;
};

}  // namespace headgate
