// What: one case cut into vocabulary shards, run by one rank and compared with the world of one.
// Why: threads, MPI and NCCL are held to the same comparison by the same code.
// Never: communicates by itself; the operator under test does.
#pragma once

#include <string>
#include <vector>

#include "talea/ranks.hpp"
#include "yardsticks/linear_cross_entropy/case.hpp"
#include "yardsticks/place.hpp"

namespace talea::testing {

struct Shard {
  int64_t begin = 0;    // global id of the first row
  int64_t logical = 0;  // rows below V
  int64_t padding = 0;  // rows stored behind them, filled with NaN
};
using Layout = std::vector<Shard>;

// The named ways to cut `vocab` rows: even, ragged, empty_first, empty_last, padded, reversed.
extern const std::vector<std::string> layout_names;
Layout layout(const std::string& name, int64_t vocab, int ranks);

// This rank's part of the case: its weight rows, and its tokens under sequence parallelism.
Case shard_case(const Case& whole, const Shard& shard, bool sequence_parallel, int rank, int ranks);

struct RankRun {
  LinearCrossEntropyResult result;
  CaseOutputs out;
};
RankRun run_rank(const Case& part, const std::string& lane, const LinearCrossEntropyRanks& ranks);

// The case on one rank.
CaseOutputs run_single(const Case& whole, const std::string& lane);

// Runs this rank's part and compares it with its part of `single`: loss and per-token values within
// 1e-6 of the largest, gradients within 1e-5 relative L2 (16-bit gradients: one rounding of their
// type), ids equal, padding exactly 0. Empty: holds.
std::string check_rank(const Case& whole, const CaseOutputs& single, const Layout& layout,
                       bool sequence_parallel, const std::string& lane, Communicator& vocab,
                       Place& place = host_place());

// check_rank of every rank, as threads of this process that wait 20 s for each other.
std::string run_world(const Case& whole, const Layout& layout, bool sequence_parallel,
                      const std::string& lane);

// The option matrix of the rank tests, in fp32, then bf16, fp16 and bf16 with fp32 weights.
std::vector<std::pair<std::string, Case>> rank_matrix();

}  // namespace talea::testing
