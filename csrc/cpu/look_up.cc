#include "cpu/look_up.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <exception>
#include <mutex>

#include "cpu/pool.h"
#include "cpu/query.h"

namespace headgate {
namespace {

enum : uint8_t { kFree, kHeld, kAttended, kWanted };  // what a place is to a head that misses

struct Scratch {
  std::vector<int32_t> wanted;
  std::vector<int32_t> places;    // of the wanted units; -1 for one that the window lacks
  std::vector<uint8_t> use;       // of every unit place
  std::vector<int32_t> place_of;  // of every stored unit; -1 between calls
  std::vector<int32_t> free, victims;
};

// The lane of one head while it gets a new set. A unit place is counted from 0 behind the sinks.
struct Lane {
  const HeadState& state;
  const CacheRule& cache;
  int layer, slot, head;
  HeadState::Side now, then;
  int32_t capacity;
  int unit_log;  // units are powers of two
  int32_t* stamp;
  Scratch& s;

  Lane(const HeadState& state_, const CacheRule& cache_, int layer_, const Wish& wish, Scratch& scratch)
      : state(state_),
        cache(cache_),
        layer(layer_),
        slot(wish.slot),
        head(wish.head),
        now(state.current(layer, slot, head)),
        then(state.next(layer, slot, head)),
        capacity(state.capacity[state.index(layer, slot, head)]),
        unit_log(std::countr_zero(unsigned(state.shape.unit))),
        stamp(state.stamp + state.index(layer, slot, head) * state.shape.units),
        s(scratch) {}

  int32_t unit_place(int32_t place) const { return (place - state.shape.sink) >> unit_log; }

  // Marks every place, finds the wanted units that are held; returns how many are not. (Its bytes may alias anything,
  // so all it works on has a name of its own.)
  int32_t match() {
    s.use.assign(capacity + 1, kFree);  // the last one stands for no place
    uint8_t* const use = s.use.data();
    const int32_t *held = now.held, *held_places = now.held_places;
    const int32_t held_count = now.held_count, wanted_count = static_cast<int32_t>(s.wanted.size());
    const auto place_at = [sink = state.shape.sink, log = unit_log](int32_t place) { return (place - sink) >> log; };
    for (int32_t i = 0; i < held_count; ++i) use[place_at(held_places[i])] = kHeld;
    if (cache.keeps) {
      for (int32_t i = 0; i < now.count; ++i) use[place_at(now.places[i])] = kAttended;
    }
    s.places.assign(wanted_count, -1);
    int32_t missing = wanted_count;
    if (!cache.whole) {
      // Through a table: whether a unit is held is as good as random, and a merge would guess wrong at every other one.
      const int32_t last = std::max(held_count ? held[held_count - 1] : -1, wanted_count ? s.wanted.back() : -1);
      if (s.place_of.size() <= size_t(last)) s.place_of.resize(last + 1, -1);
      int32_t *const table = s.place_of.data(), *const places = s.places.data();
      const int32_t *const wanted = s.wanted.data(), nowhere = capacity;
      for (int32_t i = 0; i < held_count; ++i) table[held[i]] = held_places[i];
      for (int32_t w = 0; w < wanted_count; ++w) {
        const int32_t place = table[wanted[w]];
        places[w] = place;
        missing -= place >= 0;
        use[place < 0 ? nowhere : place_at(place)] = kWanted;
      }
      for (int32_t i = 0; i < held_count; ++i) table[held[i]] = -1;
    }
    s.use.pop_back();
    return missing;
  }

  // The old set is given up, so that a failure cannot leave half of each.
  void clear() {
    now.count = 0;
    now.label_kind = static_cast<int8_t>(QueryKind::kNone);
    std::fill_n(now.label, size_t(state.shape.group) * state.shape.d, 0.f);
    if (!cache.keeps) now.held_count = 0;
    const uint8_t becomes = cache.keeps ? kHeld : kFree;
    for (uint8_t& use : s.use) use = use == kAttended || use == kHeld ? becomes : use;
  }

  // Makes `missing` places free. True if the old set had to be given up for that.
  bool make_room(int32_t missing) {
    const int32_t kept = static_cast<int32_t>(s.wanted.size()) - missing;
    int32_t free = capacity - now.held_count;
    if (missing <= free) return false;
    const bool gives_up = !cache.keeps || missing > free + std::count(s.use.begin(), s.use.end(), kHeld);
    if (gives_up) clear();
    if (!cache.keeps) free = capacity - kept;
    if (missing > free) evict(missing - free);
    return gives_up;
  }

  // The least recently (or often) used units leave at once: their places are about to be written.
  void evict(int32_t count) {
    s.victims.clear();
    for (int32_t p = 0; p < capacity; ++p) {
      if (s.use[p] == kHeld) s.victims.push_back(p);
    }
    std::nth_element(s.victims.begin(), s.victims.begin() + count - 1, s.victims.end(),
                     [&](int32_t a, int32_t b) { return stamp[a] != stamp[b] ? stamp[a] < stamp[b] : a < b; });
    for (int32_t i = 0; i < count; ++i) s.use[s.victims[i]] = kFree;
    int32_t left = 0;
    for (int32_t i = 0; i < now.held_count; ++i) {
      if (s.use[unit_place(now.held_places[i])] == kFree) continue;
      now.held[left] = now.held[i];
      now.held_places[left++] = now.held_places[i];
    }
    now.held_count = left;
  }

