// What: a device lane over NCCL ranks, one process a GPU, beside the world of one on the same GPUs.
// Why: what ranks cost, hide and need is known only where the links are; receipts come from here.
// Never: compares with a number of another run: all variants alternate, sample by sample.
//
//   talea_nccl_bench speed RANK SIZE WORLD LIBRARY LANE RECEIPT TOKENS HIDDEN VOCAB LIMIT_MIB
//   VARIANTS talea_nccl_bench train RANK SIZE WORLD LIBRARY LANE RECEIPT VOCAB
// WORLD: a name for the ranks to meet under, new to this host. RECEIPT "-": none. VARIANTS: see
// speed.hpp. bench/nccl_bench.py starts the ranks.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "bench/nccl/speed.hpp"
#include "bench/nccl/train.hpp"
#include "core/fail.hpp"
#include "io/receipt_file.hpp"

namespace {

using namespace talea;

std::string nccl_version(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW);
  auto ask = reinterpret_cast<int (*)(int*)>(handle ? dlsym(handle, "ncclGetVersion") : nullptr);
  int v = 0;
  if (!ask || ask(&v) != 0) return "unknown";
  return fmt::format("{}.{}.{}", v / 10000, v / 100 % 100, v % 100);
}

Provenance provenance_of(int argc, char** argv, DeviceSession& d, const std::string& library) {
  TextPairs environment;
  for (const char* name : relevant_environment)
    if (const char* value = std::getenv(name)) environment.emplace_back(name, value);
  Provenance p = gather_provenance({argv, argv + argc}, environment);
  const DeviceClocks c = d.clocks();
  p.device = {d.name(), c.driver, d.runtime(),
              fmt::format("SM {} MHz, memory {} MHz", c.sm_mhz, c.memory_mhz), c.throttle_reasons};
  p.libraries.emplace_back("nccl", nccl_version(library));
  return p;
}

int run(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (!(mode == "speed" && argc == 13) && !(mode == "train" && argc == 9)) return 2;
  bench::World w;
  w.rank = std::atoi(argv[2]);
  w.size = std::atoi(argv[3]);
  w.library = argv[5];
  w.host = make_shared_communicator({w.rank, w.size, std::string("/dev/shm/") + argv[4], 120});
  std::string why;
  const auto d = DeviceSession::open(0, why);
  require(d != nullptr, ErrorKind::unavailable, "{}", why);
  std::vector<lce::CallFacts> calls;
  const std::string lane = argv[6], file = argv[7];
  bool passed = true;
  nlohmann::json section;
  if (mode == "speed") {
    const bench::Size size{std::atoll(argv[8]), std::atoll(argv[9]), std::atoll(argv[10]), lane,
                           std::atoll(argv[11]) << 20};
    section = bench::measure_speed(w, *d, size, bench::parse_variants(argv[12]), calls);
    passed = section["passed"];
  } else {
    section = bench::train_both(w, *d, lane, std::atoll(argv[8]), passed);
  }
  if (w.rank == 0 && file != "-") {
    Receipt receipt(ReceiptKind::bench, provenance_of(argc, argv, *d, w.library));
    for (const lce::CallFacts& f : calls) receipt.call(lce::call_json(f));
    receipt.title(fmt::format("Lane {} over {} NCCL ranks", lane, w.size));
    receipt.section("bench", section).verdict(passed ? Verdict::passed : Verdict::failed);
    io::write_receipt(file, receipt);
  }
  w.meet();
  if (w.rank == 0) unlink((std::string("/dev/shm/") + argv[4]).c_str());
  return passed ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const talea::Error& e) {
    std::printf("%s\n", e.what());
    return static_cast<int>(e.kind());
  }
}
