// What: properties that hold whatever the numbers: permutations, unselected keys, merged states,
//       grids, precision over context lengths; on every lane.
// Why: a formula that is wrong everywhere agrees with itself; these do not.
// Never: needs a yardstick where exact equality is promised.
#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "algebra/attention_state.hpp"
#include "ops/sparse_attention/lanes.hpp"

namespace talea::testing {
namespace {

class AttentionInvariants : public AttentionLane {
 protected:
  // Between two sums of weights: those of 16 bits are rounded once.
  static double room(const Case& c) { return size_of(c.q.dtype()) == 2 ? 1e-2 : 2e-6; }
  // Nothing where the limit is below what the lane needs, which is an error.
  std::optional<Outcome> run_within(Case c, int64_t limit) {
    c.options.workspace_limit_bytes = limit;
    try {
      return run(c);
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("workspace_limit"), std::string::npos) << e.what();
      return std::nullopt;
    }
  }
};
TALEA_ATTENTION_LANES(AttentionInvariants);

Spec plain() {
  Spec s;
  s.sink = s.d_lse = true, s.foreign = false;
  return s;
}

// Absent slots appended and other rows added change nothing, bit for bit.
TEST_P(AttentionInvariants, AbsentSlotsAndOtherRows) {
  const Case c = make(plain());
  const Outcome one = run(c);
  Case more = c;
  more.indices = Grid(DType::i32, {1, c.queries(), 1, c.slots() + 70});
  more.kv = Grid(c.kv.dtype(), {1, c.kv.shape()[1] + 9, 1, c.dim()});
  Random random(5);
  fill_normal(more.kv, random);
  for (int64_t j = 0; j < c.kv.shape()[1]; ++j)
    for (int64_t x = 0; x < c.dim(); ++x) more.kv.put(c.kv.get(0, j, 0, x), 0, j, 0, x);
  for (int64_t q = 0; q < c.queries(); ++q)
    for (int64_t k = 0; k < c.slots() + 70; ++k)
      more.indices.put_integer(k < c.slots() ? c.indices.integer(0, q, 0, k) : -1, 0, q, 0, k);
  const Outcome two = run(more);
  EXPECT_EQ(two.o, one.o);
  EXPECT_EQ(two.lse, one.lse);
  EXPECT_EQ(two.dq, one.dq);
  for (size_t i = 0; i < one.dkv.size(); ++i) ASSERT_EQ(two.dkv[i], one.dkv[i]);
  for (size_t i = one.dkv.size(); i < two.dkv.size(); ++i) ASSERT_EQ(two.dkv[i], 0);
}

// A query has the bits alone that it has among many, however a lane cuts few of them.
TEST_P(AttentionInvariants, AQueryAloneHasTheBitsOfOneAmongMany) {
  Spec few;
  few.queries = 24, few.heads = 3, few.dim = 32, few.slots = 700, few.keys = 800;
  few.sink = true, few.backward = false;
  Spec packed = few;
  packed.storage = sa::KvStorage::fp8_656, packed.dim = 576, packed.value_dim = 512;
  packed.queries = 15, packed.heads = 66, packed.slots = 520;
  for (const Spec& s : {few, packed}) {
    const Case many = make(s);
    ++runs_;
    if (!accepts(many)) continue;
    Case alone = many;
    const int64_t heads = many.heads(), values = many.value_dim();
    alone.q = Grid(many.q.dtype(), {1, 1, heads, many.dim()});
    alone.indices = Grid(DType::i32, {1, 1, 1, many.slots()});
    for (const int64_t q : {int64_t{0}, s.queries - 1}) {
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t x = 0; x < many.dim(); ++x) alone.q.put(many.q.get(0, q, h, x), 0, 0, h, x);
      for (int64_t k = 0; k < many.slots(); ++k)
        alone.indices.put_integer(many.indices.integer(0, q, 0, k), 0, 0, 0, k);
      const Outcome one = run(alone), all = run(many);
      for (int64_t h = 0; h < heads; ++h) {
        const auto row = static_cast<size_t>(h), at = static_cast<size_t>(q * heads + h);
        ASSERT_EQ(one.lse[row], all.lse[at]) << describe(s);
        ASSERT_EQ(one.row_max[row], all.row_max[at]) << describe(s);
        for (int64_t x = 0; x < values; ++x)
          ASSERT_EQ(one.o[static_cast<size_t>(h * values + x)],
                    all.o[static_cast<size_t>((q * heads + h) * values + x)])
              << describe(s) << " head " << h << " column " << x;
      }
    }
  }
}

