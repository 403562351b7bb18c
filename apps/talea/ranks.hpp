// What: --ranks and mpirun: where the ranks of a command come from.
// Why: every operator's commands find them alike, and rank 0 alone speaks and writes.
// Never: starts a process; the launcher does.
#pragma once

#include <memory>

#include "talea/ranks.hpp"

namespace CLI {
class App;
}

namespace talea::cli {

// What a command's own flags for them fill.
struct RankFlags {
  int ranks = 1;
  bool said = false;  // --ranks was given: a world of one, too, has the flags of a world
  double timeout_s = default_rank_timeout_s;

  void add(CLI::App& sub, const char* what);  // --ranks; `what` they are
  void add_timeout(CLI::App& sub);
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
  double timeout_s() const { return timeout_s_; }
  Communicator* mpi() const { return mpi_.get(); }  // null: not processes

 private:
  int size_ = 1;
  double timeout_s_;
  std::unique_ptr<Communicator> mpi_;
};

// mpirun gave this process a rank: the launcher's variables say so.
bool under_mpirun();

}  // namespace talea::cli
