// A pack as frames know it. A committed one has header and checksums in memory, and blocks on disk.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/pack.h"
#include "store/counters.h"
#include "store/direct_io.h"
#include "store/disk.h"
#include "store/mapping.h"
#include "store/run_samples.h"
#include "store/tier/frame_account.h"

namespace headgate {

inline constexpr uint32_t kNoFrame = UINT32_MAX;
inline constexpr uint32_t kExtentBlocksMax = 16;  // 64 KiB; a frame's valid blocks fit 16 bits

// INVALID_ARGUMENT unless every number of the header is in its range. Run before lay_out, which multiplies them.
void check_shape(const PackHeader& header);

// The CRC that a block must have: bound to its file (build) and its place (block_no, the header is block 0).
uint32_t block_crc(const uint8_t build[16], uint64_t block_no, const uint8_t* block);
bool all_zero(const uint8_t* data, size_t bytes);
// Each number below `tokens` (kPackTokensMax at most) once.
bool is_permutation(const uint16_t* map, uint32_t tokens);
uint32_t header_crc(const PackHeader& header);

class PackFile {
 public:
  // Reads and checks header and CRC table: DATA_LOSS, FAILED_PRECONDITION (version, O_DIRECT), NOT_FOUND.
  // `account`: its owner's.
  PackFile(const std::string& path, FrameAccount& account, Counters& counters);
  // Of an upload, whose header has been laid out: frames may hold blocks that are written. Nothing is read before
  // load(), which is the other constructor's second half, and DATA_LOSS if the file has another header.
  PackFile(const PackHeader& header, FrameAccount& account, Counters& counters);
  void load(const std::string& path);

  const PackHeader& header() const { return header_; }
  int fd() const { return fd_.get(); }
  uint32_t data_blocks() const { return uint32_t(header_.map_off / kBlockBytes) - 1; }
  uint32_t extents() const { return (data_blocks() + header_.extent_blocks - 1) / header_.extent_blocks; }
  // Block of the file where a segment begins, counted from the first block after the header.
  uint32_t segment_block(uint32_t kind, uint32_t layer, uint32_t lane) const {
    const KindHeader& k = header_.kinds[kind];
    uint64_t segment = uint64_t{layer} * k.lanes + lane;
    return uint32_t((k.data_off + segment * k.segment_bytes) / kBlockBytes) - 1;
  }
  // The blocks that an extent has: all, except at the end of the data.
  uint16_t extent_mask(uint32_t extent) const {
    uint32_t left = data_blocks() - extent * header_.extent_blocks;
    return uint16_t((1u << (left < header_.extent_blocks ? left : header_.extent_blocks)) - 1);
  }
  // Names an extent among those of all packs, as good as surely.
  uint64_t key(uint32_t extent) const { return name() + uint64_t{extent} * 0x9e3779b97f4a7c15; }
  // The first bytes of its build.
  uint64_t name() const {
    uint64_t first;
    std::memcpy(&first, header_.build, sizeof first);
    return first;
  }
  // `block` counts from the first block after the header.
  bool block_ok(uint32_t block, const uint8_t* data) const;
  // Nothing is read any more, now or later.
  void close_file() { fd_.reset(); }

  // Writes the maps to a descriptor without their padding, verified, in pieces of a bounded size.
  void copy_map(int to) const;
  std::vector<uint32_t> verify() const;  // block numbers (from 1) that fail
  // Fills `to` with whole blocks from byte `offset` on, all of them checked. DATA_LOSS.
  void read_blocks(Site site, const BlockBuffer& to, uint64_t offset) const;

  FrameAccount& account;
  std::vector<uint32_t> frame_of_extent;  // written under the mutex of Frames, like the next two; as atomics
  uint32_t frames = 0;                    // that it holds
  std::atomic<bool> closed{false};        // a frame goes with its last pin
  std::atomic<uint32_t> bound{0};         // slots that use this pack
  std::atomic<bool> damaged{false};       // a read has met a block that fails its check
  std::unique_ptr<RunSamples> samples;    // made with it, if at all
  std::atomic<bool> seeded{false};        // its upload left in DRAM what the first hint would have read

 private:
  void read(Site site, uint8_t* to, uint64_t bytes, uint64_t offset) const;
  void read_header();
  void read_crcs();
  void check_blocks(const uint8_t* blocks, uint32_t first, uint32_t count) const;

  std::string path_;
  Counters& counters_;
  Fd fd_;
  PackHeader header_{};
  std::vector<uint32_t> crcs_;
};

}  // namespace headgate
