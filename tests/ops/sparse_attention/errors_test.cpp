// What: what sparse attention refuses, by name, before any work: sections 3 and 5 of the contract.
// Why: a wrong guess about storage or shape makes wrong numbers in silence.
// Never: accepts an error without argument and value in its text.
#include <cmath>
#include <cstring>
#include <functional>

#include "ops/sparse_attention/lanes.hpp"

namespace talea::testing {
namespace {

struct Call {
  sa::Inputs in;
  sa::Outputs out;
  sa::Options options;
  sa::Pass pass = sa::Pass::forward;
};

// The error of a bent call, as "kind: text"; "accepted" where there is none.
std::string refused(const Spec& spec, const std::function<void(Call&, Case&)>& bend) {
  Case c = make_case(spec);
  Grid o(c.o_dtype, {c.batch(), c.queries(), c.heads(), c.value_dim()});
  Grid dkv(DType::f32, {c.kv.shape()[0], c.kv.shape()[1], c.groups(), c.dim()});
  Call call;
  call.in = inputs_of(c);
  call.options = c.options;
  call.out.o = o.tensor();
  call.in.d_o = call.in.d_lse = {};
  bend(call, c);
  if (call.pass == sa::Pass::backward) {
    call.out.o = {};
    if (!call.out.dkv) call.out.dkv = dkv.tensor();
  }
  try {
    Room room(sa::workspace_bytes(sa::describe(call.pass, call.in, call.out, call.options)));
    if (call.pass == sa::Pass::forward)
      sa::forward(call.in, call.out, call.options, room.workspace());
    else
      sa::backward(call.in, call.out, call.options, room.workspace());
  } catch (const Error& e) {
    return std::to_string(static_cast<int>(e.kind())) + ": " + e.what();
  }
  return "accepted";
}

void expect_refused(const std::string& got, const std::string& kind,
                    const std::vector<std::string>& parts) {
  EXPECT_EQ(got.substr(0, kind.size() + 1), kind + ":") << got;
  for (const std::string& part : parts)
    EXPECT_NE(got.find(part), std::string::npos) << part << " in: " << got;
}

Spec plain(DType dtype = DType::f32) {
  Spec s;
  s.dtype = dtype, s.foreign = false;
  return s;
}
Spec scaled() {
  Spec s = plain(DType::bf16);
  s.storage = sa::KvStorage::fp8_scaled, s.backward = false;
  return s;
}
Spec packed() {
  Spec s = plain(DType::bf16);
  s.storage = sa::KvStorage::fp8_656, s.dim = 576, s.value_dim = 512, s.backward = false;
  return s;
}

TEST(AttentionErrors, Storage) {
  const auto none = [](Call&, Case&) {};
  Spec wide = packed();  // fp64 queries are lane reference's, whatever the keys are stored in
  wide.dtype = DType::f64;
  for (const Spec& s : {plain(), scaled(), packed(), wide}) EXPECT_EQ(refused(s, none), "accepted");
  expect_refused(refused(plain(), [](Call& k, Case&) { k.in.kv.data = nullptr; }), "5",
                 {"kv", "null pointer", "storage"});
  expect_refused(refused(plain(), [](Call& k, Case&) { k.in.kv.data = k.out.o.data = nullptr; }),
                 "5", {"kv", "null pointer", "storage"});
  expect_refused(refused(plain(DType::bf16),
                         [](Call& k, Case& c) {
                           c.sink = Grid(DType::f32, {37});
                           k.in.kv_scale = c.sink.tensor();
                         }),
                 "5", {"kv_scale", "bf16"});
  expect_refused(refused(scaled(), [](Call& k, Case&) { k.in.kv_scale = {}; }), "5",
                 {"kv_scale", "fp8_e4m3"});
  expect_refused(
      refused(scaled(), [](Call& k, Case&) { k.options.kv_storage = sa::KvStorage::plain; }), "5",
      {"kv", "fp8_e4m3", "plain"});
  expect_refused(
      refused(packed(), [](Call& k, Case&) { k.options.kv_storage = sa::KvStorage::plain; }), "5",
      {"kv", "uint8"});
  for (const int64_t bytes : {584, 528, 288, 655})
    expect_refused(refused(packed(), [&](Call& k, Case&) { k.in.kv.shape[3] = bytes; }), "5",
                   {"kv", std::to_string(bytes), "656"});
  expect_refused(refused(packed(), [](Call& k, Case&) { k.in.kv.stride[1] = 657; }), "5",
                 {"kv", "657", "16"});
  expect_refused(refused(packed(),
                         [](Call& k, Case&) {
                           k.pass = sa::Pass::backward;
                           k.in.d_o = k.out.o;
                         }),
                 "3", {"fp8_656", "forward only"});
  expect_refused(refused(scaled(),
                         [](Call& k, Case& c) {
                           c.kv_scale.put(0, 0, 3);
                           c.indices.put_integer(3, 0, 0, 0, 0);
                           k.in.kv_scale = c.kv_scale.tensor();
                         }),
                 "5", {"kv_scale", "row 3"});
  expect_refused(refused(scaled(),
                         [](Call& k, Case& c) {
                           c.kv_scale.put(NAN, 0, 5);
                           c.indices.put_integer(5, 0, 0, 0, 0);
                           k.in.kv_scale = c.kv_scale.tensor();
                         }),
                 "5", {"kv_scale", "row 5"});
  expect_refused(refused(scaled(), [](Call& k, Case&) { k.in.kv_scale.shape[1] = 36; }), "5",
                 {"kv_scale", "36"});
  expect_refused(refused(plain(DType::bf16), [](Call& k, Case&) { k.in.q.dtype = DType::f16; }),
                 "5", {"kv", "bf16", "fp16"});
}

TEST(AttentionErrors, ShapesAndOptions) {
  expect_refused(refused(plain(), [](Call& k, Case&) { k.options.value_dim = 0; }), "2",
                 {"value_dim = 0"});
  expect_refused(refused(plain(), [](Call& k, Case&) { k.options.value_dim = 25; }), "5",
                 {"value_dim = 25", "24"});
  for (const double scale : {static_cast<double>(NAN), static_cast<double>(INFINITY), 1e60})
    expect_refused(refused(plain(), [&](Call& k, Case&) { k.options.scale = scale; }), "2",
                   {"scale"});
  Spec grouped = plain();
  grouped.heads = 4, grouped.groups = 2;
  expect_refused(
      refused(grouped, [](Call& k, Case&) { k.in.q.shape[2] = 3, k.out.o.shape[2] = 3; }), "5",
      {"groups", "2", "3"});
  expect_refused(
      refused(plain(), [](Call& k, Case&) { k.in.q.stride[3] = 2, k.in.q.shape[3] = 12; }), "5",
      {"q", "last stride = 2"});
  expect_refused(refused(plain(), [](Call& k, Case&) { k.in.kv.stride[3] = 2; }), "5",
                 {"kv", "last stride = 2"});
  expect_refused(refused(plain(), [](Call& k, Case&) { k.in.indices.dtype = DType::f32; }), "5",
                 {"indices", "fp32", "int32"});
  expect_refused(refused(plain(), [](Call& k, Case&) { k.in.indices = {}; }), "5", {"indices"});
  expect_refused(refused(plain(), [](Call& k, Case&) { k.out.o.data = k.in.kv.data; }), "5",
                 {"o", "overlaps", "kv"});
  expect_refused(refused(plain(),
                         [](Call& k, Case&) {
                           k.out.o.device_index = 1;
                           k.out.o.device = DeviceKind::cuda;
                         }),
                 "5", {"o", "device"});
  expect_refused(refused(plain(), [](Call& k, Case&) { k.options.lane = "best"; }), "2",
                 {"lane = best"});
  expect_refused(refused(plain(), [](Call& k, Case&) { k.options.lane = "cuda"; }), "3", {"cuda"});
  expect_refused(refused(plain(),
                         [](Call& k, Case&) {
                           k.options.index_space = sa::IndexSpace::slots, k.options.causal = true;
                         }),
                 "2", {"causal", "slots"});
  expect_refused(refused(plain(),
                         [](Call& k, Case&) {
                           k.options.dkv_sum = sa::DkvSum::atomic;
                           k.pass = sa::Pass::backward;
                           k.in.d_o = k.out.o;
                         }),
                 "3", {"dkv_sum = atomic"});
  expect_refused(refused(plain(), [](Call& k, Case&) { k.out.accumulate_dkv = true; }), "5",
                 {"accumulate_dkv", "without dkv"});
  expect_refused(refused(plain(), [](Call& k, Case&) { k.pass = sa::Pass::backward; }), "2",
                 {"d_o"});
}

TEST(AttentionErrors, Sequences) {
  Spec s = plain();
  s.thd = true;
  expect_refused(refused(s, [](Call& k, Case&) { k.in.cu_seqlens_k = {}; }), "2",
                 {"cu_seqlens_q", "both or neither"});
  expect_refused(refused(s,
                         [](Call& k, Case& c) {
                           c.cu_k.put_integer(99, 3);
                           k.in.cu_seqlens_k = c.cu_k.tensor();
                         }),
                 "5", {"cu_seqlens_k", "99", "37"});
  expect_refused(refused(s,
                         [](Call& k, Case& c) {
                           c.cu_q.put_integer(0, 3);
                           k.in.cu_seqlens_q = c.cu_q.tensor();
                         }),
                 "5", {"cu_seqlens_q", "backwards"});
  Spec paged = plain();
  paged.paged = true, paged.space = sa::IndexSpace::sequence;
  EXPECT_EQ(refused(paged, [](Call&, Case&) {}), "accepted");
  expect_refused(refused(paged, [](Call& k, Case&) { k.in.kv_lengths = {}; }), "2",
                 {"block_table", "kv_lengths"});
  expect_refused(
      refused(paged, [](Call& k, Case&) { k.options.index_space = sa::IndexSpace::rows; }), "2",
      {"block_table", "sequence"});
}

TEST(AttentionErrors, WorkspaceIsNamed) {
  const Case c = make_case(plain());
  Grid o(DType::f32, {1, c.queries(), c.heads(), c.value_dim()});
  sa::Outputs out;
  out.o = o.tensor();
  sa::Inputs in = inputs_of(c);
  in.d_o = {};
  sa::Options options = c.options;
  options.lane = "cpu";
  Room room(8);
  EXPECT_THROW(sa::forward(in, out, options, room.workspace()), Error);
}

std::string kind_and_text(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return std::to_string(static_cast<int>(e.kind())) + ": " + e.what();
  }
  return "accepted";
}

TEST(AttentionErrors, WhatOneRankCannotGather) {
  const Case c = make_case(plain());
  Grid o(DType::f32, {1, c.queries(), c.heads(), c.value_dim()});
  sa::Inputs in = inputs_of(c);
  in.d_o = in.d_lse = {};
  sa::Outputs out;
  out.o = o.tensor();
  const auto of = [&](int64_t begin, int64_t total, bool gather = true) {
    sa::Ranks ranks;
    ranks.gather_kv = gather, ranks.row_begin = begin, ranks.total_kv_rows = total;
    return kind_and_text([&] { sa::describe(sa::Pass::forward, in, out, c.options, ranks); });
  };
  EXPECT_EQ(of(0, 0), "accepted");
  EXPECT_EQ(of(0, 37), "accepted");
  expect_refused(of(0, 74), "2", {"total_kv_rows = 74", "37 rows"});
  expect_refused(of(37, 37), "2", {"row_begin = 37"});
  expect_refused(of(37, 0, false), "2", {"row_begin = 37", "gather_kv"});
  expect_refused(of(0, 74, false), "2", {"total_kv_rows = 74", "gather_kv"});
}

TEST(AttentionErrors, ADenominatorThatDividesNothing) {
  float x[4] = {};
  sa::IndexLossInputs in;
  in.index_q = make_tensor(x, DType::f32, {1, 1, 4});
  in.index_k = make_tensor(x, DType::f32, {1, 4});
  in.index_weights = make_tensor(x, DType::f32, {1, 1});
  in.q = make_tensor(x, DType::f32, {1, 1, 4});
  in.kv = make_tensor(x, DType::f32, {1, 4});
  sa::IndexLossOptions options;
  options.keys = sa::LossKeys::dense;
  EXPECT_EQ(kind_and_text([&] { sa::describe(in, {}, options); }), "accepted");
  options.denominator_value = 3;
  expect_refused(kind_and_text([&] { sa::describe(in, {}, options); }), "2",
                 {"denominator_value = 3", "given"});
}

// What is given and bounds nothing stands in the receipt.
TEST(AttentionErrors, WhatBoundsNothingIsNoted) {
  Spec spec = plain();
  spec.positions = true, spec.causal = false;
  Case c = make_case(spec);
  Grid o(DType::f32, {1, c.queries(), c.heads(), c.value_dim()});
  sa::Inputs in = inputs_of(c);
  in.d_o = in.d_lse = {};
  sa::Outputs out;
  out.o = o.tensor();
  const auto notes = [&](bool causal, int64_t base) {
    sa::Options options = c.options;
    options.causal = causal, options.q_position_base = base;
    Room room(sa::workspace_bytes(sa::describe(sa::Pass::forward, in, out, options)));
    return sa::forward(in, out, options, room.workspace()).notes;
  };
  EXPECT_EQ(notes(true, 0).size(), 0u);
  ASSERT_EQ(notes(false, 0).size(), 1u);
  EXPECT_NE(notes(false, 0)[0].find("q_positions"), std::string::npos);
  EXPECT_EQ(notes(false, 5).size(), 2u);
  ASSERT_EQ(notes(true, 5).size(), 1u);
  EXPECT_NE(notes(true, 5)[0].find("q_position_base = 5"), std::string::npos);
}

TEST(AttentionStatus, RequireCleanAndMask) {
  int64_t status[4] = {0, -1, 0, 0};
  sa::require_clean(make_tensor(status, DType::i64, {4}));
  status[0] = 3, status[1] = 17, status[2] = 99;
  try {
    sa::require_clean(make_tensor(status, DType::i64, {4}));
    FAIL();
  } catch (const Error& e) {
    for (const char* part : {"3", "17", "99"})
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos);
  }
  // On a mask that is not fresh: what is 0 stays 0, slot -1 touches nothing.
  int32_t indices[3][3] = {{-1, 2, 2}, {0, 7, -5}, {-1, 3, 9}};
  float mask[3][4] = {{0, -1, -1, -1}, {-1, -1, 0, -1}, {-1, -1, -1, -1}};
  sa::Inputs in;
  in.indices = make_tensor(indices, DType::i32, {3, 3});
  for (int twice = 0; twice < 2; ++twice)
    sa::index_mask(in, make_tensor(mask, DType::f32, {3, 4}), {});
  sa::Options report;
  report.index_check = sa::IndexCheck::report;
  expect_refused(kind_and_text([&] {
                   sa::index_mask(in, make_tensor(mask, DType::f32, {3, 4}), report);
                 }),
                 "2", {"index_check = report", "status"});
  const float want[3][4] = {{0, -1, 0, -1}, {0, -1, 0, -1}, {-1, -1, -1, 0}};
  for (int i = 0; i < 12; ++i) EXPECT_EQ(mask[i / 4][i % 4], want[i / 4][i % 4]) << i;
}

