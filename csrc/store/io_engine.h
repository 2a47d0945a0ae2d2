// One thread's io_uring: collect requests, submit up to the depth, reap what has ended.
#pragma once

#include <liburing.h>

#include <cstdint>
#include <span>
#include <vector>

#include "store/disk.h"

namespace headgate {

class PackFile;
struct Portion;
struct RunTask;

// Blocks of a request that lie in one frame; those that are only read through lie in none (kNoFrame).
struct IoPart {
  uint32_t frame;
  uint16_t first;  // within the frame
  uint16_t count;
};

// One read or write of adjacent whole blocks. The memory belongs to the engine until `reap` hands the request back.
struct Io {
  static constexpr uint32_t kBlocksMax = 32;  // 128 KiB: what a neighbour's read waits behind

  Site site;
  int fd;
  bool write;
  uint32_t bytes;
  uint64_t offset;
  uint32_t piece_count;
  iovec pieces[kBlocksMax];  // a write has one

  // Whom it is for; the engine does not look at these.
  RunTask* run;      // null: a read ahead
  Portion* portion;  // of the run
  bool bulk;         // of a RANGE or a STORE
  PackFile* pack;
  uint32_t part_count;
  IoPart parts[kBlocksMax];  // in the order of the file
  uint32_t write_buffer;     // index

  uint64_t submitted_ns;
  uint32_t done;        // bytes
  uint32_t piece_done;  // pieces; the next may have begun
  uint32_t retries;
  Io* behind;  // in the queue
  [[no_unique_address]] shim::Injected injected;
};

// Single-threaded.
class IoEngine {
 public:
  explicit IoEngine(unsigned depth);
  ~IoEngine();
  IoEngine(const IoEngine&) = delete;
  IoEngine& operator=(const IoEngine&) = delete;

  // Lets the kernel keep these pages mapped; requests outside them, or all if a limit forbids it, go the ordinary way.
  // At most 1 GiB. Frames are not registered: that would touch all of dram_bytes at start, seconds per GiB, and huge
  // pages make it no faster afterwards.
  void register_memory(std::span<uint8_t> region);

  // Queues a request for the next submit; whoever decides what comes next does so while there is room, and then goes
  // beyond it by less than kBeyondRoom. Needs no memory.
  void collect(const Io& request);
  static constexpr unsigned kBeyondRoom = 64;
  unsigned room() const {
    unsigned taken = in_flight_ + queued_;
    return taken < depth_ ? depth_ - taken : 0;
  }
  unsigned depth() const { return depth_; }
  void submit();
  // Waits until something ends, at most `ns`. Only while busy.
  void wait(uint64_t ns);
  bool busy() const { return in_flight_ > 0 || queued_ > 0; }

  // Calls ended(io, error) for each finished request, at most `limit`; error is 0 or an errno (ENODATA: the file is too
  // short). It may not collect others.
  // Requests cut short, and those that the kernel asks to repeat, go back into the queue instead.
  template <typename Ended>
  size_t reap(size_t limit, Ended ended) {
    io_uring_cqe* cqe;
    size_t count = 0;
    while (count < limit && in_flight_ > 0 && io_uring_peek_cqe(&ring_, &cqe) == 0) {
      Io* io = static_cast<Io*>(io_uring_cqe_get_data(cqe));
      int result = cqe->res;
      io_uring_cqe_seen(&ring_, cqe);
      --in_flight_;
      int error = 0;
      if (!settle(*io, result, error)) continue;
      ++count;
      ended(*io, error);
      free_.push_back(io);
    }
    return count;
  }

 private:
  bool settle(Io& io, int result, int& error);
  void prepare(Io& io);
  bool registered(const iovec& piece) const;
  void push_back(Io& io);
  void push_front(Io& io);
  Io& pop_front();

  io_uring ring_;
  const unsigned depth_;
  unsigned in_flight_ = 0, queued_ = 0;
  std::vector<Io> pool_;
  std::vector<Io*> free_;
  Io *first_ = nullptr, *last_ = nullptr;  // of the queue
  std::span<uint8_t> registered_;
};

}  // namespace headgate
