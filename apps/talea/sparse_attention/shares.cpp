// What: see shares.hpp.
// Why: see shares.hpp.
// Never: reads or writes a file.
#include "shares.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "../memory.hpp"
#include "core/fail.hpp"
#include "files.hpp"
#include "ops/sparse_attention/contract.hpp"

namespace talea::cli {
namespace {

// How a tensor of whole shape falls to the ranks: along its queries, and its heads, which stand
// `heads` extents from the end (0: it has none).
template <typename Struct>
struct Role {
  Tensor Struct::*member;
  bool rows;
  int heads;
  bool lengths = false;  // one extent beside a batch is [B]
};

constexpr Role<sa::Inputs> input_roles[] = {
    {&sa::Inputs::q, true, 2},       {&sa::Inputs::q_scale, true, 1},
    {&sa::Inputs::indices, true, 0}, {&sa::Inputs::topk_length, true, 0, true},
    {&sa::Inputs::sink, false, 1},   {&sa::Inputs::q_positions, true, 0},
    {&sa::Inputs::d_o, true, 2},     {&sa::Inputs::d_lse, true, 1},
    {&sa::Inputs::o, true, 2},       {&sa::Inputs::o_residual, true, 2},
    {&sa::Inputs::lse, true, 1}};
constexpr Role<sa::Outputs> output_roles[] = {
    {&sa::Outputs::o, true, 2},    {&sa::Outputs::o_residual, true, 2},
    {&sa::Outputs::lse, true, 1},  {&sa::Outputs::row_max, true, 1},
    {&sa::Outputs::dq, true, 2},   {&sa::Outputs::d_sink, false, 1},
    {&sa::Outputs::dkv, false, 0}, {&sa::Outputs::status, false, 0}};
constexpr Role<sa::SelectInputs> select_input_roles[] = {
    {&sa::SelectInputs::index_q, true, 0},       {&sa::SelectInputs::index_q_scale, true, 0},
    {&sa::SelectInputs::index_weights, true, 0}, {&sa::SelectInputs::begin, true, 0},
    {&sa::SelectInputs::end, true, 0},           {&sa::SelectInputs::q_positions, true, 0}};
constexpr Role<sa::SelectOutputs> select_output_roles[] = {
    {&sa::SelectOutputs::indices, true, 0},
    {&sa::SelectOutputs::topk_length, true, 0},
    {&sa::SelectOutputs::scores, true, 0},
    {&sa::SelectOutputs::status, false, 0}};
constexpr Role<sa::IndexLossInputs> loss_input_roles[] = {
    {&sa::IndexLossInputs::index_q, true, 0},
    {&sa::IndexLossInputs::index_q_scale, true, 0},
    {&sa::IndexLossInputs::index_weights, true, 0},
    {&sa::IndexLossInputs::q, true, 2},
    {&sa::IndexLossInputs::q_scale, true, 1},
    {&sa::IndexLossInputs::indices, true, 0},
    {&sa::IndexLossInputs::topk_length, true, 0, true},
    {&sa::IndexLossInputs::lse, true, 1},
    {&sa::IndexLossInputs::row_weight, true, 0},
    {&sa::IndexLossInputs::begin, true, 0},
    {&sa::IndexLossInputs::end, true, 0},
    {&sa::IndexLossInputs::q_positions, true, 0}};
constexpr Role<sa::IndexLossOutputs> loss_output_roles[] = {
    {&sa::IndexLossOutputs::dindex_q, true, 0},
    {&sa::IndexLossOutputs::dindex_weights, true, 0},
    {&sa::IndexLossOutputs::loss, false, 0},
    {&sa::IndexLossOutputs::dindex_k, false, 0},
    {&sa::IndexLossOutputs::status, false, 0}};

const auto& roles_of(const sa::Inputs&) { return input_roles; }
const auto& roles_of(const sa::Outputs&) { return output_roles; }
const auto& roles_of(const sa::SelectInputs&) { return select_input_roles; }
const auto& roles_of(const sa::SelectOutputs&) { return select_output_roles; }
const auto& roles_of(const sa::IndexLossInputs&) { return loss_input_roles; }
const auto& roles_of(const sa::IndexLossOutputs&) { return loss_output_roles; }

// What one rank of a cut takes.
struct Cut {
  bool heads = false;  // else along the queries
  bool batch = false;  // B stands in front
  int64_t entries = 1, queries = 0;
  int64_t begin = 0, end = 0;
};

// Where the queries of a tensor are; B may be missing where it is 1.
int row_axis_of(const Tensor& t, const Cut& cut) {
  if (!cut.batch) return 0;
  const bool second = t.rank > 1 && t.shape[0] == 1 && t.shape[1] == cut.queries;
  return cut.entries == 1 && t.rank > 0 && t.shape[0] == cut.queries && !second ? 0 : 1;
}

template <typename Struct>
bool is_cut(const Tensor& t, const Role<Struct>& role, const Cut& cut) {
  const int row_axis = row_axis_of(t, cut);
  if (role.lengths && cut.batch && t.rank == 1) return false;
  if (!cut.heads) return role.rows && t.rank > row_axis;
  return role.heads > 0 && (!role.rows || t.rank - role.heads > row_axis);
}

template <typename Struct>
Tensor part_of(const Tensor& t, const Role<Struct>& role, const Cut& cut) {
  if (!t || !is_cut(t, role, cut)) return t;
  return slice(t, cut.heads ? t.rank - role.heads : row_axis_of(t, cut), cut.begin, cut.end);
}

// The views of a rank's inputs and outputs, and what it must own to have them.
template <typename Whole>
struct Share {
  Whole whole;
  sa::Ranks ranks;
  std::vector<io::HostTensor> owned;
};

// A packed batch cut along its queries: where each sequence's queries begin within the share, and
// their positions, which the share's own numbering no longer tells.
template <typename S>
void cut_sequences(S& share, const Tensor& whole_cu, const Cut& cut, bool causal, int64_t base) {
  const int64_t n = whole_cu.shape[0], rows = cut.end - cut.begin;
  require(whole_cu.dtype == DType::i32 && whole_cu.rank == 1 && n > 0, ErrorKind::invalid_data,
          "--cu-seqlens-q: shape {} of {}: [n + 1] int32 is needed", io::shape_text(whole_cu),
          name_of(whole_cu.dtype));
  const auto at = [&](int64_t i) {
    return int64_t{static_cast<const int32_t*>(whole_cu.data)[i * whole_cu.stride[0]]};
  };
  const io::HostTensor cu = io::allocate_tensor(DType::i32, {n});
  for (int64_t i = 0; i < n; ++i)
    static_cast<int32_t*>(cu.view.data)[i] =
        static_cast<int32_t>(std::clamp(at(i) - cut.begin, int64_t{0}, rows));
  share.whole.in.cu_seqlens_q = cu.view;
  share.owned.push_back(cu);
  if (!causal || share.whole.in.q_positions) return;
  const io::HostTensor positions = io::allocate_tensor(DType::i32, {rows});
  for (int64_t s = 0, i = 0; s < rows; ++s) {
    while (i + 1 < n && at(i + 1) <= cut.begin + s) ++i;
    static_cast<int32_t*>(positions.view.data)[s] =
        static_cast<int32_t>(base + cut.begin + s - at(i));
  }
  share.whole.in.q_positions = positions.view;
  share.owned.push_back(positions);
}

template <typename Whole>
Share<Whole> share_of(const Whole& whole, const Cut& cut, Communicator& ranks, bool shared_memory) {
  Share<Whole> s{whole, {}, {}};
  for (const auto& role : roles_of(whole.in))
    s.whole.in.*role.member = part_of(whole.in.*role.member, role, cut);
  for (const auto& role : roles_of(whole.out)) {
    const Tensor& t = whole.out.*role.member;
    if (!t) continue;
    s.whole.out.*role.member = part_of(t, role, cut);
    // Of a sum that all ranks end with, one is kept; the others have somewhere to put theirs.
    if (is_cut(t, role, cut) || !shared_memory || ranks.rank() == 0) continue;
    const std::span<const int64_t> shape(t.shape.data(), static_cast<size_t>(t.rank));
    s.owned.push_back(io::allocate_tensor(t.dtype, shape));
    std::memset(s.owned.back().view.data, 0, static_cast<size_t>(s.owned.back().bytes()));
    s.whole.out.*role.member = s.owned.back().view;
  }
  (cut.heads ? s.ranks.heads : s.ranks.sequence) = &ranks;
  if (cut.heads) s.ranks.head_begin = cut.begin;
  auto& options = s.whole.options;
  if (!cut.heads && whole.in.cu_seqlens_q)
    cut_sequences(s, whole.in.cu_seqlens_q, cut, options.causal, options.q_position_base);
  else if (!cut.heads && options.causal && !s.whole.in.q_positions)
    options.q_position_base += cut.begin;
  return s;
}

sa::Problem described(const WholeAttention& w, const sa::Ranks& r) {
  return sa::describe(w.pass, w.in, w.out, w.options, r);
}
template <typename Whole>
sa::Problem described(const Whole& w, const sa::Ranks& r) {
  return sa::describe(w.in, w.out, w.options, r);
}
sa::Result called(const WholeAttention& w, Workspace space, const sa::Ranks& r) {
  const auto call = w.pass == sa::Pass::forward ? sa::forward : sa::backward;
  return call(w.in, w.out, w.options, space, r, nullptr);
}
sa::Result called(const WholeSelect& w, Workspace space, const sa::Ranks& r) {
  return sa::select(w.in, w.out, w.options, space, r);
}
sa::Result called(const WholeIndexLoss& w, Workspace space, const sa::Ranks& r) {
  return sa::index_loss(w.in, w.out, w.options, space, r);
}

struct Ran {
  sa::Problem problem;
  sa::Result result;
  double ms = 0;
};

template <typename S>
void sum_loss(const S&, const Cut&, Communicator&, Ran&) {}
// With a denominator of the caller's each rank of the queries has its share of the sum.
void sum_loss(const Share<WholeIndexLoss>& s, const Cut& cut, Communicator& ranks, Ran& ran) {
  const Tensor& loss = s.whole.out.loss;
  const bool global = s.whole.options.denominator_scope == sa::LossScope::global;
  if (cut.heads || !loss || global) return;
  double sum = ran.result.loss;
  ranks.all_reduce_sum(&sum, 1, DType::f64, nullptr);
  if (loss.dtype == DType::f64)
    *static_cast<double*>(loss.data) = sum;
  else
    *static_cast<float*>(loss.data) = static_cast<float>(sum);
  ran.result.loss = sum;
}

template <typename Whole>
Ran run_one(const Whole& whole, const sa::Ranks& ranks) {
  Ran ran;
  int64_t bytes = 0;
  try {
    ran.problem = described(whole, ranks);
    bytes = sa::workspace_bytes(ran.problem);
  } catch (const Error&) {  // the call throws the same, and tells the other ranks
  }
  const io::HostTensor space = io::allocate_tensor(DType::u8, {bytes});
  const auto begin = std::chrono::steady_clock::now();
  ran.result = called(whole, {space.view.data, bytes}, ranks);
  ran.ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  return ran;
}

// What a rank tells the others of its share, as it travels.
struct Note {
  int64_t begin = 0, end = 0, workspace_bytes = 0;
  double ms = 0;
  int64_t given = 0, valid = 0, absent = 0, foreign = 0, first_slot = -1, first_value = 0;
};

Note note_of(const Ran& ran, const Cut& cut) {
  const sa::Result& r = ran.result;
  Note n{cut.begin,
         cut.end,
         r.workspace_bytes,
         ran.ms,
         r.slots_given,
         r.slots_valid,
         r.slots_absent,
         r.slots_foreign,
         r.first_foreign_slot,
         r.first_foreign_value};
  return n;
}

// A flat slot of a share of the queries as that of the whole.
int64_t whole_slot(int64_t slot, const Note& n, const sa::Problem& p, int64_t all_queries) {
  const int64_t a_query = std::max<int64_t>(p.groups * p.slots, 1);
  const int64_t mine = std::max<int64_t>(n.end - n.begin, 1);
  const int64_t row = slot / a_query;
  return ((row / mine) * all_queries + n.begin + row % mine) * a_query + slot % a_query;
}

// The counts of the whole: shares of queries add up, shares of heads see the same lists.
void gather_notes(const std::vector<Note>& notes, const Cut& cut, int64_t all, PassDone& done) {
  sa::Result& r = done.result;
  const bool add = !cut.heads && r.slots_given >= 0;
  if (add) {
    r.slots_given = r.slots_valid = r.slots_absent = r.slots_foreign = 0;
    r.first_foreign_slot = -1;
  }
  for (size_t i = 0; i < notes.size(); ++i) {
    const Note& n = notes[i];
    done.shares.push_back({static_cast<int>(i), n.begin, n.end, n.ms, n.workspace_bytes});
    done.ms = std::max(done.ms, n.ms);
    if (!add) continue;
    r.slots_given += n.given;
    r.slots_valid += n.valid;
    r.slots_absent += n.absent;
    r.slots_foreign += n.foreign;
    if (n.first_slot < 0) continue;
    const int64_t slot = whole_slot(n.first_slot, n, done.problem, all);
    if (r.first_foreign_slot >= 0 && r.first_foreign_slot <= slot) continue;
    r.first_foreign_slot = slot;
    r.first_foreign_value = n.first_value;
  }
}

// Under mpirun each process has filled its part of the outputs: all get the others'.
template <typename Out, typename Roles>
void exchange_parts(Out& out, const Roles& roles, Cut cut, int64_t all, Communicator& ranks) {
  for (const auto& role : roles) {
    const Tensor& t = out.*role.member;
    if (!t || !is_cut(t, role, cut)) continue;
    cut.begin = 0, cut.end = even_shard_begin(all, ranks.size(), 1);  // no share is larger
    const Tensor largest = part_of(t, role, cut);
    const int64_t bytes = largest.elements() * size_of(t.dtype);
    std::vector<char> mine(static_cast<size_t>(bytes)),
        theirs(static_cast<size_t>(bytes * ranks.size()));
    const auto dense = [&](char* at, const Tensor& part) {
      Tensor d = part;
      d.data = at;
      int64_t stride = 1;
      for (int i = d.rank - 1; i >= 0; --i) {
        d.stride[static_cast<size_t>(i)] = stride;
        stride *= d.shape[static_cast<size_t>(i)];
      }
      return d;
    };
    const auto part_of_rank = [&](int rank) {
      cut.begin = even_shard_begin(all, ranks.size(), rank);
      cut.end = even_shard_begin(all, ranks.size(), rank + 1);
      return part_of(t, role, cut);
    };
    const Tensor own = part_of_rank(ranks.rank());
    copy_elements(own, dense(mine.data(), own));
    ranks.all_gather(mine.data(), theirs.data(), bytes, nullptr);
    for (int r = 0; r < ranks.size(); ++r) {
      const Tensor part = part_of_rank(r);
      copy_elements(dense(theirs.data() + r * bytes, part), part);
    }
  }
}

// What the ranks share out of a pass: the tensor of its queries, and that of its heads.
const Tensor& queries_of(const WholeAttention& w) { return w.in.q; }
const Tensor& heads_of(const WholeAttention& w) { return w.in.q; }
const Tensor& queries_of(const WholeSelect& w) { return w.in.index_q; }
Tensor heads_of(const WholeSelect&) { return {}; }
const Tensor& queries_of(const WholeIndexLoss& w) { return w.in.index_q; }
const Tensor& heads_of(const WholeIndexLoss& w) { return w.in.q; }

// body(rank, its share of the whole, where that lies, the extent that is shared out).
template <typename Whole, typename Body>
void on_ranks(const Whole& whole, const std::string& how, const RankWorld& world,
              const Body& body) {
  const Tensor queries = queries_of(whole), heads = heads_of(whole);
  Cut base;
  base.heads = how == "heads";
  base.batch = queries.rank == 4;
  const int64_t total_heads = heads ? heads.shape[static_cast<size_t>(heads.rank - 2)] : 0;
  base.entries = base.batch ? queries.shape[0] : 1;
  base.queries = queries.shape[base.batch ? 1 : 0];
  const int64_t all = base.heads ? total_heads : base.queries;
  const auto on_rank = [&](Communicator& c) {
    Cut cut = base;
    cut.begin = even_shard_begin(all, c.size(), c.rank());
    cut.end = even_shard_begin(all, c.size(), c.rank() + 1);
    Share<Whole> share = share_of(whole, cut, c, !world.processes());
    if (cut.heads) share.ranks.total_heads = total_heads;
    body(c, share, cut, all);
  };
  if (world.processes())
    on_rank(*world.mpi());
  else
    run_thread_ranks(world.size(), world.timeout_s(), on_rank);
}

}  // namespace

void check_indices(const WholeAttention& w) {
  if (w.options.index_check != sa::IndexCheck::checked) return;
  const sa::CheckedCall call = sa::checked(w.pass, w.in, w.out, w.options, {});
  sa::check_data(call.problem, call.args);
  const auto refused = sa::refused_indices(call.problem, sa::examine(call.problem, call.args));
  require(refused.empty(), ErrorKind::invalid_data, "{}", refused);
}

template <typename Whole>
PassDone run_pass(const Whole& whole, const std::string& how, const RankWorld& world) {
  PassDone done;
  const MemoryWatch watch;
  if (world.size() == 1) {
    Ran ran = run_one(whole, {});
    done = {ran.problem, std::move(ran.result), {}, ran.ms, watch.peak_extra_bytes()};
    return done;
  }
  on_ranks(whole, how, world, [&](Communicator& c, const auto& share, Cut cut, int64_t all) {
    Ran ran = run_one(share.whole, share.ranks);
    sum_loss(share, cut, c, ran);
    const Note mine = note_of(ran, cut);
    std::vector<Note> notes(static_cast<size_t>(c.size()));
    c.all_gather(&mine, notes.data(), sizeof(Note), nullptr);
    if (world.processes()) {
      auto out = whole.out;
      exchange_parts(out, roles_of(out), cut, all, c);
    }
    if (c.rank() != 0 && !world.processes()) return;
    done.problem = ran.problem;
    done.result = std::move(ran.result);
    gather_notes(notes, cut, all, done);
    if (all > 0) (cut.heads ? done.problem.heads : done.problem.queries) = all;
  });
  done.peak_extra_bytes = watch.peak_extra_bytes();
  return done;
}

template <typename Whole>
int64_t least_limit(const Whole& whole, const std::string& how, const RankWorld& world) {
  if (world.size() == 1) return sa::least_workspace_limit(described(whole, {}));
  int64_t most = 0;
  on_ranks(whole, how, world, [&](Communicator& c, const auto& share, const Cut&, int64_t) {
    int64_t mine = 0;
    try {
      mine = sa::least_workspace_limit(described(share.whole, share.ranks));
    } catch (const Error&) {  // the call throws the same, and tells the other ranks
    }
    std::vector<int64_t> all(static_cast<size_t>(c.size()));
    c.all_gather(&mine, all.data(), sizeof mine, nullptr);
    if (c.rank() == 0 || world.processes()) most = *std::max_element(all.begin(), all.end());
  });
  return most;
}

template PassDone run_pass(const WholeAttention&, const std::string&, const RankWorld&);
template PassDone run_pass(const WholeSelect&, const std::string&, const RankWorld&);
template PassDone run_pass(const WholeIndexLoss&, const std::string&, const RankWorld&);
template int64_t least_limit(const WholeAttention&, const std::string&, const RankWorld&);
template int64_t least_limit(const WholeSelect&, const std::string&, const RankWorld&);
template int64_t least_limit(const WholeIndexLoss&, const std::string&, const RankWorld&);

void CutFlags::add(CLI::App& sub) {
  ranks.add(sub, "shares");
  sub.add_option("--cut", cut, "what the ranks share out: heads, or the queries (sequence)")
      ->check(CLI::IsMember({"heads", "sequence"}));
  ranks.add_timeout(sub);
}

void CutFlags::check() const {
  require(cut.empty() || ranks.said || under_mpirun(), ErrorKind::usage, "--cut {}: needs --ranks",
          cut);
  require(!cut.empty() || ranks.ranks == 1, ErrorKind::usage,
          "--ranks {}: needs --cut heads or --cut sequence", ranks.ranks);
  require(!cut.empty() || !under_mpirun(), ErrorKind::usage,
          "mpirun started this process: needs --cut heads or --cut sequence");
}

}  // namespace talea::cli
