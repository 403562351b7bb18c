// What: runs one property over many drawn problems inside a googletest case.
// Why: the seed, the case count and the shrunken problem are reported in one way.
// Never: passes with fewer cases than asked for.
#pragma once

#include <rapidcheck.h>

#include <cstdio>
#include <functional>
#include <sstream>

#include "support/lane_test.hpp"
#include "yardsticks/linear_cross_entropy/generate.hpp"

namespace talea::testing {

// Draws every field of a Spec; used inside rc::gen::exec.
Spec draw_spec();

inline int64_t drawn_cases = 0;  // of this process; the last lines of the program say it

// check returns complaints, or an empty string where the property holds.
template <typename Check>
void hold(int cases, void (*bend)(Spec&), Check check) {
  // Enlarged cases (a forced way) take the oracle a hundred times as long: an eighth of them.
  if (least_weight > 0) cases = (cases + 7) / 8;
  rc::detail::TestParams params = rc::detail::configuration().testParams;
  params.maxSuccess = cases;
  const auto result = rc::detail::checkTestable(
      [&] {
        const Spec spec = *rc::gen::exec([bend] {
          Spec s = draw_spec();
          bend(s);
          return s;
        });
        std::string complaints;
        try {
          complaints = check(spec);
        } catch (const Error& error) {
          complaints = std::string("threw: ") + error.what();
        }
        if (!complaints.empty()) RC_FAIL(complaints);
      },
      rc::detail::TestMetadata{}, params);
  std::ostringstream text;
  rc::detail::printResultMessage(result, text);
  drawn_cases += cases;
  EXPECT_TRUE(result.template is<rc::detail::SuccessResult>()) << text.str();
  std::printf("%d drawn cases, seed %llu\n", cases, static_cast<unsigned long long>(params.seed));
}

}  // namespace talea::testing
