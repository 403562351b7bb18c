// What: the edges of section 5 of the contract, on every lane.
// Why: padding, empty rows and odd numbers are where kernels of the field break.
// Never: accepts NaN where the contract says a number, or the reverse.
#include <cmath>
#include <functional>

#include "ops/sparse_attention/lanes.hpp"

namespace talea::testing {
namespace {

constexpr double inf = INFINITY;

class AttentionEdges : public AttentionLane {
 protected:
  // Specs of each dtype with every output.
  static Spec plain(DType dtype = DType::f32) {
    Spec s;
    s.dtype = dtype, s.sink = s.d_lse = true, s.foreign = false;
    return s;
  }
  Case logits_case(const std::vector<double>& logits, double sink) const;
};
TALEA_ATTENTION_LANES(AttentionEdges);

void every_slot(Case& c, int64_t value) {
  for (int64_t b = 0; b < c.batch(); ++b)
    for (int64_t s = 0; s < c.queries(); ++s)
      for (int64_t g = 0; g < c.groups(); ++g)
        for (int64_t k = 0; k < c.slots(); ++k) c.indices.put_integer(value, b, s, g, k);
}

void expect_all(const std::vector<double>& numbers, double value, const char* name) {
  for (const double x : numbers) ASSERT_EQ(x, value) << name;
}

TEST_P(AttentionEdges, RowsWithoutValidSlots) {
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const double sink : {0.0, 2.4e38, -inf, inf}) {
      Case c = make(plain(dtype));
      every_slot(c, -1);
      for (int64_t h = 0; h < c.heads(); ++h) c.sink.put(sink, h);
      const Outcome o = run(c);
      expect_all(o.o, 0, "o");
      expect_all(o.lse, inf, "lse");
      expect_all(o.row_max, -inf, "row_max");
      expect_all(o.dq, 0, "dq");
      expect_all(o.dkv, 0, "dkv");
      expect_all(o.d_sink, 0, "d_sink");
    }
}

TEST_P(AttentionEdges, EmptyExtents) {
  for (int which = 0; which < 5; ++which) {
    Spec s = plain();
    if (which == 0) s.queries = 0;
    if (which == 1) s.keys = 0;
    if (which == 2) s.slots = 0;
    if (which == 3) s.heads = 0;
    if (which == 4) s.batch = 0;
    const Case c = make(s);
    const Outcome o = run(c);
    expect_all(o.o, 0, "o");
    expect_all(o.dkv, 0, "dkv");
  }
}

TEST_P(AttentionEdges, OneKeyOnce) {
  Spec s = plain();
  s.sink = s.d_lse = false;
  Case c = make(s);
  every_slot(c, -1);
  for (int64_t q = 0; q < c.queries(); ++q) c.indices.put_integer(7, 0, q, 0, 4);
  const Outcome o = run(c);
  EXPECT_EQ(judge(c, o), "");
  for (size_t i = 0; i < o.o.size(); ++i)
    EXPECT_NEAR(o.o[i], c.kv.get(0, 7, 0, static_cast<int64_t>(i) % c.value_dim()), 1e-6);
  for (size_t i = 0; i < o.lse.size(); ++i) EXPECT_EQ(o.lse[i], o.row_max[i]);
}

TEST_P(AttentionEdges, OneKeyInTwoSlots) {
  Spec s = plain();
  s.sink = false;
  Case c = make(s);
  every_slot(c, -1);
  for (int64_t q = 0; q < c.queries(); ++q)
    for (const int64_t k : {2, 9}) c.indices.put_integer(7, 0, q, 0, k);
  const Outcome o = run(c);
  EXPECT_EQ(judge(c, o), "");
  for (size_t i = 0; i < o.lse.size(); ++i)
    EXPECT_NEAR(o.lse[i], o.row_max[i] + std::log(2.0), 1e-6);
}

TEST_P(AttentionEdges, ForeignIndicesAreAbsentAndCounted) {
  for (const bool wide : {false, true}) {
    Spec s = plain();
    s.index64 = wide;
    Case c = make(s);
    const Outcome clean = run(c);
    const std::vector<int64_t> odd = {INT32_MIN, -123456, c.kv.shape()[1], INT32_MAX};
    for (size_t i = 0; i < odd.size(); ++i)
      c.indices.put_integer(odd[i], 0, 1, 0, static_cast<int64_t>(i));
    if (wide) c.indices.put_integer((int64_t{1} << 32) + 3, 0, 1, 0, 4);
    const Outcome o = run(c);
    EXPECT_EQ(judge(c, o), "");
    EXPECT_EQ(o.forward.slots_foreign, clean.forward.slots_foreign + (wide ? 5 : 4));
    EXPECT_EQ(o.status[0], o.forward.slots_foreign);
    EXPECT_EQ(o.status[1], c.slots());
    EXPECT_EQ(o.status[2], INT32_MIN);
  }
}

TEST_P(AttentionEdges, CheckedNamesTheIndexAndWritesNothing) {
  Case c = make(plain());
  c.options.index_check = sa::IndexCheck::checked;
  c.indices.put_integer(c.kv.shape()[1] + 5, 0, 3, 0, 2);
  try {
    run(c);
    FAIL() << "a foreign index passed";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::invalid_data);
    for (const char* part : {"indices", "42", "batch 0", "query 3", "slot 2"})
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << part << ": " << e.what();
  }
}

