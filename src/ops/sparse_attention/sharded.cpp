// What: the exchanges of a cut call: rows gathered before the lane, sums of gradients after it.
// Why: shares of any size travel in rounds of equal pieces, so that no rank's share is a bound.
// Never: rounds a sum before all ranks have given theirs.
#include "ops/sparse_attention/sharded.hpp"

#include <algorithm>

#include "core/arena.hpp"
#include "ops/sparse_attention/rows_moved.hpp"

namespace talea::sparse_attention {
namespace {

bool cut(const Problem& p) { return p.heads_world > 1 || p.sequence_world > 1; }

bool is_loss(const Problem& p) { return p.pass == Pass::index_loss; }
bool sums_dkv(const Problem& p) { return p.wants_dkv && cut(p); }
bool sums_dk(const Problem& p) { return p.wants_dindex_k && p.sequence_world > 1; }

// fp64 where the reference computes fp64 tensors.
DType sum_dtype(const Problem& p) {
  return (is_loss(p) ? p.dindex_k_dtype : p.dkv_dtype) == DType::f64 ? DType::f64 : DType::f32;
}

// A matrix of rows that ranks hold shares of.
struct Shares {
  int64_t entries = 0;    // batch
  int64_t row_bytes = 0;  // of all groups
  bool present = false;
};

int64_t kv_columns(const Problem& p) {
  return p.options.kv_storage == KvStorage::fp8_656 ? packed_bytes : p.dim;
}
int64_t tiles(const Problem& p) {
  return p.kv_scale_rank == 2 ? (p.dim + scale_tile - 1) / scale_tile : 1;
}
int64_t sum_columns(const Problem& p) { return is_loss(p) ? p.index_dim : p.groups * p.dim; }
int64_t piece_rows(const Problem& p) {
  return std::max<int64_t>((p.keys + p.sequence_world - 1) / p.sequence_world, 1);
}

struct Layout {
  char *kv, *index_k, *send, *receive, *sum;
  float *kv_scale, *index_k_scale;
  double* d_sink;
  int64_t bytes = 0;

  Layout(const Problem& p, Arena& arena) {
    const bool gathers = p.gather_kv;
    const int64_t kv_row =
        p.pass == Pass::select ? 0 : p.groups * kv_columns(p) * size_of(p.kv_dtype);
    const int64_t k_row = p.index_dim * size_of(p.index_q_dtype);
    const int64_t rows = p.batch * p.keys, element = size_of(sum_dtype(p));
    kv = arena.take<char>(gathers ? rows * kv_row : 0);
    kv_scale = arena.take<float>(gathers && p.has_kv_scale ? rows * tiles(p) : 0);
    index_k = arena.take<char>(gathers ? rows * k_row : 0);
    index_k_scale =
        arena.take<float>(gathers && p.index_q_dtype == DType::f8_e4m3 && k_row > 0 ? rows : 0);
    const bool sums = sums_dkv(p) || sums_dk(p);
    const int64_t stored = is_paged(p) ? p.pages * p.page_rows : rows;
    sum = arena.take<char>(sums ? stored * sum_columns(p) * element : 0);
    const int64_t widest =
        std::max({gathers ? kv_row : 0, gathers ? k_row : 0, gathers ? 4 * tiles(p) : 0,
                  sums ? sum_columns(p) * element : 0});
    const bool pieces = p.sequence_world > 1 && gathers;
    send = arena.take<char>(pieces ? p.sequence_world * piece_rows(p) * widest : 0);
    receive = arena.take<char>(pieces ? p.sequence_world * piece_rows(p) * widest : 0);
    d_sink = arena.take<double>(p.wants_d_sink && p.sequence_world > 1 ? p.heads : 0);
    bytes = arena.bytes();
  }
};

struct Share {
  int64_t begin = 0, rows = 0;
};

std::vector<Share> all_shares(const Problem& p, Communicator& c) {
  std::vector<Share> all(static_cast<size_t>(c.size()));
  const Share own = {p.row_begin, p.keys_stored};
  require(c.host_gather(&own, all.data(), sizeof own), ErrorKind::usage,
          "gather_kv: ranks over {} cannot tell each other which rows they hold", c.engine());
  return all;
}

int64_t rounds_of(const std::vector<Share>& all, int64_t piece) {
  int64_t most = 0;
  for (const Share& s : all) most = std::max(most, s.rows);
  return (most + piece - 1) / piece;
}

class Exchange {
 public:
  Exchange(const Call& c, const Layout& layout)
      : c_(c), p_(c.problem), w_(layout), rows_{p_.device, p_.device_index, c.stream} {
    if (p_.gather_kv) shares_ = all_shares(p_, c.sequence);
  }

