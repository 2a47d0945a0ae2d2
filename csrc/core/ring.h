// The ring between one producer (worker) and the daemon: two shared memories, each written by one side only.
//
//   requests, written by the worker     RequestsHeader | Ticket[tickets] | Run[tickets][runs_max]
//                                       | Pair[tickets][pairs_max]
//   completions, written by the daemon  CompletionsHeader | Cell[tickets][runs_max]
//
// csrc/protocol/README.md holds the order of operations and the memory orders; every word that both sides look at is
// accessed atomically, through ring/word.h on the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.h"

namespace headgate {

inline constexpr uint64_t kRingMagic = 0x31474e4952474448ull;  // "HDGRING1"
inline constexpr uint32_t kRingVersion = 4;
inline constexpr uint64_t kPoisoned = UINT64_MAX;
inline constexpr uint32_t kTicketsMax = 4096;
inline constexpr uint32_t kRunsMax = 1u << 16;
inline constexpr uint32_t kPairsMax = 1u << 24;
inline constexpr uint8_t kGradeMax = 7;

// GATHER   pairs -> places.
// RANGE    contiguous records -> contiguous places (dense restore): first_pair is the first record, pair_count the
//          number of records, arg the first place.
// STORE    one staged segment -> an upload: slot is the upload, arg the offset in the staging memory of
//          [records dense][u16 map, kind 0 only][u8 grades]. OK means written; durable is what finish_upload makes it.
//          pair_count is the number of grades: none, or one for each block of the records, how much it is worth in
//          DRAM: 0 nothing, and up to kGradeMax, which is what higher ones mean too.
// PROMOTE  a hint without an answer: read ahead.
// CANCEL   gives up the open runs of ticket arg; after its OK nothing of them is copied.
// PROBE    pair_count lines of 64 bytes that say where they belong (core/probe.h) -> the window from byte arg on, a
//          multiple of 64; generation is their seed. Whatever is bound: it is for a worker that tests its window. The
//          daemon reads them back where it can; INTERNAL if they are not what it has delivered.
//
// The runs of a ticket may name pairs_max pairs together, those of a RANGE 2^24 records;
// a run that goes beyond ends in INVALID_ARGUMENT.
enum class Op : uint16_t { kGather = 1, kRange = 2, kStore = 3, kPromote = 4, kCancel = 5, kProbe = 6 };

enum class Status : uint32_t { kNone = 0, kOk = 1, kMiss = 2, kError = 3, kStale = 4, kPoison = 5 };

// Why a run ended in ERROR (Cell::aux); the numbers are gRPC's.
enum class Fault : uint32_t {
  kNone = 0,
  kInvalidArgument = 3,
  kNotFound = 5,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kInternal = 13,
  kUnavailable = 14,
  kDataLoss = 15
};

struct RingGeometry {
  uint32_t tickets;    // N, a power of two
  uint32_t runs_max;   // per ticket
  uint32_t pairs_max;  // per ticket
};

struct RequestsHeader {
  uint64_t magic;
  uint32_t version;
  RingGeometry geometry;
  uint64_t epoch;
  uint32_t device;  // 1: a device posts, which can wake nobody
  alignas(64) uint64_t poison;
  alignas(64) uint32_t bell;      // the worker rings it; the daemon sleeps on it
  alignas(64) uint32_t asleep;    // the worker sleeps (on CompletionsHeader::bell)
  uint32_t cpu;                   // where it posted last, from 1; 0: unknown
  alignas(64) uint64_t stepping;  // of a device's ring: not 0 while it may post; each burst of steps another number
  alignas(64) uint64_t released;  // of a device that pulls: it has read all that tickets <= released were answered with
};
static_assert(sizeof(RequestsHeader) == 384);

struct CompletionsHeader {
  uint64_t magic;
  uint32_t version;
  RingGeometry geometry;
  uint64_t epoch;
  alignas(64) uint64_t poison;
  alignas(64) uint32_t bell;      // the daemon rings it; the worker sleeps on it
  alignas(64) uint32_t asleep;    // the daemon sleeps (on RequestsHeader::bell)
  uint32_t cpu;                   // where it answered last, from 1; 0: unknown
  alignas(64) uint64_t consumed;  // every run of every ticket <= consumed is terminal
  uint64_t heartbeat;             // CLOCK_MONOTONIC, ns
};
static_assert(sizeof(CompletionsHeader) == 320);

struct Ticket {
  uint64_t seq;
  uint32_t step;
  uint16_t layer;
  uint16_t micro_batch;
  uint16_t op;
  uint16_t run_count;
  uint32_t first_run;
  uint8_t reserved[40];
};
static_assert(sizeof(Ticket) == 64);

struct Run {
  uint32_t slot;
  uint32_t slot_epoch;
  uint32_t generation;
  uint32_t first_pair;
  uint32_t pair_count;
  uint16_t lane;
  uint16_t kind;
  uint64_t arg;
};
static_assert(sizeof(Run) == 32);

struct Pair {
  uint32_t record;
  uint32_t place;
};
static_assert(sizeof(Pair) == 8);

struct alignas(16) Cell {
  uint64_t seq;
  uint32_t status;
  uint32_t aux;
};
static_assert(sizeof(Cell) == 16 && alignof(Cell) == 16);

// All offset arithmetic of the two memories. Ticket seq t (from 1) uses slot t mod N of every array.
struct RingLayout {
  RingGeometry g;

  HEADGATE_HD constexpr uint64_t ticket_off(uint64_t seq) const {
    return sizeof(RequestsHeader) + index(seq) * sizeof(Ticket);
  }
  HEADGATE_HD constexpr uint64_t runs_off(uint64_t seq) const {
    return sizeof(RequestsHeader) + uint64_t{g.tickets} * sizeof(Ticket) + index(seq) * g.runs_max * sizeof(Run);
  }
  HEADGATE_HD constexpr uint64_t pairs_off(uint64_t seq) const {
    return sizeof(RequestsHeader) + uint64_t{g.tickets} * (sizeof(Ticket) + uint64_t{g.runs_max} * sizeof(Run)) +
           index(seq) * g.pairs_max * sizeof(Pair);
  }
  HEADGATE_HD constexpr uint64_t requests_bytes() const {
    return page(sizeof(RequestsHeader) + uint64_t{g.tickets} * (sizeof(Ticket) + uint64_t{g.runs_max} * sizeof(Run) +
                                                                uint64_t{g.pairs_max} * sizeof(Pair)));
  }
  HEADGATE_HD constexpr uint64_t cell_off(uint64_t seq, uint32_t run) const {
    return sizeof(CompletionsHeader) + (index(seq) * g.runs_max + run) * sizeof(Cell);
  }
  HEADGATE_HD constexpr uint64_t completions_bytes() const {
    return page(sizeof(CompletionsHeader) + uint64_t{g.tickets} * g.runs_max * sizeof(Cell));
  }
  HEADGATE_HD constexpr bool valid() const {
    return g.tickets >= 2 && g.tickets <= kTicketsMax && (g.tickets & (g.tickets - 1)) == 0 && g.runs_max >= 1 &&
           g.runs_max < kRunsMax && g.pairs_max >= 1 && g.pairs_max <= kPairsMax;
  }

 private:
  HEADGATE_HD constexpr uint64_t index(uint64_t seq) const { return seq & (g.tickets - 1); }
  HEADGATE_HD static constexpr uint64_t page(uint64_t bytes) { return (bytes + 4095) / 4096 * 4096; }
};

}  // namespace headgate
