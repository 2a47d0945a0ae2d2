#include "store/probe_path.h"

#include <algorithm>
#include <cstring>

#include "core/probe.h"

namespace headgate {
namespace {

constexpr uint32_t kLinesAtOnce = 64;  // 4 KiB, which a bus reads back in some 10 us

uint64_t first_line(const Run& run) { return run.arg / kProbeBytes; }

}  // namespace

Fault ProbePath::begin(RunTask& t) {
  const uint64_t lines = t.shard->worker.window_bytes / kProbeBytes, first = first_line(t.run);
  const bool inside = t.run.arg % kProbeBytes == 0 && t.run.pair_count >= 1 && t.run.pair_count <= kProbeLinesMax &&
                      first <= lines && t.run.pair_count <= lines - first;
  if (!inside) return Fault::kInvalidArgument;
  t.total = t.shard->worker.window->readable() ? 2 * t.run.pair_count : t.run.pair_count;
  return Fault::kNone;
}

Need ProbePath::step(RunTask& t, uint64_t& cost) {
  const uint32_t lines = t.run.pair_count;
  const bool delivers = t.cursor < lines;
  const uint32_t count = std::min(kLinesAtOnce, (delivers ? lines : t.total) - t.cursor);
  if (delivers) {
    deliver(t, count);
  } else if (!read_back(t, count)) {
    t.fault = Fault::kInternal;
    return Need::kNothing;
  }
  t.cursor += count;
  cost += uint64_t{count} * kProbeBytes;
  return t.cursor < t.total ? Need::kTurn : Need::kNothing;
}

void ProbePath::deliver(RunTask& t, uint32_t lines) {
  uint32_t words[kLinesAtOnce][kProbeWords];
  const uint8_t* from[kLinesAtOnce];
  uint64_t to[kLinesAtOnce];
  for (uint32_t i = 0; i < lines; ++i) {
    const uint64_t line = first_line(t.run) + t.cursor + i;
    probe_line(t.run.generation, line, words[i]);
    from[i] = reinterpret_cast<const uint8_t*>(words[i]);
    to[i] = line * kProbeBytes;
  }
  t.shard->unfenced = true;
  t.shard->worker.window->deliver(from, to, lines, kProbeBytes, false);
  add(counters_.bytes_copied, uint64_t{lines} * kProbeBytes);
}

// Behind the fence that an answer would stand behind.
bool ProbePath::read_back(RunTask& t, uint32_t lines) {
  Window& window = *t.shard->worker.window;
  if (t.shard->unfenced) t.shard->unfenced = !window.fence();
  uint32_t seen[kLinesAtOnce][kProbeWords], expected[kProbeWords];
  const uint64_t first = first_line(t.run) + (t.cursor - t.run.pair_count);
  if (t.shard->unfenced || !window.read(first * kProbeBytes, reinterpret_cast<uint8_t*>(seen), lines * kProbeBytes))
    return false;
  for (uint32_t i = 0; i < lines; ++i) {
    probe_line(t.run.generation, first + i, expected);
    if (std::memcmp(seen[i], expected, kProbeBytes) != 0) return false;
  }
  return true;
}

}  // namespace headgate
