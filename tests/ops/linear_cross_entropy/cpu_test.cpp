// What: lane cpu against the fp64 reference, and bit for bit against itself.
// Why: results must not depend on threads, workspace limit or neighbouring rows.
// Never: compares times.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "core/half.hpp"
#include "device/cpu/pair_product.hpp"
#include "talea/linear_cross_entropy.hpp"
#include "yardsticks/linear_cross_entropy/limit.hpp"
#include "yardsticks/linear_cross_entropy/run.hpp"

namespace talea {
namespace {

// One small problem with owned storage; every option is a field.
struct Case {
  int64_t n = 37, d = 45, v = 611, stored = 0;
  DType dtype = DType::f32, weight_dtype = DType::f32, dw_dtype = DType::f32;
  bool bias = false, class_weight = false, token_weight = false, token_scale = false;
  bool dense = false, backward = true, entropy = false, upstream = false;
  int64_t sparse = 0, top_k = 0;
  double ignored = 0;
  LinearCrossEntropyOptions options;
};

struct Outcome {
  std::vector<double> loss, lse, logp, entropy, dx, dw, db, topk;
  std::vector<int64_t> ids;
  LinearCrossEntropyResult result;
};

std::vector<char> typed(const std::vector<double>& x, DType dtype) {
  std::vector<char> bytes(x.size() * static_cast<size_t>(size_of(dtype)));
  for (size_t i = 0; i < x.size(); ++i)
    store_element(bytes.data(), dtype, static_cast<int64_t>(i), x[i]);
  return bytes;
}

std::vector<double> doubles(const std::vector<char>& bytes, DType dtype) {
  std::vector<double> x(bytes.size() / static_cast<size_t>(size_of(dtype)));
  for (size_t i = 0; i < x.size(); ++i)
    x[i] = load_element(bytes.data(), dtype, static_cast<int64_t>(i));
  return x;
}

struct Data {
  std::vector<double> x, w, b, c, tw, ts, q, up, gl, ge;
  std::vector<int64_t> y, ids;

