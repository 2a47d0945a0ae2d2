#include "store/pack_file.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "store/crc32c.h"
#include "store/direct_io.h"

namespace headgate {
namespace {

constexpr uint64_t kFileBytesMax = uint64_t{1} << 40;
constexpr uint32_t kLayersMax = 4096;
constexpr uint32_t kLanesMax = 4096;
constexpr uint32_t kBlocksAtOnce = 256;  // read by the control plane, however large the pack
static_assert(kBlocksAtOnce >= map_blocks(kPackTokensMax));

void require(bool ok, const char* message) {
  if (!ok) throw invalid_argument(std::string("pack: ") + message);
}

void write_out(int to, const uint8_t* from, uint64_t bytes) {
  while (bytes > 0) {
    ssize_t written = ::write(to, from, bytes);
    if (written < 0 && errno != EINTR) throw system_error("copy of a map", errno);
    from += std::max(written, ssize_t{0});
    bytes -= uint64_t(std::max(written, ssize_t{0}));
  }
}

}  // namespace

void check_shape(const PackHeader& h) {
  require(h.layers >= 1 && h.layers <= kLayersMax, "layers must be 1..4096");
  require(h.kind_count >= 1 && h.kind_count <= kKindsMax, "there must be 1..4 kinds");
  require(h.tokens >= kHashBlockTokens && h.tokens <= kPackTokensMax && h.tokens % kHashBlockTokens == 0,
          "tokens must be a multiple of 256, at most 16384");
  require(h.extent_blocks >= 1 && h.extent_blocks <= kExtentBlocksMax, "extent_blocks must be 1..16");
  for (uint32_t j = 0; j < h.kind_count; ++j) {
    const KindHeader& kind = h.kinds[j];
    require(kind.lanes >= 1 && kind.lanes <= kLanesMax, "lanes must be 1..4096");
    require(kind.record_bytes >= kRecordAlign && kind.record_bytes <= kRecordBytesMax &&
                kind.record_bytes % kRecordAlign == 0,
            "record_bytes must be a multiple of 64, at most 4096");
  }
  PackHeader sized = h;
  lay_out(sized);
  require(sized.file_bytes <= kFileBytesMax, "a pack is at most 1 TiB");
}

bool all_zero(const uint8_t* data, size_t bytes) {
  uint64_t any = 0;
  for (size_t i = 0; i < bytes && any == 0; i += 8) {
    uint64_t word;
    std::memcpy(&word, data + i, 8);
    any |= word;
  }
  return any == 0;
}

bool is_permutation(const uint16_t* map, uint32_t tokens) {
  uint8_t seen[kPackTokensMax] = {};
  uint32_t beyond = 0, distinct = 0;
  for (uint32_t i = 0; i < tokens; ++i) beyond |= map[i] >= tokens, seen[map[i] % kPackTokensMax] = 1;
  for (uint32_t i = 0; i < tokens; ++i) distinct += seen[i];
  return beyond == 0 && distinct == tokens;
}

uint32_t block_crc(const uint8_t build[16], uint64_t block_no, const uint8_t* block) {
  uint8_t prefix[24];
  std::memcpy(prefix, build, 16);
  std::memcpy(prefix + 16, &block_no, 8);
  return crc32c(crc32c(0, prefix, sizeof prefix), block, kBlockBytes);
}

uint32_t header_crc(const PackHeader& header) {
  alignas(8) uint8_t block[kBlockBytes] = {};
  PackHeader copy = header;
  copy.header_crc = 0;
  std::memcpy(block, &copy, sizeof copy);
  return crc32c(0, block, sizeof block);
}

PackFile::PackFile(const std::string& path, FrameAccount& account, Counters& counters)
    : account(account), path_(path), counters_(counters), fd_(open_direct(Site::kPackOpen, path, O_RDONLY)) {
  read_header();
  read_crcs();
  frame_of_extent.assign(extents(), kNoFrame);
}

PackFile::PackFile(const PackHeader& header, FrameAccount& account, Counters& counters)
    : account(account), counters_(counters), header_(header) {
  frame_of_extent.assign(extents(), kNoFrame);
}

void PackFile::load(const std::string& path) {
  const PackHeader written = header_;
  path_ = path;
  fd_ = open_direct(Site::kPackOpen, path, O_RDONLY);
  read_header();
  if (std::memcmp(&written, &header_, sizeof written) != 0)
    throw data_loss(path_ + ": another header than was written");
  read_crcs();
}

void PackFile::read(Site site, uint8_t* to, uint64_t bytes, uint64_t offset) const {
  read_direct(site, fd_.get(), to, bytes, offset, path_);
  add(counters_.nvme_read_bytes, bytes);
  add(counters_.nvme_read_ops);
}

void PackFile::read_header() {
  BlockBuffer block(kBlockBytes);
  read(Site::kPackHeader, block.data(), kBlockBytes, 0);
  std::memcpy(&header_, block.data(), sizeof header_);
  if (header_.magic != kPackMagic) throw data_loss(path_ + ": not a pack (magic)");
  uint32_t stored = header_.header_crc;
  std::memset(block.data() + offsetof(PackHeader, header_crc), 0, sizeof stored);
  if (crc32c(0, block.data(), kBlockBytes) != stored) throw data_loss(path_ + ": header checksum");
  if (header_.version != kPackVersion)
    throw failed_precondition(path_ + ": pack version " + std::to_string(header_.version) + "; this build reads " +
                              std::to_string(kPackVersion));
  PackHeader expected = header_;
  try {
    check_shape(header_);
  } catch (const Error& error) {
    throw data_loss(path_ + ": " + error.what());
  }
  lay_out(expected);
  if (std::memcmp(&expected, &header_, sizeof header_) != 0) throw data_loss(path_ + ": header offsets");
  struct stat info;
  if (disk::fstat(Site::kPackStat, fd_.get(), &info) != 0) throw system_error(path_ + ": fstat", errno);
  if (uint64_t(info.st_size) < header_.file_bytes)
    throw data_loss(path_ + ": the file is shorter than its header says");
}

void PackFile::read_crcs() {
  const uint64_t count = checked_blocks(header_);
  BlockBuffer table(header_.file_bytes - header_.crc_off);
  read(Site::kPackCrcs, table.data(), table.bytes(), header_.crc_off);
  uint32_t stored;
  std::memcpy(&stored, table.data() + count * sizeof(uint32_t), sizeof stored);
  uint32_t crc = crc32c(crc32c(0, header_.build, sizeof header_.build), table.data(), count * sizeof(uint32_t));
  bool clean = std::all_of(table.data() + (count + 1) * sizeof(uint32_t), table.data() + table.bytes(),
                           [](uint8_t byte) { return byte == 0; });
  if (crc != stored || !clean) throw data_loss(path_ + ": checksum of the checksum table");
  crcs_.resize(count);
  std::memcpy(crcs_.data(), table.data(), count * sizeof(uint32_t));
}

bool PackFile::block_ok(uint32_t block, const uint8_t* data) const {
  return block_crc(header_.build, uint64_t{block} + 1, data) == crcs_[block] && !all_zero(data, kBlockBytes);
}

void PackFile::copy_map(int to) const {
  const uint32_t segments = header_.layers * header_.kinds[0].lanes;
  const uint32_t blocks = map_blocks(header_.tokens), at_once = std::min(segments, kBlocksAtOnce / blocks);
  const uint64_t bytes = header_.tokens * sizeof(uint16_t);
  BlockBuffer buffer(uint64_t{at_once} * blocks * kBlockBytes);
  for (uint32_t first = 0; first < segments; first += at_once) {
    const uint32_t count = std::min(at_once, segments - first);
    read(Site::kPackMap, buffer.data(), uint64_t{count} * blocks * kBlockBytes,
         header_.map_off + uint64_t{first} * blocks * kBlockBytes);
    check_blocks(buffer.data(), data_blocks() + first * blocks, count * blocks);
    for (uint32_t s = 1; s < count; ++s)
      std::memmove(buffer.data() + s * bytes, buffer.data() + uint64_t{s} * blocks * kBlockBytes, bytes);
    write_out(to, buffer.data(), count * bytes);
  }
}

void PackFile::read_blocks(Site site, const BlockBuffer& to, uint64_t offset) const {
  read(site, to.data(), to.bytes(), offset);
  check_blocks(to.data(), uint32_t(offset / kBlockBytes) - 1, uint32_t(to.bytes() / kBlockBytes));
}

// `first` counts from the first block after the header. DATA_LOSS if one of them fails its check.
void PackFile::check_blocks(const uint8_t* blocks, uint32_t first, uint32_t count) const {
  for (uint32_t b = 0; b < count; ++b) {
    if (block_ok(first + b, blocks + uint64_t{b} * kBlockBytes)) continue;
    add(counters_.crc_errors);
    throw data_loss(path_ + ": checksum of block " + std::to_string(first + b + 1));
  }
}

std::vector<uint32_t> PackFile::verify() const {
  BlockBuffer buffer(kBlocksAtOnce * kBlockBytes);
  std::vector<uint32_t> bad;
  uint32_t blocks = uint32_t(crcs_.size());
  for (uint32_t first = 0; first < blocks; first += kBlocksAtOnce) {
    uint32_t count = std::min(kBlocksAtOnce, blocks - first);
    read(Site::kPackVerify, buffer.data(), uint64_t{count} * kBlockBytes, (uint64_t{first} + 1) * kBlockBytes);
    for (uint32_t b = 0; b < count; ++b)
      if (!block_ok(first + b, buffer.data() + uint64_t{b} * kBlockBytes)) bad.push_back(first + b + 1);
  }
  add(counters_.crc_errors, bad.size());
  return bad;
}

}  // namespace headgate
