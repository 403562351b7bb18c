// What: every reproducer shows its bug and our fix; with the fix switched off, FIX_VALIDATED falls.
// Why: a sentinel that cannot fall proves nothing.
// Never: skips a reproducer.
#include "repro/support/repro.hpp"

#include <gtest/gtest.h>

#include <ostream>

namespace talea::repro {

// GoogleTest prints a parameter beside its test's name.
void PrintTo(const Reproducer& r, std::ostream* out) { *out << r.name; }

namespace {

class Reproducers : public testing::TestWithParam<Reproducer> {};

TEST_P(Reproducers, ShowsBugAndFix) {
  Report report(false);
  GetParam().run(report);
  for (const Finding& f : report.findings())
    EXPECT_NE(f.sentinel, "") << f.what << ": " << f.measured << " against " << f.bound;
  EXPECT_TRUE(report.complete());
}

TEST_P(Reproducers, WithoutTheFixTheSentinelFalls) {
  Report report(true);
  GetParam().run(report);
  EXPECT_FALSE(report.complete()) << "every sentinel held with the fix switched off";
  for (const Finding& f : report.findings())
    EXPECT_NE(f.sentinel, "FIX_VALIDATED") << "with the fix switched off: " << f.what;
}

INSTANTIATE_TEST_SUITE_P(All, Reproducers, testing::ValuesIn(all()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace talea::repro
