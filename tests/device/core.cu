// Every header of csrc/core on the device: what a kernel may ask of rings, windows, packs, labels and codes.
#include "core/cell.h"
#include "core/hamming.h"
#include "core/host_device.h"
#include "core/pack.h"
#include "core/probe.h"
#include "core/pull.h"
#include "core/ring.h"
#include "core/similarity.h"

using namespace headgate;

// Posts ticket `seq` with `pairs` pairs and looks at its first cell.
__global__ void post(uint8_t* requests, uint8_t* completions, RingGeometry geometry, uint64_t seq, uint32_t pairs,
                     CellValue* out) {
  const RingLayout layout{geometry};
  if (!layout.valid() || layout.requests_bytes() > layout.pairs_off(seq) + layout.completions_bytes()) return;
  *reinterpret_cast<Run*>(requests + layout.runs_off(seq)) = {0, 1, 0, 0, pairs, 0, 0, 0};
  Ticket& ticket = *reinterpret_cast<Ticket*>(requests + layout.ticket_off(seq));
  ticket.op = uint16_t(Op::kGather);
  Cell& cell = *reinterpret_cast<Cell*>(completions + layout.cell_off(seq, 0));
  *out = load_cell(cell);
  store_cell(cell, {seq, uint32_t(Status::kOk), uint32_t(Fault::kNone)});
}

__global__ void lay(PackHeader* header, uint64_t* blocks) {
  lay_out(*header);
  *blocks = checked_blocks(*header) + map_blocks(header->tokens) +
            segment_blocks(header->tokens, header->kinds[0].record_bytes) + kBlockBytes / kRecordAlign;
}

__global__ void look_up(const uint64_t* codes, const uint64_t* keys, int group, int* distance, float* mean) {
  const HashPlanes planes = fold_codes(codes, group);
  distance[threadIdx.x] = hash_distance(planes, keys + threadIdx.x * kHashWords);
  SafeHarmonicMean similarity;
  for (int i = 0; i < group; ++i) similarity.add(cosine(i, i + 1, i + 2), 1);
  mean[threadIdx.x] = similarity.value(0.5f);
}

// How many words of a line of a pull window differ from what a PROBE stores there.
__global__ void look_at_line(const uint8_t* memory, uint64_t bytes, const uint8_t* arena, uint32_t seed, uint64_t line,
                             int* differ) {
  const PullLayout layout{bytes};
  const uint32_t at = reinterpret_cast<const uint32_t*>(memory + layout.lines_off())[line];
  const uint8_t* from = at == 0 ? memory + line * kPullLineBytes : arena + uint64_t{at - 1} * kPullLineBytes;
  uint32_t expected[kProbeWords];
  probe_line(seed, line, expected);
  *differ = 0;
  for (uint32_t i = 0; i < kProbeWords; ++i) *differ += reinterpret_cast<const uint32_t*>(from)[i] != expected[i];
}
