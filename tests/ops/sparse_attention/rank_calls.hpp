// What: the calls of one rank, and the shares of heads and rows that it holds.
// Why: the tests of one cut and those of two at once compare with the same world of one.
// Never: compares ranks only with each other.
#pragma once

#include "ops/sparse_attention/lanes.hpp"
#include "talea/ranks.hpp"

namespace talea::testing {

inline Tensor slice(Tensor t, int dim, int64_t first, int64_t n, int64_t step = 1) {
  if (!t) return t;
  t.data = static_cast<char*>(t.data) + first * t.stride[dim] * size_of(t.dtype);
  t.shape[dim] = n;
  t.stride[dim] *= step;
  return t;
}

struct Shares {
  std::vector<int64_t> begin, count;
};
inline Shares shares(int64_t total, int ranks, bool uneven) {
  Shares s;
  int64_t at = 0;
  for (int r = 0; r < ranks; ++r) {
    int64_t n = total * (r + 1) / ranks - total * r / ranks;
    if (uneven && ranks > 1)
      n = r == 0 ? 0 : r + 1 == ranks ? total - at : std::min<int64_t>(1, total - at);
    s.begin.push_back(at);
    s.count.push_back(n);
    at += n;
  }
  return s;
}

// Every tensor of one rank's call, forward and backward.
struct RankCall {
  sa::Inputs in;
  sa::Outputs out, grad;
  sa::Ranks ranks;
  sa::Options options;

  void run() {
    sa::Inputs first = in;
    first.d_o = first.d_lse = {};
    Room room(sa::workspace_bytes(sa::describe(sa::Pass::forward, first, out, options, ranks)));
    sa::forward(first, out, options, room.workspace(), ranks);
    in.o = out.o;
    in.lse = out.lse;
    Room more(sa::workspace_bytes(sa::describe(sa::Pass::backward, in, grad, options, ranks)));
    sa::backward(in, grad, options, more.workspace(), ranks);
    EXPECT_TRUE(room.intact() && more.intact());
  }
};

struct Whole {
  Grid o, lse, dq, d_sink;
  explicit Whole(const Case& c)
      : o(c.o_dtype, {c.batch(), c.queries(), c.heads(), c.value_dim()}),
        lse(DType::f32, {c.batch(), c.queries(), c.heads()}),
        dq(c.dq_dtype, c.q.shape()),
        d_sink(DType::f32, {c.heads()}) {}
};

inline Case rank_case(uint64_t seed, DType dtype = DType::f32) {
  Spec s;
  s.seed = seed, s.batch = 2, s.queries = 9, s.heads = 7, s.keys = 31, s.dtype = dtype;
  s.sink = s.d_lse = s.causal = s.positions = true;
  return make_case(s);
}

class RankedLane : public AttentionLane {
 protected:
  void expect_close(const Whole& w, const std::vector<double>& dkv, const Outcome& one) {
    EXPECT_EQ(w.o.numbers(), one.o);
    EXPECT_EQ(w.lse.numbers(), one.lse);
    EXPECT_EQ(w.dq.numbers(), one.dq);
    EXPECT_LE(relative_l2(dkv, one.dkv), 1e-5);
    EXPECT_LE(relative_l2(w.d_sink.numbers(), one.d_sink), 1e-5);
  }
};

}  // namespace talea::testing