// Sums of a status that nobody reset: the sanitizers judge this one.
TEST(AttentionStatus, AnyNumbersAreAddedTo) {
  std::vector<float> q(8, 1), kv(16, 1), o(8), room(1 << 16);
  int32_t indices[2] = {1, 7};
  int64_t status[4] = {INT64_MAX, -1, 0, INT64_MAX};
  sa::Inputs in;
  in.q = make_tensor(q.data(), DType::f32, {1, 1, 1, 8});
  in.kv = make_tensor(kv.data(), DType::f32, {1, 2, 1, 8});
  in.indices = make_tensor(indices, DType::i32, {1, 1, 1, 2});
  sa::Outputs out;
  out.o = make_tensor(o.data(), DType::f32, {1, 1, 1, 8});
  out.status = make_tensor(status, DType::i64, {4});
  sa::Options options;
  options.value_dim = 8;
  sa::forward(in, out, options, {room.data(), static_cast<int64_t>(room.size() * sizeof(float))});
  EXPECT_EQ(status[0], INT64_MIN);
  EXPECT_EQ(status[1], 1);
  EXPECT_EQ(status[2], 7);
  EXPECT_EQ(status[3], INT64_MAX);
}

TEST(AttentionPack, RowsDecodeWithinHalfAStep) {
  Random random(3);
  Grid kv(DType::f32, {9, 576});
  fill_normal(kv, random, 3);
  for (int64_t c = 0; c < 128; ++c) kv.put(0, 4, c);
  Grid rows(DType::u8, {9, 656});
  sa::pack_rows(kv.tensor(), rows.tensor());
  for (int64_t r = 0; r < 9; ++r)
    for (int64_t t = 0; t < 4; ++t) {
      float scale;
      std::memcpy(&scale, rows.bytes(r, 512 + 4 * t), 4);
      double amax = 0;
      for (int64_t c = 128 * t; c < 128 * (t + 1); ++c)
        amax = std::max(amax, std::abs(kv.get(r, c)));
      EXPECT_EQ(static_cast<double>(scale),
                std::exp2(std::ceil(std::log2(std::max(amax / 448, 1e-4)))));
      for (int64_t c = 128 * t; c < 128 * (t + 1); ++c) {
        const double x = kv.get(r, c),
                     got = static_cast<double>(scale) * decode(DType::f8_e4m3, rows.bytes(r, c));
        EXPECT_LE(std::abs(got - x),
                  std::max(std::abs(x) / 16, static_cast<double>(scale) / 512 * 0.51));
      }
    }
  for (int64_t c = 0; c < 64; ++c)
    EXPECT_EQ(decode(DType::bf16, rows.bytes(2, 528 + 2 * c)),
              rounded(DType::bf16, kv.get(2, 512 + c)));
}

}  // namespace
}  // namespace talea::testing
