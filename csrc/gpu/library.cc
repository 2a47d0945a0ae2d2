#include "gpu/library.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

namespace headgate {
namespace {

constexpr unsigned kLoadS = 5;

// In a child: a file that was cut short kills whoever maps it, and a FIFO opens when somebody writes to it.
void try_to_load(const std::string& name) {
  const pid_t child = fork();
  if (child < 0) throw DeviceError(name + " cannot be tried: fork: " + std::strerror(errno));
  if (child == 0) {
    for (int number : {SIGBUS, SIGSEGV, SIGALRM}) std::signal(number, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    const rlimit no_core{};
    setrlimit(RLIMIT_CORE, &no_core);
    alarm(kLoadS);
    dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    _exit(0);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
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