  // Gives the missing units free places, ascending, and names their records.
  void place(int32_t step, std::vector<Pair>& pairs) {
    s.free.resize(capacity + 1);
    int32_t* const free = s.free.data();
    const uint8_t* const use = s.use.data();
    for (int32_t p = 0, n = 0; p < capacity; ++p) {
      free[n] = p;
      n += use[p] == kFree;
    }
    const int unit = state.shape.unit, log = unit_log, sink = state.shape.sink;
    const size_t wanted_count = s.wanted.size();
    if (pairs.size() < (wanted_count + 1) * unit) pairs.resize((wanted_count + 1) * unit);
    const int32_t* const wanted = s.wanted.data();
    int32_t* const places = s.places.data();
    Pair* next = pairs.data();  // what is not missing is written, and then overwritten
    for (size_t w = 0, missing = 0; w < wanted_count; ++w) {
      const bool lacks = places[w] < 0;
      const int32_t place = lacks ? sink + (free[missing] << log) : places[w];
      places[w] = place;
      for (int r = 0; r < unit; ++r) next[r] = {uint32_t(wanted[w] * unit + r), uint32_t(place + r)};
      next += lacks ? unit : 0;
      missing += lacks;
      if (cache.keeps) touch(unit_place(place), step, lacks);
    }
    pairs.resize(next - pairs.data());
  }

  void touch(int32_t place, int32_t step, bool arrives) {
    switch (cache.on_use) {
      case CacheRule::Stamp::kNone:
        if (arrives) stamp[place] = step;
        break;
      case CacheRule::Stamp::kStep:
        stamp[place] = step;
        break;
      case CacheRule::Stamp::kCount:
        stamp[place] = arrives ? 1 : stamp[place] + 1;
        break;
    }
  }

  // What the window will hold: the wanted units, and what stays beside them.
  void write_held() {
    int32_t n = 0, h = 0;
    const auto add = [&](int32_t unit, int32_t place) {
      then.held[n] = unit;
      then.held_places[n++] = place;
    };
    const int32_t old = cache.keeps ? now.held_count : 0;
    for (size_t w = 0; w < s.wanted.size(); ++w) {
      for (; h < old && now.held[h] < s.wanted[w]; ++h) add(now.held[h], now.held_places[h]);
      if (h < old && now.held[h] == s.wanted[w]) ++h;
      add(s.wanted[w], s.places[w]);
    }
    for (; h < old; ++h) add(now.held[h], now.held_places[h]);
    then.held_count = n;
  }

  // The places of the wanted units' records whose token is neither a sink nor in the tail.
  void write_places(const RecordMaps& maps, int32_t limit) {
    if (state.shape.unit == 1) {
      std::copy(s.places.begin(), s.places.end(), then.places);
      then.count = static_cast<int32_t>(s.places.size());
      return;
    }
    RecordMaps::Reader reader(maps, layer, slot, head);
    const int unit = state.shape.unit;
    int32_t n = 0;
    for (size_t w = 0; w < s.wanted.size(); ++w) {
      for (int r = 0; r < unit; ++r) {
        const int32_t token = reader.token(s.wanted[w] * unit + r);
        if (token >= state.shape.sink && token < limit) then.places[n++] = s.places[w] + r;
      }
    }
    then.count = n;
  }

