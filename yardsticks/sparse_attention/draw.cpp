// What: specs in which every pair of values of every two options occurs.
// Why: bugs live where two options meet; drawing all of them would take years.
// Never: draws a spec that the contract refuses.
#include <algorithm>
#include <set>

#include "yardsticks/sparse_attention/case.hpp"

namespace talea::yardsticks::sparse_attention {
namespace {

// What is drawn, as small numbers; `legal` bends what cannot go together.
enum Option {
  dims,
  heads,
  slots,
  type,
  space,
  causal,
  sink,
  length,
  d_lse,
  residual,
  saved,
  wide,
  accumulate,
  index64,
  layout,
  extents,
  scale,
  positions,
  operands,
  option_count
};

constexpr int counts[option_count] = {9, 6, 6, 7, 5, 2, 2, 2, 2, 2, 2, 2, 2, 2, 4, 4, 3, 2, 2};

using Draw = std::array<int, option_count>;

Spec spec_of(const Draw& v, uint64_t seed) {
  constexpr int64_t sizes[][2] = {{576, 512}, {512, 512}, {192, 128}, {128, 128}, {128, 64},
                                  {64, 64},   {96, 64},   {288, 256}, {80, 48}};
  constexpr int64_t head_counts[] = {1, 8, 11, 16, 28, 33};
  constexpr int64_t slot_counts[] = {1, 7, 33, 63, 65, 130};
  Spec s;
  s.seed = seed;
  s.dim = sizes[v[dims]][0], s.value_dim = sizes[v[dims]][1];
  s.heads = head_counts[v[heads]];
  s.slots = slot_counts[v[slots]];
  constexpr DType types[] = {DType::f32, DType::bf16, DType::f16, DType::bf16,
                             DType::f32, DType::bf16, DType::f32};
  s.dtype = types[v[type]];
  if (v[type] >= 3) s.storage = sa::KvStorage::fp8_scaled;
  s.scaled_q = v[type] == 5;
  s.scale_rank = v[type] == 3 ? 0 : v[type] == 4 ? 1 : 2;
  if (v[type] == 6 && v[dims] == 0) s.storage = sa::KvStorage::fp8_656, s.dtype = DType::bf16;
  s.thd = v[space] == 1 || v[space] == 2;
  s.paged = v[space] == 3;
  s.space = v[space] == 2 || v[space] == 3 ? sa::IndexSpace::sequence
            : v[space] == 4                ? sa::IndexSpace::slots
                                           : sa::IndexSpace::rows;
  s.causal = v[causal] && s.space != sa::IndexSpace::slots;
  s.positions = v[positions];
  s.sink = v[sink];
  s.topk_length = v[length];
  s.d_lse = v[d_lse];
  s.residual = v[residual];
  s.saved = v[saved];
  s.wide_outputs = v[wide];
  s.accumulate = v[accumulate];
  s.index64 = v[index64];
  s.lay = static_cast<Lay>(v[layout]);
  s.out_lay = v[layout] == 3 ? Lay::dense : s.lay;
  s.batch = s.thd || v[extents] < 2 ? 1 : 2;
  s.queries = v[extents] == 3 ? 1 : 4;
  s.keys = v[extents] == 1 ? 70 : 29;
  s.groups = v[extents] == 2 && s.heads % 2 == 0 ? 2 : 1;
  s.without_batch = v[extents] == 0, s.without_group = v[extents] != 3;
  s.scale = v[scale] == 1 ? -0.07 : v[scale] == 2 ? 0.2 : 0;
  s.spread = v[scale] == 2 ? 2 : 1;
  s.operands = static_cast<sa::Operands>(v[operands]);
  s.backward = s.storage != sa::KvStorage::fp8_656;
  return s;
}

using Pair = std::array<int, 4>;

}  // namespace

std::vector<Spec> pairwise(uint64_t seed) {
  Random random(seed * 77 + 5);
  std::set<Pair> missing;
  for (int a = 0; a < option_count; ++a)
    for (int b = a + 1; b < option_count; ++b)
      for (int i = 0; i < counts[a]; ++i)
        for (int j = 0; j < counts[b]; ++j) missing.insert({a, i, b, j});
  std::vector<Spec> specs;
  while (!missing.empty()) {
    Draw best{};
    size_t most = 0;
    for (int attempt = 0; attempt < 12; ++attempt) {
      Draw draw{};
      for (size_t o = 0; o < option_count; ++o) draw[o] = static_cast<int>(random.below(counts[o]));
      if (attempt % 2) {  // around a pair that is still missing
        auto at = missing.begin();
        std::advance(at, random.below(static_cast<int64_t>(std::min<size_t>(missing.size(), 50))));
        draw[static_cast<size_t>((*at)[0])] = (*at)[1];
        draw[static_cast<size_t>((*at)[2])] = (*at)[3];
      }
      size_t found = 0;
      for (int a = 0; a < option_count; ++a)
        for (int b = a + 1; b < option_count; ++b)
          found +=
              missing.count({a, draw[static_cast<size_t>(a)], b, draw[static_cast<size_t>(b)]});
      if (found > most) most = found, best = draw;
    }
    if (most == 0) continue;
    for (int a = 0; a < option_count; ++a)
      for (int b = a + 1; b < option_count; ++b)
        missing.erase({a, best[static_cast<size_t>(a)], b, best[static_cast<size_t>(b)]});
    specs.push_back(spec_of(best, seed * 1000003 + specs.size()));
  }
  return specs;
}

}  // namespace talea::yardsticks::sparse_attention
