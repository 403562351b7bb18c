// What: builds a case from its spec: numbers, lists with every kind of slot, scales, sequences.
// Why: one printed line repeats a failure on any machine.
// Never: draws from anywhere but the spec's own seed.
#include "yardsticks/sparse_attention/case.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace talea::yardsticks::sparse_attention {
namespace {

constexpr int64_t page_rows = 5;

int64_t pages_of(const Spec& s) { return (s.keys + page_rows - 1) / page_rows; }

// Packed rows: numbers of every exponent, scales that are no power of two in odd rows.
void fill_packed(Grid& kv, Random& random) {
  const auto& n = kv.shape();
  for (int64_t o = 0; o < n[0]; ++o)
    for (int64_t r = 0; r < n[1]; ++r)
      for (int64_t g = 0; g < n[2]; ++g) {
        std::byte* at = kv.bytes(o, r, g);
        for (int64_t c = 0; c < 512; ++c)
          encode(DType::f8_e4m3, at + c, std::clamp(100 * random.normal(), -448.0, 448.0));
        for (int64_t t = 0; t < 4; ++t) {
          const auto scale = static_cast<float>(r % 2 ? 0.01 * (1 + random.uniform()) : 0.0078125);
          std::memcpy(at + 512 + 4 * t, &scale, 4);
        }
        for (int64_t c = 0; c < 64; ++c) encode(DType::bf16, at + 528 + 2 * c, random.normal());
      }
}

void make_keys(const Spec& s, Case& c, Random& random) {
  const bool pages = s.paged || s.space == sa::IndexSpace::slots;
  const int64_t outer = pages ? pages_of(s) + 2 : s.batch, inner = pages ? page_rows : s.keys;
  const bool packed = s.storage == sa::KvStorage::fp8_656;
  const bool scaled = s.storage == sa::KvStorage::fp8_scaled;
  const DType dtype = packed ? DType::u8 : scaled ? DType::f8_e4m3 : s.dtype;
  c.kv = Grid(dtype, {outer, inner, s.groups, packed ? 656 : s.dim},
              s.lay == Lay::expanded ? Lay::padded : s.lay);
  if (packed) return fill_packed(c.kv, random);
  fill_normal(c.kv, random, scaled ? 60 : 1);
  if (!scaled) return;
  const int64_t tiles = (s.dim + 127) / 128;
  if (s.scale_rank == 0) c.kv_scale = Grid(DType::f32, {});
  if (s.scale_rank == 1) c.kv_scale = Grid(DType::f32, {outer, inner});
  if (s.scale_rank == 2) c.kv_scale = Grid(DType::f32, {outer, inner, tiles});
  for (int64_t o = 0; o < (s.scale_rank ? outer : 1); ++o)
    for (int64_t r = 0; r < (s.scale_rank ? inner : 1); ++r)
      for (int64_t t = 0; t < (s.scale_rank == 2 ? tiles : 1); ++t)
        c.kv_scale.put(0.011 * (1 + random.uniform()), o, r, t);
}

// cu_seqlens: an empty sequence, one of a single query, the rest.
void make_sequences(const Spec& s, Case& c) {
  const int64_t q = s.queries, k = s.keys;
  const int64_t at_q[] = {0, std::min<int64_t>(1, q), std::min<int64_t>(1, q), q};
  const int64_t at_k[] = {0, std::min<int64_t>(k / 3, k), std::min<int64_t>(k / 2, k), k};
  c.cu_q = Grid(DType::i32, {4});
  c.cu_k = Grid(DType::i32, {4});
  for (int64_t i = 0; i < 4; ++i) c.cu_q.put_integer(at_q[i], i), c.cu_k.put_integer(at_k[i], i);
}

int64_t draw_index(const Spec& s, const Case& c, Random& random, int64_t before) {
  const int64_t odd[] = {-1, -1, -1, INT32_MIN, -123456, s.keys + 1000, INT32_MAX};
  const int64_t bound =
      s.space == sa::IndexSpace::slots ? c.kv.shape()[0] * page_rows : std::max<int64_t>(s.keys, 1);
  const int64_t draw = random.below(10);
  if (draw == 0) return odd[random.below(s.foreign ? 7 : 3)];
  if (draw == 1 && s.foreign && s.index64) return (int64_t{1} << 32) + random.below(4);
  if (draw == 2 && s.duplicates && before >= 0) return before;
  return s.keys == 0 ? -1 : random.below(bound);
}

void make_lists(const Spec& s, Case& c, Random& random) {
  const bool shared = s.lay == Lay::expanded;  // one list for all batch entries
  c.indices = Grid(s.index64 ? DType::i64 : DType::i32, {s.batch, s.queries, s.groups, s.slots},
                   shared ? Lay::expanded : Lay::dense);
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t q = 0; q < s.queries; ++q)
      for (int64_t g = 0; g < s.groups; ++g) {
        int64_t before = -1;
        const bool empty = s.queries > 2 && q == 2;
        for (int64_t k = 0; k < s.slots; ++k) {
          const int64_t index = empty ? -1 : draw_index(s, c, random, before);
          c.indices.put_integer(index, b, q, g, k);
          before = index;
        }
      }
  if (!s.topk_length) return;
  c.topk_length = Grid(DType::i32, {s.batch, s.queries});
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t q = 0; q < s.queries; ++q) {
      const int64_t odd[] = {-7, s.slots + 9, s.slots / 2, s.slots, 1};
      c.topk_length.put_integer(odd[random.below(5)], b, q);
    }
}

