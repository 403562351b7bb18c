// What: the facts of a call with every one in words told, as a call leaves them.
// Why: the schema refuses an empty one; tests of receipts and pages start from the same.
// Never: runs a lane.
#pragma once

#include <string>
#include <type_traits>

#include "core/fields.hpp"

namespace talea::testing {

template <class Facts, class Fields>
Facts told(const Fields& fields) {
  Facts facts;
  for_each_field(fields, [&](const auto& f) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(facts.result.*f.member)>,
                                 std::string>)
      facts.result.*f.member = "told";
  });
  return facts;
}

}  // namespace talea::testing
