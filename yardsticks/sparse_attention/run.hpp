// What: runs one lane on one case and brings the outputs back, with everything around watched.
// Why: inputs unchanged, guards intact and the declared workspace are checked on every call.
// Never: judges the values.
#pragma once

#include "yardsticks/sparse_attention/judge.hpp"

namespace talea::yardsticks::sparse_attention {

// The tensors of a case as the library takes them. The grids must outlive it.
sa::Inputs inputs_of(const Case& c);

// Forward, and backward where the case has an upstream. The workspace has exactly the declared
// size, starts at an odd multiple of 8 bytes and holds 0xFF in every byte; outputs hold 0xFF.
Outcome run_lane(const Case& c, const std::string& lane, int threads = 0);

// Why the lane declines the case; empty: it accepts.
std::string declines(const Case& c, const std::string& lane);

// An exact workspace, poisoned, with guards behind it.
class Room {
 public:
  explicit Room(int64_t bytes);
  Workspace workspace();
  bool intact() const;

 private:
  int64_t bytes_;
  std::vector<uint64_t> memory_;
};

}  // namespace talea::yardsticks::sparse_attention
