// libFuzzer target: whatever a worker writes into its requests, the daemon stays within bounds, and so does its service
// to another worker.
//
// Two workers of two owners share a data plane with one copy thread; each has two rings. The hostile one
// reads its records in the daemon's frames. The input is a script (see
// `play`) of what the hostile one does: tickets of every kind, wild bytes, CANCELs, unbinds. The other one asks for
// records in between. Its DRAM tier holds less than the two documents together, so both are hot and cold by turns.
// Judged: what the other worker gets and when, each byte of both windows, the daemon's heap, and its census at the end.
// csrc/fuzz/replay.cc runs the same entry over files.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <optional>
#include <thread>

#include "core/probe.h"
#include "fuzz/shared_worker.h"
#include "ring/futex.h"
#include "ring/producer.h"

namespace headgate::fuzz {
namespace {

// Small ones to fill up, one of many runs over many pairs, one whose memory is nearly all untouched.
constexpr RingGeometry kGeometries[] = {{2, 1, 1},   {2, 4, 16},     {4, 16, 64},
                                        {8, 3, 300}, {2, 512, 4096}, {4, 4, 1 << 22}};
constexpr RingGeometry kVictimGeometry{4, 4, 64};
constexpr uint32_t kVictim = 0, kHostile = 1;  // documents and owners
constexpr uint32_t kPackTokens[] = {256, 512};
constexpr uint32_t kRecords = kPackTokens[0] + kPackTokens[1];
constexpr uint32_t kExtentBlocks = 4;
constexpr uint64_t kArenaBytes = 8 * kExtentBlocks * kBlockBytes;                // the hostile one's, of 12 extents
constexpr uint64_t kDramBytes = kArenaBytes + 10 * kExtentBlocks * kBlockBytes;  // of 24 extents
constexpr uint64_t kAnswerUs = 5'000'000, kInputNs = 10'000'000'000;
constexpr uint64_t kHeapBytesMax = 24 << 20;  // more than before the input
constexpr uint32_t kAsked = 4;                // records of one of the victim's tickets

PackHeader shape(uint32_t tokens, uint8_t name) {
  PackHeader h{};
  h.pack_id[0] = h.build[0] = name;
  h.layers = kLayers, h.kind_count = 1, h.tokens = tokens, h.extent_blocks = kExtentBlocks;
  h.kinds[0] = {kLanes, kRecordBytes / 4, uint32_t(Dtype::kBfloat16), kRecordBytes, 0, 0};
  return h;
}

// What outlives an input: the data plane, both documents, and the worker to whom nothing may happen.
struct World {
  DataPlane plane{DataPlaneOptions{kDramBytes, 8, 1, 30, kExtentBlocks,
                                   WindowSettings{.kind = "auto", .arena_bytes = kArenaBytes}}};
  std::string directory;
  uint32_t files = 0;
  std::vector<uint32_t> packs[2];
  std::optional<SharedWorker> victim;
  std::vector<std::unique_ptr<RingProducer>> producers;
  uint32_t asked = 0;

  World() {
    char name[] = "fuzz-XXXXXX";  // here: temporary directories often are memory, which has no O_DIRECT
    require(mkdtemp(name) != nullptr, "the working directory is not writable");
    directory = std::filesystem::absolute(name);
    victim.emplace(plane, kVictim, kVictimGeometry, "shm");
    for (uint32_t i = 0; i < kRings; ++i)
      producers.push_back(
          std::make_unique<RingProducer>(victim->ring(i).requests.fd(), victim->ring(i).completions.fd()));
    for (uint32_t document : {kVictim, kHostile}) {
      uint32_t first = 0;
      for (uint32_t tokens : kPackTokens) {
        packs[document].push_back(write_pack(document, first, tokens));
        first += tokens;
      }
    }
    victim->bind(packs[kVictim]);
  }
  ~World() {
    producers.clear();
    victim.reset();
    plane.close();
    std::filesystem::remove_all(directory);
  }

  uint32_t new_upload(uint32_t worker, uint32_t tokens) {
    ++files;
    uint32_t upload = plane.create_upload(directory + "/" + std::to_string(files), shape(tokens, uint8_t(files)));
    try {
      plane.own_upload(worker, upload);
    } catch (const Error&) {  // the worker is poisoned
      plane.abort_upload(upload);
      throw;
    }
    return upload;
  }

