// What: the indexer as a composition, [queries, heads, keys] scores in memory, beside the
// selection.
// Why: at 64 heads that tensor is what a training step runs out of memory on.
// Never: infers memory from a formula where it claims a saving.
#include <algorithm>
#include <random>

#include "repro/support/peak.hpp"
#include "repro/support/sparse.hpp"

namespace talea::repro {
namespace {

IndexData make(int64_t queries, int64_t keys, int64_t heads, int64_t dim, int64_t slots) {
  IndexData d;
  d.queries = queries, d.keys = keys, d.heads = heads, d.dim = dim, d.slots = slots;
  std::mt19937_64 engine(81);
  std::normal_distribution<float> draw;
  for (auto* v : {&d.q, &d.k, &d.weights}) {
    const int64_t n = v == &d.q ? queries * heads * dim : v == &d.k ? keys * dim : queries * heads;
    for (int64_t i = 0; i < n; ++i) v->push_back(draw(engine));
  }
  return d;
}

// matmul, relu, weighted sum, topk: each a whole tensor.
std::vector<int32_t> composition(const IndexData& d) {
  std::vector<float> all(static_cast<size_t>(d.queries * d.heads * d.keys));
  size_t at = 0;
  for (int64_t t = 0; t < d.queries; ++t)
    for (int64_t h = 0; h < d.heads; ++h)
      for (int64_t j = 0; j < d.keys; ++j) {
        float dot = 0;
        for (int64_t c = 0; c < d.dim; ++c)
          dot += d.q[static_cast<size_t>((t * d.heads + h) * d.dim + c)] *
                 d.k[static_cast<size_t>(j * d.dim + c)];
        all[at++] = std::max(dot, 0.f);
      }
  std::vector<int32_t> chosen;
  for (int64_t t = 0; t < d.queries; ++t) {
    std::vector<std::pair<float, int32_t>> row;
    for (int64_t j = 0; j < d.keys; ++j) {
      float sum = 0;
      for (int64_t h = 0; h < d.heads; ++h)
        sum += d.weights[static_cast<size_t>(t * d.heads + h)] *
               all[static_cast<size_t>((t * d.heads + h) * d.keys + j)];
      row.emplace_back(-sum, static_cast<int32_t>(j));
    }
    std::partial_sort(row.begin(), row.begin() + d.slots, row.end());
    std::sort(row.begin(), row.begin() + d.slots,
              [](const auto& a, const auto& b) { return a.second < b.second; });
    for (int64_t k = 0; k < d.slots; ++k) chosen.push_back(row[static_cast<size_t>(k)].second);
  }
  return chosen;
}

void run_all(Report& r) {
  // Large enough that a row of scores for each of 64 threads is below a tenth of them all.
  const IndexData d = make(640, 2048, 32, 8, 64);
  const Peak whole = measure_peak([&] { composition(d); });
  const Peak ours = measure_peak([&] {
    if (r.fix_disabled())
      composition(d);
    else
      select_keys(d, "auto");
  });
  r.figure("bytes of the [queries, heads, keys] scores", 4.0 * 640 * 32 * 2048);
  r.figure("measured peak of the composition, bytes", whole.bytes);
  r.figure("measured peak of the selection, bytes", ours.bytes);
  const std::vector<int32_t> want = composition(d);
  // Scores that differ in the last place may change hands; each change shows in two slots or more.
  std::vector<int32_t> have;
  if (!r.fix_disabled()) have = select_keys(d, "auto").indices;
  double other = r.fix_disabled() ? static_cast<double>(want.size()) : 0;
  for (size_t i = 0; i < have.size(); ++i)
    other += std::binary_search(want.begin() + static_cast<int64_t>(i / 64 * 64),
                                want.begin() + static_cast<int64_t>(i / 64 * 64 + 64), have[i])
                 ? 0
                 : 1;
  r.broken("bytes of scores in memory, composition", whole.bytes, 4.0 * 640 * 2048);
  r.ours("selected keys that the composition has not, without its tensor", other, 4);
  r.memory("selection, measured peak against the composition", ours.finished ? ours.bytes : -1,
           whole.finished ? whole.bytes : 0, 0.1);
}

}  // namespace

extern const Reproducer index_memory{"index_memory", "SA31",
                                     "an indexer that holds the scores of every head", run_all};

}  // namespace talea::repro