  explicit Data(const Case& k, unsigned seed = 7) {
    std::mt19937 r(seed);
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> unit(0, 1);
    const int64_t stored = k.stored > 0 ? k.stored : k.v;
    auto fill = [&](std::vector<double>& a, int64_t n, auto f) {
      a.resize(static_cast<size_t>(n));
      for (double& e : a) e = f();
    };
    // Round to the tensors' dtypes first: every lane then sees the same numbers.
    auto rounded = [&](double e, DType t) {
      char raw[8];
      store_element(raw, t, 0, e);
      return load_element(raw, t, 0);
    };
    fill(x, k.n * k.d, [&] { return rounded(normal(r), k.dtype); });
    fill(w, stored * k.d, [&] { return rounded(normal(r) * 0.3, k.weight_dtype); });
    fill(b, stored, [&] { return rounded(normal(r), k.weight_dtype); });
    auto f32 = [&](double e) { return static_cast<double>(static_cast<float>(e)); };
    fill(c, k.v, [&] { return f32(unit(r)); });
    fill(tw, k.n, [&] { return f32(normal(r)); });
    fill(ts, k.n, [&] { return f32(0.5 + unit(r)); });
    fill(up, k.n, [&] { return f32(normal(r)); });
    fill(gl, k.n, [&] { return f32(normal(r)); });
    fill(ge, k.n, [&] { return f32(normal(r)); });
    const int64_t width = k.dense ? k.v : k.sparse;
    fill(q, k.n * width, [&] { return f32(unit(r) / static_cast<double>(width)); });
    for (int64_t i = 0; i < k.n; ++i)
      y.push_back(unit(r) < k.ignored ? -100 : static_cast<int64_t>(unit(r) * k.v));
    for (int64_t i = 0; i < k.n * k.sparse; ++i) ids.push_back(static_cast<int64_t>(unit(r) * k.v));
  }
};

// Runs the rows [first, first + rows) of the data.
Outcome run(const Case& k, const Data& data, const char* lane, int64_t first = 0, int64_t rows = -1,
            int shift_bytes = 0) {
  const int64_t n = rows < 0 ? k.n : rows, stored = k.stored > 0 ? k.stored : k.v;
  auto part = [&](const std::vector<double>& a, int64_t width) {
    return std::vector<double>(a.begin() + first * width, a.begin() + (first + n) * width);
  };
  const bool exact = std::string(lane) == "reference";
  const DType xt = exact ? DType::f64 : k.dtype, wt = exact ? DType::f64 : k.weight_dtype;
  const DType dwt = exact ? DType::f64 : k.dw_dtype;
  const auto x = typed(part(data.x, k.d), xt), w = typed(data.w, wt), b = typed(data.b, wt);
  const auto c = typed(data.c, DType::f32), tw = typed(part(data.tw, 1), DType::f32);
  const auto ts = typed(part(data.ts, 1), DType::f32), up = typed(part(data.up, 1), DType::f32);
  const auto gl = typed(part(data.gl, 1), DType::f32), ge = typed(part(data.ge, 1), DType::f32);
  const int64_t width = k.dense ? k.v : k.sparse;
  const auto q = typed(part(data.q, width), DType::f32);
  const std::vector<int64_t> y(data.y.begin() + first, data.y.begin() + first + n);
  std::vector<int64_t> ids;
  if (k.sparse > 0)
    ids.assign(data.ids.begin() + first * k.sparse, data.ids.begin() + (first + n) * k.sparse);

  LinearCrossEntropyInputs in;
  in.hidden = make_tensor(x.data(), xt, {n, k.d});
  in.weight = make_tensor(w.data(), wt, {stored, k.d});
  if (k.bias) in.bias = make_tensor(b.data(), wt, {stored});
  if (!k.dense && k.sparse == 0) in.targets = make_tensor(y.data(), DType::i64, {n});
  if (k.class_weight) in.class_weight = make_tensor(c.data(), DType::f32, {k.v});
  if (k.token_weight) in.token_weight = make_tensor(tw.data(), DType::f32, {n});
  if (k.token_scale) in.token_scale = make_tensor(ts.data(), DType::f32, {n});
  if (width > 0) in.soft_target_probs = make_tensor(q.data(), DType::f32, {n, width});
  if (k.sparse > 0) in.soft_target_ids = make_tensor(ids.data(), DType::i64, {n, k.sparse});
  const bool none = k.options.reduction == Reduction::none;
  if (k.upstream) {
    in.upstream =
        none ? make_tensor(up.data(), DType::f32, {n}) : make_tensor(up.data(), DType::f32, {});
    in.upstream_lse = make_tensor(gl.data(), DType::f32, {n});
    in.upstream_entropy = make_tensor(ge.data(), DType::f32, {n});
  }
  Outcome o;
  o.loss.assign(static_cast<size_t>(none ? n : 1), -1);
  o.lse.assign(static_cast<size_t>(n), -1);
  o.logp = o.entropy = o.lse;
  o.topk.assign(static_cast<size_t>(n * k.top_k), -1);
  o.ids.assign(o.topk.size(), -7);
  std::vector<char> dx(static_cast<size_t>(n * k.d * size_of(xt)));
  std::vector<char> dw(static_cast<size_t>(stored * k.d * size_of(dwt)));
  std::vector<char> db(static_cast<size_t>(stored * size_of(dwt)));
  LinearCrossEntropyOutputs out;
  out.loss = none ? make_tensor(o.loss.data(), DType::f64, {n})
                  : make_tensor(o.loss.data(), DType::f64, {});
  out.lse = make_tensor(o.lse.data(), DType::f64, {n});
  if (in.targets) out.target_logprob = make_tensor(o.logp.data(), DType::f64, {n});
  if (k.entropy) out.entropy = make_tensor(o.entropy.data(), DType::f64, {n});
  if (k.top_k > 0) {
    out.topk_values = make_tensor(o.topk.data(), DType::f64, {n, k.top_k});
    out.topk_ids = make_tensor(o.ids.data(), DType::i64, {n, k.top_k});
  }
  if (k.backward) {
    out.dx = make_tensor(dx.data(), xt, {n, k.d});
    out.dw = make_tensor(dw.data(), dwt, {stored, k.d});
    if (k.bias) out.db = make_tensor(db.data(), dwt, {stored});
  }
  LinearCrossEntropyOptions options = k.options;
  options.lane = lane;
  options.vocab = k.v;
  options = testing::with_kept_limit(in, out, options);
  const auto problem = describe(in, out, options);
  const int64_t bytes = workspace_bytes(problem);
  std::vector<char> workspace(static_cast<size_t>(bytes + shift_bytes + 64), char(0xff));
  o.result = linear_cross_entropy(in, out, options, {workspace.data() + shift_bytes, bytes});
  for (int i = 0; i < 64; ++i)
    EXPECT_EQ(workspace[static_cast<size_t>(bytes + shift_bytes + i)], char(0xff));
  o.dx = doubles(dx, xt);
  o.dw = doubles(dw, dwt);
  o.db = doubles(db, dwt);
  return o;
}

void expect_near(const char* what, const std::vector<double>& got, const std::vector<double>& want,
                 double tolerance, double floor = 0) {
  ASSERT_EQ(got.size(), want.size());
  double largest = floor;
  for (double e : want) largest = std::max(largest, std::abs(e));
  for (size_t i = 0; i < got.size(); ++i) {
    if (!(std::abs(got[i] - want[i]) <= tolerance * largest)) {
      ADD_FAILURE() << what << "[" << i << "] = " << got[i] << ", want " << want[i] << ", largest "
                    << largest;
      return;
    }
  }
}

void expect_matches_reference(const Case& k, const char* lane, double tolerance) {
  const Data data(k);
  const Outcome truth = run(k, data, "reference"), ours = run(k, data, lane);
  const double wide = k.dtype == DType::f32 ? tolerance : 3e-6;  // fp32 softmax whatever the inputs
  expect_near("loss", ours.loss, truth.loss, wide, 10);
  expect_near("lse", ours.lse, truth.lse, wide, 10);
  expect_near("logp", ours.logp, truth.logp, wide, 10);
  if (k.entropy) expect_near("entropy", ours.entropy, truth.entropy, 4 * wide, 10);
  if (k.backward) {
    expect_near("dx", ours.dx, truth.dx, tolerance);
    expect_near("dw", ours.dw, truth.dw, tolerance);
    if (k.bias) expect_near("db", ours.db, truth.db, tolerance);
  }
  if (k.dtype == DType::f32) {
    EXPECT_EQ(ours.ids, truth.ids);
  }
}

std::vector<std::function<void(Case&)>> variations() {
  return {
      [](Case&) {},
      [](Case& k) { k.bias = k.class_weight = true, k.options.label_smoothing = 0.2; },
      [](Case& k) { k.options.softcap = 5, k.options.z_loss = 0.01, k.token_scale = true; },
      [](Case& k) { k.options.reduction = Reduction::none, k.upstream = k.entropy = true; },
      [](Case& k) { k.dense = true, k.class_weight = true, k.options.label_smoothing = 0.1; },
      [](Case& k) { k.sparse = 5, k.options.softcap = 4, k.bias = true, k.class_weight = true; },
      [](Case& k) { k.ignored = 0.6, k.token_weight = true, k.top_k = 5, k.entropy = true; },
      [](Case& k) { k.stored = 700, k.bias = true, k.options.logit_scale = 0.7; },
      [](Case& k) { k.n = 1, k.d = 1, k.v = 1; },
      [](Case& k) { k.n = 130, k.d = 300, k.v = 1030, k.options.workspace_limit_bytes = 1 << 20; },
      [](Case& k) { k.n = 3, k.d = 0, k.v = 7; },
  };
}

TEST(CpuLane, MatchesTheReference) {
  int i = 0;
  for (const auto& vary : variations()) {
    SCOPED_TRACE(i++);
    Case k;
    vary(k);
    expect_matches_reference(k, "cpu", 1e-5);
  }
}

TEST(UnfusedLane, MatchesTheReference) {
  int i = 0;
  for (const auto& vary : variations()) {
    SCOPED_TRACE(i++);
    Case k;
    vary(k);
    expect_matches_reference(k, "unfused", 1e-5);
    // Rounded logits: only as right as eager code is.
    k.dtype = k.weight_dtype = k.dw_dtype = DType::bf16;
    const Data data(k);
    const Outcome truth = run(k, data, "reference"), eager = run(k, data, "unfused");
    expect_near("dx", eager.dx, truth.dx, 0.1);
    expect_near("dw", eager.dw, truth.dw, 0.1);
    EXPECT_TRUE(eager.result.full_logits_tensor);
  }
}

// A chunk that holds every row holds the whole tensor, in any lane.
TEST(HostLanes, SayWhetherAFullTensorExisted) {
  for (const char* lane : {"reference", "cpu", "unfused"})
    for (const int64_t tokens : {7, 300}) {
      Case k;
      k.n = tokens;
      const Outcome o = run(k, Data(k), lane);
      const bool whole = tokens == 7 || std::string(lane) == "unfused";
      EXPECT_EQ(o.result.full_logits_tensor, whole) << lane << " " << tokens;
    }
}

TEST(CpuLane, SixteenBitInputsKeepAnFp32Softmax) {
  for (DType dtype : {DType::bf16, DType::f16})
    for (DType weight : {dtype, DType::f32}) {
      int i = 0;
      for (const auto& vary : variations()) {
        SCOPED_TRACE(std::string(name_of(dtype)) + name_of(weight) + std::to_string(i++));
        Case k;
        k.dtype = dtype;
        k.weight_dtype = weight;
        k.dw_dtype = weight;
        vary(k);
        expect_matches_reference(k, "cpu", dtype == DType::bf16 ? 4e-3 : 5e-4);
      }
    }
}

// fp32 and bf16 take different products.
std::vector<Case> cases_by_type() {
  std::vector<Case> cases;
  for (DType dtype : {DType::f32, DType::bf16})
    for (const auto& vary : variations()) {
      Case k;
      k.dtype = k.weight_dtype = k.dw_dtype = dtype;
      vary(k);
      cases.push_back(k);
    }
  return cases;
}

TEST(CpuLane, BitwiseForAnyNumberOfThreads) {
  for (Case k : cases_by_type()) {
    const Data data(k);
    k.options.threads = 1;
    const Outcome one = run(k, data, "cpu");
    for (int threads : {2, 3, 7}) {
      k.options.threads = threads;
      const Outcome many = run(k, data, "cpu");
      EXPECT_EQ(one.loss, many.loss);
      EXPECT_EQ(one.lse, many.lse);
      EXPECT_EQ(one.dx, many.dx);
      EXPECT_EQ(one.dw, many.dw);
      EXPECT_EQ(one.db, many.db);
    }
  }
}

TEST(CpuLane, LossAndDxDoNotDependOnTheWorkspaceLimit) {
  for (Case k : cases_by_type()) {
    k.n = std::max<int64_t>(k.n, 70);
    const Data data(k);
    k.options.workspace_limit_bytes = int64_t{1} << 30;
    const Outcome wide = run(k, data, "cpu");
    for (int64_t limit : {int64_t{0}, int64_t{1500000}, int64_t{3000000}}) {
      k.options.workspace_limit_bytes = limit;
      const Outcome tight = run(k, data, "cpu", 0, -1, 8);
      EXPECT_EQ(wide.loss, tight.loss);
      EXPECT_EQ(wide.lse, tight.lse);
      EXPECT_EQ(wide.topk, tight.topk);
      EXPECT_EQ(wide.dx, tight.dx);
      expect_near("dw", tight.dw, wide.dw, k.dtype == DType::f32 ? 1e-6 : 4e-3);  // an ulp
    }
  }
}

TEST(CpuLane, AWindowOfTheVocabularyGivesTheSameBits) {
  for (DType dtype : {DType::bf16, DType::f16})
    for (const auto& vary : variations()) {
      Case k;
      k.dtype = k.weight_dtype = k.dw_dtype = dtype;
      vary(k);
      if (k.sparse > 0) continue;  // such calls keep all logits of a chunk
      k.n = 300, k.v = 12000, k.stored = 0, k.d = 61;
      const Data data(k);
      k.options.workspace_limit_bytes = int64_t{1} << 30;
      const Outcome whole = run(k, data, "cpu");
      EXPECT_EQ(whole.result.logits_home.find("window"), std::string::npos);
      for (int threads : {1, 3}) {
        k.options.threads = threads;
        k.options.workspace_limit_bytes = int64_t{12} << 20;
        const Outcome part = run(k, data, "cpu");
        EXPECT_NE(part.result.logits_home.find("window"), std::string::npos);
        EXPECT_FALSE(part.result.full_logits_tensor);
        EXPECT_EQ(whole.loss, part.loss);
        EXPECT_EQ(whole.lse, part.lse);
        EXPECT_EQ(whole.logp, part.logp);
        EXPECT_EQ(whole.entropy, part.entropy);
        EXPECT_EQ(whole.topk, part.topk);
        EXPECT_EQ(whole.ids, part.ids);
        EXPECT_EQ(whole.dx, part.dx);
        EXPECT_EQ(whole.dw, part.dw);
        EXPECT_EQ(whole.db, part.db);
      }
    }
}

TEST(CpuLane, NativeBf16IsNamedAndRoundsWhereEagerCodeDoes) {
  Case k;
  k.n = 70, k.v = 1500, k.d = 129;
  k.dtype = k.weight_dtype = DType::bf16;
  k.dw_dtype = DType::f32;
  const Data data(k);
  const Outcome truth = run(k, data, "reference"), ours = run(k, data, "cpu");
  const char* path = talea::cpu::native_bf16() ? "products: native bf16" : "widened to fp32";
  bool named = false;
  for (const std::string& note : ours.result.notes)
    named = named || note.find(path) != std::string::npos;
  EXPECT_TRUE(named);
  // An fp32 dW shows the factors' rounding, 2^-9 of each but the large ones, and nothing more.
  double error = 0, size = 0;
  for (size_t i = 0; i < truth.dw.size(); ++i) {
    error += std::pow(ours.dw[i] - truth.dw[i], 2);
    size += truth.dw[i] * truth.dw[i];
  }
  EXPECT_LE(std::sqrt(error / size), 2e-4);
}

TEST(CpuLane, RowsDoNotSeeTheirNeighbours) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Case k;
    k.dtype = k.weight_dtype = k.dw_dtype = dtype;
    k.n = 90;
    k.d = 300;
    k.options.reduction = Reduction::none;
    k.bias = true;
    const Data data(k);
    const Outcome all = run(k, data, "cpu");
    for (int64_t first : {0, 1, 50})
      for (int64_t rows : {1, 17, 40}) {
        const Outcome part = run(k, data, "cpu", first, rows);
        for (int64_t t = 0; t < rows; ++t) {
          EXPECT_EQ(part.loss[static_cast<size_t>(t)], all.loss[static_cast<size_t>(first + t)]);
          for (int64_t i = 0; i < k.d; ++i)
            ASSERT_EQ(part.dx[static_cast<size_t>(t * k.d + i)],
                      all.dx[static_cast<size_t>((first + t) * k.d + i)]);
        }
      }
  }
}

