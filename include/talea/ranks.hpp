// What: the ways to obtain a Communicator: threads of one process, processes, MPI, NCCL.
// Why: the operator takes ranks as an argument; this is where the argument comes from.
// Never: needs MPI or NCCL to be installed: both are opened at run time, their absence is named.
//
// A caller with a group of his own derives from Communicator, or fills the table of talea.h.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "talea/communicator.hpp"

namespace talea {

inline constexpr double default_rank_timeout_s = 30;

// `ranks` communicators of one world inside this process, one for each thread that will use it. A
// communicator that is destroyed while others still wait for it has left: they throw at once.
std::vector<std::unique_ptr<Communicator>> make_thread_communicators(
    int ranks, double timeout_s = default_rank_timeout_s);

// Runs body(communicator) in `ranks` threads, which share OpenMP's threads, and joins them. If any
// threw, rethrows the error that came first, not those of the ranks that then missed it.
void run_thread_ranks(int ranks, double timeout_s, const std::function<void(Communicator&)>& body);

struct MpiOptions {
  double timeout_s = default_rank_timeout_s;
  // What the launcher says, where known: lets an error name the ranks that never reached MPI_Init.
  int launcher_rank = -1;
  int launcher_size = 0;
  std::string presence_dir;  // a folder of this job on this host; empty: not used
  std::string plugin;        // path of talea_mpi.so; empty: beside this library or program
};

// The plug-in that an empty MpiOptions::plugin stands for; empty: there is none.
std::string mpi_plugin();

// The world of MPI_COMM_WORLD. Throws Error(unavailable) where the plug-in or MPI is missing. After
// an Error(runtime) of this communicator MPI cannot be finalised: leave with std::_Exit.
std::unique_ptr<Communicator> make_mpi_communicator(const MpiOptions& options = {});

struct SharedOptions {
  int rank = 0;
  int size = 1;
  std::string file;  // the same for all, e.g. under /dev/shm; new to this world: not used before
  double timeout_s = default_rank_timeout_s;
};

// Processes of one host, without a launcher: all map one file. Sums run in rank order.
std::unique_ptr<Communicator> make_shared_communicator(const SharedOptions& options);

struct NcclOptions {
  int rank = 0;
  int size = 1;
  int device_index = 0;
  double timeout_s = default_rank_timeout_s;  // of the start, too, from the call on
  void* comm = nullptr;          // the caller's ncclComm_t, which stays his; null: an own one
  std::string unique_id;         // for an own one: rank 0's nccl_unique_id(), on every rank
  Communicator* host = nullptr;  // the same ranks over host memory: the handshake travels there,
                                 // and a lost rank is named there. null: neither.
  // Multiprocessors that a sum of dX may take while dW is multiplied beside it; even. An own
  // communicator is limited to as many (maxCTAs). A caller's is not: tell what yours is limited to.
  // 0: sums are not begun beside products, and an own communicator has no limit. -1: 8 of an own
  // communicator, 0 of a caller's.
  int multiprocessors_beside = -1;
  std::string library = "libnccl.so.2";
};
std::string nccl_unique_id(const std::string& library = "libnccl.so.2");

// Collectives are queued on the stream. A rank that does not arrive makes a watchdog abort an own
// communicator after the timeout; the next call, and wait(), throw. Call wait() before the results
// are read: it alone knows that no rank was lost on the way. Sums repeat bit for bit on one
// topology with one NCCL, whose order of summation is fixed but is not rank order.
std::unique_ptr<Communicator> make_nccl_communicator(const NcclOptions& options);

// Where row r of vocabulary rows `total` cut into `ranks` even shards begins (the last may be
// short or empty); r == ranks gives the end.
int64_t even_shard_begin(int64_t total, int ranks, int rank);

// [S, B, D] and [B, S, D] hidden states as the rows the operator takes. Row order: (s, b) for
// sequence_first, (b, s) for batch_first; targets and per-token tensors must lie in that order.
// Throws where the two outer dimensions do not merge into one row stride.
enum class HiddenLayout : int32_t { sequence_first = 0, batch_first = 1 };
Tensor rows_of(const Tensor& hidden);

// Under sequence parallelism rank r holds sequence positions [r S/R, (r+1) S/R). In [S, B, D] these
// are one block of rows of the whole call; in [B, S, D] they are not: rank-major order is
// (rank, b, s within the rank). This gives, for each row of the call's order, the row of the whole
// [B, S] (or [S, B]) tensor it comes from: use it to order targets and per-token tensors.
std::vector<int64_t> sequence_parallel_order(HiddenLayout layout, int64_t sequence, int64_t batch,
                                             int ranks);

// If every element of `ours` is the same multiple of `truth` (within `tolerance`, relative L2),
// that multiple; otherwise 0. Names the trap of a local mean where a global one was meant.
double common_factor(const float* ours, const float* truth, int64_t count, double tolerance = 1e-3);

}  // namespace talea
