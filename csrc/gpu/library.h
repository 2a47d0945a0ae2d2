// A shared library that need not be there.
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace headgate {

// A device, or what reaches it, is missing or has failed.
struct DeviceError : std::runtime_error {
  DeviceError(const std::string& message, bool out_of_memory = false)
      : std::runtime_error(message), out_of_memory(out_of_memory) {}
  bool out_of_memory;
};

// Stays loaded: drivers have threads and handlers of their own.
class Library {
 public:
  // DeviceError, within seconds, whatever stands under this name.
  explicit Library(const std::string& name);

  template <typename Function>
  void find(Function& function, const char* symbol) const {
    if (!find_if_any(function, symbol)) throw DeviceError(name_ + " has no " + symbol + ": it is too old");
  }
  template <typename Function>
  bool find_if_any(Function& function, const char* symbol) const {
    function = reinterpret_cast<Function>(dlsym(handle_, symbol));
    return function != nullptr;
  }

 private:
  const std::string name_;
  void* const handle_;
};

}  // namespace headgate
