// What: draws problems of the indexer and runs a lane on them.
// Why: scores of every dtype, bounds of every kind, rows without keys.
// Never: judges.
#include "yardsticks/sparse_attention/index_case.hpp"

#include <algorithm>

namespace talea::yardsticks::sparse_attention {
namespace {

void make_bounds(const IndexSpec& s, IndexCase& c, Random& random) {
  if (s.bounds) {
    c.begin = Grid(DType::i32, {s.batch, s.queries});
    c.end = Grid(DType::i32, {s.batch, s.queries});
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t q = 0; q < s.queries; ++q) {
        c.begin.put_integer(random.below(s.keys + 6) - 5, b, q);
        c.end.put_integer(q == 1 ? 0 : random.below(s.keys + 9), b, q);
      }
  }
  if (s.positions) {
    c.positions = Grid(DType::i32, {s.batch, s.queries});
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t q = 0; q < s.queries; ++q) c.positions.put_integer(random.below(s.keys), b, q);
  }
  if (!s.thd) return;
  const int64_t at_q[] = {0, 2, 2, s.queries}, at_k[] = {0, s.keys / 3, s.keys / 2, s.keys};
  c.cu_q = Grid(DType::i32, {4});
  c.cu_k = Grid(DType::i32, {4});
  for (int64_t i = 0; i < 4; ++i) c.cu_q.put_integer(at_q[i], i), c.cu_k.put_integer(at_k[i], i);
}

void make_loss(const IndexSpec& s, IndexCase& c, Random& random) {
  const int64_t dim = s.attention_dim;
  c.attention_q = Grid(s.attention_dtype, {s.batch, s.queries, s.attention_heads, dim});
  c.kv = Grid(s.attention_dtype, {s.batch, s.keys, 1, dim});
  fill_normal(c.attention_q, random);
  fill_normal(c.kv, random);
  c.loss.keys = s.dense ? sa::LossKeys::dense : sa::LossKeys::sparse;
  c.loss.coeff = 0.7;
  c.loss.causal = s.causal;
  c.loss.q_position_base = c.options.q_position_base;
  c.loss.act = s.act;
  if (s.dense) c.loss.key_stride = s.key_stride;
  if (s.given) {
    c.loss.denominator = sa::LossDenominator::given;
    c.loss.denominator_value = 3.5;
  }
  if (s.row_weight) {
    c.row_weight = Grid(DType::f32, {s.batch, s.queries});
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t q = 0; q < s.queries; ++q) c.row_weight.put(q % 3 ? 0.25 * q : 0, b, q);
  }
  if (s.dense) return;
  c.indices = Grid(DType::i32, {s.batch, s.queries, 1, s.top_k});
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t q = 0; q < s.queries; ++q)
      for (int64_t k = 0; k < s.top_k; ++k)
        c.indices.put_integer(q == 3 || k % 4 == 3 ? -1 : (k * 7 + q * 3) % s.keys, b, q, 0, k);
}

}  // namespace

IndexCase make_index_case(const IndexSpec& s) {
  Random random(s.seed + 99);
  IndexCase c;
  const bool scaled = s.dtype == DType::f8_e4m3;
  c.q = Grid(s.dtype, {s.batch, s.queries, s.heads, s.dim});
  c.k = Grid(s.dtype, {s.batch, s.keys, s.dim});
  fill_normal(c.q, random, scaled ? 50 : 1);
  fill_normal(c.k, random, scaled ? 50 : 1);
  c.weights = Grid(s.dtype == DType::bf16  ? DType::bf16
                   : s.dtype == DType::f64 ? DType::f64
                                           : DType::f32,
                   {s.batch, s.queries, s.heads});
  fill_normal(c.weights, random);
  if (scaled) {
    c.q_scale = Grid(DType::f32, {s.batch, s.queries, s.heads});
    c.k_scale = Grid(DType::f32, {s.batch, s.keys});
    for (int64_t b = 0; b < s.batch; ++b) {
      for (int64_t q = 0; q < s.queries; ++q)
        for (int64_t h = 0; h < s.heads; ++h) c.q_scale.put(0.02 * (1 + random.uniform()), b, q, h);
      for (int64_t j = 0; j < s.keys; ++j) c.k_scale.put(0.02 * (1 + random.uniform()), b, j);
    }
  }
  c.options.causal = s.causal;
  c.options.q_position_base = s.causal && !s.thd ? 3 : 0;
  c.options.key_stride = s.key_stride;
  c.options.act = s.act;
  c.top_k = s.top_k;
  make_bounds(s, c, random);
  if (s.loss) make_loss(s, c, random);
  return c;
}

std::string describe(const IndexSpec& s) {
  std::string text;
  const auto add = [&](const char* name, auto value) {
    text += std::string(text.empty() ? "" : " ") + name + "=" + std::to_string(value);
  };
  add("seed", s.seed), add("batch", s.batch), add("queries", s.queries), add("keys", s.keys);
  add("heads", s.heads), add("dim", s.dim), add("top_k", s.top_k);
  add("dtype", static_cast<int>(s.dtype)), add("causal", s.causal), add("bounds", s.bounds);
  add("thd", s.thd), add("positions", s.positions), add("key_stride", s.key_stride);
  add("act", static_cast<int>(s.act)), add("loss", s.loss), add("dense", s.dense);
  add("row_weight", s.row_weight), add("given", s.given), add("saved_lse", s.saved_lse);
  return text;
}

