#include "store/copy_lane.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "ring/futex.h"
#include "store/gather.h"

namespace headgate {
namespace {

constexpr size_t kRecordsAtOnce = 64;
constexpr size_t kPiecesMax = CopyLane::kBatchBytes / 64;  // a record is a line or more

}  // namespace

CopyLane::CopyLane(std::shared_ptr<CudaDriver> driver, std::shared_ptr<Patience> patience)
    : driver_(std::move(driver)), patience_(std::move(patience)) {
  driver_->enter();
  for (Batch& batch : batches_) {
    batch.memory = driver_->pin(kBatchBytes);
    undo_.add([this, &batch] { driver_->unpin(batch.memory); });
    batch.stream = driver_->make_stream();
    undo_.add([this, &batch] { driver_->end_stream(batch.stream); });
    batch.from.reserve(kPiecesMax), batch.to.reserve(kPiecesMax), batch.bytes.reserve(kPiecesMax);
  }
}

void CopyLane::put(const uint8_t* const* from, cuda::Pointer base, const uint64_t* to, size_t count, uint32_t bytes) {
  uint64_t at[kRecordsAtOnce];
  for (size_t done = 0; done < count;) {
    Batch& b = batch();
    const size_t n = std::min({count - done, kRecordsAtOnce, size_t((kBatchBytes - b.filled) / bytes)});
    if (n == 0) {
      send();
      continue;
    }
    for (size_t i = 0; i < n; ++i) {
      at[i] = b.filled + i * bytes;
      add(b, base + to[done + i], at[i], bytes);
    }
    copy_records(from + done, b.memory, at, n, bytes, false);
    b.filled += n * bytes;
    done += n;
  }
}

void CopyLane::add(Batch& batch, cuda::Pointer to, uint64_t from, uint32_t bytes) {
  if (!batch.to.empty() && batch.to.back() + batch.bytes.back() == to) {
    batch.bytes.back() += bytes;
    return;
  }
  batch.to.push_back(to);
  batch.from.push_back(reinterpret_cast<cuda::Pointer>(batch.memory) + from);
  batch.bytes.push_back(bytes);
}

// The other batch's copies have had the time of filling this one.
void CopyLane::send() {
  Batch& b = batch();
  if (b.filled == 0) return;
  driver_->enter();
  b.under_way = true;
  driver_->begin_copies(b.to, b.from, b.bytes, b.stream);
  b.to.clear(), b.from.clear(), b.bytes.clear();
  b.filled = 0;
  current_ = (current_ + 1) % kBatches;
  await(batch());
}

void CopyLane::finish() {
  send();
  for (Batch& b : batches_) await(b);
}

void CopyLane::read(uint8_t* to, cuda::Pointer from, uint64_t bytes) {
  Batch& b = batch();
  driver_->enter();
  b.under_way = true;
  driver_->begin_read(b.memory, from, bytes, b.stream);
  await(b);
  std::memcpy(to, b.memory, bytes);
}

void CopyLane::await(Batch& batch) {
  if (!batch.under_way) return;
  driver_->enter();
  const uint64_t patience = patience_->ns(), deadline = now_ns() + patience;
  while (!driver_->has_ended(batch.stream)) {
    if (now_ns() >= deadline) {
      patience_->lose();
      throw DeviceError("copies to the device have not ended within " + std::to_string(patience / 1'000'000) + " ms");
    }
    cpu_relax();
  }
  batch.under_way = false;
  patience_->regain();
}

bool CopyLane::at_rest() noexcept try {
  for (Batch& b : batches_) await(b);
  return true;
} catch (const DeviceError&) {
  return false;
}

bool CopyLane::has_ended() noexcept try {
  driver_->enter();
  for (Batch& b : batches_) {
    if (b.under_way && !driver_->has_ended(b.stream)) return false;
    b.under_way = false;
  }
  return true;
} catch (const DeviceError&) {
  return false;
}

}  // namespace headgate
