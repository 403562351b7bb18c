// What: one row of kv, q or an indexer's matrix as numbers, whatever its storage.
// Why: the reference lane and the checks read every storage by this code.
// Never: rounds.
#include "ops/sparse_attention/rows.hpp"

namespace talea::sparse_attention {

void load_vector(const View& v, int64_t element, int64_t n, double* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = load_element(v.data, v.dtype, element + i * v.stride[3]);
}

void load_key(const Problem& p, const Args& a, const KeyRow& row, int64_t g, double* to) {
  const int64_t first = a.kv.at(row.outer, row.inner, g);
  if (p.options.kv_storage != KvStorage::fp8_656) {
    load_vector(a.kv, first, p.dim, to);
    if (a.kv_scale)
      for (int64_t c = 0; c < p.dim; ++c)
        to[c] *= tile_scale(
            a.kv_scale.get(row.outer, row.inner, p.kv_scale_rank == 2 ? c / scale_tile : 0));
    return;
  }
  const char* bytes = a.kv.address(first);
  float scale[4];
  std::memcpy(scale, bytes + packed_scales, sizeof scale);
  for (int64_t c = 0; c < packed_value_dim; ++c)
    to[c] = tile_scale(static_cast<double>(scale[c / scale_tile])) *
            static_cast<double>(e4m3_to_float(static_cast<uint8_t>(bytes[c])));
  for (int64_t c = packed_value_dim; c < packed_dim; ++c) {
    uint16_t bits;
    std::memcpy(&bits, bytes + packed_rope + 2 * (c - packed_value_dim), sizeof bits);
    to[c] = bf16_to_float(bits);
  }
}

void load_query(const Problem& p, const Args& a, int64_t b, int64_t s, int64_t h, double* to) {
  load_vector(a.q, a.q.at(b, s, h), p.dim, to);
  if (!a.q_scale) return;
  const double scale = a.q_scale.get(b, s, h);
  for (int64_t c = 0; c < p.dim; ++c) to[c] *= scale;
}

double index_logit(const Problem& p, const Args& a, int64_t b, int64_t s, int64_t j,
                   const double* z) {
  double sum = 0;
  for (int64_t h = 0; h < p.index_heads; ++h) {
    double w = a.index_weights.get(b, s, h);
    if (a.index_q_scale) w *= a.index_q_scale.get(b, s, h);
    // A comparison with NaN is false: NaN stays.
    sum += w * (p.act == Activation::relu && z[h] <= 0 ? 0 : z[h]);
  }
  return a.index_k_scale ? sum * a.index_k_scale.get(b, j) : sum;
}

}  // namespace talea::sparse_attention
