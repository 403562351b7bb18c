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
};
struct WholeSelect {
  sa::SelectInputs in;
  sa::SelectOutputs out;
  sa::SelectOptions options;
};
struct WholeIndexLoss {
  sa::IndexLossInputs in;
  sa::IndexLossOutputs out;
  sa::IndexLossOptions options;
};

struct PassDone {
  sa::Problem problem;  // of the whole call where one rank runs it, else of rank 0
  sa::Result result;    // of rank 0
  std::vector<sa::ShareFact> shares;
  double ms = 0;  // of the slowest rank
  int64_t peak_extra_bytes = -1;
};

// Afterwards all of the outputs are there: under mpirun on every process.
PassDone run_pass(sa::Pass pass, const WholeAttention& whole, const std::string& cut,
                  const RankWorld& world, double timeout_s);
PassDone run_pass(const WholeSelect& whole, const std::string& cut, const RankWorld& world,
                  double timeout_s);
PassDone run_pass(const WholeIndexLoss& whole, const std::string& cut, const RankWorld& world,
                  double timeout_s);

}  // namespace talea::cli