// Bits of everything but what `part` says.
void expect_same(const Outcome& a, const Outcome& b) {
  const auto same = [](const std::vector<double>& x, const std::vector<double>& y,
                       const char* name) {
    ASSERT_EQ(x.size(), y.size());
    for (size_t i = 0; i < x.size(); ++i)
      ASSERT_TRUE(x[i] == y[i] || (std::isnan(x[i]) && std::isnan(y[i])))
          << name << "[" << i << "]";
  };
  same(a.o, b.o, "o"), same(a.lse, b.lse, "lse"), same(a.row_max, b.row_max, "row_max");
  same(a.dq, b.dq, "dq"), same(a.dkv, b.dkv, "dkv"), same(a.d_sink, b.d_sink, "d_sink");
}

TEST_P(AttentionEdges, RowsThatNobodyNamesAreNeverRead) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Spec s = plain(dtype);
    s.causal = s.topk_length = true;
    Case c = make(s);
    const Outcome clean = run(c);
    std::vector<bool> named(static_cast<size_t>(c.kv.shape()[1]), false);
    for (int64_t q = 0; q < c.queries(); ++q)
      for (int64_t k = 0; k < c.slots(); ++k)
        if (const int64_t row = named_row(c, 0, q, 0, k); row >= 0)
          named[static_cast<size_t>(row)] = true;
    int poisoned = 0;
    for (size_t j = 0; j < named.size(); ++j)
      for (int64_t x = 0; !named[j] && x < c.dim(); ++x, ++poisoned)
        c.kv.put(x % 2 ? NAN : inf, 0, static_cast<int64_t>(j), 0, x);
    ASSERT_GT(poisoned, 0);
    expect_same(run(c), clean);
  }
}

TEST_P(AttentionEdges, NaNStaysWhereItBelongs) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Case c = make(plain(dtype));
    const Outcome clean = run(c);
    c.q.put(NAN, 0, 3, 1, 5);
    Outcome o = run(c);
    EXPECT_EQ(judge(c, o), "");
    for (int64_t i = 0; i < c.queries() * c.heads(); ++i) {
      const auto at = static_cast<size_t>(i);
      if (i == 3 * c.heads() + 1)
        EXPECT_TRUE(std::isnan(o.lse[at]));
      else
        EXPECT_EQ(o.lse[at], clean.lse[at]);
    }
    c = make(plain(dtype));
    c.d_o.put(NAN, 0, 1, 0, 2);
    o = run(c);
    EXPECT_EQ(judge(c, o), "");
    c = make(plain(dtype));
    c.kv.put(NAN, 0, c.indices.integer(0, 0, 0, 0) < 0 ? 1 : c.indices.integer(0, 0, 0, 0), 0, 1);
    EXPECT_EQ(judge(c, run(c)), "");
  }
}