Selected run_select(const IndexCase& c, const std::string& lane, int threads, Place* place) {
  Home home(place);
  sa::SelectInputs in;
  in.index_q = home.tensor(c.q);
  in.index_k = home.tensor(c.k);
  in.index_weights = home.tensor(c.weights);
  if (c.q_scale) in.index_q_scale = home.tensor(c.q_scale);
  if (c.k_scale) in.index_k_scale = home.tensor(c.k_scale);
  if (c.begin) in.begin = home.tensor(c.begin), in.end = home.tensor(c.end);
  if (c.cu_q) in.cu_seqlens_q = home.tensor(c.cu_q), in.cu_seqlens_k = home.tensor(c.cu_k);
  if (c.positions) in.q_positions = home.tensor(c.positions);
  Grid indices(DType::i32, {c.batch(), c.queries(), c.top_k}, Lay::padded);
  Grid scores(c.q.dtype() == DType::f64 ? DType::f64 : DType::f32,
              {c.batch(), c.queries(), c.top_k});
  Grid length(DType::i32, {c.batch(), c.queries()}), status(DType::i64, {4});
  indices.fill_bytes(0xff), scores.fill_bytes(0xff), length.fill_bytes(0xff);
  status.put_integer(-1, 1);
  const auto before = indices.outside();
  sa::SelectOutputs out;
  out.indices = home.tensor(indices);
  out.scores = home.tensor(scores);
  out.topk_length = home.tensor(length);
  out.status = home.tensor(status);
  sa::SelectOptions o = c.options;
  o.lane = lane;
  o.threads = threads;
  o.top_k = c.top_k;
  Room room(sa::workspace_bytes(sa::describe(in, out, o)), place);
  Selected s;
  s.result = sa::select(in, out, o, room.workspace(), {}, place ? place->stream() : nullptr);
  home.fetch();
  if (s.result.nan_scores < 0) s.result.nan_scores = status.integer(3);  // it stayed on the device
  if (!room.intact()) s.damage = "wrote behind its workspace; ";
  if (indices.outside() != before) s.damage += "indices: guards written; ";
  for (const double x : indices.numbers()) s.indices.push_back(static_cast<int64_t>(x));
  for (const double x : length.numbers()) s.length.push_back(static_cast<int64_t>(x));
  s.scores = scores.numbers();
  return s;
}

LossOutcome run_loss(const IndexCase& c, const std::string& lane, int threads, Place* place) {
  Home home(place);
  sa::IndexLossInputs in;
  in.index_q = home.tensor(c.q);
  in.index_k = home.tensor(c.k);
  in.index_weights = home.tensor(c.weights);
  if (c.q_scale)
    in.index_q_scale = home.tensor(c.q_scale), in.index_k_scale = home.tensor(c.k_scale);
  in.q = home.tensor(c.attention_q);
  in.kv = home.tensor(c.kv);
  if (c.indices) in.indices = home.tensor(c.indices);
  if (c.topk_length) in.topk_length = home.tensor(c.topk_length);
  if (c.row_weight) in.row_weight = home.tensor(c.row_weight);
  if (c.lse) in.lse = home.tensor(c.lse);
  if (c.begin && !c.indices) in.begin = home.tensor(c.begin), in.end = home.tensor(c.end);
  if (c.cu_q) in.cu_seqlens_q = home.tensor(c.cu_q), in.cu_seqlens_k = home.tensor(c.cu_k);
  if (c.positions) in.q_positions = home.tensor(c.positions);
  const DType wide = c.q.dtype() == DType::f64 ? DType::f64 : DType::f32;
  Grid loss(DType::f64, {}), dq(wide, c.q.shape()), dk(wide, c.k.shape()),
      dw(wide, c.weights.shape());
  for (Grid* g : {&loss, &dq, &dk, &dw}) g->fill_bytes(0xff);
  sa::IndexLossOutputs out;
  out.loss = home.tensor(loss);
  out.dindex_q = home.tensor(dq);
  out.dindex_k = home.tensor(dk);
  out.dindex_weights = home.tensor(dw);
  sa::IndexLossOptions o = c.loss;
  o.lane = lane;
  o.threads = threads;
  Room room(sa::workspace_bytes(sa::describe(in, out, o)), place);
  LossOutcome r;
  r.result = sa::index_loss(in, out, o, room.workspace(), {}, place ? place->stream() : nullptr);
  home.fetch();
  if (!room.intact()) r.damage = "wrote behind its workspace; ";
  r.loss = loss.get();
  r.dq = dq.numbers();
  r.dk = dk.numbers();
  r.dw = dw.numbers();
  return r;
}

}  // namespace talea::yardsticks::sparse_attention
