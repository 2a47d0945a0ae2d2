#include "gpu/library.h"

#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <thread>

namespace headgate {
namespace {

constexpr uint64_t kLoadS = 5;
constexpr auto kNap = std::chrono::milliseconds(1);

// Waits for a child, and ends it after kLoadS, whatever it does about signals; -1 then, else its status.
int wait_for(pid_t child) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(kLoadS);
  for (int status = 0;; std::this_thread::sleep_for(kNap)) {
    const pid_t ended = waitpid(child, &status, WNOHANG);
    if (ended == child || (ended < 0 && errno != EINTR)) return status;
    if (std::chrono::steady_clock::now() < end) continue;
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    return -1;
  }
}

// In a child: a file that was cut short kills whoever maps it, and a FIFO opens when somebody writes to it.
void try_to_load(const std::string& name) {
  const pid_t parent = getpid(), child = fork();
  if (child < 0) throw DeviceError(name + " cannot be tried: fork: " + std::strerror(errno));
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // it has the daemon's locks
    if (getppid() != parent) _exit(0);
    for (int number : {SIGBUS, SIGSEGV}) std::signal(number, SIG_DFL);
    const rlimit no_core{};
    setrlimit(RLIMIT_CORE, &no_core);
    dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    _exit(0);
  }
  const int status = wait_for(child);
  if (status < 0)
    throw DeviceError(name + " did not load within " + std::to_string(kLoadS) + " s; name a library's file");
  if (status != 0) throw DeviceError(name + " ends whoever loads it: it is cut short or broken; install it anew");
}

void* load(const std::string& name) {
  if (name.empty()) throw DeviceError("a library without a name; write its name or path");
  try_to_load(name);
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) throw DeviceError(dlerror());
  return handle;
}

}  // namespace

Library::Library(const std::string& name) : name_(name), handle_(load(name)) {}

}  // namespace headgate
