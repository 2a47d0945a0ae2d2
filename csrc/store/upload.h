// A pack that is being written: segments arrive in any order through STORE runs, then map, checksums and header follow.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "core/pack.h"
#include "core/ring.h"
#include "store/counters.h"
#include "store/disk.h"
#include "store/mapping.h"

namespace headgate {

class Upload {
 public:
  // `header` has its shape and identity; offsets and checks are added here. The file must not exist.
  Upload(const std::string& path, const PackHeader& header, Counters& counters);

  const PackHeader& header() const { return header_; }
  int fd() const { return fd_.get(); }

  // Called by copy threads, for a segment by the one that began it. begin_segment: kNone, or why the segment is
  // refused; after kNone end_segment must follow, once no write of the segment is in flight.
  Fault begin_segment(uint32_t kind, uint32_t layer, uint32_t lane);
  void end_segment(uint32_t kind, uint32_t layer, uint32_t lane, bool written);
  void set_map(uint32_t layer, uint32_t lane, const uint8_t* map);    // u16[tokens], any alignment
  void set_crc(uint32_t block, uint32_t crc) { crcs_[block] = crc; }  // block counts from the first after the header

  uint32_t missing() const;
  void finish();  // durable on return
  void abort();   // waits some seconds for the segments in flight, closes, unlinks

 private:
  enum class State : uint8_t { kOpen, kFinishing, kRetired, kFinished };
  enum class Segment : uint8_t { kEmpty, kWriting, kFilled };

  size_t segment_index(uint32_t kind, uint32_t layer, uint32_t lane) const;
  void start_finish();
  void check_map() const;
  void write_map_and_crcs();
  void write_header();
  void make_durable(Site site);

  std::string path_;
  Counters& counters_;
  PackHeader header_;
  Fd fd_;
  std::vector<uint16_t> map_;
  std::vector<uint32_t> crcs_;

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  State state_ = State::kOpen;
  std::vector<Segment> segments_;
  uint32_t missing_ = 0;
  uint32_t writing_ = 0;
};

}  // namespace headgate
