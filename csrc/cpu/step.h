// One decode step on the CPU, layer by layer (decode_worker/kernels/base.py is the contract): look_up posts what is
// missing, arrive waits for it and writes the new token, attend reads. One thread calls.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/pack.h"
#include "cpu/attend.h"
#include "cpu/head_state.h"
#include "cpu/look_ahead.h"
#include "cpu/look_up.h"
#include "ring/rings.h"

namespace headgate {

struct StepSettings {
  RecordKind own;     // of the records that the worker writes
  RecordKind stored;  // of those that come from packs
  int kind_count;     // 1: they are one kind
  float scale;
  int threads;
  bool stale_fails;  // a failed fetch ends the row even where an old set would do
  uint64_t wait_us;  // for a ticket
};

class Step {
 public:
  Step(HeadState state, const RecordMaps& maps, Selector& selector, LookUpRules rules, StepSettings settings,
       LookAheadRules ahead, uint8_t* window, size_t window_bytes)
      : state_(state),
        look_up_(state_, maps, selector, rules),
        look_ahead_(state_, selector, ahead),
        settings_(settings),
        window_(window),
        window_bytes_(window_bytes),
        tickets_(state.shape.layers) {}

  void begin(const Rows& rows);

  // Plans; with rings also posts.
  void look_up(Rings& rings, int layer, const float* query, QueryKind kind, const CheckIn& check_in);
  const Outbox& outbox() const { return out_; }
  // Hints what heads of the layer will select with such a query; with rings also posts, if the first one has room.
  void look_ahead(Rings& rings, int layer, const float* query);
  const Outbox& hints() const { return hints_; }

  // Takes the results of the layer's runs. No results at all: the ticket was never posted.
  void commit(int layer, std::span<const RunResult> results);
  // Waits for the layer's ticket and commits it, if there is one.
  void await(Rings& rings, int layer, uint64_t timeout_us, const CheckIn& check_in);
  bool awaits(int layer) const { return tickets_[layer].ticket.under_way(); }
  const StepSettings& settings() const { return settings_; }

  // Writes the rows' new tokens. key, value: [rows][heads][d].
  void append(int layer, const float* key, const float* value);
  // query, out: [rows][heads * group][d]; lse: [rows][heads * group] or null.
  void attend(int layer, const float* query, float* out, float* lse);

 private:
  struct Posted {
    SharedTicket ticket;
    std::vector<Wish> wishes;
  };

  // One for each kind of records: the worker's own, then those of packs.
  void find_lanes(int layer, int slot, int head, int32_t position, AttendLane* lanes) const;
  uint8_t* own_record(int layer, int slot, int head, int32_t position) const;
  uint8_t* window_at(uint64_t at, size_t bytes) const;
  void fail(int slot, int32_t fault);

  HeadState state_;
  LookUp look_up_;
  LookAhead look_ahead_;
  StepSettings settings_;
  uint8_t* window_;
  size_t window_bytes_;
  Rows rows_{};
  Outbox out_, hints_;
  std::vector<Posted> tickets_;  // of each layer
  std::vector<AttendLane> lanes_;
};

}  // namespace headgate
