#include "cpu/step.h"

#include <algorithm>
#include <stdexcept>

#include "cpu/store_token.h"

namespace headgate {
namespace {

constexpr uint64_t kSpinUs = 30;

int32_t fault_of(const RunResult& result) {
  if (result.aux != 0) return static_cast<int32_t>(result.aux);
  return static_cast<int32_t>(result.status == uint32_t(Status::kStale) ? Fault::kAborted : Fault::kInternal);
}

}  // namespace

void Step::begin(const Rows& rows) {
  rows_ = rows;
  look_ahead_.begin();
  for (int row = 0; row < rows.count; ++row) {
    if (rows.slot[row] >= 0) state_.fault[rows.slot[row]] = int32_t(StepFault::kNone);
  }
}

void Step::look_up(Rings& rings, int layer, const float* query, QueryKind kind, const CheckIn& check_in) {
  Posted& posted = tickets_[layer];
  if (posted.ticket.under_way()) throw std::logic_error("look_up: the layer's ticket is under way");
  look_up_.plan(layer, rows_, query, kind, out_);
  if (out_.wishes.empty()) return;
  std::swap(posted.wishes, out_.wishes);
  if (rings.empty()) return;
  try {
    rings.post(posted.ticket, Op::kGather, uint32_t(rows_.step), uint16_t(layer), out_.runs, out_.pairs,
               settings_.wait_us, check_in);
  } catch (...) {
    if (!posted.ticket.under_way()) commit(layer, {});
    throw;
  }
}

void Step::look_ahead(Rings& rings, int layer, const float* query) {
  look_ahead_.plan(layer, rows_, query, hints_);
  if (rings.empty() || hints_.runs.empty()) return;
  RingProducer& ring = rings.first();
  const bool room = ring.has_room_for_hint();
  state_.counters[int(Counter::kHinted)] += int64_t(hints_.pairs.size());
  state_.counters[int(Counter::kHintsDropped)] += room ? 0 : int64_t(hints_.pairs.size());
  if (room) ring.post(Op::kPromote, uint32_t(rows_.step), uint16_t(layer), hints_.runs, hints_.pairs, 0);
}

void Step::commit(int layer, std::span<const RunResult> results) {
  Posted& posted = tickets_[layer];
  posted.ticket = {};
  for (size_t i = 0; i < posted.wishes.size(); ++i) {
    const Wish& wish = posted.wishes[i];
    const bool answered = i < results.size();
    if (answered && results[i].status == uint32_t(Status::kOk)) {
      state_.commit(layer, wish.slot, wish.head);
      state_.counters[int(Counter::kMoved)] += wish.pairs;
      continue;
    }
    state_.counters[int(Counter::kErrors)] += answered;
    // A lost block is never papered over with an old set, whatever the setting says.
    const bool lost = answered && results[i].aux == uint32_t(Fault::kDataLoss);
    const bool goes_on = wish.has_old_set && !settings_.stale_fails && !lost;
    state_.counters[int(Counter::kStale)] += goes_on;
    if (!goes_on) fail(wish.slot, answered ? fault_of(results[i]) : int32_t(StepFault::kNotPosted));
  }
  posted.wishes.clear();
}

void Step::await(Rings& rings, int layer, uint64_t timeout_us, const CheckIn& check_in) {
  if (!awaits(layer)) return;
  commit(layer, rings.wait(tickets_[layer].ticket, timeout_us, kSpinUs, check_in));
}

uint8_t* Step::window_at(uint64_t at, size_t bytes) const {
  if (at + bytes > window_bytes_) throw std::logic_error("a place lies outside the window");
  return window_ + at;
}

uint8_t* Step::own_record(int layer, int slot, int head, int32_t position) const {
  const uint64_t first = state_.own[state_.index(layer, slot, head)], bytes = settings_.own.record_bytes;
  const int32_t place = state_.is_resident(layer, head) ? position : position % state_.shape.tail;
  return window_at(first + uint64_t(place) * bytes, bytes);
}

void Step::append(int layer, const float* key, const float* value) {
  const HeadState::Shape& shape = state_.shape;
  for (int row = 0; row < rows_.count; ++row) {
    const int slot = rows_.slot[row];
    for (int head = 0; slot >= 0 && head < shape.heads; ++head) {
      const int32_t position = rows_.position[row];
      if (!state_.is_resident(layer, head) && position - state_.current(layer, slot, head).cover >= state_.shape.tail) {
        fail(slot, int32_t(StepFault::kTailFull));
        break;
      }
      const size_t lane = size_t(row) * shape.heads + head;
      store_token(own_record(layer, slot, head, position), key + lane * shape.d, value + lane * shape.d, shape.d,
                  settings_.own.dtype);
    }
  }
}

// docs/qsac.md step 6: sinks, the set and the tail, or everything.
void Step::find_lanes(int layer, int slot, int head, int32_t position, AttendLane* lanes) const {
  const size_t i = state_.index(layer, slot, head);
  AttendLane &own = lanes[0], &stored = lanes[settings_.kind_count - 1];
  stored.base = window_at(state_.base[i], settings_.stored.record_bytes);
  if (state_.is_resident(layer, head)) {
    own.base = window_at(state_.own[i], settings_.own.record_bytes);
    own.ranges[0] = {0, position + 1};
    return;
  }
  int32_t first = 0;
  if (&own == &stored)  // then the tail is counted from the same place 0
    first = state_.shape.sink + state_.capacity[i] * state_.shape.unit;
  else
    own.base = window_at(state_.own[i], settings_.own.record_bytes);
  const HeadState::Side now = state_.current(layer, slot, head);
  const int32_t tail = state_.shape.tail;
  const int32_t start = now.cover % tail, count = std::min(position + 1 - now.cover, tail);
  const int32_t before_wrap = std::min(count, tail - start);
  stored.ranges[0] = {0, std::min(now.cover, state_.shape.sink)};
  own.ranges[1] = {first + start, before_wrap};
  own.ranges[2] = {first, count - before_wrap};
  stored.places = now.places;
  stored.count = now.count;
}

void Step::attend(int layer, const float* query, float* out, float* lse) {
  const HeadState::Shape& shape = state_.shape;
  const int kinds = settings_.kind_count;
  lanes_.assign(size_t(rows_.count) * shape.heads * kinds, AttendLane{.base = window_});
  for (int row = 0; row < rows_.count; ++row) {
    const int slot = rows_.slot[row];
    for (int head = 0; slot >= 0 && head < shape.heads; ++head)
      find_lanes(layer, slot, head, rows_.position[row], &lanes_[(size_t(row) * shape.heads + head) * kinds]);
  }
  headgate::attend({.query = query,
                    .lanes = lanes_.data(),
                    .kinds = {settings_.own, settings_.stored},
                    .kind_count = kinds,
                    .batch = rows_.count,
                    .heads = shape.heads,
                    .group = shape.group,
                    .d = shape.d,
                    .scale = settings_.scale,
                    .threads = settings_.threads,
                    .out = out,
                    .lse = lse});
}

// The gravest fault of a row is kept: a lost block before any other.
void Step::fail(int slot, int32_t fault) {
  int32_t& kept = state_.fault[slot];
  if (kept == 0 || fault == int32_t(Fault::kDataLoss)) kept = fault;
}

}  // namespace headgate
