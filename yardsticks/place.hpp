// What: memory that a lane reads and writes: of the host, or of a CUDA device.
// Why: the same suite serves every lane; only where the tensors lie differs.
// Never: decides what is run.
#pragma once

#include <memory>
#include <string>

#include "talea/communicator.hpp"
#include "talea/error.hpp"

namespace talea::testing {

class Place {
 public:
  virtual ~Place() = default;
  virtual DeviceKind kind() const = 0;
  // 256-byte aligned, freed by reset().
  virtual void* allocate(int64_t bytes) = 0;
  virtual void reset() = 0;
  virtual void upload(void* to, const void* from, int64_t bytes) = 0;
  virtual void download(void* to, const void* from, int64_t bytes) = 0;
  virtual Stream stream() { return nullptr; }
};

Place& host_place();
// Null where this build or machine has none; why says which.
Place* cuda_place(std::string& why);

}  // namespace talea::testing