TEST(CpuLane, ANanRowLeavesTheOthersAlone) {
  Case k;
  k.options.reduction = Reduction::none;
  Data data(k);
  const Outcome clean = run(k, data, "cpu");
  data.x[static_cast<size_t>(5 * k.d + 3)] = NAN;
  const Outcome dirty = run(k, data, "cpu");
  for (int64_t t = 0; t < k.n; ++t) {
    const auto i = static_cast<size_t>(t);
    if (t == 5)
      EXPECT_TRUE(std::isnan(dirty.loss[i]) && std::isnan(dirty.dx[i * k.d]));
    else
      EXPECT_TRUE(dirty.loss[i] == clean.loss[i] && dirty.dx[i * k.d] == clean.dx[i * k.d]);
  }
}

// The mean over the words of equal logits is that logit: their fp32 sum would be off by forty
// roundings.
TEST(CpuLane, SmoothingOverEqualLogitsKeepsItsDigits) {
  std::vector<float> x = {1}, w(250, 29.9f);
  std::vector<int64_t> y = {3};
  double loss = 0;
  LinearCrossEntropyInputs in;
  in.hidden = make_tensor(x.data(), DType::f32, {1, 1});
  in.weight = make_tensor(w.data(), DType::f32, {250, 1});
  in.targets = make_tensor(y.data(), DType::i64, {1});
  LinearCrossEntropyOutputs out;
  out.loss = make_tensor(&loss, DType::f64, {});
  LinearCrossEntropyOptions options;
  options.lane = "cpu";
  options.label_smoothing = 0.9;
  std::vector<char> workspace(static_cast<size_t>(workspace_bytes(describe(in, out, options))));
  linear_cross_entropy(in, out, options,
                       {workspace.data(), static_cast<int64_t>(workspace.size())});
  EXPECT_NEAR(loss, std::log(250.0), 4e-6);
}

