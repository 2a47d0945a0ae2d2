#include "cpu/look_ahead.h"

#include <algorithm>

#include "cpu/query.h"

namespace headgate {

bool LookAhead::expects_miss(int layer, int slot, int head, int32_t position, const float* query) {
  const HeadState::Shape& shape = state_.shape;
  const size_t at = state_.index(layer, slot, head), lane = size_t(layer) * shape.heads + head;
  const HeadState::Side now = state_.current(layer, slot, head);
  Mark& mark = marks_[at];
  if (mark.generation != state_.issued[at]) mark = {state_.issued[at], position, -1};
  if (now.label_kind == int8_t(QueryKind::kNone) || now.generation != mark.generation) return false;
  if (!rules_.reuses) return rules_.steps == 0;  // a query that it has just selected with
  if (mark.hinted >= 0 && position - mark.hinted < rules_.steps) return false;
  const bool forced = position + rules_.steps - now.cover >= state_.forced_from[lane] &&
                      state_.limit(slot, position + rules_.steps) > now.cover;
  const double similar =
      similarity(query, now.label, state_.weights + lane * shape.group, shape.group, shape.d, rules_.cos_floor);
  const int32_t age = std::max(1, position - mark.asked);
  // Not a number is a miss, as in a look-up.
  if (!forced && similar - (1 - similar) * rules_.steps / age > state_.tau[lane]) return false;
  mark.hinted = position;
  return true;
}

void LookAhead::plan(int layer, const Rows& rows, const float* query, Outbox& out) {
  const HeadState::Shape& shape = state_.shape;
  const size_t head_floats = size_t(shape.group) * shape.d;
  out.runs.clear(), out.pairs.clear(), out.wishes.clear();
  for (int row = 0; row < rows.count; ++row) {
    const int slot = rows.slot[row];
    for (int head = 0; slot >= 0 && !state_.fault[slot] && head < shape.heads; ++head) {
      if (left_ <= 0) return;
      const float* own = query + (size_t(row) * shape.heads + head) * head_floats;
      const int32_t limit = state_.limit(slot, rows.position[row]);
      if (state_.is_resident(layer, head) || limit <= shape.sink) continue;
      if (!expects_miss(layer, slot, head, rows.position[row], own)) continue;
      const size_t at = state_.index(layer, slot, head);
      wanted_.clear();
      selector_.select(layer, slot, head, own, {shape.sink, limit, state_.selected[at], shape.unit}, rules_.threads,
                       wanted_);
      const HeadState::Side now = state_.current(layer, slot, head);
      const int32_t *const held = now.held, *const held_end = now.held + now.held_count;
      const uint32_t first = uint32_t(out.pairs.size());
      for (int32_t unit : wanted_) {
        if (left_ <= 0) break;
        if (!rules_.whole && std::binary_search(held, held_end, unit)) continue;
        for (int r = 0; r < shape.unit; ++r) out.pairs.push_back({uint32_t(unit * shape.unit + r), 0});
        left_ -= shape.unit;
      }
      if (out.pairs.size() == first) continue;
      out.runs.push_back({.slot = uint32_t(slot),
                          .slot_epoch = uint32_t(state_.epoch[slot]),
                          .generation = uint32_t(state_.issued[at]),
                          .first_pair = first,
                          .pair_count = uint32_t(out.pairs.size() - first),
                          .lane = uint16_t(head),
                          .kind = 0,
                          .arg = 0});
    }
  }
}

}  // namespace headgate
