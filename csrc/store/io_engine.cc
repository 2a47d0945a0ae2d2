#include "store/io_engine.h"

#include <cerrno>
#include <cstring>
#include <string>

#include "core/pack.h"
#include "ring/futex.h"
#include "store/direct_io.h"
#include "store/error.h"

namespace headgate {
namespace {

BlockTransfer rest_of(const Io& io) {
  return {io.fd, io.write, std::span(io.pieces, io.piece_count).subspan(io.piece_done), io.bytes - io.done,
          io.offset + io.done};
}

void advance(Io& io, uint32_t bytes) {
  io.done += bytes;
  for (; bytes > 0 && bytes >= io.pieces[io.piece_done].iov_len; ++io.piece_done)
    bytes -= uint32_t(io.pieces[io.piece_done].iov_len);
  if (bytes == 0) return;
  iovec& begun = io.pieces[io.piece_done];
  begun = {static_cast<uint8_t*>(begun.iov_base) + bytes, begun.iov_len - bytes};
}

}  // namespace

IoEngine::IoEngine(unsigned depth) : depth_(depth), pool_(depth + kBeyondRoom) {
  for (Io& io : pool_) free_.push_back(&io);
  int error = io_uring_queue_init(depth, &ring_, IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG);
  if (error == -EINVAL) error = io_uring_queue_init(depth, &ring_, 0);
  if (error != 0)
    throw failed_precondition(std::string("io_uring: ") + std::strerror(-error) +
                              "; allow it (kernel.io_uring_disabled, seccomp) or raise the memlock limit");
}

IoEngine::~IoEngine() { io_uring_queue_exit(&ring_); }

void IoEngine::register_memory(std::span<uint8_t> region) {
  iovec pages{region.data(), region.size()};
  if (io_uring_register_buffers(&ring_, &pages, 1) == 0) registered_ = region;
}

void IoEngine::collect(const Io& request) {
  Io& io = *free_.back();
  free_.pop_back();
  io = request;
  io.done = io.piece_done = io.retries = 0;
  io.submitted_ns = now_ns();
  push_back(io);
}

void IoEngine::push_back(Io& io) {
  io.behind = nullptr;
  (last_ ? last_->behind : first_) = &io;
  last_ = &io;
  ++queued_;
}

void IoEngine::push_front(Io& io) {
  io.behind = first_;
  first_ = &io;
  if (!last_) last_ = &io;
  ++queued_;
}

Io& IoEngine::pop_front() {
  Io& io = *first_;
  first_ = io.behind;
  if (!first_) last_ = nullptr;
  --queued_;
  return io;
}

void IoEngine::submit() {
  unsigned before = in_flight_;
  for (; queued_ > 0 && in_flight_ < depth_; ++in_flight_) prepare(pop_front());
  // What a failed submit leaves in the submission queue goes with the next one.
  if (in_flight_ > before || io_uring_sq_ready(&ring_) > 0) disk::submit(Site::kSubmit, &ring_);
}

void IoEngine::wait(uint64_t ns) {
  __kernel_timespec timeout{int64_t(ns / 1'000'000'000), int64_t(ns % 1'000'000'000)};
  io_uring_cqe* cqe;
  if (in_flight_ > 0) io_uring_wait_cqe_timeout(&ring_, &cqe, &timeout);
}

bool IoEngine::settle(Io& io, int result, int& error) {
  result = shim::settle(io.injected, rest_of(io), result);
  // A transfer that ends inside a block cannot go on from there.
  bool repeat = result == -EAGAIN || result == -EINTR || (result > 0 && result < int(kBlockBytes));
  if (repeat && ++io.retries <= kRetriesMax) return push_back(io), false;
  if (result < 0) return error = -result, true;
  uint32_t whole = uint32_t(result) / kBlockBytes * kBlockBytes;
  if (whole == 0) return error = ENODATA, true;
  advance(io, whole);
  if (io.done < io.bytes) return push_front(io), false;
  return true;
}

void IoEngine::prepare(Io& io) {
  io_uring_sqe* sqe = io_uring_get_sqe(&ring_);  // never null: the queue has depth_ entries
  BlockTransfer t = rest_of(io);
  if (shim::prepare(io.site, io.injected, sqe, t)) {
    // a test build's fault or disk stands in for the transfer
  } else if (t.pieces.size() > 1) {
    io_uring_prep_readv(sqe, t.fd, t.pieces.data(), unsigned(t.pieces.size()), t.offset);
  } else if (registered(t.pieces[0]) && t.write) {
    io_uring_prep_write_fixed(sqe, t.fd, t.pieces[0].iov_base, t.bytes, t.offset, 0);
  } else if (registered(t.pieces[0])) {
    io_uring_prep_read_fixed(sqe, t.fd, t.pieces[0].iov_base, t.bytes, t.offset, 0);
  } else if (t.write) {
    io_uring_prep_write(sqe, t.fd, t.pieces[0].iov_base, t.bytes, t.offset);
  } else {
    io_uring_prep_read(sqe, t.fd, t.pieces[0].iov_base, t.bytes, t.offset);
  }
  io_uring_sqe_set_data(sqe, &io);
}

bool IoEngine::registered(const iovec& piece) const {
  const uint8_t* at = static_cast<uint8_t*>(piece.iov_base);
  return at >= registered_.data() && at + piece.iov_len <= registered_.data() + registered_.size();
}

}  // namespace headgate
