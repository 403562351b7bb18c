// What: the test program's main: googletest, the mutant switch and a fixed random seed.
// Why: a run is reproducible from its command line alone, and the kill table needs the switch.
// Never: part of the library; the library has no switch of this kind in a normal build.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "core/kernel_mutant.hpp"
#include "core/mutant.hpp"
#include "core/provenance.hpp"
#include "device/cpu/isa.hpp"
#include "ops/linear_cross_entropy/forced.hpp"
#include "ops/mamba3/mutants.hpp"
#include "ops/sparse_attention/mutants.hpp"
#include "support/hold.hpp"
#include "yardsticks/linear_cross_entropy/compare.hpp"
#include "yardsticks/linear_cross_entropy/generate.hpp"
#include "yardsticks/linear_cross_entropy/run.hpp"
#include "yardsticks/place.hpp"
#include "yardsticks/sparse_attention/judge.hpp"

namespace {

using talea::testing::CompareMutant;

constexpr std::pair<const char*, CompareMutant> compare_mutants[] = {
    {"b25_nan_passes", CompareMutant::nan_passes},
    {"b26_tolerance_cannot_fail", CompareMutant::tolerance_cannot_fail},
    {"b21_only_losses_compared", CompareMutant::only_losses},
    {"floor_widened", CompareMutant::wide_floor},
    {"l2_not_compared", CompareMutant::luck_of_one}};

#ifdef TALEA_MUTANTS
template <class Bug>
struct Planted {
  const char* name;
  const char* text;
  Bug bug;
};

// Whether visit(list) is true of one of the lists; those behind it are not visited.
template <class Visit>
bool any_list(Visit visit) {
#define TALEA_ROW(name, text) {#name, text, Bug::name},
#define TALEA_VISIT(LIST, Type)                               \
  [&] {                                                       \
    using Bug = Type;                                         \
    return visit(std::vector<Planted<Bug>>{LIST(TALEA_ROW)}); \
  }()
  return TALEA_VISIT(TALEA_MUTANT_LIST, talea::Mutant) ||
         TALEA_VISIT(TALEA_KERNEL_MUTANT_LIST, talea::KernelMutant) ||
         TALEA_VISIT(TALEA_SPARSE_ATTENTION_MUTANT_LIST, talea::sparse_attention::Mutant) ||
         TALEA_VISIT(TALEA_MAMBA3_MUTANT_LIST, talea::mamba3::ScanMutant);
#undef TALEA_VISIT
#undef TALEA_ROW
}

template <class Bug>
bool plant(Bug bug) {
  talea::planted<Bug> = bug;
  std::string why;
  if (!talea::testing::cuda_place(why)) return true;  // no kernel runs here
  const auto& switches = talea::device_switches<Bug>;
  return std::all_of(switches.begin(), switches.end(), [&](auto set) { return set(bug); });
}
#endif

void list_mutants() {
#ifdef TALEA_MUTANTS
  any_list([](const auto& list) {
    for (const auto& m : list) std::printf("%s\t%s\n", m.name, m.text);
    return false;
  });
#endif
  for (const auto& [name, mutant] : compare_mutants)
    std::printf("%s\ta bug of the comparison itself\n", name);
}

bool plant(std::string_view wanted) {
  for (const auto& [name, mutant] : compare_mutants)
    if (wanted == name) {
      talea::testing::compare_mutant = mutant;
      return true;
    }
#ifdef TALEA_MUTANTS
  return any_list([&](const auto& list) {
    const auto found =
        std::find_if(list.begin(), list.end(), [&](const auto& m) { return wanted == m.name; });
    return found != list.end() && plant(found->bug);
  });
#else
  return false;
#endif
}

class Tally final : public ::testing::EmptyTestEventListener {
  void OnTestProgramEnd(const ::testing::UnitTest&) override {
    const talea::BuildInfo& built = talea::build_info();
    std::printf("built from %s%s\n", built.git_revision.c_str(),
                built.git_dirty == 1 ? " with changes" : "");
    std::fputs(talea::testing::tally().c_str(), stdout);
    std::printf("%lld drawn cases\n", static_cast<long long>(talea::testing::drawn_cases));
    using talea::testing::Used;
    const auto line = [](const char* who, const Used& used) {
      std::printf(
          "%s needed beyond the accuracy rule: %.3f of the floor, %.3f of the room for ties, "
          "%.3f of that of a logit\n",
          who, static_cast<double>(used.floor), static_cast<double>(used.tie),
          static_cast<double>(used.logit));
    };
    line("products", talea::testing::used_by_products);
    line("eager arithmetic", talea::testing::used_by_yardstick);
    std::printf("sparse attention needed beyond it: %.3f of the room for sums that are cut off\n",
                talea::yardsticks::sparse_attention::used_of_cut_sums);
  }
};

// Forces a way, and nothing else; false where there is no such way.
bool take(std::string_view way) {
  talea::lce::forced = {};
  if (!talea::lce::force(way)) return false;
  // More elements than a weight for which lane sm90 keeps two terms by itself.
  const bool large = !talea::lce::forced.two_terms.value_or(true);
  talea::testing::least_weight = large ? (int64_t{1} << 17) + 1 : 0;
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  std::vector<std::string_view> ways;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    if (arg == "--list-mutants") {
      list_mutants();
      return 0;
    }
    if (arg == "--isa=avx2") {  // throws where the CPU has no AVX2: then nothing was tested
      talea::cpu::limit_isa(talea::cpu::IsaLimit::avx2);
      continue;
    }
    if (arg.substr(0, 8) == "--force=" && take(arg.substr(8))) {
      ways.push_back(arg.substr(8));
      continue;
    }
    if (arg.substr(0, 9) == "--mutant=" && plant(arg.substr(9))) continue;
    std::fprintf(stderr, "%s: not an option, a way to force, or a mutant of this build\n", argv[i]);
    return 2;
  }
  // rapidcheck reads its parameters here; RC_PARAMS from outside repeats a failing run.
  setenv("RC_PARAMS", "seed=20250601", 0);
  ::testing::UnitTest::GetInstance()->listeners().Append(new Tally);
  if (ways.size() < 2) return RUN_ALL_TESTS();
  // One after the other: under a tool that rewrites each kernel a process costs more than its
  // cases.
  int failed = 0;
  for (const std::string_view way : ways) {
    take(way);
    failed |= RUN_ALL_TESTS();
  }
  return failed;
}
