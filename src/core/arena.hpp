// What: hands out aligned pieces of a caller's workspace, or only counts them.
// Why: the same layout code gives the workspace formula and the pointers; they cannot disagree.
// Never: allocates.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/fail.hpp"
#include "core/mutant.hpp"
#include "talea/call.hpp"

namespace talea {

class Arena {
 public:
  static constexpr int64_t alignment = 256;

  Arena() = default;  // counts only
  explicit Arena(Workspace workspace)
      : base_(static_cast<char*>(workspace.data)), given_(workspace.bytes) {
    // The caller's address may be unaligned; the slack is part of every formula (see bytes()).
    const auto address = reinterpret_cast<uintptr_t>(base_);
    skew_ = static_cast<int64_t>((alignment - address % alignment) % alignment);
    used_ = skew_;
  }

  // Nothing has no address: a null pointer, not one that the next piece has as well.
  template <typename T>
  T* take(int64_t count) {
    const int64_t bytes =
        (count * static_cast<int64_t>(sizeof(T)) + alignment - 1) / alignment * alignment;
    const int64_t begin = used_;
    used_ += bytes;
    if (!base_ || (count == 0 && !mutant(Mutant::empty_piece_has_address))) return nullptr;
    require(used_ <= given_, ErrorKind::runtime,
            "workspace: {} bytes given, {} needed at this point", given_, used_);
    return reinterpret_cast<T*>(base_ + begin);
  }

  // Bytes from the workspace's address on that are taken: what follows is free.
  int64_t used() const { return used_; }

  // What a caller must give so that the same takes succeed at any address.
  int64_t bytes() const { return used_ - skew_ + alignment; }

 private:
  char* base_ = nullptr;
  int64_t given_ = 0;
  int64_t skew_ = 0;
  int64_t used_ = 0;
};

}  // namespace talea
