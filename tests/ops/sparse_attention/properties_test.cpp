// What: what a call does with the memory it is given, on every host lane: guard pages, rows far
//       apart, plans without data, workspaces of their own.
// Why: a wrong access shows where the pages around are closed; those are of the host.
// Never: judges numbers.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/sparse_attention/lanes.hpp"

namespace talea::testing {
namespace {

class AttentionProperties : public AttentionLane {};
TALEA_ATTENTION_ON(AttentionProperties, host_attention_lanes);

Spec plain() {
  Spec s;
  s.sink = s.d_lse = true, s.foreign = false;
  return s;
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

}  // namespace
}  // namespace talea::testing
