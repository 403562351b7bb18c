// What: what forward and backward of lane cpu share: tiles of gathered rows, panels of heads.
// Why: a row is fetched once for all heads of a query, in either direction.
// Never: included by another lane.
#pragma once

#include <vector>

#include "device/cpu/gather_product.hpp"
#include "ops/sparse_attention/cpu/plan.hpp"
#include "ops/sparse_attention/cpu/softmax.hpp"

namespace talea::sparse_attention::cpu {

// One query and group, and where its list has been read to.
struct Cursor {
  int64_t b = 0, s = 0, g = 0;
  HeadRange heads;
  QueryRule query;
  int64_t slot = 0;
  int64_t count() const { return heads.last - heads.first; }
};

// One row of kv in fp32, whatever its storage; rounded at most once.
void load_key_row(const Problem& p, const Args& a, const KeyRow& row, int64_t g, float* to);

class Attention {
 public:
  Attention(const Call& c, const Plan& plan);
  void forward();
  void backward();

 private:
  Cursor start(int64_t b, int64_t s, int64_t g) const;
  // The next valid slots, up to a tile: where their rows lie, and which rows they are.
  int64_t next_tile(Cursor& at, const float** to, int64_t* rows, float* widened) const;
  // Heads of a query as fp32 rows: in place, or widened into `room`.
  void head_rows(const View& v, const Cursor& at, int64_t columns, float* room,
                 const float** to) const;
  // The last tile's scores of all heads: keys [n], panels of q or d_o.
  void product(const float* const* keys, int64_t n, int64_t wide, const float* panels,
               int64_t depth, float* to, const float* const* next, int64_t next_n) const;

  // Leaves o (normalised), max and lse of each head in the thread's buffers.
  int64_t forward_query(Cursor at, const ThreadBuffers& w) const;
  void finish_heads(const Cursor& at, int64_t valid, const ThreadBuffers& w) const;
  void write_heads(const Cursor& at, const ThreadBuffers& w) const;

  void backward_query(Cursor at, int64_t place, const ThreadBuffers& w) const;
  void deltas(int64_t heads, const ThreadBuffers& w, float* delta) const;
  void prepare_heads(const Cursor& at, int64_t place, const ThreadBuffers& w) const;
  void measure_heads(Cursor at, const ThreadBuffers& w) const;
  void far_heads(const Cursor& at, int64_t place, const ThreadBuffers& w) const;
  void keep_weights(const Cursor& at, int64_t list, int64_t first, int64_t n,
                    const ThreadBuffers& w) const;
  void cut_rows(int64_t first, int64_t queries, std::vector<int64_t>& cuts) const;
  void sum_keys(int64_t first, int64_t queries, int64_t low, int64_t high, int64_t base,
                const ThreadBuffers& w) const;
  void backward_entry(int64_t base, int64_t first, int64_t last);
  void clear_dkv(int64_t base, int64_t rows, int thread) const;
  void round_dkv(int64_t base, int64_t row) const;
  float* dkv_row(int64_t base, int64_t row, int64_t g) const;

  int64_t padded(const Cursor& at) const;

  const Problem& p_;
  const Args& a_;
  const Plan& plan_;
  Layout layout_;
  KeyRule rule_;
  std::vector<double> d_sink_;
};

}  // namespace talea::sparse_attention::cpu
