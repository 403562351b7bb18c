// What: the one exception type of the C++ interface and its kinds.
// Why: every failure names the argument and value, and maps to one exit code and one C status.
// Never: carries a type of CUDA, MPI or any other library.
#pragma once

#include <stdexcept>
#include <string>

namespace talea {

// The values are the exit codes of the command line tool (docs/cli.md) and the C status codes.
enum class ErrorKind : int {
  check_failed = 1,  // a parity or regression check failed
  usage = 2,         // an option or argument that no data could make right
  unavailable = 3,   // this machine or build lacks something, named in the message
  runtime = 4,       // memory, CUDA, NCCL, MPI, input/output
  invalid_data = 5,  // a tensor, file, shape, dtype or target that breaks the contract
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace talea
