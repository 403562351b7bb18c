// What: the NCCL communicator of a build without CUDA or without nccl.h.
// Why: "not built" is a reason like any other.
// Never: communicates.
#include "core/fail.hpp"
#include "talea/ranks.hpp"

namespace talea {

std::string nccl_unique_id(const std::string&) {
  fail(ErrorKind::unavailable, "nccl: this library was built without CUDA and nccl.h");
}

std::unique_ptr<Communicator> make_nccl_communicator(const NcclOptions&) {
  fail(ErrorKind::unavailable, "nccl: this library was built without CUDA and nccl.h");
}

}  // namespace talea
