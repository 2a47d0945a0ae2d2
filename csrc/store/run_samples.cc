#include "store/run_samples.h"

#include <algorithm>
#include <bit>
#include <new>

#include "core/pack.h"
#include "store/error.h"

namespace headgate {
namespace {

using Word = std::atomic_ref<uint64_t>;
constexpr auto kRelaxed = std::memory_order_relaxed;

uint32_t words_of(uint32_t tokens) { return (tokens + 63) / 64; }

}  // namespace

std::unique_ptr<RunSamples> RunSamples::within(uint64_t limit, std::atomic<uint64_t>& held, uint32_t segments,
                                               uint32_t tokens) {
  const uint64_t bytes = blocks_of(uint64_t{segments} * kRuns * words_of(tokens) * sizeof(uint64_t)) * kBlockBytes;
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
      run_words_(words_of(tokens)),
      words_(bytes),
      runs_(std::make_unique<std::atomic<uint64_t>[]>(segments)) {}

uint64_t* RunSamples::run(uint64_t segment, uint32_t run) const {
  return reinterpret_cast<uint64_t*>(words_.data()) + (segment * kRuns + run) * run_words_;
}

void RunSamples::note(uint32_t segment, uint32_t number, uint32_t first, std::span<const Pair> pairs) {
  const uint64_t before = runs_[segment].load(kRelaxed);
  const bool begins = before >> 32 == 0 || uint32_t(before) != number;
  const uint32_t runs = uint32_t(before >> 32) + begins;
  if (begins) runs_[segment].store(uint64_t{runs} << 32 | number, kRelaxed);
  if (runs > kRuns && runs % kEvery != 0) return;
  uint64_t* words = run(segment, (runs > kRuns ? runs / kEvery : runs) % kRuns);
  for (uint32_t i = 0; begins && i < run_words_; ++i) Word(words[i]).store(0, kRelaxed);  // of the run before
  for (const Pair& pair : pairs) {
    const uint32_t record = pair.record - first;
    if (record >= tokens_) continue;
    const Word word(words[record / 64]);
    word.store(word.load(kRelaxed) | uint64_t{1} << record % 64, kRelaxed);
  }
}

void RunSamples::copy(std::span<uint64_t> to) const {
  std::ranges::fill(to, 0);
  for (uint32_t segment = 0; segment < segments_; ++segment) {
    uint64_t* wanted = to.data() + uint64_t{segment} * tokens_;
    for (uint32_t each = 0; each < kRuns; ++each) {
      uint64_t* words = run(segment, each);
      for (uint32_t i = 0; i < run_words_; ++i)
        for (uint64_t left = Word(words[i]).load(kRelaxed); left != 0; left &= left - 1)
          wanted[i * 64 + uint32_t(std::countr_zero(left))] |= uint64_t{1} << each;
    }
  }
}

}  // namespace headgate