void make_places(const Spec& s, Case& c, Random& random) {
  if (s.thd) make_sequences(s, c);
  if (s.positions) {
    c.positions = Grid(DType::i32, {s.batch, s.queries});
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t q = 0; q < s.queries; ++q)
        c.positions.put_integer(random.below(s.keys + 1), b, q);
  }
  if (!s.paged) return;
  const int64_t pages = c.kv.shape()[0], blocks = pages_of(s);
  c.table = Grid(DType::i32, {s.batch, blocks});
  c.lengths = Grid(DType::i32, {s.batch});
  for (int64_t b = 0; b < s.batch; ++b) {
    c.lengths.put_integer(s.keys - b, b);
    for (int64_t i = 0; i < blocks; ++i)  // sequences share no page where there are enough
      c.table.put_integer(s.foreign && i == 1 ? pages + 3 : (i * 7 + b * 3) % pages, b, i);
  }
}

void make_upstream(const Spec& s, Case& c, Random& random) {
  const DType own = c.o_dtype;
  if (s.backward) {
    c.d_o = Grid(own, {s.batch, s.queries, s.heads, s.value_dim}, s.lay);
    fill_normal(c.d_o, random);
  }
  if (s.backward && s.d_lse) {
    c.d_lse = Grid(DType::f32, {s.batch, s.queries, s.heads});
    fill_normal(c.d_lse, random);
  }
  if (!s.accumulate || !s.backward) return;
  c.accumulate = true;
  c.dkv_dtype = s.dtype == DType::f64 ? DType::f64 : DType::f32;
  c.dkv_before = Grid(c.dkv_dtype, {c.kv.shape()[0], c.kv.shape()[1], s.groups, s.dim});
  fill_normal(c.dkv_before, random);
}

}  // namespace

double Case::scale() const {
  return options.scale == 0 ? 1 / std::sqrt(static_cast<double>(dim())) : options.scale;
}

