// libFuzzer target: whatever a worker writes into its requests, the daemon takes, refuses or serves it in bounds.
//
// The input is a script (see `play`) of tickets, wild bytes and completions. What the decoder lets through is judged
// here once more, by other arithmetic than its own. csrc/fuzz/replay.cc runs the same entry over files.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <memory>
#include <vector>

#include "store/gather_path.h"
#include "store/store_path.h"

namespace headgate {
namespace {

constexpr RingGeometry kGeometries[] = {{2, 1, 1}, {2, 4, 16}, {4, 16, 64}, {8, 3, 300}};
constexpr uint32_t kLayers = 2, kLanes = 2, kRecordBytes = 64, kPackTokens[] = {256, 512};
constexpr uint32_t kPlaces = 300, kGap = 4096;
constexpr uint32_t kRecords = kPackTokens[0] + kPackTokens[1];
constexpr uint32_t kSlot = 0, kEpoch = 1, kUpload = 1;
constexpr uint64_t kLaneBytes = kPlaces * kRecordBytes;
constexpr uint64_t kWindowBytes = kLayers * kLanes * (kLaneBytes + kGap);
constexpr uint64_t kStagingBytes = 5 * kBlockBytes;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz_requests: %s\n", what);
  std::abort();
}

int memory(uint64_t bytes) {
  int fd = memfd_create("fuzz", MFD_CLOEXEC);
  require(fd >= 0 && ftruncate(fd, off_t(bytes)) == 0, "memfd_create failed");
  return fd;
}

PackHeader shape(uint32_t tokens) {
  PackHeader h{};
  h.layers = kLayers, h.kind_count = 1, h.tokens = tokens, h.extent_blocks = 4;
  h.kinds[0] = {kLanes, kRecordBytes / 4, uint32_t(Dtype::kBfloat16), kRecordBytes, 0, 0};
  return h;
}

// A pack with the right header and map; nothing here reads its records.
std::shared_ptr<PackFile> make_pack(const std::string& directory, uint32_t tokens, Counters& counters) {
  std::string path = directory + "/" + std::to_string(tokens);
  Upload upload(path, shape(tokens), counters);
  std::vector<uint16_t> map(tokens);
  for (uint32_t i = 0; i < tokens; ++i) map[i] = uint16_t(i);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      upload.begin_segment(0, layer, lane);
      upload.set_map(layer, lane, reinterpret_cast<const uint8_t*>(map.data()));
      upload.end_segment(0, layer, lane, true);
    }
  }
  upload.finish();
  return std::make_shared<PackFile>(path, counters);
}

std::vector<LaneWindow> windows() {
  std::vector<LaneWindow> out;
  for (uint64_t i = 0; i < kLayers * kLanes; ++i) out.push_back({i * (kLaneBytes + kGap) + kGap / 2, kPlaces});
  return out;
}

// What outlives an input: a worker with one bound slot and one upload. Files are made once.
struct World {
  Counters counters;
  IoEngine io{4};
  StorePath store{io, counters};
  Worker worker{1, memory(kWindowBytes), kWindowBytes, memory(kStagingBytes), kStagingBytes, 1};
  std::string directory;

  World() {
    char name[] = "fuzz-XXXXXX";  // here: temporary directories often are memory, which has no O_DIRECT
    require(mkdtemp(name) != nullptr, "the working directory is not writable");
    directory = name;
    std::vector<std::shared_ptr<PackFile>> packs;
    for (uint32_t tokens : kPackTokens) packs.push_back(make_pack(directory, tokens, counters));
    worker.slots[kSlot].epoch = kEpoch;
    worker.slots[kSlot].binding.emplace(packs, kLayers, kLanes, windows(), kRecordBytes, kWindowBytes);
    worker.uploads[kUpload] = std::make_shared<Upload>(directory + "/upload", shape(256), counters);
    std::filesystem::remove_all(directory);
  }
};

World& world() {
  static World one;
  return one;
}

// Takes numbers and bytes off the input; zeros once it is used up.
class Script {
 public:
  Script(const uint8_t* data, size_t size) : at_(data), left_(size) {}
  bool empty() const { return left_ == 0; }
  template <typename T>
  T next() {
    T value{};
    copy_to(reinterpret_cast<uint8_t*>(&value), sizeof value);
    return value;
  }
  void copy_to(uint8_t* to, size_t bytes) {
    size_t count = bytes < left_ ? bytes : left_;
    if (count > 0) std::memcpy(to, at_, count);
    at_ += count, left_ -= count;
  }

 private:
  const uint8_t* at_;
  size_t left_;
};

class Player {
 public:
  explicit Player(RingGeometry geometry)
      : layout_{geometry},
        requests_(memory(layout_.requests_bytes())),
        completions_(memory(layout_.completions_bytes())),
        ring_(requests_.get(), completions_.get(), geometry, 1),
        written_(requests_.get(), layout_.requests_bytes(), PROT_READ | PROT_WRITE, "requests") {}

  void play(Script script) {
    while (!script.empty()) {
      switch (script.next<uint8_t>() % 5) {
        case 0:
        case 1:
          post(script);
          take();
          break;
        case 2:
          scribble(script);
          take();
          break;
        case 3:
          complete(script.next<uint8_t>());
          break;
        case 4:
          if (script.next<uint8_t>() == 255) ring_.poison();
          require(!ring_.in_flight(script.next<uint64_t>()) || !pending_.empty(), "in_flight found nothing's ticket");
          break;
      }
      ring_.ring_if_needed();
    }
  }

