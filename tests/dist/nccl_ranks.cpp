// What: one process of the NCCL tests, a GPU each: the option matrix, or one bad rank of a world.
// Why: what threads and MPI show on the host must hold on devices, over the engine people train on.
// Never: judges by itself whether a fault was named in time; nccl_test.py does.
#include <dlfcn.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "core/device_session.hpp"
#include "core/provenance.hpp"
#include "yardsticks/linear_cross_entropy/generate.hpp"
#include "yardsticks/linear_cross_entropy/ranks.hpp"
#include "yardsticks/linear_cross_entropy/run.hpp"

namespace talea::testing {
namespace {

struct World {
  int rank, size;
  std::string file, library;
  double timeout_s;
};

// Few enough that lane sm90 lets the sum of half of dX run beside the product of the other half.
constexpr int multiprocessors = 4;

// Rank 0's id, over the host.
std::string share_id(const World& w, Communicator& host) {
  std::string own = w.rank == 0 ? nccl_unique_id(w.library) : std::string(128, '\0');
  std::string all(own.size() * w.size, '\0');
  host.all_gather(own.data(), all.data(), static_cast<int64_t>(own.size()), nullptr);
  return all.substr(0, own.size());
}

// A communicator as a program of the user's has it: made without us.
void* callers_comm(const World& w, const std::string& id) {
  struct Id {
    char bytes[128];
  } value;
  std::memcpy(value.bytes, id.data(), sizeof value.bytes);
  void* library = dlopen(w.library.c_str(), RTLD_NOW);
  auto init = reinterpret_cast<int (*)(void**, int, Id, int)>(dlsym(library, "ncclCommInitRank"));
  void* comm = nullptr;
  if (!init || init(&comm, w.size, value, w.rank) != 0)
    throw Error(ErrorKind::runtime, "ncclCommInitRank failed");
  return comm;
}

std::unique_ptr<Communicator> join(const World& w, Communicator& host, const std::string& id,
                                   void* comm = nullptr) {
  NcclOptions o;
  o.comm = comm;
  o.rank = w.rank;
  o.size = w.size;
  o.timeout_s = w.timeout_s;
  o.unique_id = id;
  o.host = &host;
  o.library = w.library;
  o.multiprocessors_beside = comm ? -1 : multiprocessors;
  return make_nccl_communicator(o);  // the launcher shows each process one device: number 0
}

Place& device() {
  std::string why;
  Place* place = cuda_place(why);
  if (!place) throw Error(ErrorKind::unavailable, why);
  return *place;
}

// Rows and columns enough for several waves of tiles of dX; the tokens divide by 2, 3 and 4.
const Case& large_case() {
  static const Case large = [] {
    Spec s;
    s.seed = 1;
    s.tokens = 1056;
    s.hidden = 4096;
    s.vocab = 120;
    s.types = Types::bf16;
    s.ignored_percent = 10;
    s.limit_bytes = int64_t{1} << 28;  // one chunk
    return make_case(s);
  }();
  return large;
}

int run_matrix(const World& w, const std::string& lane, bool callers) {
  const auto host = make_shared_communicator({w.rank, w.size, w.file, 120});
  World slow = w;
  slow.timeout_s = 120;
  device();  // NCCL takes the current device of a caller's communicator
  const std::string id = share_id(w, *host);
  const auto c = join(slow, *host, id, callers ? callers_comm(w, id) : nullptr);
  int wrong = 0, cases = 0, declined = 0;
  const auto check = [&](const Case& whole, const Layout& shards, bool sequence,
                         const std::string& name) {
    LinearCrossEntropyRanks ranks;
    ranks.vocab = c.get();
    ranks.vocab_begin = shards[w.rank].begin;
    ranks.sequence_parallel = sequence;
    const Case part = shard_case(whole, shards[w.rank], sequence, w.rank, w.size);
    // All ranks must leave a case out together, and world 1 must take it, too.
    const int64_t own = declines(device(), lane, part, ranks) || declines(device(), lane, whole);
    int64_t any = own;
    host->all_reduce_sum(&any, 1, DType::i64, nullptr);
    if (any > 0) return void(++declined);
    ++cases;
    const CaseOutputs single = run_lane(device(), lane, whole).out;
    const std::string said = check_rank(whole, single, shards, sequence, lane, *c, device());
    if (said.empty()) return;
    ++wrong;
    std::printf("FAILED %s: %s\n", name.c_str(), said.c_str());
    std::fflush(stdout);
  };
  const auto matrix = rank_matrix();
  for (const auto& [name, whole] : matrix)
    for (const bool sequence : {false, true})
      check(whole, layout("even", whole.vocab(), w.size), sequence, name);
  for (size_t i = 3; i < matrix.size(); i += matrix.size() / 4)
    for (const std::string& name : layout_names)
      for (const bool sequence : {false, true})
        check(matrix[i].second, layout(name, matrix[i].second.vocab(), w.size), sequence,
              matrix[i].first + ", layout " + name);
  check(large_case(), layout("even", large_case().vocab(), w.size), false, "large");
  std::printf("rank %d of %d: %d cases, %d wrong, %d declined\n", w.rank, w.size, cases, wrong,
              declined);
  return wrong > 0 || cases == 0;
}

// Thousands of small exchanges, each begun while the watchdog looks: what ends a job of NCCL's must
// be one thread at a time. (Two threads freed it twice, within some hundred exchanges.)
int run_storm(const World& w) {
  constexpr int waves = 40, each = 250;
  const auto host = make_shared_communicator({w.rank, w.size, w.file, 120});
  Place& place = device();
  const auto c = join(w, *host, share_id(w, *host));
  std::vector<int64_t> all(static_cast<size_t>(w.size));
  auto* buffer = static_cast<int64_t*>(place.allocate(8 * (w.size + 1)));
  int wrong = 0;
  for (int64_t wave = 0; wave < waves; ++wave) {
    const int64_t own = 1000 * wave + w.rank;
    place.upload(buffer, &own, 8);
    for (int i = 0; i < each; ++i) c->all_gather(buffer, buffer + 1, 8, place.stream());
    c->wait(place.stream());
    place.download(all.data(), buffer + 1, 8 * w.size);
    for (int r = 0; r < w.size; ++r) wrong += all[static_cast<size_t>(r)] != 1000 * wave + r;
  }
  std::printf("rank %d of %d: %d cases, %d wrong, 0 declined\n", w.rank, w.size, waves * each,
              wrong);
  return wrong > 0;
}

// What a receipt says of the program and its device, as JSON.
int tell() {
  std::string why;
  const auto d = DeviceSession::open(0, why);
  if (!d) throw Error(ErrorKind::unavailable, why);
  const DeviceClocks c = d->clocks();
  const char* clean[] = {"state of the tree unknown", "clean", "with uncommitted changes"};
  const nlohmann::json facts = {{"revision", build_info().git_revision},
                                {"dirty", clean[build_info().git_dirty + 1]},
                                {"device",
                                 {{"name", d->name()},
                                  {"driver", c.driver},
                                  {"runtime", d->runtime()},
                                  {"clocks", "SM " + std::to_string(c.sm_mhz) + " MHz"},
                                  {"throttle_reasons", c.throttle_reasons}}}};
  std::printf("%s\n", facts.dump().c_str());
  return 0;
}

void call(Communicator& c, const Case& whole, bool handshake) {
  const Layout shards = layout("even", whole.vocab(), c.size());
  LinearCrossEntropyRanks ranks;
  ranks.vocab = &c;
  ranks.vocab_begin = shards[c.rank()].begin;
  ranks.handshake = handshake;
  run_lane(device(), "cuda", shard_case(whole, shards[c.rank()], false, c.rank(), c.size()), ranks);
}

[[noreturn]] void leave(int status) {
  std::fflush(stdout);
  std::_Exit(status);
}

// Whoever starts late must not be taken for the one that never comes.
void meet_without(int culprit, const World& w) {
  const int seat = w.rank - (w.rank > culprit);
  const auto others = make_shared_communicator({seat, w.size - 1, w.file + "-others", 60});
  const int64_t here = 1;
  std::vector<int64_t> all(static_cast<size_t>(w.size - 1));
  others->all_gather(&here, all.data(), sizeof here, nullptr);
}

// kind: dies, stops, absent (never comes), absent_init (comes, but not to NCCL), disagrees.
void run_fault(const World& w, const std::string& kind, int culprit) {
  const bool bad = w.rank == culprit;
  auto start = std::chrono::steady_clock::now();
  try {
    if (kind == "absent" && bad) leave(0);
    device();
    const auto host = make_shared_communicator({w.rank, w.size, w.file, 60});
    if (kind == "absent") {
      meet_without(culprit, w);
      host->set_timeout(w.timeout_s);
    }
    start = std::chrono::steady_clock::now();
    const std::string id = share_id(w, *host);
    if (kind == "absent_init" && bad) {
      std::this_thread::sleep_for(std::chrono::duration<double>(w.timeout_s + 4));
      leave(0);
    }
    // NCCL's start takes seconds where many worlds start at once: only absent_init is about it.
    World starting = w;
    if (kind != "absent_init") starting.timeout_s = 60;
    start = std::chrono::steady_clock::now();
    const auto c = join(starting, *host, id);
    Case whole = rank_matrix()[0].second;
    c->set_timeout(60);  // NCCL connects in the first call
    for (int i = 0; i < 2; ++i) call(*c, whole, true);
    c->set_timeout(w.timeout_s);
    const int64_t here = 1;
    std::vector<int64_t> all(static_cast<size_t>(w.size));
    host->all_gather(&here, all.data(), sizeof here, nullptr);
    start = std::chrono::steady_clock::now();
    if (bad && kind == "dies") std::raise(SIGKILL);
    if (bad && kind == "stops") std::raise(SIGSTOP);
    if (bad && kind == "disagrees") whole.options.label_smoothing = 0.25;
    call(*c, whole, kind == "disagrees");
    std::printf("survivor %d: no error\n", w.rank);
  } catch (const Error& e) {
    const double took =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("survivor %d after %.3f s, kind %d: %s\n", w.rank, took, static_cast<int>(e.kind()),
                e.what());
    leave(static_cast<int>(e.kind()));
  }
  leave(0);
}

}  // namespace
}  // namespace talea::testing

// nccl_ranks MODE RANK SIZE FILE LIBRARY [LANE | CULPRIT TIMEOUT]; nccl_ranks facts
int main(int argc, char** argv) {
  using namespace talea;
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "facts") return testing::tell();
  if (argc < 7) return 2;
  const testing::World w{std::atoi(argv[2]), std::atoi(argv[3]), argv[4], argv[5],
                         argc > 7 ? std::atof(argv[7]) : 120};
  const bool callers = mode == "callers_comm";
  const bool storm = mode == "storm";
  if (mode != "matrix" && !callers && !storm) testing::run_fault(w, mode, std::atoi(argv[6]));
  try {
    return storm ? testing::run_storm(w) : testing::run_matrix(w, argv[6], callers);
  } catch (const Error& e) {
    std::printf("rank %d: %s\n", w.rank, e.what());
    return static_cast<int>(e.kind());
  }
}
