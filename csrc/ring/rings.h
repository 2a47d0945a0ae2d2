// Several rings of one worker, each of which another copy thread may serve: the runs of a ticket are shared among them.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "ring/producer.h"

namespace headgate {

inline constexpr uint32_t kRingsMax = 8;

// Who took which runs of a ticket: ring 0 the first ones, and so on. All 0: nothing is under way.
struct SharedTicket {
  std::array<uint64_t, kRingsMax> seqs{};

  bool under_way() const { return seqs != std::array<uint64_t, kRingsMax>{}; }
};

// The rings are others', and have one geometry. One thread posts and waits.
class Rings {
 public:
  // What is worth another ring: a ticket costs a copy thread some microseconds.
  static constexpr uint64_t kPairsMin = 128;

  Rings() = default;
  explicit Rings(std::vector<RingProducer*> rings) : rings_(std::move(rings)) {}

  bool empty() const { return rings_.empty(); }
  RingProducer& first() const { return *rings_.front(); }

  // As RingProducer::post; changes first_pair of runs behind the first ring's. Runs name their pairs in turn. Whatever
  // it throws, what `ticket` names by then is under way.
  void post(SharedTicket& ticket, Op op, uint32_t step, uint16_t layer, std::span<Run> runs,
            std::span<const Pair> pairs, uint64_t timeout_us, const CheckIn& check_in) {
    const uint64_t sharers = std::clamp<uint64_t>(pairs.size() / kPairsMin, 1, rings_.size());
    size_t run = 0, pair = 0;
    for (size_t sharer = 0; sharer < sharers; ++sharer) {
      const size_t begin = run, first = pair, end = pairs.size() * (sharer + 1) / sharers;
      for (; run < runs.size() && (run == begin || sharer + 1 == sharers || runs[run].first_pair < end); ++run) {
        pair = runs[run].first_pair + runs[run].pair_count;
        runs[run].first_pair -= uint32_t(first);
      }
      if (run == begin) break;
      ticket.seqs[sharer] = rings_[sharer]->post(op, step, layer, runs.subspan(begin, run - begin),
                                                 pairs.subspan(first, pair - first), timeout_us, check_in);
    }
  }

  // As RingProducer::wait, for all of it: the results of runs that were taken, in turn.
  std::span<const RunResult> wait(const SharedTicket& ticket, uint64_t timeout_us, uint64_t spin_us,
                                  const CheckIn& check_in) {
    if (rings_.size() == 1) return first().wait(ticket.seqs[0], timeout_us, spin_us, check_in);
    const uint64_t end_ns = now_ns() + timeout_us * 1000;
    results_.clear();
    for (size_t i = 0; i < rings_.size() && ticket.seqs[i] != 0; ++i) {
      const uint64_t now = now_ns(), left_us = now < end_ns ? (end_ns - now) / 1000 : 0;
      const std::vector<RunResult>& its = rings_[i]->wait(ticket.seqs[i], left_us, spin_us, check_in);
      results_.insert(results_.end(), its.begin(), its.end());
    }
    return results_;
  }

 private:
  std::vector<RingProducer*> rings_;
  std::vector<RunResult> results_;
};

}  // namespace headgate
