// The shim of test builds: which operation of which site suffers what. Included by store/disk.h only.
#pragma once

#include <liburing.h>

#include <cerrno>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "shim/crash_model.h"
#include "store/site.h"

namespace headgate::shim {

// kFail: -1 and errno `value`. kShorten: `value` bytes are transferred and reported. kTear: `value` bytes are
// transferred and all are reported; a read finds garbage behind them. kDelay: `value` microseconds first. Writes are
// cut at whole blocks. Bugs of the store, planted: kSkip makes no call and reports success, kTrust takes a transfer
// that ended early for a whole one.
enum class Action : uint8_t { kNone, kFail, kShorten, kTear, kDelay, kSkip, kTrust };

struct Rule {
  std::string site;  // or "*": of all sites together
  Action action;
  uint64_t nth;    // the first operation that suffers, from 1
  uint64_t times;  // how many in a row
  uint64_t value;
  uint64_t seen = 0;
};

struct Injected {
  Action action = Action::kNone;
  uint64_t value = 0;
  Turn turn = Turn::kKernel;
  ssize_t moved = 0;  // by a transfer that has had its turn
  __kernel_timespec delay{};

  size_t asked(bool write, size_t bytes) const;  // what to transfer
  // What to report.
  ssize_t answer(bool write, std::span<const iovec> pieces, size_t bytes, ssize_t result) const;
};

// Replaces all rules and starts counting anew. INVALID_ARGUMENT for an unknown site.
void set(std::vector<Rule> rules);
// (operations, of them with a fault) of every site since the last `set`.
std::vector<std::pair<uint64_t, uint64_t>> counts();

// Counts an operation and says what it suffers.
Injected take(Site site);
void sleep_us(uint64_t us);

template <typename Call>
int call(Site site, Call call) {
  Injected injected = take(site);
  if (injected.action == Action::kFail) return errno = int(injected.value), -1;
  if (injected.action == Action::kDelay) sleep_us(injected.value);
  if (injected.action == Action::kSkip) return 0;
  return call();
}

template <typename Call>
ssize_t transfer(Site site, bool write, void* buffer, size_t bytes, Call call) {
  Injected injected = take(site);
  if (injected.action == Action::kFail) return errno = int(injected.value), -1;
  if (injected.action == Action::kDelay) sleep_us(injected.value);
  size_t asked = injected.asked(write, bytes);
  const iovec piece{buffer, bytes};
  return injected.answer(write, {&piece, 1}, bytes, asked > 0 ? call(asked) : 0);
}

// The same for an io_uring request. True: sqe has been prepared as something else; a delay is a timeout, after which
// the request is repeated. A disk of the crash model is no kernel's: such transfers are made here.
bool prepare(Site site, Injected& injected, io_uring_sqe* sqe, BlockTransfer& transfer);
int settle(Injected& injected, const BlockTransfer& transfer, int result);

}  // namespace headgate::shim