// Few queries of long lists may be cut over many blocks, which needs memory. Lists with holes, of
// uneven lengths, of three tiles of heads; logits whose maximum grows along a list.
TEST_P(AttentionInvariants, AQueryHasItsBitsWhateverTheLimit) {
  Spec s;
  s.queries = 3, s.keys = 900, s.slots = 700, s.dim = 576, s.value_dim = 512;
  s.sink = s.topk_length = s.residual = true, s.backward = false;
  for (const sa::KvStorage storage : {sa::KvStorage::plain, sa::KvStorage::fp8_656})
    for (const int64_t heads : {5, 66, 130})
      for (const double spread : {1.0, 8.0}) {
        s.storage = storage, s.heads = heads, s.spread = spread;
        s.wide_outputs = spread > 1, s.index64 = heads == 66;
        const Case c = make(s);
        ++runs_;
        if (!accepts(c)) continue;
        const Outcome one = run(c);
        EXPECT_EQ(judge(c, one, lane() == "cpu"), "") << describe(s);
        const std::optional<Outcome> two = run_within(c, 4096);
        if (!two) continue;
        EXPECT_EQ(one.o, two->o) << describe(s);
        EXPECT_EQ(one.o_residual, two->o_residual) << describe(s);
        EXPECT_EQ(one.lse, two->lse) << describe(s);
        EXPECT_EQ(one.row_max, two->row_max) << describe(s);
      }
}

TEST_P(AttentionInvariants, HeadsAndQueriesPermuted) {
  Spec s = plain();
  s.heads = 21;
  const Case c = make(s);
  Case turned = c;
  const int64_t n = c.queries(), h = c.heads();
  for (int64_t q = 0; q < n; ++q) {
    for (int64_t i = 0; i < h; ++i) {
      for (int64_t x = 0; x < c.dim(); ++x)
        turned.q.put(c.q.get(0, n - 1 - q, h - 1 - i, x), 0, q, i, x);
      for (int64_t x = 0; x < c.value_dim(); ++x)
        turned.d_o.put(c.d_o.get(0, n - 1 - q, h - 1 - i, x), 0, q, i, x);
      turned.d_lse.put(c.d_lse.get(0, n - 1 - q, h - 1 - i), 0, q, i);
      turned.sink.put(c.sink.get(h - 1 - i), i);
    }
    for (int64_t k = 0; k < c.slots(); ++k)
      turned.indices.put_integer(c.indices.integer(0, n - 1 - q, 0, k), 0, q, 0, k);
  }
  const Outcome a = run(c), b = run(turned);
  const auto rows = static_cast<size_t>(n * h);
  for (size_t i = 0; i < rows; ++i) {
    const size_t other = rows - 1 - i;
    ASSERT_EQ(a.lse[i], b.lse[other]);
    for (size_t x = 0; x < static_cast<size_t>(c.value_dim()); ++x)
      ASSERT_EQ(a.o[i * static_cast<size_t>(c.value_dim()) + x],
                b.o[other * static_cast<size_t>(c.value_dim()) + x]);
    for (size_t x = 0; x < static_cast<size_t>(c.dim()); ++x)
      ASSERT_EQ(a.dq[i * static_cast<size_t>(c.dim()) + x],
                b.dq[other * static_cast<size_t>(c.dim()) + x]);
  }
  EXPECT_LE(relative_l2(b.dkv, a.dkv), 1e-5);
}

// The weights of a row sum to 1 less the sink's share: values of 1 show it.
TEST_P(AttentionInvariants, WeightsSumToWhatTheSinkLeaves) {
  Case c = make(plain());
  for (int64_t j = 0; j < c.kv.shape()[1]; ++j) c.kv.put(1, 0, j, 0, 0);
  const Outcome o = run(c);
  for (int64_t q = 0; q < c.queries(); ++q)
    for (int64_t h = 0; h < c.heads(); ++h) {
      const auto at = static_cast<size_t>(q * c.heads() + h);
      const double want = std::isinf(o.lse[at]) ? 0 : 1 / (1 + std::exp(c.sink.get(h) - o.lse[at]));
      EXPECT_NEAR(o.o[at * static_cast<size_t>(c.value_dim())], want, room(c));
    }
}

// A problem with the first half of its slots alone, and one with the second.
std::pair<Case, Case> halves(const Case& c) {
  std::pair<Case, Case> both{c, c};
  for (int64_t q = 0; q < c.queries(); ++q)
    for (int64_t k = 0; k < c.slots(); ++k)
      (k < c.slots() / 2 ? both.second : both.first).indices.put_integer(-1, 0, q, 0, k);
  return both;
}

// Halves of a list merged by the algebra are the whole list's row.
TEST_P(AttentionInvariants, HalvesMerge) {
  Spec s = plain();
  s.sink = s.d_lse = s.duplicates = false;
  const Case c = make(s);
  const auto [low, high] = halves(c);
  const Outcome whole = run(c), a = run(low), b = run(high);
  const auto v = static_cast<size_t>(c.value_dim());
  for (size_t row = 0; row < whole.lse.size(); ++row) {
    const auto state = [&](const Outcome& o, std::vector<double>& values) {
      const bool empty = o.row_max[row] == -INFINITY;
      AttentionState<double> part;
      part.max = o.row_max[row];
      part.sum = empty ? 0 : std::exp(o.lse[row] - o.row_max[row]);
      for (size_t x = 0; x < v; ++x) values.push_back(o.o[row * v + x] * part.sum);
      return part;
    };
    std::vector<double> left, right;
    AttentionState<double> sum = state(a, left);
    const AttentionState<double> other = state(b, right);
    merge(sum, left.data(), other, right.data(), c.value_dim());
    if (whole.row_max[row] == -INFINITY) {
      EXPECT_EQ(sum.sum, 0);
      continue;
    }
    EXPECT_NEAR(lse_of(sum, false), whole.lse[row], 2e-6);
    for (size_t x = 0; x < v; ++x) EXPECT_NEAR(left[x] / sum.sum, whole.o[row * v + x], room(c));
  }
}