// One head of one column: the logits of a query are the keys' numbers.
Spec of_logits(const std::vector<double>& logits) {
  Spec s;
  s.queries = 1, s.heads = 1, s.dim = 2, s.value_dim = 1, s.sink = true, s.d_lse = true;
  s.keys = s.slots = static_cast<int64_t>(logits.size());
  s.scale = 1, s.foreign = false;
  return s;
}
Case with_logits(Case c, const std::vector<double>& logits, double sink) {
  const int64_t column = c.value_dim();  // beyond the value's columns
  for (int64_t x = 0; x < c.dim(); ++x) c.q.put(x == column, 0, 0, 0, x);
  c.sink.put(sink, 0);
  for (size_t j = 0; j < logits.size(); ++j) {
    const auto at = static_cast<int64_t>(j);
    c.kv.put(logits[j], 0, at, 0, column);
    c.indices.put_integer(at, 0, 0, 0, at);
  }
  return c;
}

Case AttentionEdges::logits_case(const std::vector<double>& logits, double sink) const {
  return with_logits(make(of_logits(logits)), logits, sink);
}

TEST_P(AttentionEdges, InfiniteLogits) {
  for (const double sink : {0.5, -inf}) {
    Outcome o = run(logits_case({1, inf, 2}, sink));
    EXPECT_TRUE(std::isnan(o.lse[0]) && std::isnan(o.o[0]));
    Case c = logits_case({1, -inf, 2}, sink);
    c.d_o = c.d_lse = Grid();
    o = run(c);
    EXPECT_EQ(judge(c, o), "");
    EXPECT_TRUE(std::isfinite(o.o[0]));
    c = logits_case({-inf, -inf}, sink);
    c.d_o = c.d_lse = Grid();
    o = run(c);
    if (sink == -inf) {
      EXPECT_TRUE(std::isnan(o.lse[0]) && std::isnan(o.o[0]));
    } else {
      EXPECT_EQ(o.o[0], 0);
      EXPECT_EQ(o.lse[0], -inf);
    }
  }
}

TEST_P(AttentionEdges, LogitsFarFromZero) {
  for (const std::vector<double>& logits : {std::vector<double>{-200, -201, -199.5},
                                            {-3e38, -2.9e38, -3.3e38},
                                            {3e38, 2.9e38, 1e38},
                                            {-1e31, -1.0001e31, -1e30},
                                            {88.9, 89.5, 120}})
    for (const double sink : {-inf, 0.0}) {
      Case c = logits_case(logits, sink);
      c.options.scale = logits[0] == -1e31 ? -1 : 1;
      const Outcome o = run(c);
      EXPECT_EQ(judge(c, o), "") << logits[0] << " sink " << sink;
      EXPECT_TRUE(std::isfinite(o.lse[0]));
    }
}

// Softmax knows distances alone: keys that share a row far from 0 share it as they do at 0, in o
// and in gradients, though an lse of fp32 (and of fp64) no longer tells one key from two.
TEST_P(AttentionEdges, EqualLogitsFarFromZero) {
  for (const double logit : {-1e31, -1e17, -1e9, -4321.0, 100.0, 1e5, 3e37})
    for (const bool saved : {true, false}) {
      Case near = logits_case({0, 0, -300}, -inf), far = logits_case({logit, logit, -3e38}, -inf);
      near.saved = far.saved = saved;
      const Outcome at = run(near), o = run(far);
      const double stored = far.kv.get(0, 0, 0, far.value_dim());  // 16 bits round it
      EXPECT_EQ(o.row_max[0], at.row_max[0] + stored);
      EXPECT_NEAR(o.o[0], at.o[0], 1e-6 * std::abs(at.o[0])) << logit;
      for (size_t i = 0; i < o.dkv.size(); ++i)
        EXPECT_NEAR(o.dkv[i], at.dkv[i], 2e-6 * std::max(1.0, std::abs(at.dkv[i]))) << logit;
      EXPECT_NEAR(o.dq[0], at.dq[0], 2e-6 * std::max(1.0, std::abs(at.dq[0]))) << logit;
    }
}

