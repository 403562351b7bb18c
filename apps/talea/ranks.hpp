// What: --ranks, --sequence-parallel and mpirun: where the ranks of a command come from.
// Why: loss, check, bench and train spell them alike, and rank 0 alone speaks and writes.
// Never: starts a process; the launcher does.
#pragma once

#include <memory>

#include "context.hpp"
#include "core/receipt.hpp"
#include "ops/linear_cross_entropy/receipt.hpp"
#include "ops/linear_cross_entropy/sharded.hpp"

namespace talea::cli {

struct RankFlags {
  int ranks = 1;
  bool sequence_parallel = false;
  std::string dx_sum = "fp32";
  double timeout_s = default_rank_timeout_s;

  void add(CLI::App& sub);
  void add_dx_sum(CLI::App& sub);  // of commands that make one call
};

// The world of a command: one, threads of this process, or the processes of mpirun.
class RankWorld {
 public:
  // Joins mpirun's world where this process is part of one. Error(usage) where --ranks says
  // another size.
  explicit RankWorld(const RankFlags& flags);
  // Where an error is on its way, MPI is left as it is: finalising would wait for the other ranks.
  ~RankWorld();
  RankWorld(const RankWorld&) = delete;
  RankWorld& operator=(const RankWorld&) = delete;

  int size() const { return size_; }
  bool processes() const { return mpi_ != nullptr; }
  bool speaks() const { return !mpi_ || mpi_->rank() == 0; }  // prints and writes files
  const char* engine() const { return mpi_ ? mpi_->engine() : size_ > 1 ? "threads" : "none"; }

  // This process' ranks, each in its own thread under --ranks; afterwards all of the outputs are
  // there. The result is that of rank 0, or of this process.
  lce::ShardedResult call(const lce::ShardedCall& whole) const;
  Communicator* mpi() const { return mpi_.get(); }  // null: not processes

 private:
  int size_ = 1;
  double timeout_s_;
  DType dx_sum_ = DType::f32;
  std::unique_ptr<Communicator> mpi_;
};

// The ranks' shards, the engine and one note a rank.
void add_ranks(const RankWorld& world, const std::vector<lce::ShardFigures>& ranks,
               lce::CallFacts& facts);

// mpirun gave this process a rank: the launcher's variables say so.
bool under_mpirun();

}  // namespace talea::cli
