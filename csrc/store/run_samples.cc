#include "store/run_samples.h"

#include <new>

#include "core/pack.h"
#include "store/error.h"

namespace headgate {
namespace {

using Word = std::atomic_ref<uint64_t>;
constexpr auto kRelaxed = std::memory_order_relaxed;

}  // namespace

std::unique_ptr<RunSamples> RunSamples::within(uint64_t limit, std::atomic<uint64_t>& held, uint32_t segments,
                                               uint32_t tokens) {
  const uint64_t bytes = blocks_of(uint64_t{segments} * tokens * sizeof(uint64_t)) * kBlockBytes;
  if (held.fetch_add(bytes, kRelaxed) + bytes <= limit) {
    try {
      return std::unique_ptr<RunSamples>(new RunSamples(held, bytes, segments, tokens));
    } catch (const Error&) {
    } catch (const std::bad_alloc&) {
    }
  }
  held.fetch_sub(bytes, kRelaxed);
  return nullptr;
}

RunSamples::RunSamples(std::atomic<uint64_t>& held, uint64_t bytes, uint32_t segments, uint32_t tokens)
    : held_(held),
      segments_(segments),
      tokens_(tokens),
      words_(bytes),
      runs_(std::make_unique<std::atomic<uint64_t>[]>(segments)) {}

void RunSamples::note(uint32_t segment, uint32_t number, uint32_t first, std::span<const Pair> pairs) {
  const uint64_t before = runs_[segment].load(kRelaxed);
  const bool begins = before >> 32 == 0 || uint32_t(before) != number;
  const uint32_t run = uint32_t(before >> 32) + begins;
  if (begins) runs_[segment].store(uint64_t{run} << 32 | number, kRelaxed);
  if (run > kRuns && run % kEvery != 0) return;
  const uint64_t bit = uint64_t{1} << (run > kRuns ? run / kEvery : run) % kRuns;
  uint64_t* words = reinterpret_cast<uint64_t*>(words_.data()) + uint64_t{segment} * tokens_;
  for (uint32_t i = 0; begins && i < tokens_; ++i) {  // of the run that had this bit before
    const Word word(words[i]);
    if (const uint64_t held = word.load(kRelaxed); held & bit) word.store(held & ~bit, kRelaxed);
  }
  for (const Pair& pair : pairs) {
    const uint32_t record = pair.record - first;
    if (record >= tokens_) continue;
    const Word word(words[record]);
    word.store(word.load(kRelaxed) | bit, kRelaxed);
  }
}

void RunSamples::copy(std::span<uint64_t> to) const {
  uint64_t* words = reinterpret_cast<uint64_t*>(words_.data());
  for (size_t i = 0; i < to.size(); ++i) to[i] = Word(words[i]).load(kRelaxed);
}

}  // namespace headgate
