// What: what each rank of a cut holds of whole host tensors, and a pass over all ranks.
// Why: --ranks R must give what one rank gives; threads and processes cut alike.
// Never: reads or writes a file.
#pragma once

#include "../ranks.hpp"
#include "context.hpp"
#include "ops/sparse_attention/receipt.hpp"

namespace talea::cli {

namespace sa = sparse_attention;

struct CutFlags {
  RankFlags ranks;
  std::string cut;
  void add(CLI::App& sub);
  // Error(usage) where --ranks and --cut do not belong together.
  void check() const;
};

// Whole tensors in the order [B, S, ...]; views of slices are made of them.
struct WholeAttention {
  sa::Inputs in;
  sa::Outputs out;
  sa::Options options;
  sa::Pass pass = sa::Pass::forward;  // or backward
};
struct WholeSelect {
  sa::SelectInputs in;
  sa::SelectOutputs out;
  sa::SelectOptions options;
  static constexpr sa::Pass pass = sa::Pass::select;
};
struct WholeIndexLoss {
  sa::IndexLossInputs in;
  sa::IndexLossOutputs out;
  sa::IndexLossOptions options;
  static constexpr sa::Pass pass = sa::Pass::index_loss;
};

struct PassDone {
  sa::Problem problem;  // of the whole call where one rank runs it, else of rank 0
  sa::Result result;    // of rank 0
  std::vector<sa::ShareFact> shares;
  double ms = 0;  // of the slowest rank
  int64_t peak_extra_bytes = -1;
};

// Under IndexCheck::checked, by the numbers of the whole: ranks that share out the queries count
// from the first of their own.
void check_indices(const WholeAttention& whole);
// One of the structs above. Afterwards all of the outputs are there: under mpirun on every process.
template <typename Whole>
PassDone run_pass(const Whole& whole, const std::string& cut, const RankWorld& world);
// The least workspace limit that each of its ranks can keep.
template <typename Whole>
int64_t least_limit(const Whole& whole, const std::string& cut, const RankWorld& world);

}  // namespace talea::cli