// Gradients of each half by the merged o and lse add up to those of the whole list: keys cut over
// ranks without a gather are the caller's to merge.
TEST_P(AttentionInvariants, GradientsOfHalvesAddUp) {
  Spec s = plain();
  s.sink = s.d_lse = s.duplicates = false;
  const Case c = make(s);
  const auto [low, high] = halves(c);
  const Outcome forward = run(c);
  Grid o(c.o_dtype, {1, c.queries(), c.heads(), c.value_dim()});
  Grid lse(DType::f32, {1, c.queries(), c.heads()});
  for (int64_t q = 0, row = 0; q < c.queries(); ++q)
    for (int64_t h = 0; h < c.heads(); ++h, ++row) {
      lse.put(forward.lse[static_cast<size_t>(row)], 0, q, h);
      for (int64_t x = 0; x < c.value_dim(); ++x)
        o.put(forward.o[static_cast<size_t>(row * c.value_dim() + x)], 0, q, h, x);
    }
  const auto gradients = [&](const Case& part) {
    Home home(place());
    Grid dq(DType::f32, c.q.shape()), dkv(DType::f32, c.kv.shape());
    sa::Inputs in = inputs_of(part, home);
    in.o = home.tensor(o), in.lse = home.tensor(lse);
    sa::Outputs out;
    out.dq = home.tensor(dq), out.dkv = home.tensor(dkv);
    sa::Options options = part.options;
    options.lane = lane();
    Room room(sa::workspace_bytes(sa::describe(sa::Pass::backward, in, out, options)), place());
    sa::backward(in, out, options, room.workspace(), {}, place() ? place()->stream() : nullptr);
    home.fetch();
    std::vector<double> all = dq.numbers();
    const std::vector<double> more = dkv.numbers();
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const std::vector<double> whole = gradients(c), a = gradients(low), b = gradients(high);
  double most = 0;
  for (const double x : whole) most = std::max(most, std::abs(x));
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(a[i] + b[i], whole[i], room(c) * most) << i;
}

TEST_P(AttentionInvariants, MoreQueriesThanAGridHolds) {
  Spec s;
  s.queries = 66000, s.heads = 1, s.dim = 4, s.value_dim = 2, s.slots = 1, s.keys = 9;
  s.backward = s.foreign = false;
  const Case c = make(s);
  const Outcome o = run(c);
  for (const int64_t q : {int64_t{65534}, int64_t{65535}, int64_t{65536}, s.queries - 1}) {
    const int64_t row = c.indices.integer(0, q, 0, 0);
    EXPECT_EQ(o.o[static_cast<size_t>(c.value_dim() * q)], row < 0 ? 0 : c.kv.get(0, row, 0, 0));
  }
}

// One key that every query names: what is added up in 16 bits would grow with the context.
TEST_P(AttentionInvariants, ErrorIsFlatOverContext) {
  double first = 0;
  for (const int64_t queries : {64, 512, 2048}) {
    Spec s;
    s.queries = queries, s.heads = 2, s.dim = 16, s.value_dim = 8, s.slots = 6, s.keys = 64;
    s.dtype = DType::bf16, s.wide_outputs = true, s.foreign = s.duplicates = false;
    Case c = make(s);
    for (int64_t q = 0; q < queries; ++q) c.indices.put_integer(0, 0, q, 0, 0);
    const Outcome o = run(c);
    const double error = relative_l2(o.dkv, truth(c).dkv);
    EXPECT_LE(error, 3e-3) << queries;
    if (queries == 64) first = std::max(error, 1e-6);
    EXPECT_LE(error, 1.5 * first + 1e-5) << queries;
  }
}

TEST_P(AttentionInvariants, SplitWithResidualHasTheDigitsOfFp32) {
  for (const double spread : {1.0, 4.0}) {
    Spec s;
    s.queries = 24, s.heads = 4, s.dim = 32, s.value_dim = 16, s.slots = 40, s.keys = 64;
    s.dtype = DType::bf16, s.sink = s.residual = true, s.operands = sa::Operands::split;
    s.spread = spread;
    Case c = make_case(s);
    ++runs_;
    if (!accepts(c)) continue;  // a lane may lack split, and then says so
    c.dq_dtype = c.dkv_dtype = DType::f32;
    const Outcome o = run(c);
    const Numbers right = truth(c);
    EXPECT_LE(relative_l2(o.dq, right.dq), 2e-5);
    EXPECT_LE(relative_l2(o.dkv, right.dkv), 2e-5);
    EXPECT_LE(relative_l2(o.d_sink, right.d_sink), 2e-5);
  }
}

}  // namespace
}  // namespace talea::testing
