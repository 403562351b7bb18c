// What: times every algorithm that cuBLASLt proposes for the products of lane cuda's chunks.
// Why: which tiles to prefer and how many rows a chunk should have is read off measurements.
// Never: decides anything: the rules stand in device/common/cublaslt.cpp and cuda/products.cpp.
//
//   talea_product_bench TOKENS HIDDEN VOCAB LIMIT_MIB [ROWS...]
// ROWS: also for chunks of so many rows. One JSON object a line; the first proposal is the lane's.
// same_bits: of the first MiB of the result, beside the first proposal's.
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/device_session.hpp"
#include "core/fail.hpp"
#include "ops/linear_cross_entropy/cuda/products.hpp"

namespace {

using namespace talea;
namespace lane = talea::lce::cuda;
constexpr int kSamples = 9, kProposals = 10, kCompared = 1 << 20;

lce::Problem training(int64_t tokens, int64_t hidden, int64_t vocab, int64_t limit_mib) {
  lce::Problem p;
  p.tokens = tokens;
  p.hidden = p.hidden_row_stride = p.weight_row_stride = p.dx_row_stride = p.dw_row_stride = hidden;
  p.vocab = p.vocab_local = p.vocab_stored = vocab;
  p.hidden_dtype = p.weight_dtype = p.dx_dtype = DType::bf16;
  p.dw_dtype = DType::f32;
  p.device = DeviceKind::cuda;
  p.has_targets = p.wants_loss = p.wants_dx = p.wants_dw = p.accumulate_dw = true;
  p.options.workspace_limit_bytes = limit_mib << 20;
  return p;
}

class Bench {
 public:
  explicit Bench(const lce::Problem& p, DeviceSession& session)
      : p_(p), plan_(lane::plan(p, gather_device_facts(0))), session_(session) {
    const int64_t most = 8192;
    weight_ = normal(p.vocab * p.hidden, 1);
    x_ = normal(most * p.hidden, 2);
    dz_ = normal(most * plan_.logits_stride, 3);
    // Also the fp32 logits of a chunk.
    sums_ = session.allocate(std::max(p.vocab * p.hidden, most * plan_.logits_stride) * 4);
    session.fill_bytes(sums_, 0, p.vocab * p.hidden * 4);
    workspace_ = session.allocate(device::product_workspace_bytes);
  }

  void rows(int64_t n) {
    using Tiles = device::Product::Tiles;
    const int64_t v = p_.vocab_local;
    for (const auto& [name, tiles] :
         {std::pair{"logits square", Tiles::square}, std::pair{"logits middle", Tiles::middle}}) {
      device::Product g = lane::logits_product(p_, plan_, n, v);
      g.tiles = tiles;
      each(name, g, {weight_, x_, sums_}, 0, 2);
    }
    for (const auto& [name, tiles] :
         {std::pair{"dx library", Tiles::library}, std::pair{"dx large", Tiles::large},
          std::pair{"dx square", Tiles::square}, std::pair{"dx narrow", Tiles::narrow}})
      each(name, lane::dx_product(p_, plan_, n, v, tiles), {weight_, dz_, sums_}, 0,
           tiles == Tiles::library ? 4 : 2);
    for (const auto& [name, tiles] :
         {std::pair{"dw square", Tiles::square}, std::pair{"dw middle", Tiles::middle}}) {
      device::Product g = lane::dw_product(p_, plan_, n, v, p_.hidden);
      g.tiles = tiles;
      each(name, g, {x_, dz_, sums_}, 1, 3);
    }
  }
  int64_t chunk_rows() const { return plan_.chunk_rows; }

 private:
  void* normal(int64_t elements, uint64_t seed) {
    Tensor t =
        make_tensor(session_.allocate(elements * 2), DType::bf16, {elements}, DeviceKind::cuda);
    session_.fill_normal(t, seed, 0.02);
    return t.data;
  }
  // Proposals take turns: the chip's clock drifts with its load.
  void each(const char* name, const device::Product& g, device::ProductBuffers x, float beta,
            int most = kProposals) {
    const float one = 1;
    x.alpha = &one;
    x.beta = &beta;
    x.workspace = workspace_;
    const auto count = static_cast<size_t>(std::min(most, device::proposed_algorithms(g)));
    std::vector<std::vector<double>> ms(count);
    std::vector<char> first, same(count, 1);
    for (int s = 0; s < kSamples; ++s)
      for (size_t i = 0; i < count; ++i) try {
          const auto once = [&] {
            device::run_proposed(g, static_cast<int>(i), x, device::cuda_stream(session_.stream()));
          };
          ms[i].push_back(session_.time_ms(once));
          if (s == 0 && beta == 0) same[i] = compare(first);
        } catch (const Error&) {  // chosen for the canonical size, not for this one
        }
    for (size_t i = 0; i < count; ++i) {
      if (ms[i].empty()) continue;
      std::sort(ms[i].begin(), ms[i].end());
      const double median = ms[i][ms[i].size() / 2];
      const double flops =
          2.0 * static_cast<double>(g.m) * static_cast<double>(g.n) * static_cast<double>(g.k);
      const nlohmann::json line = {{"product", name},
                                   {"hidden", p_.hidden},
                                   {"vocab", p_.vocab_local},
                                   {"rows", name[1] == 'w' ? g.k : g.n},
                                   {"proposal", i},
                                   {"algorithm", device::proposed_name(g, static_cast<int>(i))},
                                   {"ms", median},
                                   {"tflops", flops / median / 1e9},
                                   {"same_bits", same[i] != 0}};
      std::puts(line.dump().c_str());
    }
  }
  char compare(std::vector<char>& first) {
    std::vector<char> now(kCompared);
    session_.download(now.data(), sums_, kCompared);
    if (first.empty()) first = now;
    return now == first ? 1 : 0;
  }

  lce::Problem p_;
  lane::Plan plan_;
  DeviceSession& session_;
  void *weight_, *x_, *dz_, *sums_, *workspace_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) {
    std::fputs("usage: talea_product_bench TOKENS HIDDEN VOCAB LIMIT_MIB [ROWS...]\n", stderr);
    return 2;
  }
  try {
    std::string why;
    const std::unique_ptr<DeviceSession> session = DeviceSession::open(0, why);
    require(session != nullptr, ErrorKind::unavailable, "{}", why);
    const lce::Problem p = training(std::stoll(argv[1]), std::stoll(argv[2]), std::stoll(argv[3]),
                                    std::stoll(argv[4]));
    Bench bench(p, *session);
    bench.rows(bench.chunk_rows());
    for (int i = 5; i < argc; ++i) bench.rows(std::stoll(argv[i]));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "talea_product_bench: %s\n", e.what());
    return 1;
  }
}
