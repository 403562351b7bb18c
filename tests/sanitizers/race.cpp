// What: one loop with a planted race between OpenMP threads and one between std::threads.
// Why: a thread sanitizer that reports nothing proves something only if it reports these.
// Never: part of the library; usage: race none | openmp | threads.
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int rounds = 1000;

// The shape of the library's loops: shared input, one slot a row, a sum that must not be shared.
double openmp(bool planted) {
  std::vector<double> rows(rounds, 1);
  double sum = 0;
#pragma omp parallel for num_threads(2)
  for (int t = 0; t < rounds; ++t) {
    rows[static_cast<size_t>(t)] *= 2;
    if (planted) sum += rows[static_cast<size_t>(t)];
  }
  for (int t = 0; t < rounds && !planted; ++t) sum += rows[static_cast<size_t>(t)];
  return sum;
}

double threads(bool planted) {
  double sum = 0, own = 0;
  std::thread other([&] {
    for (int t = 0; t < rounds; ++t) (planted ? sum : own) += 1;
  });
  for (int t = 0; t < rounds; ++t) sum += 1;
  other.join();
  return sum + own;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string kind = argc > 1 ? argv[1] : "none";
  std::printf("%g %g\n", openmp(kind == "openmp"), threads(kind == "threads"));
  return 0;
}
