// What: workspace limits on the host: kept at every size from the least on, refused below it.
// Why: a limit that is exceeded without a word is found by whoever runs out of memory.
// Never: touches data but in the last test; the suite runs at drawn limits (draw.cpp, rank_matrix).
#include "yardsticks/linear_cross_entropy/limit.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/expect_error.hpp"
#include "yardsticks/linear_cross_entropy/generate.hpp"
#include "yardsticks/linear_cross_entropy/run.hpp"

namespace talea::testing {
namespace {

constexpr int64_t no_limit = int64_t{1} << 50;

struct Shape {
  int64_t tokens, hidden, vocab;
  DType dtype = DType::f32;
  int64_t soft_k = 0;
  std::string text() const {
    return fmt::format("{} x {} x {} {} soft {}", tokens, hidden, vocab, name_of(dtype), soft_k);
  }
};

// Smallest plans of each kind: rows in chunks, a window of the vocabulary, nothing at all.
std::vector<Shape> shapes() {
  std::vector<Shape> all = {{0, 4, 7}, {1, 1, 1}, {5, 0, 9}, {8192, 4096, 128256, DType::bf16}};
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const int64_t soft : {0, 5}) {
      all.push_back({37, 21, 90, dtype, soft});
      all.push_back({700, 8, 3000, dtype, soft});
      all.push_back({16, 300, 20000, dtype, soft});
      all.push_back({4096, 64, 50257, dtype, soft});
    }
  return all;
}

// Tensors at made-up addresses: describe() looks at no data.
LinearCrossEntropyProblem problem_of(const Shape& s, const std::string& lane) {
  uintptr_t next = 4096;
  auto make = [&](DType dtype, std::initializer_list<int64_t> shape) {
    next += uintptr_t{1} << 40;
    return make_tensor(reinterpret_cast<void*>(next), dtype, shape);
  };
  LinearCrossEntropyInputs in;
  in.hidden = make(s.dtype, {s.tokens, s.hidden});
  in.weight = make(s.dtype, {s.vocab, s.hidden});
  if (s.soft_k == 0) in.targets = make(DType::i64, {s.tokens});
  if (s.soft_k > 0) in.soft_target_ids = make(DType::i64, {s.tokens, s.soft_k});
  if (s.soft_k > 0) in.soft_target_probs = make(DType::f32, {s.tokens, s.soft_k});
  LinearCrossEntropyOutputs out;
  out.loss = make(DType::f32, {});
  out.dx = make(s.dtype, {s.tokens, s.hidden});
  out.dw = make(s.dtype, {s.vocab, s.hidden});
  LinearCrossEntropyOptions options;
  options.lane = lane;
  options.workspace_limit_bytes = no_limit;
  return describe(in, out, options);
}

template <typename Check>
void every_problem(Check&& check) {
  for (const Shape& s : shapes())
    for (const std::string& lane : lanes_here()) {
      if (is_device_lane(lane)) continue;
      SCOPED_TRACE(s.text() + " on lane " + lane);
      check(problem_of(s, lane));
    }
}

TEST(WorkspaceLimit, IsKeptFromTheLeastOn) {
  every_problem([](LinearCrossEntropyProblem p) {
    for (const int threads : {0, 1, 2, 5}) {
      p.options.threads = threads;
      p.options.workspace_limit_bytes = no_limit;
      const int64_t most = workspace_bytes(p);
      for (int64_t limit = least_limit(p); limit <= 2 * most; limit += 1 + limit / 3) {
        p.options.workspace_limit_bytes = limit;
        EXPECT_LE(workspace_bytes(p), limit) << threads << " threads";
      }
    }
  });
}

TEST(WorkspaceLimit, BelowTheLeastIsAnErrorThatNamesIt) {
  every_problem([](LinearCrossEntropyProblem p) {
    const int64_t least = least_limit(p);
    if (least == 0) return;
    p.options.workspace_limit_bytes = least - 1;
    const std::string given = fmt::format("workspace_limit = {} bytes", least - 1);
    const std::string said = fmt::format("lane {} needs at least {} bytes", p.options.lane, least);
    expect_error(ErrorKind::usage, {given.c_str(), said.c_str()}, [&] { workspace_bytes(p); });
    expect_error(ErrorKind::usage, {given.c_str(), said.c_str()}, [&] { explain(p); });
  });
}

// At the least limit the host's lane runs and is right.
TEST(WorkspaceLimit, TheLeastIsEnough) {
  for (const Types types : {Types::f32, Types::bf16, Types::f16})
    for (const Soft soft : {Soft::none, Soft::dense, Soft::sparse}) {
      // run_lane raises the limit to the least.
      const Spec spec{
          .tokens = 150, .hidden = 9, .vocab = 700, .types = types, .soft = soft, .limit_bytes = 0};
      EXPECT_EQ(verify(host_lane(), make_case(spec)), "") << spec;
    }
}

}  // namespace
}  // namespace talea::testing
