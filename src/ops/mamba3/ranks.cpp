// What: a call shared by ranks: heads cut, tokens cut, or both, around a lane that knows neither.
// Why: pieces of a sequence merge like chunks; every host lane takes part without a line of its
//      own.
// Never: waits for another rank's scan, or lets a result depend on who arrived first.
#include "ops/mamba3/ranks.hpp"

#include <algorithm>
#include <vector>

#include "core/arena.hpp"
#include "core/fail.hpp"
#include "dist/agree.hpp"
#include "ops/mamba3/element.hpp"
#include "ops/mamba3/token_ranks.hpp"

namespace talea::mamba3 {
namespace {

constexpr int64_t block_tokens = 64;  // of rows that are summed over ranks at once

DType plain_of(const Problem& p) { return p.dtype == DType::f64 ? DType::f64 : DType::f32; }

// Gradients that other ranks add to: whole in fp32 here, summed a block of tokens at a time.
struct SharedRows {
  SharedRows(Arena& arena, const Problem& p) {
    const int64_t size = size_of(plain_of(p)), tokens = p.batch * p.tokens;
    const int64_t groups = std::max(p.total_groups, p.groups);
    const auto rows = [&](const Tensor& t, int64_t row) {
      return arena.take<char>(t ? tokens * row * size : 0);
    };
    q = rows(p.out.d.q, p.rank * p.groups * p.state_dim);
    k = rows(p.out.d.k, p.rank * p.groups * p.state_dim);
    angles = rows(p.out.d.angles, p.pairs);
    block =
        arena.take<char>(block_tokens * std::max(p.rank * groups * p.state_dim, p.pairs) * size);
  }
  char *q, *k, *angles, *block;
};

bool shares_rows(const Problem& p) { return p.heads_world > 1 && p.backward(); }

// The problem that the lane sees: d_q, d_k and summed d_angles in the workspace.
Problem local_problem(const Problem& p) {
  Problem local = p;
  local.heads_world = 1;
  if (!shares_rows(p)) return local;
  const DType plain = plain_of(p);
  for (Tensor* t : {&local.out.d.q, &local.out.d.k})
    if (*t) {
      t->dtype = plain;
      if (p.rank_axis)
        *t = make_tensor(nullptr, plain, {p.batch, p.tokens, p.rank, p.groups, p.state_dim});
      else
        *t = make_tensor(nullptr, plain, {p.batch, p.tokens, p.groups, p.state_dim});
    }
  return local;
}

struct HeadShare {
  int64_t begin, heads, groups, sums_angles;
};

class SharedHeads {
 public:
  SharedHeads(const Call& c, Communicator& ranks, Arena& arena)
      : c_(c), p_(c.problem), ranks_(ranks), m_(arena, p_) {
    const HeadShare own = {p_.head_begin, p_.heads, p_.groups, p_.sum_angles};
    all_.resize(static_cast<size_t>(ranks.size()));
    ranks.all_gather(&own, all_.data(), sizeof own, nullptr);
    check();
  }

  Outputs outputs() const {
    Outputs out = c_.out;
    const auto rows = [&](Tensor& t, char* data) {
      if (t)
        t = make_tensor(data, plain_of(p_),
                        {p_.batch, p_.tokens, p_.rank, p_.groups, p_.state_dim});
    };
    rows(out.d.q, m_.q);
    rows(out.d.k, m_.k);
    if (sums_angles() && out.d.angles) {
      out.d.angles = make_tensor(m_.angles, plain_of(p_), {p_.batch, p_.tokens, 1, p_.pairs});
      out.d.angles.stride[2] = 0;
    }
    return out;
  }

  void sum(const Outputs& local) {
    const int64_t first = first_group();
    const bool exchange = groups_are_shared();
    rows(c_.out.d.q, local.d.q, first, exchange, "d_q");
    rows(c_.out.d.k, local.d.k, first, exchange, "d_k");
    if (sums_angles() && c_.out.d.angles) angles(local.d.angles);
  }

