#include "store/upload.h"

#include <chrono>
#include <cstring>

#include "store/crc32c.h"
#include "store/direct_io.h"
#include "store/pack_file.h"

namespace headgate {
namespace {

constexpr auto kAbortDeadline = std::chrono::seconds(5);

}  // namespace

Upload::Upload(const std::string& path, const PackHeader& header, Counters& counters)
    : path_(path), counters_(counters), header_(header) {
  header_.magic = kPackMagic;
  header_.version = kPackVersion;
  check_shape(header_);
  lay_out(header_);
  fd_ = open_direct(Site::kUploadOpen, path, O_RDWR | O_CREAT | O_EXCL);
  int result = disk::fallocate(Site::kUploadAllocate, fd_.get(), header_.file_bytes);
  if (result != 0 && errno == EOPNOTSUPP) result = disk::ftruncate(Site::kUploadExtend, fd_.get(), header_.file_bytes);
  if (result != 0) {
    int error = errno;
    disk::unlink(Site::kUploadUnlink, path.c_str());
    throw system_error(path + ": allocate", error);
  }
  for (uint32_t j = 0; j < header_.kind_count; ++j) missing_ += header_.layers * header_.kinds[j].lanes;
  segments_.assign(missing_, Segment::kEmpty);
  map_.resize(size_t{header_.layers} * header_.kinds[0].lanes * header_.tokens);
  crcs_.resize(header_.crc_off / kBlockBytes - 1);
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
  missing_ -= written;
  if (--writing_ == 0) idle_.notify_all();
}

void Upload::set_map(uint32_t layer, uint32_t lane, const uint8_t* map) {
  size_t first = (size_t{layer} * header_.kinds[0].lanes + lane) * header_.tokens;
  std::memcpy(map_.data() + first, map, header_.tokens * sizeof(uint16_t));
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
    check_map();
    write_map_and_crcs();
    make_durable(Site::kUploadTailSync);
    write_header();
    make_durable(Site::kUploadHeaderSync);
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

void Upload::check_map() const {
  std::vector<uint32_t> seen(header_.tokens, 0);
  uint32_t segment = 0;
  for (size_t first = 0; first < map_.size(); first += header_.tokens) {
    ++segment;
    for (uint32_t i = 0; i < header_.tokens; ++i) {
      uint16_t token = map_[first + i];
      if (token >= header_.tokens || seen[token] == segment)
        throw invalid_argument(path_ + ": map of segment " + std::to_string(segment - 1) + " is no permutation");
      seen[token] = segment;
    }
  }
}

void Upload::write_map_and_crcs() {
  BlockBuffer tail(header_.file_bytes - header_.map_off);
  std::memcpy(tail.data(), map_.data(), map_.size() * sizeof(uint16_t));
  uint64_t first = header_.map_off / kBlockBytes - 1;
  for (uint64_t b = 0; b < header_.map_bytes / kBlockBytes; ++b)
    crcs_[first + b] = block_crc(header_.build, first + b + 1, tail.data() + b * kBlockBytes);
  uint64_t table_bytes = crcs_.size() * sizeof(uint32_t);
  uint8_t* table = tail.data() + header_.map_bytes;
  std::memcpy(table, crcs_.data(), table_bytes);
  uint32_t own = crc32c(crc32c(0, header_.build, sizeof header_.build), table, table_bytes);
  std::memcpy(table + table_bytes, &own, sizeof own);
  write_direct(Site::kUploadTail, fd_.get(), tail.data(), tail.bytes(), header_.map_off, path_);
  add(counters_.nvme_write_bytes, tail.bytes());
}

void Upload::write_header() {
  header_.header_crc = header_crc(header_);
  BlockBuffer block(kBlockBytes);
  std::memcpy(block.data(), &header_, sizeof header_);
  write_direct(Site::kUploadHeader, fd_.get(), block.data(), kBlockBytes, 0, path_);
  add(counters_.nvme_write_bytes, kBlockBytes);
}

void Upload::make_durable(Site site) {
  if (disk::fdatasync(site, fd_.get()) != 0) throw system_error(path_ + ": fdatasync", errno);
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
