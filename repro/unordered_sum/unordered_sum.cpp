// What: a scalar loss summed in fp32 in whatever order threads arrive.
// Why: two runs of the same program give different bits, and a bisection of a drift finds nothing.
// Never: lets the order of our own sums depend on threads.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

// The orders that a race can produce, drawn by a generator: distinct results over 32 runs.
int distinct_sums(const std::vector<double>& losses) {
  std::vector<size_t> order(losses.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::mt19937 engine(3);
  std::vector<float> sums;
  for (int run = 0; run < 32; ++run) {
    std::shuffle(order.begin(), order.end(), engine);
    float sum = 0;
    for (size_t i : order) sum += static_cast<float>(losses[i]);
    sums.push_back(sum);
  }
  std::sort(sums.begin(), sums.end());
  return static_cast<int>(std::unique(sums.begin(), sums.end()) - sums.begin());
}

void run_all(Report& r) {
  Data d = make_data(512, 16, 256, 111, 3.0);
  Data none = d;
  none.options.reduction = Reduction::none;
  const int distinct = distinct_sums(run(none, "reference").losses);
  r.broken("results beyond the first over 32 orders of an fp32 sum", distinct - 1, 0.5);
  int different = 0;
  if (r.fix_disabled()) {
    different = distinct - 1;
  } else {
    const Answer first = run(d, "auto");
    for (int threads : {1, 2, 3, 5, 0}) {
      Data again = d;
      again.options.threads = threads;
      const Answer other = run(again, "auto");
      different += std::memcmp(&other.loss, &first.loss, sizeof(double)) != 0;
      different += std::memcmp(other.dw.data(), first.dw.data(), other.dw.size() * 8) != 0;
      different += std::memcmp(other.dx.data(), first.dx.data(), other.dx.size() * 8) != 0;
    }
  }
  r.ours("tensors that differ in any bit over 1, 2, 3, 5 and all threads", different, 0.0);
}

}  // namespace

extern const Reproducer unordered_sum{"unordered_sum", "B17",
                                      "a reduction whose order depends on threads", run_all};

}  // namespace talea::repro
