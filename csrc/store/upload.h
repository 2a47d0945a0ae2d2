// A pack that is being written: segments with their maps arrive in any order through STORE runs, then checksums and
// header follow. Until then memory holds a state per segment and a checksum per block, both made with the upload; the
// pages of the checksums are touched as segments come.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/pack.h"
#include "core/ring.h"
#include "store/counters.h"
#include "store/direct_io.h"
#include "store/disk.h"
#include "store/mapping.h"
#include "store/pack_file.h"

namespace headgate {

class Upload {
 public:
  // `header` has its shape and identity; offsets and checks are added here. The file must not exist.
  Upload(const std::string& path, const PackHeader& header, Counters& counters);

  const PackHeader& header() const { return header_; }
  const std::string& path() const { return path_; }
  int fd() const { return fd_.get(); }

  // Called by copy threads, for a segment by the one that began it. begin_segment: kNone, or why the segment is
  // refused; after kNone end_segment must follow, once no write of the segment is in flight.
  Fault begin_segment(uint32_t kind, uint32_t layer, uint32_t lane);
  void end_segment(uint32_t kind, uint32_t layer, uint32_t lane, bool written);
  // Of a block of a segment that was begun; `block` counts from the first after the header.
  void set_crc(uint32_t block, uint32_t crc) { crcs()[block] = crc; }

  // Blocks of a segment that was begun, at their place in the file. RESOURCE_EXHAUSTED, UNAVAILABLE.
  void write(Site site, const BlockBuffer& blocks, uint64_t offset) const;

  // What DRAM holds of it: blocks that are written, which nobody can read before it is a pack. Null: nothing ever. Set
  // before copy threads know the upload; closed once a segment has failed, which may come again with other bytes.
  std::shared_ptr<PackFile> seeds;

  uint32_t missing() const;
  void finish();  // durable on return
  void abort();   // waits some seconds for the segments in flight, closes, unlinks

 private:
  enum class State : uint8_t { kOpen, kFinishing, kRetired, kFinished };
  enum class Segment : uint8_t { kEmpty, kWriting, kFilled };

  size_t segment_index(uint32_t kind, uint32_t layer, uint32_t lane) const;
  void start_finish();
  uint32_t* crcs() const { return reinterpret_cast<uint32_t*>(table_.data()); }
  void write_crcs();
  void write_header();
  void make_durable();

  std::string path_;
  Counters& counters_;
  const PackHeader header_;
  const BlockBuffer table_;  // of checksums, as it will stand in the file
  Fd fd_;

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  State state_ = State::kOpen;
  std::vector<Segment> segments_;
  uint32_t missing_ = 0;
  uint32_t writing_ = 0;
};

}  // namespace headgate