  uint32_t write_pack(uint32_t document, uint32_t first, uint32_t tokens) {
    uint32_t upload = new_upload(victim->id(), tokens);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      for (uint32_t lane = 0; lane < kLanes; ++lane) {
        uint8_t* at = victim->staging();
        for (uint32_t i = 0; i < tokens; ++i, at += kRecordBytes) {
          Record r = Record::of(document, layer, lane, first + i);
          std::memcpy(at, &r, sizeof r);
        }
        for (uint16_t i = 0; i < tokens; ++i, at += sizeof i) std::memcpy(at, &i, sizeof i);
        Run run{upload, 0, 0, 0, 0, uint16_t(lane), 0, 0};
        uint64_t ticket = producers[0]->post(Op::kStore, 0, uint16_t(layer), {&run, 1}, {}, kAnswerUs);
        require(producers[0]->wait(ticket, kAnswerUs, 30)[0].status == uint32_t(Status::kOk), "a STORE failed");
      }
    }
    plane.finish_upload(upload);
    return plane.open_pack(directory + "/" + std::to_string(files), document);
  }

  // The victim asks for a few records through either ring; they must come, in time, and be its own.
  void ask() {
    uint32_t n = ++asked, layer = n % kLayers, lane = n / kLayers % kLanes, place = n % (kPlaces - kAsked);
    uint32_t record = n * 37 % (kRecords - kAsked);
    Run run{0, victim->epoch(), 1, 0, kAsked, uint16_t(lane), 0, 0};
    Pair pairs[kAsked];
    for (uint32_t i = 0; i < kAsked; ++i) pairs[i] = {record + i, place + i};
    bool range = n % 3 == 0;
    if (range) run.first_pair = record, run.arg = place;
    RingProducer& ring = *producers[n / 2 % kRings];
    uint64_t ticket = ring.post(range ? Op::kRange : Op::kGather, 0, uint16_t(layer), {&run, 1},
                                {pairs, range ? 0 : kAsked}, kAnswerUs);
    RunResult result = ring.wait(ticket, kAnswerUs, 30)[0];
    require(result.status == uint32_t(Status::kOk), "the other worker's run failed");
    for (uint32_t i = 0; i < kAsked; ++i)
      require(victim->at(layer, lane, place + i) == Record::of(kVictim, layer, lane, record + i),
              "the other worker got a wrong record");
  }

