// What: --ranks, --sequence-parallel and --dx-sum of this operator, and its call over the ranks.
// Why: loss, check, bench and train spell them alike and report the same of every shard.
// Never: starts a process; the launcher does.
#pragma once

#include "../ranks.hpp"
#include "context.hpp"
#include "core/receipt.hpp"
#include "ops/linear_cross_entropy/receipt.hpp"
#include "ops/linear_cross_entropy/sharded.hpp"

namespace talea::cli {

struct ShardFlags : RankFlags {
  bool sequence_parallel = false;
  std::string dx_sum = "fp32";

  void add(CLI::App& sub);
  void add_dx_sum(CLI::App& sub);  // of commands that make one call
};

class ShardWorld : public RankWorld {
 public:
  // Error(usage), too, where --dx-sum has no ranks whose shares it could sum.
  explicit ShardWorld(const ShardFlags& flags);

  // This process' ranks, each in its own thread under --ranks; afterwards all of the outputs are
  // there. The result is that of rank 0, or of this process.
  lce::ShardedResult call(const lce::ShardedCall& whole) const;

 private:
  DType dx_sum_;
};

// The ranks' shards, the engine and one note a rank.
void add_ranks(const RankWorld& world, const std::vector<lce::ShardFigures>& ranks,
               lce::CallFacts& facts);

}  // namespace talea::cli
