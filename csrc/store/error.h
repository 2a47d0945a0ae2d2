// The one exception of the data plane; its code is the name of a gRPC status.
#pragma once

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace headgate {

class Error : public std::runtime_error {
 public:
  Error(const char* code, const std::string& message) : std::runtime_error(message), code_(code) {}
  const char* code() const { return code_; }

 private:
  const char* code_;
};

inline Error invalid_argument(const std::string& m) { return {"INVALID_ARGUMENT", m}; }
inline Error failed_precondition(const std::string& m) { return {"FAILED_PRECONDITION", m}; }
inline Error not_found(const std::string& m) { return {"NOT_FOUND", m}; }
inline Error resource_exhausted(const std::string& m) { return {"RESOURCE_EXHAUSTED", m}; }
inline Error data_loss(const std::string& m) { return {"DATA_LOSS", m}; }
inline Error unavailable(const std::string& m) { return {"UNAVAILABLE", m}; }

// A failed system call: "what: reason", with the code that fits errno.
inline Error system_error(const std::string& what, int error) {
  const char* code = error == ENOENT                                         ? "NOT_FOUND"
                     : error == ENOSPC || error == ENOMEM || error == EDQUOT ? "RESOURCE_EXHAUSTED"
                     : error == EEXIST                                       ? "FAILED_PRECONDITION"
                                                                             : "UNAVAILABLE";
  return {code, what + ": " + std::strerror(error)};
}

}  // namespace headgate
