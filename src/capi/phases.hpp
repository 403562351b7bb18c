// What: a call of any operator cut at its exchanges, as C holds it.
// Why: an operator gives its groups and a body; turns, exchanges and states are the same for all.
// Never: knows an operator.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "capi/result.hpp"
#include "talea/phases.hpp"

namespace talea::capi {

// Of a group that the caller named; null: a world of one.
struct GroupOfCall {
  ExchangeGroup group;
  std::shared_ptr<const Communicator> named;
};

// `body` runs the call with a communicator a group, in their order, and makes its result.
using PhasesBody = std::function<talea_result*(std::span<Communicator* const>)>;
talea_phases* begin_phases(const std::vector<GroupOfCall>& groups, PhasesBody body);

}  // namespace talea::capi
