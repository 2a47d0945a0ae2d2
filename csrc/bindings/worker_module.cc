// decode_worker._native: the ring producer and the CPU kernels. Shapes are checked here, once; kernels trust them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>

#include "bindings/worker_products.h"
#include "bindings/worker_ring.h"
#include "bindings/worker_step.h"
#include "bindings/worker_window.h"
#include "cpu/attend.h"
#include "cpu/level.h"
#include "cpu/query.h"
#include "cpu/store_token.h"

namespace nb = nanobind;

namespace headgate {
namespace {

template <class T, int kDims>
using In = nb::ndarray<const T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;
using Window = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool ok, const char* message) {
  if (!ok) throw std::invalid_argument(message);
}

// A NumPy array that owns `data`.
template <class T>
nb::ndarray<nb::numpy, T> owned(std::unique_ptr<T[]> data, std::initializer_list<size_t> shape) {
  T* raw = data.get();
  nb::capsule owner(data.release(), [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T>(raw, shape, owner);
}

template <class T>
nb::ndarray<nb::numpy, T> owned(std::vector<T> data, std::initializer_list<size_t> shape) {
  auto* kept = new std::vector<T>(std::move(data));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T>(kept->data(), shape, owner);
}

Dtype storage(int dtype, size_t d, size_t record_bytes) {
  require(dtype == 1 || dtype == 2, "dtype must be 1 (float32) or 2 (bfloat16)");
  require(2 * d * (dtype == 1 ? 4 : 2) <= record_bytes, "a key and a value do not fit record_bytes");
  return static_cast<Dtype>(dtype);
}

void require_inside(uint64_t base, int64_t first, int64_t count, size_t record_bytes, size_t window_bytes) {
  require(first >= 0 && count >= 0, "attend: a place or a count is negative");
  require(base <= window_bytes && uint64_t(first + count) * record_bytes <= window_bytes - base,
          "attend: a place lies outside the window");
}

// What is attended to in records of one kind: base [B, H], ranges [B, H, R, 2], places [B, H, K], counts [B, H], dtype,
// record_bytes.
using Held = std::tuple<In<uint64_t, 2>, In<int32_t, 4>, In<int32_t, 3>, In<int32_t, 2>, int, size_t>;

// Every `step`-th of `lanes`, from `first` on: [B, H] places, each checked to lie inside the window.
void find_lanes(const Window& window, const Held& held, size_t first, size_t step, std::vector<AttendLane>& lanes) {
  const auto& [base, ranges, places, counts, dtype, record_bytes] = held;
  const size_t range_count = ranges.shape(2), stride = places.shape(2);
  for (size_t i = 0; i < base.size(); ++i) {
    AttendLane& lane = lanes[i * step + first];
    lane = {.base = window.data() + base.data()[i], .places = places.data() + i * stride, .count = counts.data()[i]};
    for (size_t r = 0; r < range_count; ++r) {
      const int32_t* range = ranges.data() + (i * range_count + r) * 2;
      if (range[1] != 0) require_inside(base.data()[i], range[0], range[1], record_bytes, window.size());
      lane.ranges[r] = {range[0], range[1]};
    }
    require(lane.count >= 0 && size_t(lane.count) <= stride, "attend: counts exceeds the place list");
    uint32_t most = 0;  // a negative place becomes a large one
    for (int32_t k = 0; k < lane.count; ++k) most = std::max(most, static_cast<uint32_t>(lane.places[k]));
    if (lane.count > 0) require_inside(base.data()[i], most, 1, record_bytes, window.size());
  }
}

void check_held(const Held& held, size_t batch, size_t heads) {
  const auto& [base, ranges, places, counts, dtype, record_bytes] = held;
  require(base.shape(0) == batch && base.shape(1) == heads, "attend: base must be [B, H]");
  require(ranges.shape(0) == batch && ranges.shape(1) == heads && ranges.shape(3) == 2 &&
              ranges.shape(2) <= AttendLane::kRanges,
          "attend: ranges must be [B, H, R, 2] with R up to 3");
  require(places.shape(0) == batch && places.shape(1) == heads, "attend: places must be [B, H, K]");
  require(counts.shape(0) == batch && counts.shape(1) == heads, "attend: counts must be [B, H]");
}

nb::tuple bind_attend(In<float, 3> query, Window window, const std::vector<Held>& held, float scale, int threads) {
  require(!held.empty() && held.size() <= kRecordKindsMax, "attend: there must be one or two kinds of records");
  const size_t batch = std::get<0>(held[0]).shape(0), heads = std::get<0>(held[0]).shape(1), d = query.shape(2);
  require(query.shape(0) == batch && heads > 0 && query.shape(1) % heads == 0, "attend: query must be [B, H * g, d]");
  require(d % 16 == 0 && d > 0, "attend: d must be a multiple of 16");
  require(threads >= 1, "attend: threads must be at least 1");
  RecordKind kinds[kRecordKindsMax] = {};
  for (size_t i = 0; i < held.size(); ++i) {
    check_held(held[i], batch, heads);
    kinds[i] = record_kind(std::get<4>(held[i]), int(d), std::get<5>(held[i]));
  }
  std::unique_ptr<float[]> out(new float[query.size()]), lse(new float[query.size() / d]);
  {
    nb::gil_scoped_release release;
    std::vector<AttendLane> lanes(batch * heads * held.size());
    for (size_t i = 0; i < held.size(); ++i) find_lanes(window, held[i], i, held.size(), lanes);
    attend({.query = query.data(),
            .lanes = lanes.data(),
            .kinds = {kinds[0], kinds[1]},
            .kind_count = int(held.size()),
            .batch = int(batch),
            .heads = int(heads),
            .group = int(query.shape(1) / heads),
            .d = int(d),
            .scale = scale,
            .threads = threads,
            .out = out.get(),
            .lse = lse.get()});
  }
  return nb::make_tuple(owned(std::move(out), {batch, query.shape(1), d}),
                        owned(std::move(lse), {batch, query.shape(1)}));
}

void bind_store_token(Window window, In<uint64_t, 2> base, In<int32_t, 2> place, In<float, 3> key, In<float, 3> value,
                      int dtype, size_t record_bytes) {
  const size_t lanes = base.size(), d = key.shape(2);
  require(place.shape(0) == base.shape(0) && place.shape(1) == base.shape(1), "store_token: place must be [B, H]");
  require(key.size() == lanes * d && value.size() == lanes * d, "store_token: key and value must be [B, H, d]");
  const Dtype stored = storage(dtype, d, record_bytes);
  nb::gil_scoped_release release;
  for (size_t lane = 0; lane < lanes; ++lane) {
    if (place.data()[lane] == -1) continue;
    require(place.data()[lane] >= 0 && base.data()[lane] <= window.size() &&
                (uint64_t(place.data()[lane]) + 1) * record_bytes <= window.size() - base.data()[lane],
            "store_token: a place lies outside the window");
    uint8_t* record = window.data() + base.data()[lane] + uint64_t(place.data()[lane]) * record_bytes;
    store_token(record, key.data() + lane * d, value.data() + lane * d, d, stored);
  }
}

nb::ndarray<nb::numpy, double> bind_similarity(In<float, 4> query, In<float, 4> label, In<float, 2> weights,
                                               float cos_floor) {
  const size_t batch = query.shape(0), heads = query.shape(1), group = query.shape(2), d = query.shape(3);
  for (int i = 0; i < 4; ++i)
    require(label.shape(i) == query.shape(i), "similarity: label's shape differs from query's");
  require(weights.shape(0) == heads && weights.shape(1) == group, "similarity: weights must be [H, g]");
  std::unique_ptr<double[]> out(new double[batch * heads]);
  {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < batch * heads; ++i) {
      out[i] = similarity(query.data() + i * group * d, label.data() + i * group * d,
                          weights.data() + i % heads * group, int(group), int(d), cos_floor);
    }
  }
  return owned(std::move(out), {batch, heads});
}

nb::ndarray<nb::numpy, uint64_t> bind_hash_encode(In<float, 2> x, In<float, 2> projection, In<float, 1> centre) {
  const size_t n = x.shape(0), d = x.shape(1);
  require(projection.shape(0) == d && projection.shape(1) == kHashBits, "hash_encode: projection must be [d, 256]");
  require(centre.shape(0) == d, "hash_encode: centre must be [d]");
  std::unique_ptr<uint64_t[]> codes(new uint64_t[n * kHashWords]);
  {
    nb::gil_scoped_release release;
    hash_encode(x.data(), projection.data(), centre.data(), n, int(d), codes.get());
  }
  return owned(std::move(codes), {n, kHashWords});
}

nb::ndarray<nb::numpy, int32_t> bind_hash_select(In<uint64_t, 2> query_codes, std::vector<In<uint64_t, 2>> codes,
                                                 std::vector<In<uint16_t, 1>> maps, int32_t low, int32_t high,
                                                 int32_t k, int unit, int threads) {
  require(query_codes.shape(1) == kHashWords, "hash_select: query_codes must be [g, 4]");
  require(codes.size() == maps.size(), "hash_select: one map per pack");
  require(k >= 0 && unit >= 1 && threads >= 1, "hash_select: k must not be negative, unit and threads at least 1");
  std::vector<PackCodes> packs;
  int32_t first = 0;
  for (size_t i = 0; i < codes.size(); ++i) {
    require(codes[i].shape(1) == kHashWords && codes[i].shape(0) == maps[i].shape(0),
            "hash_select: a pack's codes must be [n, 4] and its map [n]");
    require(codes[i].shape(0) % unit == 0, "hash_select: a pack must hold whole units");
    packs.push_back({codes[i].data(), maps[i].data(), codes[i].shape(0), first});
    first += int32_t(codes[i].shape(0));
  }
  std::vector<int32_t> chosen;
  {
    nb::gil_scoped_release release;
    hash_select(query_codes.data(), int(query_codes.shape(0)), packs, {low, high, k, unit}, threads, chosen);
  }
  const size_t count = chosen.size();
  return owned(std::move(chosen), {count});
}

std::vector<int> level_numbers() {
  std::vector<int> numbers;
  for (Level l : levels()) numbers.push_back(static_cast<int>(l));
  return numbers;
}

}  // namespace
}  // namespace headgate

NB_MODULE(_native, m) {
  using namespace headgate;
  bind_ring(m);
  bind_step(m);
  bind_products(m);
  bind_window(m);
  m.def("attend", &bind_attend, nb::arg("query"), nb::arg("window"), nb::arg("held"), nb::arg("scale"),
        nb::arg("threads"));
  m.def("store_token", &bind_store_token, nb::arg("window"), nb::arg("base"), nb::arg("place"), nb::arg("key"),
        nb::arg("value"), nb::arg("dtype"), nb::arg("record_bytes"));
  m.def("similarity", &bind_similarity, nb::arg("query"), nb::arg("label"), nb::arg("weights"), nb::arg("cos_floor"));
  m.def("hash_encode", &bind_hash_encode, nb::arg("x"), nb::arg("projection"), nb::arg("centre"));
  m.def("hash_select", &bind_hash_select, nb::arg("query_codes"), nb::arg("codes"), nb::arg("maps"), nb::arg("low"),
        nb::arg("high"), nb::arg("k"), nb::arg("unit") = 1, nb::arg("threads") = 1);
  m.def("_levels", &level_numbers);
  m.def("_set_level", [](int level) { set_level(static_cast<Level>(level)); });
}