 private:
  bool known() const { return p_.total_heads > 0; }
  int64_t first_group() const {
    return p_.groups == p_.total_groups || !known() ? 0 : p_.head_begin / p_.heads_per_group;
  }
  bool sums_angles() const {
    for (const HeadShare& s : all_)
      if (s.sums_angles) return true;
    return false;
  }

  void check() const {
    if (!known()) return;
    int64_t covered = 0;
    for (size_t r = 0; r < all_.size(); ++r) {
      require(all_[r].begin == covered, ErrorKind::invalid_data,
              "head_begin = {} on rank {}: the heads before it end at {}", all_[r].begin, r,
              covered);
      covered += all_[r].heads;
    }
    require(covered == p_.total_heads, ErrorKind::invalid_data,
            "total_heads = {}: the ranks hold {}", p_.total_heads, covered);
  }

  // Whether a rank holds a group that another rank's heads read.
  bool groups_are_shared() const {
    if (!known()) return false;
    for (const HeadShare& s : all_) {
      if (s.groups * p_.heads_per_group > s.heads) return true;
      if (s.begin % p_.heads_per_group != 0 && s.heads > 0) return true;
    }
    return false;
  }

  void said(const char* name, int64_t bytes) {
    c_.result.exchanges.push_back({name, "all_reduce_sum", bytes});
  }

  void rows(const Tensor& to, const Tensor& from, int64_t first, bool exchange, const char* name) {
    if (!to) return;
    const int64_t N = p_.state_dim, R = p_.rank, G = exchange ? p_.total_groups : p_.groups;
    const int64_t offset = exchange ? first : 0, row = R * G * N;
    Tensor block = make_tensor(m_.block, plain_of(p_), {block_tokens, R, G, N});
    int64_t bytes = 0;
    for (int64_t t = 0; t < p_.batch * p_.tokens; t += block_tokens) {
      const int64_t count = std::min(block_tokens, p_.batch * p_.tokens - t);
      std::fill_n(m_.block, count * row * size_of(block.dtype), char{0});
      each(count, [&](int64_t i, int64_t r, int64_t g, int64_t n) {
        const int64_t b = (t + i) / p_.tokens, s = (t + i) % p_.tokens;
        set(block, get(from, b, s, r, g, n), i, r, g + offset, n);
      });
      if (exchange) ranks_.all_reduce_sum(m_.block, count * row, block.dtype, nullptr);
      if (exchange) bytes += count * row * size_of(block.dtype);
      each(count, [&](int64_t i, int64_t r, int64_t g, int64_t n) {
        const int64_t b = (t + i) / p_.tokens, s = (t + i) % p_.tokens;
        set(to, get(block, i, r, g + offset, n), b, s, r, g, n);
      });
    }
    if (exchange) said(name, bytes);
  }

  template <typename F>
  void each(int64_t tokens, F f) {
    for (int64_t i = 0; i < tokens; ++i)
      for (int64_t r = 0; r < p_.rank; ++r)
        for (int64_t g = 0; g < p_.groups; ++g)
          for (int64_t n = 0; n < p_.state_dim; ++n) f(i, r, g, n);
  }

  void angles(const Tensor& from) {
    const int64_t count = p_.batch * p_.tokens * p_.pairs;
    ranks_.all_reduce_sum(from.data, count, from.dtype, nullptr);
    said("d_angles", count * size_of(from.dtype));
    for (int64_t i = 0; i < p_.batch * p_.tokens; ++i)
      for (int64_t a = 0; a < p_.pairs; ++a) {
        const int64_t b = i / p_.tokens, s = i % p_.tokens;
        set(c_.out.d.angles, get(from, b, s, 0, a), b, s, 0, a);
      }
  }