  // A session that was bound with fewer stored tokens than sinks has them only in its tail so far.
  void add_sinks(const RecordMaps& maps, int32_t limit, std::vector<Pair>& pairs) const {
    const int32_t sinks = std::min(state.shape.sink, limit);
    if (now.cover >= sinks) return;
    for (const PackMap& pack : maps.packs(slot)) {
      const uint16_t* order = maps.order(pack, layer, head);
      for (int32_t i = 0; i < pack.tokens && pack.first < sinks; ++i) {
        const int32_t token = pack.first + order[i];
        if (token >= now.cover && token < sinks) pairs.push_back({uint32_t(pack.first + i), uint32_t(token)});
      }
    }
    std::sort(pairs.begin(), pairs.end(), [](const Pair& a, const Pair& b) { return a.record < b.record; });
  }
};

// Tasks on several threads, whose first exception is thrown here.
template <class Task>
void run_or_throw(int count, int threads, Task task) {
  std::exception_ptr thrown;
  std::mutex lock;
  std::atomic<bool> stopped{false};
  run_tasks(count, threads, [&](int i) {
    if (stopped.load(std::memory_order_relaxed)) return;
    try {
      task(i);
    } catch (...) {
      stopped.store(true, std::memory_order_relaxed);
      std::lock_guard held(lock);
      if (!thrown) thrown = std::current_exception();
    }
  });
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace

bool LookUp::misses(int layer, int slot, int head, int32_t position, const float* query, QueryKind kind) {
  const HeadState::Shape& shape = state_.shape;
  const size_t lane = size_t(layer) * shape.heads + head;
  const HeadState::Side now = state_.current(layer, slot, head);
  const bool similar = rules_.reuses && now.label_kind == static_cast<int8_t>(kind) &&
                       similarity(query, now.label, state_.weights + lane * shape.group, shape.group, shape.d,
                                  rules_.cos_floor) > state_.tau[lane];
  const bool forced = position - now.cover >= state_.forced_from[lane] && state_.limit(slot, position) > now.cover;
  const bool hit = similar && !forced;
  if (position != state_.first_position[slot]) {
    ++state_.counters[int(Counter::kLookups)];
    state_.counters[int(Counter::kHits)] += hit;
    state_.counters[int(Counter::kForced)] += forced;
  }
  return !hit;
}

void LookUp::choose(int layer, const Rows& rows, const float* query, QueryKind kind, int threads, Wish& wish,
                    std::vector<Pair>& pairs) {
  static thread_local Scratch scratch;
  const HeadState::Shape& shape = state_.shape;
  const size_t at = state_.index(layer, wish.slot, wish.head);
  const int32_t limit = state_.limit(wish.slot, rows.position[wish.row]);
  scratch.wanted.clear();
  if (limit > shape.sink)
    selector_.select(layer, wish.slot, wish.head, query, {shape.sink, limit, state_.selected[at], shape.unit}, threads,
                     scratch.wanted);
  Lane lane(state_, rules_.cache, layer, wish, scratch);
  wish.has_old_set = lane.now.label_kind != static_cast<int8_t>(QueryKind::kNone);
  const int32_t missing = lane.match();
  wish.cleared = lane.make_room(missing);
  wish.has_old_set &= !wish.cleared;
  wish.chosen = static_cast<int64_t>(scratch.wanted.size());
  wish.missing = missing;
  lane.place(rows.step, pairs);
  lane.write_held();
  lane.write_places(maps_, limit);
  lane.add_sinks(maps_, limit, pairs);
  wish.pairs = static_cast<int64_t>(pairs.size());
  std::memcpy(lane.then.label, query, sizeof(float) * shape.group * shape.d);
  lane.then.label_kind = static_cast<int8_t>(kind);
  lane.then.cover = limit;
  lane.then.generation = ++state_.issued[at];
}

void LookUp::plan(int layer, const Rows& rows, const float* query, QueryKind kind, Outbox& out) {
  const HeadState::Shape& shape = state_.shape;
  const size_t head_floats = size_t(shape.group) * shape.d;
  const auto query_of = [&](const Wish& w) { return query + (size_t(w.row) * shape.heads + w.head) * head_floats; };
  wishes_.clear();
  for (int row = 0; row < rows.count; ++row) {
    const int slot = rows.slot[row];
    // Behind a fault a row computes on what means nothing.
    for (int head = 0; slot >= 0 && !state_.fault[slot] && head < shape.heads; ++head) {
      Wish wish{row, slot, head, false, false, 0, 0, 0};
      if (state_.is_resident(layer, head)) continue;
      if (misses(layer, slot, head, rows.position[row], query_of(wish), kind)) wishes_.push_back(wish);
    }
  }
  if (pairs_.size() < wishes_.size()) pairs_.resize(wishes_.size());
  // As many heads at a time as there are threads, or all threads for one head after the other.
  const int threads = selector_.parallel() ? rules_.threads : 1;
  const bool side_by_side = static_cast<int>(wishes_.size()) >= threads;
  run_or_throw(static_cast<int>(wishes_.size()), side_by_side ? threads : 1, [&](int i) {
    choose(layer, rows, query_of(wishes_[i]), kind, side_by_side ? 1 : threads, wishes_[i], pairs_[i]);
  });
  out.runs.clear();
  out.pairs.clear();
  out.wishes.clear();
  for (size_t i = 0; i < wishes_.size(); ++i) {
    const Wish& wish = wishes_[i];
    const size_t at = state_.index(layer, wish.slot, wish.head);
    state_.chosen[at] += wish.chosen;
    state_.missing[at] += wish.missing;
    state_.counters[int(Counter::kCleared)] += wish.cleared;
    if (pairs_[i].empty()) {
      state_.commit(layer, wish.slot, wish.head);
      continue;
    }
    out.runs.push_back({.slot = uint32_t(wish.slot),
                        .slot_epoch = uint32_t(state_.epoch[wish.slot]),
                        .generation = uint32_t(state_.issued[at]),
                        .first_pair = uint32_t(out.pairs.size()),
                        .pair_count = uint32_t(pairs_[i].size()),
                        .lane = uint16_t(wish.head),
                        .kind = 0,
                        .arg = 0});
    out.pairs.insert(out.pairs.end(), pairs_[i].begin(), pairs_[i].end());
    out.wishes.push_back(wish);
  }
}

}  // namespace headgate
