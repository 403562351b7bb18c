// What: the fixture of tests of the kernels that a device lane has for some numbers of heads.
// Why: the same heads have the same bits, alone or among more, whichever kernel takes them.
// Never: cuts a list over blocks, which is the way of other tests.
#pragma once

#include <cmath>

#include "ops/sparse_attention/lanes.hpp"

namespace talea::testing {

inline std::vector<std::string> tensor_core_lanes() {
  std::vector<std::string> lanes = device_attention_lanes();
  std::erase(lanes, "cuda");  // sums as its products do
  return lanes;
}

inline Case first_heads(const Case& all, int64_t heads) {
  Case c = all;
  c.q = Grid(all.q.dtype(), {all.batch(), all.queries(), heads, all.dim()});
  for (int64_t b = 0; b < all.batch(); ++b)
    for (int64_t s = 0; s < all.queries(); ++s)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t x = 0; x < all.dim(); ++x) c.q.put(all.q.get(b, s, h, x), b, s, h, x);
  if (all.sink) {
    c.sink = Grid(DType::f32, {heads});
    for (int64_t h = 0; h < heads; ++h) c.sink.put(all.sink.get(h), h);
  }
  return c;
}

class AttentionHeads : public AttentionLane {
 protected:
  // Few queries of long lists are cut over blocks where there is memory; here one block has a list.
  Case whole_lists(const Spec& s) const {
    Case c = make(s);
    c.options.workspace_limit_bytes = 4096;
    return c;
  }
  // Batch, groups, layouts and outputs of problem i; by then it is known whether it is `thd`.
  static void choose_rest(Spec& s, uint64_t i) {
    s.batch = s.thd ? 1 : 1 + static_cast<int64_t>(i % 2);
    s.groups = i % 6 == 3 ? 2 : 1;
    if (s.groups == 2) s.heads = s.heads / 2 * 2 + 2;
    s.residual = i % 4 == 2, s.wide_outputs = i % 8 == 6, s.index64 = i % 3 == 1;
    s.lay = i % 2 ? Lay::dense : i % 4 ? Lay::padded : Lay::swapped;
    s.out_lay = i % 3 ? Lay::dense : i % 9 ? Lay::padded : Lay::swapped;
    s.scale = i % 9 == 4 ? -0.05 : 0, s.spread = i % 5 == 3 ? 8 : 1;
  }
  // The first heads of a case have the bits alone that they have among all.
  void expect_same_bits(const Case& all, int64_t heads, const std::string& what) {
    ASSERT_TRUE(accepts(all)) << what;
    const Outcome many = run(all), few = run(first_heads(all, heads));
    const auto values = static_cast<size_t>(all.value_dim());
    const auto each = static_cast<size_t>(heads), of = static_cast<size_t>(all.heads());
    const auto rows = static_cast<size_t>(all.batch() * all.queries()) * each;
    const auto same = [&](const std::vector<double>& x, const std::vector<double>& y, size_t width,
                          const char* name) {
      if (y.empty()) return;
      for (size_t i = 0; i < rows * width; ++i) {
        const size_t row = i / width;
        const double a = x[i], b = y[(row / each * of + row % each) * width + i % width];
        ASSERT_TRUE(a == b || (std::isnan(a) && std::isnan(b)))
            << name << " of row " << row << ", column " << i % width << ": " << a << ", among more "
            << b << "; " << what;
      }
    };
    same(few.lse, many.lse, 1, "lse");
    same(few.row_max, many.row_max, 1, "row_max");
    same(few.o, many.o, values, "o");
    same(few.o_residual, many.o_residual, values, "o_residual");
  }
  // Lists that begin, go on or end without a valid slot, and one that has none.
  static void leave_out(Case& c) {
    const auto absent = [&](int64_t query, int64_t first, int64_t last) {
      for (int64_t k = first; k < last; ++k) c.indices.put_integer(-1, 0, query, 0, k);
    };
    absent(0, 0, c.slots());
    absent(1, 0, 300);
    absent(2, 64, 128), absent(2, 256, 384);
    absent(3, 0, c.slots() - 1);
    absent(4, 1, c.slots());
    absent(5, 128, c.slots());
  }
};

}  // namespace talea::testing
