// What: the row kernels of lane cuda's index loss, as host functions that queue them.
// Why: what happens between the library products is said once, with its shapes.
// Never: allocates, synchronises, or multiplies matrices.
//
// Rows of a chunk are [n, heads, Kp], as in kernels.hpp; of a dense loss Kp is the number of keys,
// rounded up to 8. Only the first `columns` of them are read or written.
#pragma once

#include "ops/sparse_attention/cuda/kernels.hpp"

namespace talea::sparse_attention::cuda {

struct LossTables {
  IndexTables index;
  View row_weight;
  double coeff = 1;
  bool relu = true, dense = false;
  int64_t keys = 0;  // rows of a batch entry
};

// Over the whole call, in the workspace.
struct LossSums {
  double rows = 0;   // N
  double total = 0;  // of the queries' losses, in their order
};
void begin_loss(LossSums* sums, double rows, cudaStream_t stream);
// rows += queries with a key and a weight.
void count_rows(const LossTables& t, int64_t batch, LossSums* sums, cudaStream_t stream);
void end_loss(const LossSums* sums, const View& loss, cudaStream_t stream);

// rows [n, Kp] of a dense loss: b * keys + j of each key within a query's bounds, -1 else.
void find_bounded(const LossTables& t, const Chunk& chunk, int64_t columns, int64_t* rows,
                  cudaStream_t stream);
// rows [Kp]: every key of batch entry b.
void name_all(int64_t b, int64_t keys, int64_t padded, int64_t* rows, cudaStream_t stream);

// index_q [n, copies, Hi, di] in `to`, as it lies in memory: scales come later.
void pack_index_q(const View& q, const Chunk& chunk, int64_t dim, int copies, DType to,
                  void* packed, cudaStream_t stream);

// What a head's weights are relative to: e^(s - max) / sum.
struct HeadSum {
  float max, sum;
};
// lse: of the attention, may be absent: then by a pass over S [n, H, Kp].
void normalise(const View& lse, float scale, const Chunk& chunk, int64_t columns,
               const int64_t* rows, const float* logits, HeadSum* sums, cudaStream_t stream);
// teacher [n, Kp]: the sum of the weights over heads, not normalised; 0 where there is no key.
void teach(float scale, const Chunk& chunk, int64_t columns, const int64_t* rows,
           const float* logits, const HeadSum* sums, float* teacher, cudaStream_t stream);

// z [n, Hi, Kp] -> scores [n, Kp].
void score(const LossTables& t, const Chunk& chunk, int64_t columns, const int64_t* rows,
           const float* z, float* scores, cudaStream_t stream);
// scores -> the gradients of the scores; losses [n].
void diverge(const LossTables& t, const Chunk& chunk, int64_t columns, const int64_t* rows,
             const float* teacher, float* scores, const LossSums* sums, double* losses,
             cudaStream_t stream);
void add_losses(const double* losses, int64_t n, LossSums* sums, cudaStream_t stream);

// Which scale of e4m3 the gradient of a product has as a factor: of the other operand.
enum class Factor { none, of_key, of_query };
// z, gradients g [n, Kp] -> dz [n, copies, Hi, Kp] as operands: in bf16 what rounding left stands
// behind. dw may be absent.
void chain(const LossTables& t, Factor factor, const Chunk& chunk, int64_t columns,
           const int64_t* rows, const float* z, const float* g, int copies, DType to, void* dz,
           const View& dw, cudaStream_t stream);
// values [n, copies, Hi, di] -> dindex_q.
void write_dindex_q(const float* values, const Chunk& chunk, int64_t dim, int copies,
                    const View& to, cudaStream_t stream);

}  // namespace talea::sparse_attention::cuda
