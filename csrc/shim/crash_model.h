// The crash model, a library that test processes preload: a disk below one directory that keeps only what was synced.
// How a transfer of a ring, which libc does not see, comes to go through it. Included by shim/disk_shim.cc only.
#pragma once

#include <cstdint>

namespace headgate::shim {

// When a transfer happens: with its submission, or with its completion; kAgain: not yet, the kernel wants it repeated;
// kLate: with a completion that takes its time. kKernel: it is none of the model's, which may not be there at all.
enum class Turn : uint32_t { kKernel, kAtSubmission, kAtCompletion, kAgain, kLate };

extern "C" __attribute__((weak)) Turn crash_model_turn(int fd, uint64_t offset);

}  // namespace headgate::shim