  // Rows of `from` [entry, row, groups, columns] of all ranks into `to`, dense.
  View gather(const View& from, char* to, int64_t groups, int64_t columns, const char* what) {
    const int64_t element = size_of(from.dtype), row = groups * columns * element;
    const int64_t piece = piece_rows(p_), world = p_.sequence_world;
    for (int64_t b = 0; b < p_.batch; ++b)
      for (int64_t t = 0; t < rounds_of(shares_, piece); ++t) {
        const int64_t first = t * piece, own = std::min(piece, p_.keys_stored - first);
        if (own > 0)
          rows_.copy({w_.send, from.address(from.at(b, first)), own, groups, columns * element, row,
                      from.stride[1] * element, from.stride[2] * element});
        c_.sequence.all_gather(w_.send, w_.receive, piece * row, c_.stream);
        for (int64_t r = 0; r < world; ++r) {
          const Share& s = shares_[static_cast<size_t>(r)];
          const int64_t rows = std::clamp<int64_t>(s.rows - t * piece, 0, piece);
          if (rows > 0)
            rows_.copy({to + (b * p_.keys + s.begin + t * piece) * row,
                        w_.receive + r * piece * row, rows, 1, row, row, row});
        }
      }
    c_.result.exchanges.push_back(
        fmt::format("all_gather of {}: {} bytes a row in its storage", what, row));
    return {to, from.dtype, {p_.keys * groups * columns, groups * columns, columns, 1}, true};
  }

  void put_sink(const View& out) const {
    rows_.put({w_.d_sink, DType::f64, {1, 0, 0, 0}, true}, out, {p_.heads, 1, 1, 1}, false);
  }

  // The sum over ranks of the whole dkv or dindex_k, into the owners' rows.
  void sum(const View& out, int64_t groups, int64_t columns, bool accumulate, bool heads) {
    const DType dtype = sum_dtype(p_);
    const int64_t outer = is_paged(p_) ? p_.pages : p_.batch;
    const int64_t inner = is_paged(p_) ? p_.page_rows : p_.keys;
    const int64_t count = outer * inner * groups * columns;
    const char* name = is_loss(p_) ? "dindex_k" : "dkv";
    if (heads && p_.heads_world > 1 && count > 0) {
      c_.heads.all_reduce_sum(w_.sum, count, dtype, c_.stream);
      c_.result.exchanges.push_back(
          fmt::format("all_reduce_sum of {} over heads, {}", name, name_of(dtype)));
    }
    if (p_.gather_kv) return scatter(out, groups * columns, columns, accumulate);
    if (p_.sequence_world > 1 && count > 0) {
      c_.sequence.all_reduce_sum(w_.sum, count, dtype, c_.stream);
      c_.result.exchanges.push_back(
          fmt::format("all_reduce_sum of {} over the sequence, {}", name, name_of(dtype)));
    }
    const View whole = {
        w_.sum, dtype, {inner * groups * columns, groups * columns, columns, 1}, true};
    rows_.put(whole, out, {outer, inner, groups, columns}, accumulate);
  }

 private:
  void scatter(const View& out, int64_t width, int64_t columns, bool accumulate) {
    const DType dtype = sum_dtype(p_);
    const int64_t row = width * size_of(dtype), piece = piece_rows(p_), world = p_.sequence_world;
    for (int64_t b = 0; b < p_.batch; ++b)
      for (int64_t t = 0; t < rounds_of(shares_, piece); ++t) {
        rows_.clear(w_.send, world * piece * row);
        for (int64_t r = 0; r < world; ++r) {
          const Share& s = shares_[static_cast<size_t>(r)];
          const int64_t rows = std::clamp<int64_t>(s.rows - t * piece, 0, piece);
          if (rows > 0)
            rows_.copy({w_.send + r * piece * row,
                        w_.sum + (b * p_.keys + s.begin + t * piece) * row, rows, 1, row, row,
                        row});
        }
        c_.sequence.reduce_scatter_sum(w_.send, w_.receive, piece * width, dtype, c_.stream);
        const int64_t first = t * piece, own = std::min(piece, p_.keys_stored - first);
        if (own <= 0) continue;
        View to = out;
        to.data = static_cast<char*>(out.data) + out.at(b, first) * size_of(out.dtype);
        rows_.put({w_.receive, dtype, {0, width, columns, 1}, true}, to,
                  {1, own, width / columns, columns}, accumulate);
      }
    c_.result.exchanges.push_back(fmt::format("reduce_scatter_sum of {} to the owners of rows, {}",
                                              is_loss(p_) ? "dindex_k" : "dkv", name_of(dtype)));
  }