// Equal logits: every word has 1/V of both parts, and a thousandth of them is left. Both factors of
// the row are carried in two fp32 numbers for this.
TEST(CpuLane, SmoothingOverEqualLogitsKeepsTheRestsDigits) {
  testing::Case c = testing::plain_case({.tokens = 3, .hidden = 1, .vocab = 7});
  c.options.label_smoothing = 0.999;
  for (int64_t v = 0; v < 7; ++v) c.in.weight.set(v, 0, 1);
  for (int64_t t = 0; t < 3; ++t) c.in.hidden.set(t, 0, 1), c.in.targets.set_integer(t, 0, 2);
  testing::want_everything(c);
  const testing::Outcome o = testing::run_lane(testing::host_place(), "cpu", c);
  const testing::Answer truth = testing::oracle(c);
  for (const int64_t v : {0, 1, 3, 4, 5, 6})  // the target's own term is one number
    EXPECT_NEAR(double(o.out.dw.get(v, 0) / truth.dw[size_t(v)]), 1, 1e-6) << "word " << v;
}

TEST(CpuLane, ConfidentRowsKeepTheirDigits) {
  // Two logits: the target leads by `gap`; 1 - p is exp(-gap) / (1 + exp(-gap)).
  for (double gap : {2.2, 4.6, 7.6, 13.8, 30.0}) {
    std::vector<float> x = {1}, w = {static_cast<float>(gap), 0}, dw(2);
    std::vector<int64_t> y = {0};
    double loss = 0;
    LinearCrossEntropyInputs in;
    in.hidden = make_tensor(x.data(), DType::f32, {1, 1});
    in.weight = make_tensor(w.data(), DType::f32, {2, 1});
    in.targets = make_tensor(y.data(), DType::i64, {1});
    LinearCrossEntropyOutputs out;
    out.loss = make_tensor(&loss, DType::f64, {});
    out.dw = make_tensor(dw.data(), DType::f32, {2, 1});
    LinearCrossEntropyOptions options;
    options.lane = "cpu";
    std::vector<char> workspace(static_cast<size_t>(workspace_bytes(describe(in, out, options))));
    linear_cross_entropy(in, out, options,
                         {workspace.data(), static_cast<int64_t>(workspace.size())});
    const double others = std::exp(-double{w[0]}), share = others / (1 + others);
    EXPECT_NEAR(dw[0], -share, 1e-6 * share);
    EXPECT_NEAR(dw[1], share, 1e-6 * share);
    EXPECT_NEAR(loss, std::log1p(others), 1e-6 * others);
  }
}

}  // namespace
}  // namespace talea
