// What: a call shared by ranks: heads cut, tokens cut, or both, around a lane that knows neither.
// Why: pieces of a sequence merge like chunks; every lane takes part without a line of its own.
// Never: waits for another rank's scan, or lets a result depend on who arrived first.
#include "ops/mamba3/ranks.hpp"

#include <algorithm>
#include <vector>

#include "core/arena.hpp"
#include "core/fail.hpp"
#include "ops/mamba3/element.hpp"
#include "ops/mamba3/fields.hpp"
#include "ops/mamba3/mutants.hpp"
#include "ops/mamba3/rows_moved.hpp"
#include "ops/mamba3/token_ranks.hpp"

namespace talea::mamba3 {
namespace {

constexpr int64_t host_tokens = 64;                  // of rows that are summed at once
constexpr int64_t device_bytes = int64_t{32} << 20;  // the same, where a block is an exchange

DType plain_of(const Problem& p) { return p.dtype == DType::f64 ? DType::f64 : DType::f32; }

// Tokens of a block of rows over ranks: the same on all of them.
int64_t block_tokens(const Problem& p) {
  if (p.device == DeviceKind::cpu) return host_tokens;
  const int64_t row = p.rank * std::max<int64_t>(p.total_groups, 1) * p.state_dim * 4;
  return std::clamp<int64_t>(device_bytes / row, 1, std::max<int64_t>(p.batch * p.tokens, 1));
}

bool shares_rows(const Problem& p) { return p.heads_world > 1 && p.backward(); }
// Ranks that know no heads but their own share no group.
bool shares_groups(const Problem& p) { return shares_rows(p) && p.total_heads > 0; }

// Gradients that other ranks add to: whole in fp32 here, summed a block of tokens at a time.
struct SharedRows {
  SharedRows(Arena& arena, const Problem& p) {
    const int64_t size = size_of(plain_of(p)), tokens = p.batch * p.tokens;
    const auto rows = [&](bool wanted, int64_t count, int64_t row) {
      return arena.take<char>(wanted ? count * row * size : 0);
    };
    const bool groups = shares_groups(p);
    q = rows(groups && p.out.d.q, tokens, p.rank * p.groups * p.state_dim);
    k = rows(groups && p.out.d.k, tokens, p.rank * p.groups * p.state_dim);
    angles = rows(p.out.d.angles.present, tokens, p.pairs);
    block = rows(groups, block_tokens(p), p.rank * p.total_groups * p.state_dim);
  }
  char *q, *k, *angles, *block;
};

// The problem that the lane sees: d_q, d_k and summed d_angles in the workspace.
Problem local_problem(const Problem& p) {
  Problem local = p;
  local.heads_world = 1;
  // What a lane chooses by heads it chooses on every rank as it would for all of them.
  if (p.total_heads == 0) local.total_heads = p.heads * p.heads_world;
  if (!shares_groups(p)) return local;
  const DType plain = plain_of(p);
  for (Tensor* t : {&local.out.d.q, &local.out.d.k})
    if (*t) {
      if (p.rank_axis)
        *t = make_tensor(nullptr, plain, {p.batch, p.tokens, p.rank, p.groups, p.state_dim},
                         p.device, p.device_index);
      else
        *t = make_tensor(nullptr, plain, {p.batch, p.tokens, p.groups, p.state_dim}, p.device,
                         p.device_index);
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
      : c_(c),
        p_(c.problem),
        ranks_(ranks),
        m_(arena, p_),
        moved_{p_.device, p_.device_index, c.stream} {
    const Tensor& angles = c_.out.d.angles;
    const HeadShare own = {p_.head_begin, p_.heads, p_.groups, p_.sum_angles,
                           angles ? angles.shape[2] : -1};
    all_.resize(static_cast<size_t>(ranks.size()));
    require(ranks.host_gather(&own, all_.data(), sizeof own), ErrorKind::usage,
            "heads over ranks: ranks over {} cannot tell each other which heads they hold",
            ranks.engine());
    check();
  }

  Outputs outputs() const {
    Outputs out = c_.out;
    const auto rows = [&](Tensor& t, char* data) {
      if (t && shares_groups(p_))
        t = make_tensor(data, plain_of(p_), {p_.batch, p_.tokens, p_.rank, p_.groups, p_.state_dim},
                        p_.device, p_.device_index);
    };
    rows(out.d.q, m_.q);
    rows(out.d.k, m_.k);
    if (sums_angles() && out.d.angles) {
      out.d.angles = make_tensor(m_.angles, plain_of(p_), {p_.batch, p_.tokens, 1, p_.pairs},
                                 p_.device, p_.device_index);
      out.d.angles.stride[2] = 0;
    }
    return out;
  }

  void sum(const Outputs& local) {
    if (shares_groups(p_)) {
      rows(c_.out.d.q, m_.q, "d_q");
      rows(c_.out.d.k, m_.k, "d_k");
    }
    if (sums_angles() && c_.out.d.angles) angles(local.d.angles);
  }

 private:
  bool known() const { return p_.total_heads > 0; }
  int64_t first_group() const { return (p_.head_begin - p_.head_offset) / p_.heads_per_group; }
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
    for (const HeadShare& s : all_) {
      if (s.groups * p_.heads_per_group > s.heads) return true;
      if (s.begin % p_.heads_per_group != 0 && s.heads > 0) return true;
    }
    return false;
  }

  void said(const char* name, int64_t bytes) {
    c_.result.exchanges.push_back({name, "all_reduce_sum", bytes});
  }

  // Rows (r, g) of a token of all groups, in blocks of tokens, or of this rank's, all at once.
  void rows(const Tensor& to, char* own, const char* name) {
    if (!to) return;
    const int64_t N = p_.state_dim, G = p_.groups, all = p_.total_groups;
    const int64_t tokens = p_.batch * p_.tokens, at = first_group() * N;
    const DType plain = plain_of(p_);
    const RowsOfTokens local = {
        own, plain, 0, p_.tokens, {p_.tokens * p_.rank * G * N, p_.rank * G * N, G * N, N, 1}};
    RowsOfTokens outer = {to.data, to.dtype, 0, p_.tokens, to.stride};
    const RowShape shape = {p_.rank, G, N};
    if (!groups_are_shared()) return moved_.put(local, outer, shape, 0, tokens);
    const int64_t row = p_.rank * all * N, block = block_tokens(p_);
    int64_t bytes = 0;
    for (int64_t t = 0; t < tokens; t += block) {
      const int64_t count = std::min(block, tokens - t);
      RowsOfTokens shared = {
          m_.block + at * size_of(plain), plain, t, count, {0, row, all * N, N, 1}};
      if (mutant(ScanMutant::m3_6_rows_cut_as_if_by_groups) && ranks_.rank() > 0)
        shared.stride[2] = N, shared.stride[3] = p_.rank * N;
      moved_.clear(m_.block, count * row * size_of(plain));
      moved_.put(local, shared, shape, t, count);
      ranks_.all_reduce_sum(m_.block, count * row, plain, c_.stream);
      bytes += count * row * size_of(plain);
      moved_.put(shared, outer, shape, t, count);
    }
    said(name, bytes);
  }

  void angles(const Tensor& from) {
    const int64_t tokens = p_.batch * p_.tokens, count = tokens * p_.pairs;
    if (count > 0) ranks_.all_reduce_sum(from.data, count, from.dtype, c_.stream);
    said("d_angles", count * size_of(from.dtype));
    const Tensor& to = c_.out.d.angles;
    const auto rows_of = [&](const Tensor& t) {
      return RowsOfTokens{
          t.data, t.dtype, 0, p_.tokens, {t.stride[0], t.stride[1], 0, 0, t.stride[3]}};
    };
    moved_.put(rows_of(from), rows_of(to), {1, 1, p_.pairs}, 0, tokens);
  }

  const Call& c_;
  const Problem& p_;
  Communicator& ranks_;
  SharedRows m_;
  const RowsMoved moved_;
  std::vector<HeadShare> all_;
};

// Ranks of device tensors exchange them where they lie.
void check_place(const Problem& p, const Communicator* ranks) {
  require(p.device == DeviceKind::cpu || !ranks || ranks->size() == 1 ||
              ranks->device() == DeviceKind::cuda,
          ErrorKind::usage, "ranks over {}: they exchange host memory, the tensors are a device's",
          ranks ? ranks->engine() : "");
}

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
  if (alone(p)) {
    RankedPlan one;
    one.whole = plan(p, device);
    Planned planned = talea::planned(one.whole.workspace_bytes, one.whole.flops, one);
    planned.kept_bytes = one.whole.kept_bytes;
    return planned;
  }
  Arena arena;
  count_room(arena, p);
  const int64_t room = arena.used() > 0 ? arena.bytes() : 0;
  Problem local = local_problem(p);
  int64_t& limit = local.options.workspace_limit_bytes;
  limit = std::max<int64_t>(limit - room, 0);
  RankedPlan ranked;
  int64_t most = 0;
  const auto of = [&](const Problem& one) {
    Planned made = plan(one, device);
    most = std::max(most, made.workspace_bytes);
    return made;
  };
  if (p.sequence_world == 1) {
    ranked.whole = of(local);
  } else {
    const PieceProblems pieces(local);
    if (p.device == DeviceKind::cpu) ranked.turns = of(pieces.turns);
    ranked.summary = of(pieces.summary);
    if (p.backward()) ranked.feedback = of(pieces.feedback);
    ranked.whole = of(pieces.whole);
  }
  const double flops = ranked.whole.flops;
  int64_t kept = ranked.whole.kept_bytes;
  if (p.sequence_world > 1) kept = PieceTold::behind(kept) + PieceTold::bytes(p);
  Planned planned = talea::planned(most + room, flops, std::move(ranked));
  planned.kept_bytes = kept;
  return planned;
}

void run_over_ranks(RunAlone run, const Call& call, const RankedPlan& plan) {
  const Problem& p = call.problem;
  if (alone(p)) return run(call, plan.whole);
  check_place(p, call.ranks.heads);
  check_place(p, call.ranks.sequence);
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
