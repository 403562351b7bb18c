// What: a call shared by ranks: heads cut, tokens cut, or both, around a lane that knows neither.
// Why: pieces of a sequence merge like chunks; every host lane takes part without a line of its
//      own.
// Never: waits for another rank's scan, or lets a result depend on who arrived first.
#include "ops/mamba3/ranks.hpp"

#include <algorithm>
#include <vector>

#include "core/arena.hpp"
#include "core/fail.hpp"
#include "ops/mamba3/element.hpp"
#include "ops/mamba3/fields.hpp"
#include "ops/mamba3/mutants.hpp"
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
  int64_t angle_heads;  // of d_angles; -1: not wanted
};

class SharedHeads {
 public:
  SharedHeads(const Call& c, Communicator& ranks, Arena& arena)
      : c_(c), p_(c.problem), ranks_(ranks), m_(arena, p_) {
    const Tensor& angles = c_.out.d.angles;
    const HeadShare own = {p_.head_begin, p_.heads, p_.groups, p_.sum_angles,
                           angles ? angles.shape[2] : -1};
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
    return known() ? (p_.head_begin - p_.head_offset) / p_.heads_per_group : 0;
  }
  bool sums_angles() const {
    for (const HeadShare& s : all_)
      if (s.sums_angles) return true;
    return false;
  }

  // By what all ranks know: all of them throw, and none waits for another.
  void check() const {
    for (size_t r = 0; sums_angles() && r < all_.size(); ++r)
      require(all_[r].angle_heads < 0 || all_[r].angle_heads == 1, ErrorKind::invalid_data,
              "d_angles: {} heads on rank {}, where another rank's [B, S, 1, A] are shared by all "
              "heads: share them on every rank or on none",
              all_[r].angle_heads, r);
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
    if (mutant(ScanMutant::m3_6_rows_cut_as_if_by_groups) && ranks_.rank() > 0)
      block.stride[1] = N, block.stride[2] = R * N;
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

void count_room(Arena& arena, const Problem& p) {
  if (shares_rows(p)) SharedRows(arena, p);
  if (p.sequence_world > 1) PieceMemory(arena, p);
}

bool alone(const Problem& p) { return p.heads_world == 1 && p.sequence_world == 1; }

std::vector<AgreedField> fields_of(const Problem& p, const std::string& lane, bool heads) {
  std::vector<AgreedField> f;
  const auto add = [&](const char* name, const auto& value) {
    f.push_back({name, fmt::format("{}", value)});
  };
  add("pass", word(p.pass));
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
  add("rotary_pairs", word(p.rotary_pairs));
  for_each_field(option_fields, [&](const auto& o) {
    if (o.agreed) f.push_back({o.name, text_of(p.options.*o.member)});
  });
  add("total_heads", p.total_heads);
  add("total_groups", p.total_groups);
  add("z", p.in.z.present);
  if (!heads) {  // what each rank replays of the others' pieces depends on all of these
    const auto presence = [&](const char* name, const Tensor& t) { add(name, t.present); };
    for (const auto& [name, t] :
         {std::pair{"q_bias", &p.in.q_bias}, std::pair{"k_bias", &p.in.k_bias},
          std::pair{"d", &p.in.d}, std::pair{"mimo_v", &p.in.mimo_v},
          std::pair{"mimo_z", &p.in.mimo_z}, std::pair{"mimo_out", &p.in.mimo_out},
          std::pair{"norm_weight", &p.in.norm_weight}})
      presence(name, *t);
    for_states(p.in.initial_states, initial_names, presence);
    for_states(p.in.d_final_states, d_final_names, presence);
  }
  add("output d_q", p.out.d.q.present);
  add("output d_k", p.out.d.k.present);
  add("output d_angles", p.out.d.angles.present);
  return f;
}

}  // namespace

std::array<Meeting, 2> meetings_of(const Ranks& ranks) {
  if (!ranks.handshake) return {};
  return {{{ranks.heads, sizeof(int64_t)}, {ranks.sequence, sizeof(int64_t)}}};
}

void shake_hands(const Problem& p, const Inputs& in, const std::string& lane,
                 std::array<Meeting, 2>& meetings, Result& result) {
  for (Meeting& group : meetings) {
    if (!group.with_others()) continue;
    auto fields = fields_of(p, lane, &group == &meetings[0]);
    if (p.packed) fields.push_back({"cu_seqlens", content_of(in.cu_seqlens)});
    const int64_t nothing = 0;
    if (!agree(fields, nothing, group)) result.notes.push_back(not_compared(group));
  }
}

Planned plan_over_ranks(PlanAlone plan, const Problem& p, const DeviceFacts& device) {
  require(alone(p) || p.device == DeviceKind::cpu, ErrorKind::unavailable,
          "mamba3: heads or tokens over several ranks are for host tensors");
  const Problem local = local_problem(p);
  RankedPlan ranked;
  ranked.whole = plan(local, device);
  int64_t most = ranked.whole.workspace_bytes;
  if (p.sequence_world > 1) {
    const PieceProblems pieces(local);
    const auto of = [&](const Problem& one) {
      Planned made = plan(one, device);
      most = std::max(most, made.workspace_bytes);
      return made;
    };
    ranked.turns = of(pieces.turns);
    ranked.summary = of(pieces.summary);
    if (p.backward()) ranked.feedback = of(pieces.feedback);
    ranked.whole = of(pieces.whole);
  }
  Arena arena;
  count_room(arena, p);
  if (arena.used() > 0) most += arena.bytes();
  const double flops = ranked.whole.flops;
  const int64_t kept = ranked.whole.kept_bytes;
  Planned planned = talea::planned(most, flops, std::move(ranked));
  planned.kept_bytes = kept;
  return planned;
}

void run_over_ranks(RunAlone run, const Call& call, const RankedPlan& plan) {
  const Problem& p = call.problem;
  if (alone(p)) return run(call, plan.whole);
  Arena arena(call.workspace);
  const Problem local = local_problem(p);
  const auto run_local = [&](const Outputs& out) {
    Call one = {local,          call.device, call.in,     out,        call.slots,
                call.workspace, call.ranks,  call.stream, call.result};
    if (p.sequence_world > 1) return run_piece({run, plan}, one, arena);
    one.workspace = {static_cast<char*>(call.workspace.data) + arena.used(),
                     call.workspace.bytes - arena.used()};
    run(one, plan.whole);
  };
  if (!shares_rows(p)) return run_local(call.out);
  SharedHeads shared(call, *call.ranks.heads, arena);
  const Outputs out = shared.outputs();
  run_local(out);
  shared.sum(out);
}

}  // namespace talea::mamba3
