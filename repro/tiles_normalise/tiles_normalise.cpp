// What: a tiled loss whose backward lets each tile normalise itself.
// Why: the forward weighs tiles by their tokens, the backward by one over the number of tiles.
// Never: cuts a denominator of ours by tiles.
#include "repro/support/softmax.hpp"

namespace talea::repro {
namespace {

constexpr int64_t tiles = 4;

// The loss of the forward: tiles weighed by their valid tokens, empty ones left out. It is right.
Answer each_tile_for_itself(const Data& d) {
  Answer a;
  const auto z = logits_of(d);
  const int64_t width = d.tokens / tiles;
  std::vector<int64_t> valid(tiles, 0);
  for (int64_t t = 0; t < d.tokens; ++t) valid[t / width] += d.y[t] != d.options.ignore_index;
  std::vector<PlainRow> rows;
  for (int64_t t = 0; t < d.tokens; ++t) {
    rows.push_back(softmax_row(&z[t * d.stored], d.vocab));
    if (d.y[t] == d.options.ignore_index) continue;
    a.loss += (rows[t].lse - z[t * d.stored + d.y[t]]) / static_cast<double>(valid_count(d));
  }
  // The backward differentiates each tile's own mean and divides by the number of tiles.
  products(d, a, [&](int64_t t, int64_t v) {
    if (d.y[t] == d.options.ignore_index) return 0.0;
    const double p = std::exp(z[t * d.stored + v] - rows[t].lse);
    return (p - (v == d.y[t] ? 1.0 : 0.0)) / static_cast<double>(valid[t / width] * tiles);
  });
  return a;
}

void run_all(Report& r) {
  Data d = make_data(32, 48, 96, 131);
  // Tiles of 8, 6, 2 and 0 tokens that count, as packing and a prompt mask leave them.
  for (const int64_t t : {8, 9, 16, 17, 18, 19, 20, 21, 24, 25, 26, 27, 28, 29, 30, 31})
    d.y[static_cast<size_t>(t)] = d.options.ignore_index;
  const Answer truth = run(d, "reference");
  const Answer bad = each_tile_for_itself(d);
  r.figure("loss, tiles weighed by their tokens (right)", relative(bad.loss, truth.loss));
  r.broken("dX, each tile divided by its own count", relative_l2(bad.dx, truth.dx), 0.1);
  r.broken("dW, each tile divided by its own count", relative_l2(bad.dw, truth.dw), 0.1);
  const Answer good =
      r.fixed([&] { return run(d, "auto"); }, [&] { return each_tile_for_itself(d); });
  r.ours("dX", relative_l2(good.dx, truth.dx), 1e-5);
  r.ours("dW", relative_l2(good.dw, truth.dw), 1e-5);
}

}  // namespace

extern const Reproducer tiles_normalise{"tiles_normalise", "B27",
                                        "tiles of tokens that each normalise", run_all};

}  // namespace talea::repro
