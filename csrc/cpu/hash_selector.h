// `hash` (HATA) as a selector: 256-bit codes of every stored key, the nearest to the query's in Hamming distance.
#pragma once

#include <vector>

#include "cpu/query.h"
#include "cpu/record_maps.h"
#include "cpu/selector.h"

namespace headgate {

class HashSelector : public Selector {
 public:
  // projection: [layers][heads][d][256]. `maps` are the slots' packs, whose codes `extend` adds in step with them.
  HashSelector(const RecordMaps& maps, const float* projection, int slots, int heads, int group, int d)
      : maps_(maps), codes_(slots), projection_(projection), heads_(heads), group_(group), d_(d), no_centre_(d) {}

  // codes: [layers][heads][tokens][4] of the slot's latest pack.
  void extend(int slot, const uint64_t* codes) { codes_[slot].push_back(codes); }
  void clear(int slot) { codes_[slot].clear(); }

  void select(int layer, int slot, int head, const float* query, const Selection& wanted, int threads,
              std::vector<int32_t>& out) override {
    static thread_local std::vector<uint64_t> query_codes;
    static thread_local std::vector<PackCodes> packs;
    query_codes.resize(size_t(group_) * kHashWords);
    const size_t lane = size_t(layer) * heads_ + head;
    hash_encode(query, projection_ + lane * d_ * kHashBits, no_centre_.data(), group_, d_, query_codes.data());
    packs.clear();
    for (size_t p = 0; p < codes_[slot].size(); ++p) {
      const PackMap& pack = maps_.packs(slot)[p];
      packs.push_back({codes_[slot][p] + lane * pack.tokens * kHashWords, maps_.order(pack, layer, head),
                       size_t(pack.tokens), pack.first});
    }
    hash_select(query_codes.data(), group_, packs, wanted, threads, out);
  }
  bool parallel() const override { return true; }

 private:
  const RecordMaps& maps_;
  std::vector<std::vector<const uint64_t*>> codes_;  // [slot][pack]
  const float* projection_;
  int heads_, group_, d_;
  std::vector<float> no_centre_;
};

}  // namespace headgate
