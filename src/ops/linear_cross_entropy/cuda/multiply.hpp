// What: runs the three products of a chunk through cuBLASLt.
// Why: columns of the tail, panels, tiles and second terms are decided in one place, and the way
// through a call (lane.cpp) reads as its steps.
// Never: allocates or waits.
#pragma once

#include "ops/linear_cross_entropy/cuda/products.hpp"

namespace talea::lce::cuda {

class Multiply {
 public:
  Multiply(const Call& call, const Plan& plan, const Buffers& buffers, cudaStream_t stream)
      : c_(call), p_(call.problem), plan_(plan), b_(buffers), stream_(stream) {}

  // Once a call: the weight as the products read it.
  void prepare();
  bool has_products() const { return p_.vocab_local > 0 && p_.hidden > 0; }
  // Logits of the panel's columns over rows of x.
  void logits(const Panel& panel, const void* x, int64_t rows, float* to) const;
  // The chunk's dX from its dz.
  void dx(int64_t rows) const;
  // The chunk's dz into the weight's gradient. multiprocessors: what the products may take; 0: all.
  void dw(const ChunkRows& rows, int multiprocessors) const;
  // Once a call, after the last chunk: what the products did not store themselves. `formed`:
  // logical rows whose gradient was formed.
  void finish_dw(int64_t formed) const;
  // After that, of the hidden rows: what dW's products left out of it (targets_apart).
  void add_targets_to_dw(const View& x) const;

 private:
  // Columns of the vocabulary in one product, and the weight's rows for them.
  struct Section {
    int64_t begin, columns;
    bool tail;
    const char* weight;
    int64_t weight_stride;
  };
  std::vector<Section> sections(const Panel& panel) const;
  void dx_part(int64_t row, const DxPart& part) const;
  void run(device::Product g, const device::ProductBuffers& x) const;
  void run(const device::Product& g, const void* a, const void* b, void* c, float alpha,
           float beta) const;
  char* dz_at(char* base, int64_t row, int64_t column) const {
    return base + (row * plan_.logits_stride + column) * size_of(plan_.compute);
  }
  bool outside() const { return plan_.dw_in_place || plan_.dw_direct; }

  const Call& c_;
  const Problem& p_;
  const Plan& plan_;
  const Buffers& b_;
  cudaStream_t stream_;
  const char* weight_ = nullptr;
};

}  // namespace talea::lce::cuda