uint64_t Random::bits() {
  uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
double Random::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
double Random::normal() {
  double sum = -6;  // twelve uniforms: the same on every machine, no logarithm
  for (int i = 0; i < 12; ++i) sum += uniform();
  return sum;
}
int64_t Random::below(int64_t bound) {
  return static_cast<int64_t>(bits() % static_cast<uint64_t>(bound));
}

void fill_normal(Grid& g, Random& random, double deviation) {
  std::array<int64_t, 4> n = {1, 1, 1, 1};
  for (size_t d = 0; d < g.shape().size(); ++d) n[d] = g.shape()[d];
  const double most = g.dtype() == DType::f8_e4m3 ? 448 : 1e30;
  for (int64_t i = 0; i < n[0]; ++i)
    for (int64_t j = 0; j < n[1]; ++j)
      for (int64_t k = 0; k < n[2]; ++k)
        for (int64_t l = 0; l < n[3]; ++l)
          g.put(std::clamp(deviation * random.normal(), -most, most), i, j, k, l);
}

Case make_case(const Spec& s) {
  Random random(s.seed);
  Case c;
  c.options.value_dim = s.value_dim;
  c.options.scale = s.scale;
  c.options.causal = s.causal;
  c.options.q_position_base = s.causal ? s.keys / 3 : 0;
  c.options.index_space = s.space;
  c.options.kv_storage = s.storage;
  c.options.operands = s.operands;
  const bool fp8_q = s.storage == sa::KvStorage::fp8_scaled && s.scaled_q;
  c.q = Grid(fp8_q ? DType::f8_e4m3 : s.dtype, {s.batch, s.queries, s.heads, s.dim}, s.lay);
  fill_normal(c.q, random, fp8_q ? 60 : s.spread);
  if (fp8_q) {
    c.q_scale = Grid(DType::f32, {s.batch, s.queries, s.heads});
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t q = 0; q < s.queries; ++q)
        for (int64_t h = 0; h < s.heads; ++h)
          c.q_scale.put(0.013 * (1 + random.uniform()), b, q, h);
  }
  make_keys(s, c, random);
  make_lists(s, c, random);
  make_places(s, c, random);
  if (s.sink) {
    c.sink = Grid(DType::f32, {s.heads});
    fill_normal(c.sink, random, 2);
  }
  const DType own = fp8_q ? DType::bf16 : s.dtype;
  c.o_dtype = c.dq_dtype = c.dkv_dtype = own;
  if (s.wide_outputs && own != DType::f64) c.o_dtype = c.dq_dtype = c.dkv_dtype = DType::f32;
  c.residual = s.residual && size_of(c.o_dtype) == 2;
  c.saved = s.saved;
  c.without_batch = s.without_batch && s.batch == 1;
  c.without_group = s.without_group && s.groups == 1;
  c.out_lay = s.out_lay;
  make_upstream(s, c, random);
  return c;
}

std::string describe(const Spec& s) {
  std::string text;
  const auto add = [&](const char* name, auto value) {
    text += std::string(text.empty() ? "" : " ") + name + "=" + std::to_string(value);
  };
  add("seed", s.seed), add("batch", s.batch), add("queries", s.queries), add("keys", s.keys);
  add("heads", s.heads), add("groups", s.groups), add("dim", s.dim);
  add("value_dim", s.value_dim), add("slots", s.slots), add("dtype", static_cast<int>(s.dtype));
  add("storage", static_cast<int>(s.storage)), add("scaled_q", s.scaled_q);
  add("scale_rank", s.scale_rank), add("space", static_cast<int>(s.space)), add("paged", s.paged);
  add("thd", s.thd), add("causal", s.causal), add("positions", s.positions), add("sink", s.sink);
  add("topk_length", s.topk_length), add("d_lse", s.d_lse), add("residual", s.residual);
  add("accumulate", s.accumulate), add("wide", s.wide_outputs), add("index64", s.index64);
  add("saved", s.saved), add("operands", static_cast<int>(s.operands)), add("scale", s.scale);
  add("spread", s.spread), add("lay", static_cast<int>(s.lay));
  add("out_lay", static_cast<int>(s.out_lay)), add("without_batch", s.without_batch);
  add("without_group", s.without_group), add("backward", s.backward);
  return text;
}

}  // namespace talea::yardsticks::sparse_attention
