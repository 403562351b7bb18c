// What: see shards.hpp.
// Why: see shards.hpp.
// Never: joins MPI; a RankWorld has.
#include "shards.hpp"

#include <CLI/CLI.hpp>

#include "core/fail.hpp"

namespace talea::cli {

void ShardFlags::add(CLI::App& sub) {
  RankFlags::add(sub, "vocabulary shards");
  sub.add_flag("--sequence-parallel", sequence_parallel,
               "each rank holds its share of the tokens: gathered in, reduce-scattered out");
  add_timeout(sub);
}

void ShardFlags::add_dx_sum(CLI::App& sub) {
  sub.add_option("--dx-sum", dx_sum, "in what the ranks' shares of dX are summed")
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->capture_default_str();
}

ShardWorld::ShardWorld(const ShardFlags& flags)
    : RankWorld(flags), dx_sum_(flags.dx_sum == "bf16" ? DType::bf16 : DType::f32) {
  require(processes() || size() > 1 || dx_sum_ == DType::f32, ErrorKind::usage,
          "--dx-sum bf16: needs --ranks, whose shares are summed");
  require(processes() || flags.said || !flags.sequence_parallel, ErrorKind::usage,
          "--sequence-parallel: needs --ranks, which share the tokens");
}

lce::ShardedResult ShardWorld::call(const lce::ShardedCall& whole) const {
  lce::ShardedCall own = whole;
  own.dx_sum = dx_sum_;
  return mpi() ? run_shard(own, *mpi(), false) : run_thread_shards(own, size(), timeout_s());
}

void add_ranks(const RankWorld& world, const std::vector<lce::ShardFigures>& ranks,
               lce::CallFacts& facts) {
  facts.collective = world.engine();
  facts.shards.clear();
  for (size_t r = 0; r < ranks.size(); ++r) {
    const lce::ShardFigures& f = ranks[r];
    facts.shards.push_back({static_cast<int>(r), f.begin, f.end});
    facts.result.notes.push_back(
        fmt::format("rank {} of {}: vocabulary rows [{}, {}), {} stored; {} targets in the "
                    "partition; {} workspace bytes; {:.3f} ms",
                    r, ranks.size(), f.begin, f.end, f.stored, f.targets_in_partition,
                    f.workspace_bytes, f.ms));
  }
}

}  // namespace talea::cli
