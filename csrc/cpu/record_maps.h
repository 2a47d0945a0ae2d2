// Which token each record of a slot's packs holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace headgate {

// One pack of a session. `order`: [layers][heads][tokens], record -> token within the pack.
struct PackMap {
  const uint16_t* order;
  int32_t first;  // its first token, and its first record's id
  int32_t tokens;
};

// The packs of every slot, from token 0 on without a gap.
class RecordMaps {
 public:
  RecordMaps(int slots, int heads) : packs_(slots), heads_(heads) {}

  void extend(int slot, PackMap pack) { packs_[slot].push_back(pack); }
  void clear(int slot) { packs_[slot].clear(); }
  const std::vector<PackMap>& packs(int slot) const { return packs_[slot]; }

  const uint16_t* order(const PackMap& pack, int layer, int head) const {
    return pack.order + (size_t(layer) * heads_ + head) * pack.tokens;
  }

  // Tokens of ascending records.
  class Reader {
   public:
    Reader(const RecordMaps& maps, int layer, int slot, int head)
        : maps_(maps), pack_(maps.packs(slot).begin()), end_(maps.packs(slot).end()), layer_(layer), head_(head) {}

    int32_t token(int32_t record) {
      while (record >= pack_->first + pack_->tokens) ++pack_;
      return pack_->first + maps_.order(*pack_, layer_, head_)[record - pack_->first];
    }
    bool has(int32_t record) const { return pack_ != end_ && record < (end_ - 1)->first + (end_ - 1)->tokens; }

   private:
    const RecordMaps& maps_;
    std::vector<PackMap>::const_iterator pack_, end_;
    int layer_, head_;
  };

 private:
  std::vector<std::vector<PackMap>> packs_;
  int heads_;
};

}  // namespace headgate