  const Call& c_;
  const Problem& p_;
  Communicator& ranks_;
  SharedRows m_;
  std::vector<HeadShare> all_;
};

int64_t lane_bytes(const Problem& p, const Lane& lane, const DeviceFacts& device) {
  if (p.sequence_world == 1) return lane.workspace_bytes(p, device);
  const PieceProblems pieces(p);
  int64_t most = 0;
  for (const Problem* one : {&pieces.turns, &pieces.summary, &pieces.whole})
    most = std::max(most, lane.workspace_bytes(*one, device));
  return p.backward() ? std::max(most, lane.workspace_bytes(pieces.feedback, device)) : most;
}

void count_room(Arena& arena, const Problem& p) {
  if (shares_rows(p)) SharedRows(arena, p);
  if (p.sequence_world > 1) PieceMemory(arena, p);
}

std::vector<AgreedField> fields_of(const Problem& p, const std::string& lane, bool heads) {
  std::vector<AgreedField> f;
  const auto add = [&](const char* name, const auto& value) {
    f.push_back({name, fmt::format("{}", value)});
  };
  add("pass", static_cast<int>(p.pass));
  add("lane", lane);
  add("batch", p.batch);
  if (heads) add("tokens", p.tokens);
  if (!heads) add("heads", p.heads);
  if (!heads) add("groups", p.groups);
  add("rank R", p.rank);
  add("N", p.state_dim);
  add("P", p.head_dim);
  add("pairs A", p.pairs);
  add("sequences", p.sequences);
  add("packed", p.packed);
  add("dtype", name_of(p.dtype));
  add("rotary_pairs", static_cast<int>(p.rotary_pairs));
  add("head_norm", p.options.head_norm);
  add("norm_eps", p.options.norm_eps);
  add("chunk", p.options.chunk);
  add("total_heads", p.total_heads);
  add("total_groups", p.total_groups);
  add("z", p.in.z.present);
  add("output d_q", p.out.d.q.present);
  add("output d_k", p.out.d.k.present);
  add("output d_angles", p.out.d.angles.present);
  return f;
}

void shake_hands(const Call& c, const std::string& lane, Communicator& ranks, bool heads) {
  if (ranks.size() == 1 || !c.problem.handshake) return;
  auto fields = fields_of(c.problem, lane, heads);
  if (c.problem.packed) fields.push_back({"cu_seqlens", content_of(c.in.cu_seqlens)});
  const int64_t nothing = 0;
  if (!agree(fields, nothing, ranks))
    c.result.notes.push_back(fmt::format(
        "handshake: not run; communicator {} has no channel for host memory", ranks.engine()));
}

}  // namespace

int64_t ranked_workspace(const Problem& p, const Lane& lane, const DeviceFacts& device) {
  Arena arena;
  count_room(arena, p);
  const int64_t own = lane_bytes(local_problem(p), lane, device);
  return arena.used() > 0 ? arena.bytes() + own : own;
}

void run_ranked(const Lane& lane, const Call& call, const Ranks& ranks) {
  const Problem& p = call.problem;
  if (p.heads_world == 1 && p.sequence_world == 1) return lane.run(call);
  require(p.device == DeviceKind::cpu, ErrorKind::unavailable,
          "mamba3: heads or tokens over several ranks are for host tensors");
  if (ranks.heads) shake_hands(call, lane.name, *ranks.heads, true);
  if (ranks.sequence) shake_hands(call, lane.name, *ranks.sequence, false);
  Arena arena(call.workspace);
  const Problem local = local_problem(p);
  const auto run = [&](const Outputs& out) {
    if (p.sequence_world > 1) {
      const Call one = {local,      call.device,    call.in,     out,
                        call.slots, call.workspace, call.stream, call.result};
      return run_piece(lane, one, *ranks.sequence, arena);
    }
    const Workspace rest = {static_cast<char*>(call.workspace.data) + arena.used(),
                            call.workspace.bytes - arena.used()};
    lane.run({local, call.device, call.in, out, call.slots, rest, call.stream, call.result});
  };
  if (!shares_rows(p)) return run(call.out);
  SharedHeads shared(call, *ranks.heads, arena);
  const Outputs out = shared.outputs();
  run(out);
  shared.sum(out);
}

}  // namespace talea::mamba3