// A sink beside them takes its third there, too: its share is a distance, and so is its gradient.
TEST_P(AttentionEdges, ASinkFarFromZeroBesideItsKeys) {
  for (const double logit : {-1e31, -4321.0, 100.0, 1e5, 3e37})
    for (const bool saved : {true, false}) {
      Case near = logits_case({0, 0, -300}, 0), far = logits_case({logit, logit, -3e38}, 0);
      far.sink.put(far.kv.get(0, 0, 0, far.value_dim()), 0);  // 16 bits round it
      near.saved = far.saved = saved;
      const Outcome at = run(near), o = run(far);
      EXPECT_NE(at.d_sink[0], 0);
      EXPECT_NEAR(o.d_sink[0], at.d_sink[0], 2e-6 * std::abs(at.d_sink[0])) << logit;
      EXPECT_NEAR(o.o[0], at.o[0], 1e-6 * std::abs(at.o[0])) << logit;
      for (size_t i = 0; i < o.dkv.size(); ++i)
        EXPECT_NEAR(o.dkv[i], at.dkv[i], 2e-6 * std::max(1.0, std::abs(at.dkv[i]))) << logit;
    }
}

// Absent slots beside a row far below 0: a zero-filled key would have logit 0.
TEST_P(AttentionEdges, AbsentSlotsHaveNoLogit) {
  for (const int64_t slots : {1, 15, 16, 17, 63, 64, 65, 129}) {
    Spec s = plain();
    s.slots = slots;
    Case c = make(s);
    every_slot(c, -1);
    for (int64_t q = 0; q < c.queries(); ++q) {
      c.indices.put_integer(5 + q, 0, q, 0, slots - 1);
      for (int64_t h = 0; h < c.heads(); ++h)
        for (int64_t x = 0; x < c.dim(); ++x) c.q.put(-300 * c.kv.get(0, 5 + q, 0, x), 0, q, h, x);
    }
    expect_right(c, std::to_string(slots));
  }
}

TEST_P(AttentionEdges, Sinks) {
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const double sink : {-inf, inf, 2.4e38, -2.4e38, 0.0}) {
      Spec s = plain(dtype);
      Case c = make(s), none = c;
      for (int64_t h = 0; h < c.heads(); ++h) c.sink.put(sink, h);
      const Outcome o = run(c);
      EXPECT_EQ(judge(c, o), "") << sink;
      none.sink = Grid();
      const Outcome without = run(none);
      for (size_t i = 0; i < o.lse.size(); ++i) EXPECT_EQ(o.lse[i], without.lse[i]);
      if (sink > 1e38) {
        expect_all(o.o, 0, "o");
        expect_all(o.d_sink, 0, "d_sink");
      }
      for (size_t i = 0; sink < -1e38 && i < o.o.size(); ++i) EXPECT_EQ(o.o[i], without.o[i]);
    }
  Case c = make(plain());
  c.sink.put(NAN, 1);
  const Outcome o = run(c);
  EXPECT_EQ(judge(c, o), "");
  EXPECT_TRUE(std::isnan(o.o[static_cast<size_t>(c.value_dim())]));
  EXPECT_TRUE(std::isfinite(o.o[0]));
}

