// What: calls of the C interface from several threads at once.
// Why: "calls from several threads are independent", each with its own last error, is a promise.
// Never: a test of ranks; these calls know nothing of each other.
#include <gtest/gtest.h>
#include <talea/talea.h>

#include <string>
#include <thread>
#include <vector>

#include "view.hpp"

namespace {

constexpr int64_t tokens = 32, hidden = 24, vocab = 300;

// What one thread does, over and over: a call of its own numbers, and one that fails.
struct Caller {
  int number;
  std::vector<float> results;
  std::string trouble;

  void work(int rounds) {
    std::vector<float> x(tokens * hidden), w(vocab * hidden), dw(w.size());
    std::vector<int64_t> y(tokens);
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>((i * 7 + number) % 11) / 8;
    for (size_t i = 0; i < w.size(); ++i) w[i] = static_cast<float>(i * 5 % (13 + number)) / 16;
    for (size_t t = 0; t < y.size(); ++t) y[t] = static_cast<int64_t>(t * 17 + number) % vocab;
    for (int round = 0; round < rounds && trouble.empty(); ++round) {
      float loss = 0;
      call(x, w, y, loss, dw, 0);
      results.push_back(loss);
      results.insert(results.end(), dw.begin(), dw.end());
      call(x, w, y, loss, dw, -1 - number);
      const std::string said = talea_last_error(), own = "softcap = " + std::to_string(-1 - number);
      if (said.find(own + ":") == std::string::npos) trouble = own + " was told: " + said;
    }
  }

  void call(std::vector<float>& x, std::vector<float>& w, std::vector<int64_t>& y, float& loss,
            std::vector<float>& dw, double softcap) {
    talea_linear_cross_entropy_inputs inputs{};
    inputs.struct_bytes = sizeof inputs;
    inputs.hidden = view(x.data(), TALEA_F32, {tokens, hidden});
    inputs.weight = view(w.data(), TALEA_F32, {vocab, hidden});
    inputs.targets = view(y.data(), TALEA_I64, {tokens});
    talea_linear_cross_entropy_outputs outputs{};
    outputs.struct_bytes = sizeof outputs;
    outputs.loss = view(&loss, TALEA_F32, {});
    outputs.dw = view(dw.data(), TALEA_F32, {vocab, hidden});
    talea_linear_cross_entropy_options options;
    talea_linear_cross_entropy_options_init(&options, sizeof options);
    options.softcap = softcap;
    talea_linear_cross_entropy_args args = args_of(inputs, outputs, options);
    std::vector<char> workspace;
    const bool good = softcap >= 0;
    if ((call_in(workspace, args) == TALEA_OK) != good) trouble = talea_last_error();
  }
};

TEST(CApiThreads, CallsAreIndependent) {
  constexpr int callers = 4, rounds = 20;
  std::vector<Caller> alone, together;
  for (int i = 0; i < callers; ++i) {
    alone.push_back({i, {}, ""});
    together.push_back({i, {}, ""});
    alone.back().work(rounds);
  }
  std::vector<std::thread> threads;
  for (Caller& c : together) threads.emplace_back([&c] { c.work(rounds); });
  for (std::thread& t : threads) t.join();
  for (int i = 0; i < callers; ++i) {
    EXPECT_EQ(together[i].trouble, "");
    EXPECT_EQ(alone[i].trouble, "");
    EXPECT_EQ(together[i].results, alone[i].results);
  }
}

}  // namespace
