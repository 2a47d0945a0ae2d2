#include "store/disk_cost.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <random>

#include "ring/futex.h"
#include "store/direct_io.h"
#include "store/error.h"
#include "store/io_engine.h"

namespace headgate {
namespace {

constexpr uint32_t kFileBlocks = HugePage::kBytes / kBlockBytes;
constexpr uint32_t kDepth = 32;
constexpr uint32_t kReads = 128, kLongReads = 32;  // of one block; of kLongBlocks
constexpr uint32_t kLongBlocks = 16;
static_assert(kDepth * kLongBlocks <= kFileBlocks);
constexpr uint32_t kScatter = 37;  // odd: no two blocks come to lie in one place
constexpr uint32_t kRounds = 4;    // the fastest of each kind counts: others may use the disk
constexpr uint64_t kWaitNs = 1'000'000'000;
constexpr double kUsPerNs = 1e-3, kKibPerBlock = kBlockBytes / 1024.0;

// Reads of random blocks of a file into its memory.
class Probe {
 public:
  explicit Probe(const std::string& directory)
      : directory_(directory), fd_(open_direct(Site::kProbeOpen, directory + "/.", O_TMPFILE | O_RDWR)) {
    for (uint64_t i = 0; i < HugePage::kBytes; i += sizeof(uint32_t))
      *reinterpret_cast<uint32_t*>(memory_.data() + i) = uint32_t(random_());
    write_direct(Site::kProbeWrite, fd_.get(), memory_.data(), HugePage::kBytes, 0, directory);
  }

  // Microseconds per read of so many blocks, to one piece of memory or to one for each block.
  double read(uint32_t blocks, bool scattered, uint32_t reads) {
    const uint64_t began = now_ns();
    read_all(blocks, scattered, reads);
    return double(now_ns() - began) * kUsPerNs / reads;
  }

 private:
  void read_all(uint32_t blocks, bool scattered, uint32_t reads) {
    for (uint32_t begun = 0, ended = 0; ended < reads;) {
      for (; begun < reads && engine_.room() > 0; ++begun) engine_.collect(request(blocks, scattered, begun % kDepth));
      engine_.submit();
      engine_.wait(kWaitNs);
      const size_t now = engine_.reap(kDepth, [&](const Io&, int error) {
        if (error != 0) throw system_error(directory_ + ": read", error);
      });
      if (now == 0) throw unavailable(directory_ + ": the disk did not answer within a second");
      ended += uint32_t(now);
    }
  }

  Io request(uint32_t blocks, bool scattered, uint32_t number) {
    Io io{};
    io.site = Site::kProbeRead;
    io.fd = fd_.get();
    io.bytes = blocks * kBlockBytes;
    io.offset = random_() % (kFileBlocks - blocks) * kBlockBytes;
    const uint32_t first = number * kLongBlocks, count = scattered ? blocks : 1;
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t block = scattered ? (first + i) * kScatter % kFileBlocks : first;
      io.pieces[io.piece_count++] = {memory_.data() + uint64_t{block} * kBlockBytes, io.bytes / count};
    }
    return io;
  }

  const std::string directory_;
  HugePage memory_;
  Fd fd_;
  std::minstd_rand random_{1};
  IoEngine engine_{kDepth};  // first to go: nothing is in flight into the memory then
};

}  // namespace

uint32_t DiskCost::through_blocks() const {
  const double worth = (request - piece) / std::max(kib * kKibPerBlock, 1e-3);
  return uint32_t(std::clamp(worth, 0.0, double(kThroughMax)));
}

DiskCost measure_disk(const std::string& directory) {
  Probe probe(directory);
  double one = HUGE_VAL, many = HUGE_VAL, scattered = HUGE_VAL;
  for (uint32_t round = 0; round < kRounds; ++round) {
    one = std::min(one, probe.read(1, false, kReads));
    many = std::min(many, probe.read(kLongBlocks, false, kLongReads));
    scattered = std::min(scattered, probe.read(kLongBlocks, true, kLongReads));
  }
  DiskCost cost;
  cost.kib = std::max(0.0, many - one) / ((kLongBlocks - 1) * kKibPerBlock);
  cost.request = std::max(0.0, one - cost.kib * kKibPerBlock);
  cost.piece = std::max(0.0, scattered - many) / (kLongBlocks - 1);
  return cost;
}

}  // namespace headgate
