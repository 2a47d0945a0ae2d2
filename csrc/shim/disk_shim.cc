#include "shim/disk_shim.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "core/pack.h"
#include "ring/futex.h"
#include "store/error.h"

namespace headgate::shim {
namespace {

constexpr uint8_t kGarbage = 0xa5;

std::mutex mutex;
std::vector<Rule> rules;
std::vector<std::pair<uint64_t, uint64_t>> counted(std::size(kSiteNames));

}  // namespace

void set(std::vector<Rule> wanted) {
  for (const Rule& rule : wanted)
    if (rule.site != "*" && std::find(std::begin(kSiteNames), std::end(kSiteNames), rule.site) == std::end(kSiteNames))
      throw invalid_argument("no site " + rule.site);
  std::lock_guard lock(mutex);
  rules = std::move(wanted);
  counted.assign(size_t(Site::kCount), {0, 0});
}

std::vector<std::pair<uint64_t, uint64_t>> counts() {
  std::lock_guard lock(mutex);
  return counted;
}

Injected take(Site site) {
  std::lock_guard lock(mutex);
  auto& [operations, faults] = counted[size_t(site)];
  ++operations;
  Injected injected;
  for (Rule& rule : rules) {
    if (rule.site != "*" && rule.site != kSiteNames[size_t(site)]) continue;
    ++rule.seen;
    if (injected.action != Action::kNone || rule.seen < rule.nth || rule.seen - rule.nth >= rule.times) continue;
    injected.action = rule.action;
    injected.value = rule.value;
    ++faults;
  }
  return injected;
}

void sleep_us(uint64_t us) {
  timespec left = to_timespec(us * 1000);
  while (nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
}

size_t Injected::asked(bool write, size_t bytes) const {
  if (!write || (action != Action::kShorten && action != Action::kTear)) return bytes;
  return std::min<size_t>(value, bytes) / kBlockBytes * kBlockBytes;
}

ssize_t Injected::answer(bool write, std::span<const iovec> pieces, size_t bytes, ssize_t result) const {
  if (action == Action::kTrust && result > 0) return ssize_t(bytes);
  if (result < 0 || (action != Action::kShorten && action != Action::kTear)) return result;
  size_t kept = std::min<size_t>(value, bytes);
  size_t before = 0;
  for (const iovec& piece : pieces) {
    size_t spared = std::clamp(kept, before, before + piece.iov_len) - before;
    if (!write) std::memset(static_cast<uint8_t*>(piece.iov_base) + spared, kGarbage, piece.iov_len - spared);
    before += piece.iov_len;
  }
  return ssize_t(action == Action::kTear ? bytes : kept);
}

namespace {

constexpr int64_t kLateNs = 50'000;

// errno as the kernel tells it of a request, negative.
ssize_t move(const BlockTransfer& t) {
  size_t done = 0;
  for (const iovec& piece : t.pieces) {
    const size_t bytes = std::min(piece.iov_len, t.bytes - done);
    const off_t at = off_t(t.offset + done);
    ssize_t moved = t.write ? pwrite(t.fd, piece.iov_base, bytes, at) : pread(t.fd, piece.iov_base, bytes, at);
    if (moved < 0 && done == 0) return -errno;
    done += size_t(std::max<ssize_t>(moved, 0));
    if (moved < ssize_t(bytes) || done == t.bytes) break;
  }
  return ssize_t(done);
}

}  // namespace

bool prepare(Site site, Injected& injected, io_uring_sqe* sqe, BlockTransfer& transfer) {
  bool delayed = injected.action == Action::kDelay;  // and repeated now, as the same operation
  injected = delayed ? Injected{} : take(site);
  if (injected.action == Action::kDelay) {
    injected.delay = {int64_t(injected.value / 1'000'000), int64_t(injected.value % 1'000'000 * 1000)};
    io_uring_prep_timeout(sqe, &injected.delay, 0, 0);
    return true;
  }
  transfer.bytes = uint32_t(injected.asked(transfer.write, transfer.bytes));
  if (transfer.bytes > 0 && injected.action != Action::kFail) {
    injected.turn = crash_model_turn ? crash_model_turn(transfer.fd, transfer.offset) : Turn::kKernel;
    if (injected.turn == Turn::kKernel) return false;
    if (injected.turn == Turn::kAtSubmission) injected.moved = move(transfer);
    if (injected.turn == Turn::kLate) {
      injected.delay = {0, kLateNs};
      io_uring_prep_timeout(sqe, &injected.delay, 0, 0);
      return true;
    }
  }
  io_uring_prep_nop(sqe);
  return true;
}

int settle(Injected& injected, const BlockTransfer& transfer, int result) {
  if (injected.action == Action::kFail) return -int(injected.value);
  if (injected.action == Action::kDelay || injected.turn == Turn::kAgain) return -EAGAIN;
  if (injected.turn == Turn::kAtSubmission) result = int(injected.moved);
  if (injected.turn == Turn::kAtCompletion || injected.turn == Turn::kLate) result = int(move(transfer));
  return int(injected.answer(transfer.write, transfer.pieces, transfer.bytes, result));
}

}  // namespace headgate::shim