 private:
  // The next ticket as a worker would post it: its numbers are the script's, its sequence is right.
  void post(Script& script) {
    const RingGeometry& g = layout_.g;
    uint8_t* ticket = written_.data() + layout_.ticket_off(next_);
    script.copy_to(ticket + sizeof(uint64_t), 16);
    uint32_t runs = script.next<uint8_t>() % (g.runs_max + 1), pairs = script.next<uint8_t>() % (g.pairs_max + 1);
    bool tame = script.next<uint8_t>() % 4 != 0;
    Run* run = reinterpret_cast<Run*>(written_.data() + layout_.runs_off(next_));
    Pair* pair = reinterpret_cast<Pair*>(written_.data() + layout_.pairs_off(next_));
    script.copy_to(reinterpret_cast<uint8_t*>(run), runs * sizeof(Run));
    script.copy_to(reinterpret_cast<uint8_t*>(pair), pairs * sizeof(Pair));
    for (uint32_t i = 0; tame && i < runs; ++i) soften(run[i]);
    for (uint32_t i = 0; tame && i < pairs; ++i)
      pair[i] = {pair[i].record % (kRecords + 1), pair[i].place % (kPlaces + 1)};
    std::memcpy(ticket, &next_, sizeof next_);
  }

  // Brings the numbers of a run to their bounds and one beyond, so that they reach the checks behind the first.
  void soften(Run& run) {
    run.slot %= kUpload + 1, run.slot_epoch %= kEpoch + 1, run.lane %= kLanes + 1, run.kind %= 2;
    run.first_pair %= kRecords + 1, run.pair_count %= kPlaces + 2, run.arg %= kStagingBytes;
    if (run.slot == kSlot) run.arg %= kPlaces + 2;
  }

  // Anything, anywhere in the worker's memory, headers included.
  void scribble(Script& script) {
    uint64_t offset = script.next<uint16_t>() % written_.bytes();
    uint64_t room = written_.bytes() - offset;
    script.copy_to(written_.data() + offset, script.next<uint8_t>() % (room < 256 ? room : 256));
  }

  void take() {
    if (ring_.dead()) return;
    TakenTicket* ticket = ring_.take();
    if (!ticket) return;
    require(ticket->seq == next_ && ticket->runs.size() <= layout_.g.runs_max, "a ticket is out of order or too long");
    require(ticket->pairs.size() <= layout_.g.pairs_max, "a ticket has too many pairs");
    ++next_;
    for (const Run& run : ticket->runs) judge(*ticket, run);
    if (ticket->op == Op::kPromote) {
      ring_.complete_silently(*ticket);
    } else if (!ticket->runs.empty()) {
      pending_.push_back({ticket, 0});
    }
    require(pending_.size() <= layout_.g.tickets, "more tickets in flight than the ring has");
  }

  void judge(const TakenTicket& ticket, const Run& run) {
    if (ticket.op == Op::kStore) return judge_store(ticket, run);
    const Slot& slot = world().worker.slots[kSlot];
    bool pairs = ticket.op == Op::kGather || ticket.op == Op::kPromote;
    if ((!pairs && ticket.op != Op::kRange) || run.slot != kSlot || run.slot_epoch != slot.epoch) return;
    if (GatherPath::validate(run, ticket.op == Op::kRange ? Op::kRange : Op::kGather, ticket.layer, *slot.binding,
                             ticket) != Fault::kNone)
      return;
    require(ticket.layer < kLayers && run.lane < kLanes && run.kind == 0, "a lane that is not there");
    for (uint64_t i = 0; i < run.pair_count; ++i) {
      Pair pair = pairs ? ticket.pairs.at(run.first_pair + i)
                        : Pair{uint32_t(run.first_pair + i), uint32_t(uint32_t(run.arg) + i)};
      require(pair.place < kPlaces, "a place beyond its lane");
      require(pair.record < kRecords, "a record beyond the session");
      require(pairs || (run.arg + i < kPlaces && run.first_pair + i == pair.record), "a range that wraps");
      RecordOrigin origin = slot.binding->origin(pair.record);
      require(origin.first <= pair.record && pair.record < origin.end, "a record in another pack");
    }
  }

  void judge_store(const TakenTicket& ticket, const Run& run) {
    RunTask task{};
    task.worker = &world().worker;
    task.run = run, task.layer = ticket.layer, task.op = ticket.op;
    if (world().store.begin(task) != Fault::kNone) return;
    require(run.slot == kUpload && run.kind == 0 && run.lane < kLanes && ticket.layer < kLayers, "a wrong segment");
    constexpr uint64_t kSegment = 256 * (kRecordBytes + 2);
    require(run.arg <= kStagingBytes - kSegment && task.blocks == 4, "a segment beyond the staging memory");
    require(world().store.drain(task), "a segment that no write holds stays taken");
  }

  void complete(uint8_t which) {
    if (pending_.empty()) return;
    auto at = pending_.begin() + which % pending_.size();
    require(ring_.in_flight(at->ticket->seq) == at->ticket, "a pending ticket is not in flight");
    if (ring_.complete(*at->ticket, at->done++, Status::kError, Fault::kInvalidArgument)) pending_.erase(at);
  }

  struct Pending {
    TakenTicket* ticket;
    uint32_t done;
  };

  const RingLayout layout_;
  Fd requests_, completions_;
  RingConsumer ring_;
  Mapping written_;
  std::deque<Pending> pending_;
  uint64_t next_ = 1;
};

}  // namespace
}  // namespace headgate

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  headgate::Script script(data, size);
  headgate::Player player(headgate::kGeometries[script.next<uint8_t>() % std::size(headgate::kGeometries)]);
  player.play(script);
  return 0;
}
