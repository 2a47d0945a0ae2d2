// The shim of test builds, for copy threads: which of them stand still, and what runs suffer.
// Included by store/faults.h only.
#pragma once

#include <algorithm>
#include <cstdint>

namespace headgate::shim {

// Of every data plane in the process.
struct CopyRules {
  bool stopped;         // no tickets, copies or heartbeats, but commands
  int only_thread;      // that is stopped; negative: all
  uint32_t delay_us;    // before a run's first copy
  bool delay_random;    // uniformly up to delay_us
  uint32_t fail_every;  // that many runs one ends in ERROR/INTERNAL, after half of its copies
  bool reorder;         // runs of a ticket begin in any order
  uint32_t dawdle_us;   // uniformly up to it, before the last copies from frames that are held
  uint64_t seed;
};

void set_copy_rules(const CopyRules& rules);

bool stops(uint32_t thread);
void dawdle();

// In which order the runs of a ticket begin.
class TicketFaults {
 public:
  void begin(uint32_t run_count);
  uint32_t run(uint32_t number, uint32_t run_count) const {
    return uint32_t((first_ + uint64_t{number} * step_) % run_count);
  }

 private:
  uint32_t first_ = 0, step_ = 1;
};

class RunFaults {
 public:
  // Takes what the rules say now; returns how many of its records are copied.
  uint32_t begin(uint32_t records);
  bool fails() const { return fails_; }

 private:
  template <typename List>
  friend class HeldRuns;

  bool fails_;
  uint64_t delay_ns_, due_ns_;
};

// Runs that begin late.
template <typename List>
class HeldRuns {
 public:
  template <typename Task>
  bool hold(Task& t, uint64_t now_ns) {
    if (t.faults.delay_ns_ == 0) return false;
    t.faults.due_ns_ = now_ns + t.faults.delay_ns_;
    next_due_ns_ = std::min(next_due_ns_, t.faults.due_ns_);
    list_.push_back(t);
    return true;
  }
  template <typename Ready>
  void let_go(uint64_t now_ns, Ready ready) {
    if (now_ns < next_due_ns_) return;  // a look at thousands of them takes the whole of a slice
    next_due_ns_ = UINT64_MAX;
    for (auto* t = list_.front(); t;) {
      auto* next = t->after;
      const uint64_t due_ns = t->faults.due_ns_;
      if (due_ns <= now_ns)
        ready(*t);
      else
        next_due_ns_ = std::min(next_due_ns_, due_ns);
      t = next;
    }
  }

 private:
  List list_;
  uint64_t next_due_ns_ = UINT64_MAX;  // none is due before that
};

}  // namespace headgate::shim