TEST_P(AttentionEdges, LengthsBelowZeroAndBeyondK) {
  Spec s = plain();
  s.topk_length = true;
  Case c = make(s);
  const int64_t lengths[] = {-9, 0, 1, 1000, 11};
  for (int64_t q = 0; q < 5; ++q) c.topk_length.put_integer(lengths[q], 0, q);
  expect_right(c);
  const Outcome clean = run(c);
  for (int64_t q = 0; q < 3; ++q)  // garbage behind the length is never read
    for (int64_t k = std::max<int64_t>(lengths[q], 0); k < c.slots(); ++k)
      c.indices.put_integer(INT32_MAX - k, 0, q, 0, k);
  const Outcome o = run(c);
  expect_same(o, clean);
  EXPECT_EQ(o.forward.slots_foreign, clean.forward.slots_foreign);
}

TEST_P(AttentionEdges, KeyZeroAndMoreSlotsThanKeys) {
  Spec s = plain();
  s.keys = 3, s.slots = 70;
  Case c = make(s);
  expect_right(c, "K > S_kv");
  every_slot(c, -1);
  for (int64_t q = 0; q < c.queries(); ++q) c.indices.put_integer(0, 0, q, 0, 3 * q);
  expect_right(c, "only key 0");
  const Outcome o = run(c);
  for (size_t i = static_cast<size_t>(c.dim()); i < o.dkv.size(); ++i) EXPECT_EQ(o.dkv[i], 0);
}

TEST_P(AttentionEdges, AnotherSequencesRowIsAbsentALocalOneBeyondForeign) {
  Spec s = plain();
  s.thd = true;
  Case c = make(s);
  every_slot(c, c.kv.shape()[1] - 1);  // of the last sequence
  Outcome o = run(c);
  EXPECT_EQ(judge(c, o), "");
  EXPECT_EQ(o.forward.slots_foreign, 0);
  EXPECT_EQ(o.lse[0], inf);  // query 0 is of the first
  c.options.index_space = sa::IndexSpace::sequence;
  every_slot(c, c.kv.shape()[1] / 2);  // beyond every sequence
  o = run(c);
  EXPECT_EQ(judge(c, o), "");
  EXPECT_GT(o.forward.slots_foreign, 0);
}

TEST_P(AttentionEdges, SecondBackwardAndParts) {
  const Case c = make(plain(DType::bf16));
  expect_same(run(c), run(c));
  // dq, dkv or d_sink alone equal the full call.
  const Outcome whole = run(c);
  sa::Options o = c.options;
  o.lane = whole.backward.lane;
  for (int part = 0; part < 2; ++part) {
    Case repeated = c;
    repeated.saved = false;
    const Outcome all = run(repeated);
    Home home(place());
    const sa::Inputs in = inputs_of(c, home);
    Grid g(DType::bf16, part ? std::vector<int64_t>{1, c.kv.shape()[1], 1, c.dim()} : c.q.shape());
    sa::Outputs out;
    (part ? out.dkv : out.dq) = home.tensor(g);
    if (sa::explain(sa::describe(sa::Pass::backward, in, out, o)).lane.empty()) o.lane = "auto";
    Room room(sa::workspace_bytes(sa::describe(sa::Pass::backward, in, out, o)), place());
    const sa::Result r =
        sa::backward(in, out, o, room.workspace(), {}, place() ? place()->stream() : nullptr);
    home.fetch();
    EXPECT_TRUE(r.forward_repeated);
    EXPECT_EQ(g.numbers(), part ? all.dkv : all.dq);
  }
}

TEST_P(AttentionEdges, AnyNumberOfThreads) {
  for (const DType dtype : {DType::bf16, DType::f32}) {  // 16 bits hide the order of a sum
    Spec s = plain(dtype);
    s.queries = 23, s.heads = 17, s.slots = 60;
    const Case c = make(s);
    const Outcome one = run(c, 1);
    for (const int threads : {2, 3, 5, 16}) expect_same(run(c, threads), one);
  }
}

}  // namespace
}  // namespace talea::testing
