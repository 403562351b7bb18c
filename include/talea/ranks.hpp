// What: the ways to obtain a Communicator: threads of one process, MPI, NCCL, a caller's callbacks.
// Why: the operator takes ranks as an argument; this is where the argument comes from.
// Never: needs MPI or NCCL to be installed: both are opened at run time, and their absence is
// named.
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

// Runs body(communicator) in `ranks` threads, which share OpenMP's threads, and joins them. If any threw, rethrows the error that
// came first, not those of the ranks that then missed it.
void run_thread_ranks(int ranks, double timeout_s, const std::function<void(Communicator&)>& body);

struct MpiOptions {
  double timeout_s = default_rank_timeout_s;
  // What the launcher says, where known: lets an error name the ranks that never reached MPI_Init.
  int launcher_rank = -1;
  int launcher_size = 0;
  std::string presence_dir;  // a folder of this job on this host; empty: not used
  std::string plugin;        // path of talea_mpi.so; empty: beside this library or program
};

// The world of MPI_COMM_WORLD. Throws Error(unavailable) where the plug-in or MPI is missing. After
// an Error(runtime) of this communicator MPI cannot be finalised: leave with std::_Exit.
std::unique_ptr<Communicator> make_mpi_communicator(const MpiOptions& options = {});

// A group that the caller already has (torch.distributed, Megatron's, his own). Every callback
// returns 0, or another number and then error_text says why.
struct CommunicatorCallbacks {
  const char* engine = "callbacks";
  int rank = 0;
  int size = 1;
  DeviceKind device = DeviceKind::cpu;
  void* user = nullptr;
  int32_t (*all_gather)(void* user, const void* send, void* recv, int64_t bytes,
                        void* stream) = nullptr;
  int32_t (*all_reduce_sum)(void* user, void* buffer, int64_t count, int32_t dtype,
                            void* stream) = nullptr;
  int32_t (*reduce_scatter_sum)(void* user, const void* send, void* recv, int64_t count,
                                int32_t dtype, void* stream) = nullptr;
  const char* (*error_text)(void* user) = nullptr;  // may be null
  void (*close)(void* user) = nullptr;              // called by the destructor; may be null
};
std::unique_ptr<Communicator> make_callback_communicator(const CommunicatorCallbacks& callbacks);

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
