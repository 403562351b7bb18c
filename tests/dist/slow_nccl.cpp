// What: the start of NCCL ranks over a library that is slow to begin and slow to abort.
// Why: a rank that never comes must be named within the timeout and two seconds, on any host.
// Never: opens the real NCCL: this program exports what the communicator looks for.
#include <gtest/gtest.h>

#pragma GCC visibility push(default)
#include <nccl.h>
#pragma GCC visibility pop

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "support/temp_dir.hpp"
#include "talea/error.hpp"
#include "talea/ranks.hpp"

namespace {

constexpr double init_s = 0.7, abort_s = 1.5;
std::atomic<int> aborts{0};

void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

}  // namespace

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = {};
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*) {
  sleep(init_s);
  return ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* state) {
  *state = ncclInProgress;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t) {
  ++aborts;
  sleep(abort_s);
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t) { return "pretended"; }
ncclResult_t ncclAllGather(const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t) {
  return ncclInternalError;
}
ncclResult_t ncclAllReduce(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                           cudaStream_t) {
  return ncclInternalError;
}
ncclResult_t ncclReduceScatter(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                               cudaStream_t) {
  return ncclInternalError;
}

}  // extern "C"

namespace talea::testing {
namespace {

// Opening, waiting for the rank, aborting and asking who is missing, one after the other, would
// take 0.7 + 1 + 1.5 + 1 s.
TEST(SlowNccl, ARankThatNeverComesIsNamedWithinTheTimeoutAndTwoSeconds) {
  const TempDir folder;
  const auto host = make_shared_communicator({0, 2, folder.file("world"), 60});
  const auto other = make_shared_communicator({1, 2, folder.file("world"), 60});
  NcclOptions o;
  o.size = 2;
  o.timeout_s = 1;
  o.library = "";  // the program
  o.unique_id = nccl_unique_id(o.library);
  o.host = host.get();
  const auto begin = std::chrono::steady_clock::now();
  std::string said;
  try {
    make_nccl_communicator(o);
  } catch (const Error& e) {
    said = e.what();
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  EXPECT_EQ(said.rfind("rank 1: did not arrive", 0), 0u) << said;
  EXPECT_LE(took.count(), o.timeout_s + 2);
  EXPECT_EQ(aborts, 1);
}

}  // namespace
}  // namespace talea::testing
