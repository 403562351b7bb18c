// What: runs one lane on one case and brings the outputs back, with everything around watched.
// Why: inputs unchanged, guards intact and the declared workspace are checked on every call.
// Never: judges the values.
#pragma once

#include "yardsticks/place.hpp"
#include "yardsticks/sparse_attention/judge.hpp"

namespace talea::yardsticks::sparse_attention {

using testing::Place;

// Where the tensors of a call lie: in the grids' own memory, or in copies of them on a device. One
// at a time on a device.
class Home {
 public:
  explicit Home(Place* place = nullptr);  // null: the host
  // The grid must outlive the home.
  Tensor tensor(const Grid& g, std::vector<int> without = {});
  // What the call wrote, into the grids.
  void fetch();
  Place* place() const { return place_; }

 private:
  struct Copy {
    const Grid* grid;
    char* there;
  };
  Place* place_;
  std::vector<Copy> copies_;
};

// The tensors of a case as the library takes them. The grids must outlive it.
sa::Inputs inputs_of(const Case& c, Home& home);
sa::Inputs inputs_of(const Case& c);

// Forward, and backward where the case has an upstream: by lane auto where the lane has none. The
// workspace has exactly the declared size, starts at an odd multiple of 8 bytes and holds 0xFF in
// every byte; outputs hold 0xFF. place: of a device lane.
Outcome run_lane(const Case& c, const std::string& lane, int threads = 0, Place* place = nullptr);

// Why the lane declines the case; empty: it accepts.
std::string declines(const Case& c, const std::string& lane, Place* place = nullptr);

// An exact workspace, poisoned, with guards behind it.
class Room {
 public:
  explicit Room(int64_t bytes, Place* place = nullptr);
  Workspace workspace();
  bool intact();

 private:
  int64_t bytes_;
  std::vector<uint64_t> memory_;
  Place* place_;
  char* there_ = nullptr;
};

}  // namespace talea::yardsticks::sparse_attention
