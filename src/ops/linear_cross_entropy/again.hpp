// What: a call that is checked and planned once, and made again with other addresses.
// Why: of a small call most of the host's time went into checking what the call before had.
// Never: runs on addresses that it has not compared with each other.
#pragma once

#include "ops/linear_cross_entropy/contract.hpp"

namespace talea::lce {

class Again {
 public:
  // `workspace_bytes`: of every call. A world of one; the tensors' own addresses are not kept.
  Again(const Inputs& in, const Outputs& out, const Options& options, int64_t workspace_bytes);

  const char* lane() const { return ready_.lane->name; }
  size_t tensors() const { return extents_.size(); }
  // An address for each tensor that is present, in the order of input_fields and output_fields.
  void run(std::span<void* const> addresses, void* workspace, Stream stream) const;

 private:
  struct Extent {  // bytes that the view can touch, from its address on
    int64_t first, last;
    bool written;
  };
  bool apart(std::span<void* const> addresses, const void* workspace) const;

  Inputs in_;
  Outputs out_;
  Options options_;
  int64_t workspace_bytes_;
  std::vector<Tensor Inputs::*> given_;
  std::vector<Tensor Outputs::*> asked_;
  std::vector<Extent> extents_;
  Prepared<Operator> ready_;
};

}  // namespace talea::lce
