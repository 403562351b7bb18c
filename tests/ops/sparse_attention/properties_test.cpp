// What: properties that hold whatever the numbers: permutations, unselected keys, dense limits,
//       merged states, guard pages, precision over context lengths.
// Why: a formula that is wrong everywhere agrees with itself; these do not.
// Never: needs a yardstick where exact equality is promised.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "algebra/attention_state.hpp"
#include "ops/sparse_attention/lanes.hpp"

namespace talea::testing {
namespace {

class AttentionProperties : public AttentionLane {};
TALEA_ATTENTION_LANES(AttentionProperties);

Spec plain() {
  Spec s;
  s.sink = s.d_lse = true, s.foreign = false;
  return s;
}

// Absent slots appended and other rows added change nothing, bit for bit.
TEST_P(AttentionProperties, AbsentSlotsAndOtherRows) {
  const Case c = make_case(plain());
  const Outcome one = run(c);
  Case more = c;
  more.indices = Grid(DType::i32, {1, c.queries(), 1, c.slots() + 70});
  more.kv = Grid(DType::f32, {1, c.kv.shape()[1] + 9, 1, c.dim()});
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

TEST_P(AttentionProperties, HeadsAndQueriesPermuted) {
  Spec s = plain();
  s.heads = 21;
  const Case c = make_case(s);
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
TEST_P(AttentionProperties, WeightsSumToWhatTheSinkLeaves) {
  Case c = make_case(plain());
  for (int64_t j = 0; j < c.kv.shape()[1]; ++j) c.kv.put(1, 0, j, 0, 0);
  const Outcome o = run(c);
  for (int64_t q = 0; q < c.queries(); ++q)
    for (int64_t h = 0; h < c.heads(); ++h) {
      const auto at = static_cast<size_t>(q * c.heads() + h);
      const double want = std::isinf(o.lse[at]) ? 0 : 1 / (1 + std::exp(c.sink.get(h) - o.lse[at]));
      EXPECT_NEAR(o.o[at * static_cast<size_t>(c.value_dim())], want, 2e-6);
    }
}

// Halves of a list merged by the algebra are the whole list's row.
TEST_P(AttentionProperties, HalvesMerge) {
  Spec s = plain();
  s.sink = s.d_lse = s.duplicates = false;
  const Case c = make_case(s);
  Case low = c, high = c;
  for (int64_t q = 0; q < c.queries(); ++q)
    for (int64_t k = 0; k < c.slots(); ++k)
      (k < c.slots() / 2 ? high : low).indices.put_integer(-1, 0, q, 0, k);
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
    for (size_t x = 0; x < v; ++x) EXPECT_NEAR(left[x] / sum.sum, whole.o[row * v + x], 2e-6);
  }
}

// Memory with pages on both sides that nobody may touch.
class Guarded {
 public:
  Guarded(const std::vector<std::byte>& bytes, bool at_end) {
    page_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    size_ = (bytes.size() + page_ - 1) / page_ * page_ + 2 * page_;
    base_ = static_cast<char*>(
        mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    data_ = base_ + (at_end ? size_ - page_ - bytes.size() : page_);
    std::memcpy(data_, bytes.data(), bytes.size());
    mprotect(base_, page_, PROT_NONE);
    mprotect(base_ + size_ - page_, page_, PROT_NONE);
  }
  ~Guarded() { munmap(base_, size_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  void* data() { return data_; }

 private:
  size_t page_, size_;
  char *base_, *data_;
};

TEST_P(AttentionProperties, GuardPagesAroundKvAndDkv) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f8_e4m3, DType::u8})
    for (const bool at_end : {false, true}) {
      Spec s;
      s.index64 = true, s.dtype = dtype == DType::f32 ? DType::f32 : DType::bf16;
      if (dtype == DType::f8_e4m3) s.storage = sa::KvStorage::fp8_scaled;
      if (dtype == DType::u8) s.storage = sa::KvStorage::fp8_656, s.dim = 576, s.value_dim = 512;
      s.backward = dtype != DType::u8;
      s.keys = 29;  // rows end off every page
      const Case c = make_case(s);
      if (!accepts(c)) {
        EXPECT_TRUE(may_decline(c));
        continue;
      }
      const Outcome right = run(c);
      const auto bytes = static_cast<size_t>(c.kv.elements() * size_of(c.kv.dtype()));
      Guarded kv(std::vector<std::byte>(c.kv.bytes(), c.kv.bytes() + bytes), at_end);
      Guarded dkv(std::vector<std::byte>(static_cast<size_t>(29 * c.dim() * 4)), at_end);
      sa::Options o = c.options;
      o.lane = lane();
      sa::Inputs in = inputs_of(c);
      in.kv = c.kv.tensor({}, kv.data());
      sa::Inputs first = in;
      first.d_o = {};
      Grid result(c.o_dtype, {1, c.queries(), c.heads(), c.value_dim()});
      sa::Outputs out;
      out.o = result.tensor();
      Room room(sa::workspace_bytes(sa::describe(sa::Pass::forward, first, out, o)));
      sa::forward(first, out, o, room.workspace());
      EXPECT_EQ(result.numbers(), right.o);
      if (!s.backward) continue;
      sa::Outputs grad;
      grad.dkv = make_tensor(dkv.data(), DType::f32, {1, 29, 1, c.dim()});
      Room more(sa::workspace_bytes(sa::describe(sa::Pass::backward, in, grad, o)));
      sa::backward(in, grad, o, more.workspace());
    }
}

// A cache of pages without rows holds no slot: nothing is read where its rows would begin.
TEST_P(AttentionProperties, PagesWithoutRows) {
  const float q[4] = {1, 2, 3, 4};
  const int32_t indices[2] = {0, 1};
  float o[4] = {1, 1, 1, 1}, lse = 0;
  sa::Inputs in;
  in.q = make_tensor(q, DType::f32, {1, 1, 4});
  in.kv = make_tensor(nullptr, DType::f32, {2, 0, 1, 4});
  in.indices = make_tensor(indices, DType::i32, {1, 2});
  sa::Outputs out;
  out.o = make_tensor(o, DType::f32, {1, 1, 4});
  out.lse = make_tensor(&lse, DType::f32, {1, 1});
  sa::Options options;
  options.value_dim = 4;
  options.index_space = sa::IndexSpace::slots;
  options.lane = lane();
  ++runs_;
  if (lane() == "unfused") return;  // declines slots of pages
  Room room(sa::workspace_bytes(sa::describe(sa::Pass::forward, in, out, options)));
  EXPECT_EQ(sa::forward(in, out, options, room.workspace()).slots_foreign, 2);
  EXPECT_EQ(lse, INFINITY);
  for (const float x : o) EXPECT_EQ(x, 0);
}

// Shapes decide: of these pages nobody may read a byte.
TEST_P(AttentionProperties, PlanTouchesNoData) {
  const Case c = make_case(plain());
  const size_t bytes = size_t{1} << 20;
  void* nowhere = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  sa::Inputs in = inputs_of(c);
  in.d_o = in.d_lse = {};
  for (Tensor* t : {&in.q, &in.kv, &in.indices, &in.sink}) t->data = nowhere;
  Grid o(DType::f32, {1, c.queries(), c.heads(), c.value_dim()});
  sa::Outputs out;
  out.o = o.tensor();
  sa::Options options = c.options;
  options.lane = lane();
  const sa::Problem p = sa::describe(sa::Pass::forward, in, out, options);
  EXPECT_EQ(sa::explain(p).lane, lane());
  EXPECT_GE(sa::workspace_bytes(p), 0);
  ++runs_;
  munmap(nowhere, bytes);
}

// Nothing of one call is kept for the next: memory that was given back stays as it is.
TEST_P(AttentionProperties, WorkspaceIsThatOfTheCall) {
  const Case c = make_case(plain());
  sa::Inputs in = inputs_of(c);
  in.d_o = in.d_lse = {};
  Grid o(DType::f32, {1, c.queries(), c.heads(), c.value_dim()});
  sa::Outputs out;
  out.o = o.tensor();
  sa::Options options = c.options;
  options.lane = lane();
  const auto bytes =
      static_cast<size_t>(sa::workspace_bytes(sa::describe(sa::Pass::forward, in, out, options)));
  std::vector<char> first(bytes), second(bytes);
  sa::forward(in, out, options, {first.data(), static_cast<int64_t>(bytes)});
  std::fill(first.begin(), first.end(), '#');
  sa::forward(in, out, options, {second.data(), static_cast<int64_t>(bytes)});
  runs_ += 2;
  EXPECT_EQ(std::count(first.begin(), first.end(), '#'), static_cast<int64_t>(bytes));
}

TEST_P(AttentionProperties, MoreQueriesThanAGridHolds) {
  Spec s;
  s.queries = 66000, s.heads = 1, s.dim = 4, s.value_dim = 2, s.slots = 1, s.keys = 9;
  s.backward = s.foreign = false;
  const Case c = make_case(s);
  const Outcome o = run(c);
  for (const int64_t q : {int64_t{65534}, int64_t{65535}, int64_t{65536}, s.queries - 1}) {
    const int64_t row = c.indices.integer(0, q, 0, 0);
    EXPECT_EQ(o.o[static_cast<size_t>(2 * q)], row < 0 ? 0 : c.kv.get(0, row, 0, 0));
  }
}

// Rows further apart than 32 bits can say; nothing between them is ever touched.
TEST_P(AttentionProperties, RowsFurtherApartThan32BitsCanSay) {
  constexpr int64_t apart = (int64_t{1} << 32) + 64;
  const size_t bytes = static_cast<size_t>(apart) * 2 * sizeof(float) + 4096;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space";
  auto* kv = static_cast<float*>(memory);
  for (int64_t j = 0; j < 3; ++j)
    for (int64_t x = 0; x < 4; ++x) kv[j * apart + x] = static_cast<float>(10 * j + x);
  const float q[4] = {0, 0, 0, 1};
  const int32_t indices[1] = {2};
  float o[2];
  sa::Inputs in;
  in.q = make_tensor(q, DType::f32, {1, 1, 4});
  in.kv = make_tensor(kv, DType::f32, {3, 4});
  in.kv.stride[0] = apart;
  in.indices = make_tensor(indices, DType::i32, {1, 1});
  sa::Outputs out;
  out.o = make_tensor(o, DType::f32, {1, 1, 2});
  sa::Options options;
  options.value_dim = 2;
  options.lane = lane();
  Room room(sa::workspace_bytes(sa::describe(sa::Pass::forward, in, out, options)));
  sa::forward(in, out, options, room.workspace());
  ++runs_;
  EXPECT_EQ(o[0], 20);
  EXPECT_EQ(o[1], 21);
  munmap(memory, bytes);
}

// One key that every query names: what is added up in 16 bits would grow with the context.
TEST_P(AttentionProperties, ErrorIsFlatOverContext) {
  double first = 0;
  for (const int64_t queries : {64, 512, 2048}) {
    Spec s;
    s.queries = queries, s.heads = 2, s.dim = 16, s.value_dim = 8, s.slots = 6, s.keys = 64;
    s.dtype = DType::bf16, s.wide_outputs = true, s.foreign = s.duplicates = false;
    Case c = make_case(s);
    for (int64_t q = 0; q < queries; ++q) c.indices.put_integer(0, 0, q, 0, 0);
    const Outcome o = run(c);
    const double error = relative_l2(o.dkv, truth(c).dkv);
    EXPECT_LE(error, 3e-3) << queries;
    if (queries == 64) first = std::max(error, 1e-6);
    EXPECT_LE(error, 1.5 * first + 1e-5) << queries;
  }
}

TEST_P(AttentionProperties, SplitWithResidualHasTheDigitsOfFp32) {
  for (const double spread : {1.0, 4.0}) {
    Spec s;
    s.queries = 24, s.heads = 4, s.dim = 32, s.value_dim = 16, s.slots = 40, s.keys = 64;
    s.dtype = DType::bf16, s.sink = s.residual = true, s.operands = sa::Operands::split;
    s.spread = spread;
    Case c = make_case(s);
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
