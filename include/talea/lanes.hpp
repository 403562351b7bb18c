// What: a lane as its operator's table lists it.
// Why: tools and tests ask the table where a lane runs and how it is reached; none types a name.
// Never: says whether a lane takes a problem: explain() does.
#pragma once

#include <string>

#include "talea/tensor.hpp"

namespace talea {

struct LaneInfo {
  std::string name;
  // "native kernel", "library composition", "unfused comparison", "reference", or "not built".
  std::string kind;
  DeviceKind runs_on = DeviceKind::cpu;
  bool by_name = false;  // lane = auto passes it by
};

}  // namespace talea
