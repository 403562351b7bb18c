// What: one process of the MPI tests: the option matrix, or one bad rank of a world of any
// operator.
// Why: ranks as processes must give what ranks as threads give, and must never hang.
// Never: judges by itself whether a fault was named in time; mpi_test.py does.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "dist/mpi_calls.hpp"
#include "yardsticks/linear_cross_entropy/ranks.hpp"

namespace talea::testing {
namespace {

int run_matrix(Communicator& c) {
  int wrong = 0, cases = 0;
  const auto check = [&](const Case& whole, const Layout& shards, bool sequence,
                         const std::string& name) {
    const std::string said =
        check_rank(whole, run_single(whole, "cpu"), shards, sequence, "cpu", c);
    ++cases;
    if (said.empty()) return;
    ++wrong;
    std::printf("FAILED %s: %s\n", name.c_str(), said.c_str());
  };
  for (const auto& [name, whole] : rank_matrix())
    for (const bool sequence : {false, true})
      check(whole, layout("even", whole.vocab(), c.size()), sequence, name);
  const Case plain = rank_matrix()[3].second;
  for (const std::string& name : layout_names)
    check(plain, layout(name, plain.vocab(), c.size()), false, "layout " + name);
  std::printf("rank %d of %d: %d cases, %d wrong\n", c.rank(), c.size(), cases, wrong);
  return wrong > 0;
}

void call_loss(Communicator& c, Bad bad) {
  Case whole = rank_matrix()[0].second;
  if (bad == Bad::option) whole.options.label_smoothing = 0.25;
  if (bad == Bad::data) whole.in.targets.set(0, 0, 1e6);
  const Layout shards = layout("even", whole.vocab(), c.size());
  LinearCrossEntropyRanks ranks;
  ranks.vocab = &c;
  ranks.vocab_begin = shards[c.rank()].begin;
  run_rank(shard_case(whole, shards[c.rank()], false, c.rank(), c.size()), "cpu", ranks);
}

void call(const std::string& op, Communicator& c, Bad bad) {
  if (op == "attention") return call_attention(c, bad);
  op == "scan" ? call_scan(c, bad) : call_loss(c, bad);
}

[[noreturn]] void leave(int status) {
  std::fflush(stdout);
  std::_Exit(status);
}

// The rank `culprit` goes bad after two good calls; the others report what they are told.
int run_fault(const std::string& kind, int culprit, double timeout_s,
              const std::string& presence_dir, const std::string& op) {
  auto start = std::chrono::steady_clock::now();
  const int launcher_rank = std::atoi(std::getenv("OMPI_COMM_WORLD_RANK"));
  const auto report = [&](int rank, const Error& e) {
    const double took =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("survivor %d after %.3f s, kind %d: %s\n", rank, took, static_cast<int>(e.kind()),
                e.what());
    std::fflush(stdout);
    // Open MPI 5 ends the others when one leaves: not before they have spoken too.
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    leave(static_cast<int>(e.kind()));
  };
  try {
    if (kind == "absent" && launcher_rank == culprit)
      std::this_thread::sleep_for(std::chrono::duration<double>(timeout_s + 3));
    MpiOptions options;
    options.timeout_s = timeout_s;
    options.launcher_rank = launcher_rank;
    options.launcher_size = std::atoi(std::getenv("OMPI_COMM_WORLD_SIZE"));
    options.presence_dir = presence_dir;
    const auto c = make_mpi_communicator(options);
    for (int i = 0; i < 2; ++i) call(op, *c, Bad::no);
    start = std::chrono::steady_clock::now();
    if (c->rank() == culprit) {
      if (kind == "dies") std::raise(SIGKILL);
      if (kind == "stops") std::raise(SIGSTOP);
    }
    const Bad bad = kind == "disagrees" ? Bad::option : kind == "refuses" ? Bad::data : Bad::no;
    call(op, *c, c->rank() == culprit ? bad : Bad::no);
  } catch (const Error& e) {
    report(launcher_rank, e);
  }
  std::printf("survivor %d: no error\n", launcher_rank);
  leave(0);
}

}  // namespace
}  // namespace talea::testing

int main(int argc, char** argv) {
  using namespace talea;
  const std::string mode = argc > 1 ? argv[1] : "matrix";
  if (mode != "matrix")
    return testing::run_fault(mode, std::atoi(argv[2]), std::atof(argv[3]), argv[4],
                              argc > 5 ? argv[5] : "loss");
  const auto c = make_mpi_communicator();
  return testing::run_matrix(*c);
}