  // Every run has ended, every frame is accounted for, and none is pinned, once the reads in flight have landed.
  void settle() {
    for (uint64_t deadline_ns = now_ns() + kAnswerUs * 1000;; std::this_thread::yield()) {
      std::map<std::string, uint64_t> census, stats;
      for (auto& [name, value] : plane.census()) census[name] = value;
      for (auto& [name, value] : plane.stats()) stats[name] = value;
      bool adds_up = census["runs"] == census["runs_ended"] && census["runs_in_flight"] == 0 &&
                     census["blocks_landed"] == census["blocks_valid"] + census["blocks_evicted"] &&
                     census["frames_used"] == census["frames_held"] &&
                     census["frames_used"] == census["frames_of_owners"] && census["owners_miscounted"] == 0 &&
                     stats["frames_pinned"] == 0;
      if (adds_up) return;
      require(now_ns() < deadline_ns, "the census does not add up");
    }
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
  explicit Player(RingGeometry geometry) : geometry_(geometry), worker_(world().plane, kHostile, geometry, "pull") {
    worker_.bind(world().packs[kHostile]);
    // A STORE of any even offset finds a map that is a permutation, and records that are not empty.
    uint16_t* staged = reinterpret_cast<uint16_t*>(worker_.staging());
    for (uint64_t i = 0; i < kStagingBytes / sizeof *staged; ++i) staged[i] = uint16_t(i % kPackTokens[0]);
  }

  void play(Script script) {
    while (!script.empty()) {
      switch (script.next<uint8_t>() % 8) {
        case 0:
        case 1:
        case 2:
          post(script, script.next<uint8_t>() % kRings);
          break;
        case 3:
          scribble(script, worker_.ring(script.next<uint8_t>() % kRings).requests);
          break;
        case 4:
          cancel(script, script.next<uint8_t>() % kRings);
          break;
        case 5:
          command(script, script.next<uint8_t>());
          break;
        case 6:
          std::this_thread::sleep_for(std::chrono::microseconds(script.next<uint8_t>()));
          break;
        case 7:
          world().ask();
          break;
      }
    }
    world().ask();
  }

  void check_window() const {
    worker_.check_window(kHostile, kRecords);
    worker_.check_arena(kHostile, kRecords);
  }

 private:
  // The next ticket as a worker would post it: its numbers are the script's, its sequence is right. A few runs and
  // pairs are repeated until there are as many as the script wants; pairs may lie at the end of their area.
  void post(Script& script, uint32_t index) {
    SharedRing& ring = worker_.ring(index);
    uint64_t seq = next_[index]++;
    uint8_t* ticket = ring.requests.data() + ring.layout.ticket_off(seq);
    script.copy_to(ticket + sizeof(uint64_t), 16);
    uint8_t given_runs = script.next<uint8_t>() % 8, given_pairs = script.next<uint8_t>() % 32;
    uint32_t runs = script.next<uint16_t>() % (geometry_.runs_max + 1);
    uint32_t pairs = script.next<uint16_t>() % (std::min(geometry_.pairs_max, 4096u) + 1);
    uint8_t flags = script.next<uint8_t>();
    bool tame = flags % 4 != 0;
    uint32_t first = flags & 4 ? geometry_.pairs_max - pairs : 0;
    if (tame) soften(*reinterpret_cast<Ticket*>(ticket), runs);
    const bool probe = reinterpret_cast<Ticket*>(ticket)->op == uint16_t(Op::kProbe);
    Run* run = reinterpret_cast<Run*>(ring.requests.data() + ring.layout.runs_off(seq));
    Pair* pair = reinterpret_cast<Pair*>(ring.requests.data() + ring.layout.pairs_off(seq)) + first;
    for (uint32_t i = 0; i < runs; ++i) {
      if (i < given_runs) run[i] = script.next<Run>();
      if (i >= given_runs) run[i] = given_runs ? run[i % given_runs] : Run{};
      if (tame && i < given_runs) probe ? soften_probe(run[i]) : soften(run[i], first, pairs);
    }
    for (uint32_t i = 0; i < pairs; ++i) {
      if (i < given_pairs) pair[i] = script.next<Pair>();
      if (i >= given_pairs) pair[i] = given_pairs ? pair[i % given_pairs] : Pair{};
      if (tame && i < given_pairs) pair[i] = {pair[i].record % (kRecords + 1), pair[i].place % (kPlaces + 1)};
    }
    publish(ring, seq);
  }

  // Brings a ticket's numbers to their bounds and one beyond, so that they reach the checks behind the first.
  void soften(Ticket& ticket, uint32_t runs) {
    ticket.layer %= kLayers + 1, ticket.op = uint16_t(ticket.op % 7);
    ticket.first_run = 0, ticket.run_count = uint16_t(runs);
  }

  void soften(Run& run, uint32_t first, uint32_t pairs) {
    bool store = run.slot % 4 == 3;
    if (store) open_upload();
    run.slot = store ? upload_.value_or(0) : run.slot % 4 == 2,
    run.slot_epoch = worker_.epoch() - (run.slot_epoch % 8 == 7);
    run.lane %= kLanes + 1, run.kind = run.kind % 8 == 7;
    run.pair_count %= std::max(pairs, kPlaces) + 2, run.arg %= store ? kStagingBytes : kPlaces + 2;
    run.first_pair = run.first_pair % 2 ? run.first_pair % kRecords : first + run.first_pair % (pairs + 1);
  }

  void soften_probe(Run& run) {
    run.arg = run.arg % (kWindowBytes / kProbeBytes + 2) * kProbeBytes + (run.kind % 8 == 7);
    run.pair_count %= kProbeLinesMax + 2;
  }

  void open_upload() {
    if (upload_) return;
    allow_poison([&] { upload_ = world().new_upload(worker_.id(), kPackTokens[0]); });
  }

  void cancel(Script& script, uint32_t index) {
    SharedRing& ring = worker_.ring(index);
    uint64_t seq = next_[index]++, back = script.next<uint8_t>();
    Ticket& ticket = *reinterpret_cast<Ticket*>(ring.requests.data() + ring.layout.ticket_off(seq));
    ticket.op = uint16_t(Op::kCancel), ticket.run_count = 1, ticket.first_run = 0;
    *reinterpret_cast<Run*>(ring.requests.data() + ring.layout.runs_off(seq)) = Run{0, 0, 0, 0, 0, 0, 0, seq - back};
    publish(ring, seq);
  }

  // Anything, anywhere near the front of the worker's memory, headers included.
  void scribble(Script& script, Shared& requests) {
    uint64_t offset = script.next<uint16_t>() % requests.bytes(), room = requests.bytes() - offset;
    script.copy_to(requests.data() + offset, script.next<uint8_t>() % std::min<uint64_t>(room, 256));
  }

  // What the control plane does for a worker, at any moment.
  void command(Script& script, uint8_t which) {
    switch (which % 7) {
      case 0:
        allow_poison([&] { rebind(); });
        break;
      case 1:
        if (upload_) world().plane.abort_upload(*std::exchange(upload_, std::nullopt));
        break;
      case 2: {
        const uint32_t hot[kLayers * kLanes] = {kRecords, 1, 0, kPackTokens[0]};
        world().plane.warm(world().packs[kHostile][0], hot, kHostile);
        break;
      }
      case 3:
        require(heap_bytes() <= heap_before_ + kHeapBytesMax, "the heap grows with what a worker declares");
        break;
      case 4:
        release(script);
        break;
      case 5:
        trace(script.next<uint8_t>());
        break;
      case 6:
        world().plane.set_dram_quota(kHostile, script.next<uint8_t>() % 4 * world().plane.dram_quota_min());
        break;
    }
  }

  // What an operator hears meanwhile is of runs that there are.
  void trace(uint8_t what) {
    allow_poison([&] {  // FAILED_PRECONDITION too: it is on, or off
      if (what % 4 == 0) return world().plane.end_accesses();
      if (what % 4 == 1) return world().plane.trace_accesses(1);
      for (const Access& a : world().plane.drain_accesses().first)
        require(a.owner <= kHostile && a.layer < kLayers && a.lane < kLanes && a.records > 0 && a.wanted > 0,
                "an access that no run can have made");
    });
  }

  // What its device says that it has read: often of about now, and as often anything.
  void release(Script& script) {
    uint64_t value = script.next<uint64_t>();
    if (value % 2 == 0) value = next_[kRings - 1] - value / 2 % 4;
    as_atomic(reinterpret_cast<RequestsHeader*>(worker_.ring(kRings - 1).requests.data())->released).store(value);
  }

  // After unbind nothing of the old epoch can store any more.
  void rebind() {
    worker_.unbind();
    check_window();
    worker_.clear_window();
    std::this_thread::yield();
    require(worker_.window_is_clear(), "a store after unbind has returned");
    worker_.bind(world().packs[kHostile]);
  }

  // A script may poison its worker; then, and only then, commands fail.
  template <typename Command>
  void allow_poison(Command command) {
    try {
      command();
    } catch (const Error& error) {
      require(error.code() == std::string("FAILED_PRECONDITION"), error.what());
    }
  }

  void publish(SharedRing& ring, uint64_t seq) {
    auto& header = *reinterpret_cast<RequestsHeader*>(ring.requests.data());
    Ticket& ticket = *reinterpret_cast<Ticket*>(ring.requests.data() + ring.layout.ticket_off(seq));
    as_atomic(ticket.seq).store(seq, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    as_atomic(header.bell).fetch_add(1, std::memory_order_relaxed);
    futex_wake(header.bell);
  }

  const RingGeometry geometry_;
  const uint64_t heap_before_ = heap_bytes();
  SharedWorker worker_;
  std::optional<uint32_t> upload_;
  uint64_t next_[kRings] = {1, 1};
};

}  // namespace
}  // namespace headgate::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace headgate::fuzz;
  World& w = world();
  uint64_t heap_before = heap_bytes(), started_ns = headgate::now_ns();
  Script script(data, size);
  {
    Player player(kGeometries[script.next<uint8_t>() % std::size(kGeometries)]);
    player.play(script);
    require(heap_bytes() <= heap_before + kHeapBytesMax, "the heap grows with what a worker declares");
    player.check_window();
  }
  w.plane.set_dram_quota(kHostile, 0);
  w.plane.end_accesses();
  w.settle();
  w.victim->check_window(kVictim, kRecords);
  require(heap_bytes() <= heap_before + kHeapBytesMax, "memory is kept after its worker has gone");
  require(headgate::now_ns() - started_ns < kInputNs, "an input takes too long");
  return 0;
}