  const Call& c_;
  const Problem& p_;
  const Layout& w_;
  const RowsMoved rows_;
  std::vector<Share> shares_;
};

void gather_inputs(const Problem& p, const Args& a, Exchange& exchange, const Layout& w,
                   Args& local) {
  if (!p.gather_kv) return;
  if (a.kv) local.kv = exchange.gather(a.kv, w.kv, p.groups, kv_columns(p), "rows of kv");
  if (a.kv_scale && p.kv_scale_rank > 0) {
    local.kv_scale =
        exchange.gather(a.kv_scale, reinterpret_cast<char*>(w.kv_scale), tiles(p), 1, "kv_scale");
    if (p.kv_scale_rank == 1) local.kv_scale.stride[2] = 0;
  }
  if (a.index_k) local.index_k = exchange.gather(a.index_k, w.index_k, 1, p.index_dim, "index_k");
  if (a.index_k_scale)
    local.index_k_scale = exchange.gather(a.index_k_scale, reinterpret_cast<char*>(w.index_k_scale),
                                          1, 1, "index_k_scale");
}

}  // namespace

Problem local_problem(const Problem& p) {
  if (!cut(p)) return p;
  Problem l = p;
  l.gather_kv = false;
  if (p.gather_kv) {
    l.keys_stored = p.keys;
    l.row_begin = 0;
    const int64_t columns = p.pass == Pass::select ? p.index_dim : kv_columns(p);  // of index_k
    l.kv_stride = {p.keys * p.groups * columns, p.groups * columns, columns};
    l.kv_scale_rank = p.kv_scale_rank;
  }
  if (sums_dkv(p)) {
    l.dkv_dtype = sum_dtype(p);
    l.accumulate_dkv = false;
    const int64_t inner = is_paged(p) ? p.page_rows : p.keys;
    l.dkv_stride = {inner * p.groups * p.dim, p.groups * p.dim, p.dim};
  }
  if (sums_dk(p)) l.dindex_k_dtype = sum_dtype(p);
  return l;
}

int64_t exchange_bytes(const Problem& p) {
  if (!cut(p)) return 0;
  Arena arena;
  return Layout(p, arena).bytes;
}

void run_sharded(const Call& c, const Planned& plan, RunOnOneRank run) {
  const Problem& p = c.problem;
  if (!cut(p)) return run(c, plan);
  for (const Communicator* ranks : {&c.heads, &c.sequence})
    require(
        p.device == DeviceKind::cpu || ranks->size() == 1 || ranks->device() == DeviceKind::cuda,
        ErrorKind::usage, "ranks over {}: they exchange host memory, the tensors are a device's",
        ranks->engine());
  const int64_t own = exchange_bytes(p);
  Arena arena(Workspace{c.workspace.data, own});
  const Layout w(p, arena);
  Exchange exchange(c, w);
  const Problem problem = local_problem(p);
  Args args = c.args;
  gather_inputs(p, c.args, exchange, w, args);
  const int64_t inner = is_paged(p) ? p.page_rows : p.keys;
  if (sums_dkv(p)) {
    args.dkv = {w.sum, sum_dtype(p), {inner * p.groups * p.dim, p.groups * p.dim, p.dim, 1}, true};
    args.accumulate_dkv = false;
  }
  if (sums_dk(p)) {
    args.dindex_k = {w.sum, sum_dtype(p), {p.keys * p.index_dim, p.index_dim, 0, 1}, true};
    args.accumulate_dindex_k = false;
  }
  const bool sums_sink = c.args.d_sink && p.sequence_world > 1;
  if (sums_sink) args.d_sink = {w.d_sink, DType::f64, {1, 0, 0, 0}, true};
  const Workspace rest = {static_cast<char*>(c.workspace.data) + own, c.workspace.bytes - own};
  run({problem, c.device, args, rest, c.heads, c.sequence, c.batch, c.stream, c.result}, plan);
  if (sums_dkv(p)) exchange.sum(c.args.dkv, p.groups, p.dim, c.args.accumulate_dkv, true);
  if (sums_dk(p)) exchange.sum(c.args.dindex_k, 1, p.index_dim, c.args.accumulate_dindex_k, false);
  if (!sums_sink) return;
  if (p.heads > 0) c.sequence.all_reduce_sum(w.d_sink, p.heads, DType::f64, c.stream);
  c.result.exchanges.push_back("all_reduce_sum of d_sink over the sequence, fp64");
  exchange.put_sink(c.args.d_sink);
}

}  // namespace talea::sparse_attention
