#include "store/upload.h"

#include <chrono>
#include <cstring>

#include "store/crc32c.h"
#include "store/direct_io.h"

namespace headgate {
namespace {

constexpr auto kAbortDeadline = std::chrono::seconds(5);

PackHeader laid_out(PackHeader header) {
  header.magic = kPackMagic;
  header.version = kPackVersion;
  check_shape(header);
  lay_out(header);
  header.header_crc = header_crc(header);
  return header;
}

}  // namespace

Upload::Upload(const std::string& path, const PackHeader& header, Counters& counters)
    : path_(path), counters_(counters), header_(laid_out(header)), table_(header_.file_bytes - header_.crc_off) {
  for (uint32_t j = 0; j < header_.kind_count; ++j) missing_ += header_.layers * header_.kinds[j].lanes;
  segments_.assign(missing_, Segment::kEmpty);
  fd_ = open_direct(Site::kUploadOpen, path, O_RDWR | O_CREAT | O_EXCL);
  int result = disk::fallocate(Site::kUploadAllocate, fd_.get(), header_.file_bytes);
  if (result != 0 && errno == EOPNOTSUPP) result = disk::ftruncate(Site::kUploadExtend, fd_.get(), header_.file_bytes);
  if (result != 0) {
    int error = errno;
    disk::unlink(Site::kUploadUnlink, path.c_str());
    throw system_error(path + ": allocate", error);
  }
}

size_t Upload::segment_index(uint32_t kind, uint32_t layer, uint32_t lane) const {
  size_t first = 0;
  for (uint32_t j = 0; j < kind; ++j) first += size_t{header_.layers} * header_.kinds[j].lanes;
  return first + size_t{layer} * header_.kinds[kind].lanes + lane;
}

Fault Upload::begin_segment(uint32_t kind, uint32_t layer, uint32_t lane) {
  std::lock_guard lock(mutex_);
  if (state_ != State::kOpen) return Fault::kFailedPrecondition;
  Segment& segment = segments_[segment_index(kind, layer, lane)];
  if (segment != Segment::kEmpty) return Fault::kInvalidArgument;
  segment = Segment::kWriting;
  ++writing_;
  return Fault::kNone;
}

void Upload::end_segment(uint32_t kind, uint32_t layer, uint32_t lane, bool written) {
  std::lock_guard lock(mutex_);
  segments_[segment_index(kind, layer, lane)] = written ? Segment::kFilled : Segment::kEmpty;
  if (!written && seeds) seeds->closed = true;
  missing_ -= written;
  if (--writing_ == 0) idle_.notify_all();
}

void Upload::write(Site site, const BlockBuffer& blocks, uint64_t offset) const {
  write_direct(site, fd_.get(), blocks.data(), blocks.bytes(), offset, path_);
  add(counters_.nvme_write_bytes, blocks.bytes());
}

uint32_t Upload::missing() const {
  std::lock_guard lock(mutex_);
  return missing_;
}

void Upload::start_finish() {
  std::lock_guard lock(mutex_);
  if (state_ == State::kRetired) throw unavailable(path_ + ": an earlier attempt failed; abort this upload");
  if (state_ != State::kOpen) throw failed_precondition(path_ + ": the upload is being finished");
  if (missing_ > 0) throw failed_precondition(path_ + ": " + std::to_string(missing_) + " segments are missing");
  state_ = State::kFinishing;
}

void Upload::finish() {
  start_finish();
  try {
    write_crcs();
    write_header();
    make_durable();
  } catch (const Error&) {
    // After a failed sync the kernel may call pages clean that never reached the disk: nothing here can be trusted.
    std::lock_guard lock(mutex_);
    state_ = State::kRetired;
    throw;
  }
  std::lock_guard lock(mutex_);
  state_ = State::kFinished;
  fd_.reset();
}

void Upload::write_crcs() {
  const uint64_t count = checked_blocks(header_);
  const uint32_t own = crc32c(0, header_.build, sizeof header_.build);
  crcs()[count] = crc32c(own, table_.data(), count * sizeof(uint32_t));
  write_direct(Site::kUploadTail, fd_.get(), table_.data(), table_.bytes(), header_.crc_off, path_);
  add(counters_.nvme_write_bytes, table_.bytes());
}

void Upload::write_header() {
  BlockBuffer block(kBlockBytes);
  std::memcpy(block.data(), &header_, sizeof header_);
  write_direct(Site::kUploadHeader, fd_.get(), block.data(), kBlockBytes, 0, path_);
  add(counters_.nvme_write_bytes, kBlockBytes);
}

// Once for all: a header beside blocks that were lost vouches for nothing, as each of them has its own checksum.
void Upload::make_durable() {
  if (disk::fdatasync(Site::kUploadSync, fd_.get()) != 0) throw system_error(path_ + ": fdatasync", errno);
}

void Upload::abort() {
  std::unique_lock lock(mutex_);
  if (state_ == State::kFinished) return;
  state_ = State::kRetired;
  // A write that a hanging disk keeps in flight needs the descriptor; it goes with the last reference then.
  if (idle_.wait_for(lock, kAbortDeadline, [this] { return writing_ == 0; })) fd_.reset();
  disk::unlink(Site::kUploadUnlink, path_.c_str());
}

}  // namespace headgate
