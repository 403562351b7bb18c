// What: bytes of heap in use, counted at every allocation of this program.
// Why: "no full logits tensor existed" must be measured, not asserted.
// Never: linked into the library; the tool alone replaces malloc.
#pragma once

#include <cstdint>

namespace talea::cli {

// False under a sanitizer, which has an allocator of its own.
bool memory_is_measured();

// The peak of the heap above what was in use at construction.
class MemoryWatch {
 public:
  MemoryWatch();
  int64_t peak_extra_bytes() const;  // -1: not measured

 private:
  int64_t before_;
};

}  // namespace talea::cli
