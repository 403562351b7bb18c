// What: the collectives on host memory, built on one primitive: an exchange of blocks.
// Why: threads and MPI share chunking and the order of every sum; only the transport differs.
// Never: lets the order of a sum depend on which rank arrived first.
#pragma once

#include <vector>

#include "talea/communicator.hpp"

namespace talea {

class HostCommunicator : public Communicator {
 public:
  // A world has two blocks for every pair of ranks: the more ranks, the smaller they are. Results
  // do not depend on it.
  static constexpr int64_t block_bytes(int ranks) {
    const int64_t pairs = int64_t{ranks} * ranks, share = (int64_t{32} << 20) / pairs / 64 * 64;
    return share > largest_block_bytes ? largest_block_bytes : share < 64 ? 64 : share;
  }
  static constexpr int64_t largest_block_bytes = int64_t{128} << 10;

  HostCommunicator(int rank, int size);
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void all_gather(const void* send, void* recv, int64_t bytes, Stream) override;
  void all_reduce_sum(void* buffer, int64_t count, DType dtype, Stream) override;
  void reduce_scatter_sum(const void* send, void* recv, int64_t count, DType dtype,
                          Stream) override;

 protected:
  // bytes <= block_bytes(size()) of send[r] go to rank r; recv[r] takes what rank r sent here.
  // send[r] and recv[r] may be the same address for r == rank(). `what` names the collective in
  // errors.
  virtual void exchange(const void* const* send, void* const* recv, int64_t bytes,
                        const char* what) = 0;

 private:
  void scatter_sums(const std::vector<const char*>& blocks, char* recv, int64_t count, DType dtype,
                    const char* what);
  char* slot(int r) { return scratch_.data() + r * block_bytes_; }

  int rank_, size_;
  int64_t block_bytes_;
  std::vector<char> scratch_;  // one block for each rank
  // The slice that this rank sums, or the last elements, one less than ranks.
  std::vector<char> own_;
};

}  // namespace talea
