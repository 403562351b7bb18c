// What: the measured call, alone or over threads that are ranks.
// Why: see call.hpp.
// Never: allocates between the watch's start and end but the workspace and what ranks sum.
#include "call.hpp"

#include <algorithm>
#include <chrono>
#include <mutex>

#include "axes.hpp"
#include "core/fail.hpp"
#include "core/half.hpp"
#include "memory.hpp"
#include "ops/mamba3/contract.hpp"
#include "ops/mamba3/fields.hpp"
#include "talea/ranks.hpp"

namespace talea::cli::scan {
namespace {

using Clock = std::chrono::steady_clock;

mamba3::Result call(mamba3::Pass pass, const mamba3::Inputs& in, const mamba3::Outputs& out,
                    const mamba3::Options& options, const mamba3::Ranks& ranks) {
  int64_t bytes = 0;
  try {
    bytes = workspace_bytes(describe(pass, in, out, options, ranks));
  } catch (const Error&) {  // the call throws the same, and tells the other ranks
  }
  const io::HostTensor memory = io::allocate_tensor(DType::i64, {(bytes + 7) / 8});
  const Workspace workspace{memory.view.data, (bytes + 7) / 8 * 8};
  return pass == mamba3::Pass::backward ? backward(in, out, options, workspace, ranks)
                                        : forward(in, out, options, workspace, ranks);
}

// What a rank writes for itself, and where it belongs: the same on all ranks, or one share of it.
struct Share {
  Tensor own, whole;
  bool sum = false;
};

struct Piece {
  mamba3::Inputs in;
  mamba3::Outputs out;
  mamba3::Ranks ranks;
  mamba3::PieceFact fact;
  std::vector<Share> shares;
  std::vector<io::HostTensor> owners;
};

bool is_parameter(const std::string& name) {
  for (const char* p :
       {"d_q_bias", "d_k_bias", "d_d", "d_mimo_v", "d_mimo_z", "d_mimo_out", "d_norm_weight"})
    if (name == p) return true;
  return false;
}

void set_own(Piece& piece, Tensor& t, bool sum) {
  const DType dtype = sum && is_16bit(t.dtype) ? DType::f32 : t.dtype;
  piece.owners.push_back(io::allocate_tensor(
      dtype, std::span<const int64_t>(t.shape.data(), static_cast<size_t>(t.rank))));
  piece.shares.push_back({piece.owners.back().view, t, sum});
  t = piece.owners.back().view;
}

// Tokens [begin, end) of everything that has tokens; states whole; parameters' gradients shared.
void cut_tokens(Piece& piece, int64_t begin, int64_t end) {
  const auto tokens = [&](const char* name, Tensor& t) {
    if (t && std::string(name) != "saved" && std::string(name) != "status")
      t = cut(t, axes_of(name, t.rank), 's', begin, end);
  };
  mamba3::for_inputs(piece.in, tokens);
  mamba3::for_outputs(piece.out, [&](const char* name, Tensor& t) {
    if (!t) return;
    tokens(name, t);
    const std::string key = name;
    const bool state = key.find("initial_") != std::string::npos || key.rfind("final_", 0) == 0;
    if (state || is_parameter(key)) set_own(piece, t, is_parameter(key));
  });
}

// Heads [begin, end) and, where the cut falls between groups, their groups; else all groups, whose
// gradients are then the same on all ranks.
void cut_heads(Piece& piece, int64_t begin, int64_t end, int64_t heads_per_group, bool by_groups) {
  const Tensor& d_angles = piece.out.d.angles;
  const bool shared_angles = d_angles && d_angles.shape[2] == 1;  // the tool cuts two heads or more
  piece.ranks.shared_angles = shared_angles;
  const auto heads = [&](const char* name, Tensor& t) {
    if (!t || std::string(name) == "saved" || std::string(name) == "status") return;
    const std::string axes = axes_of(name, t.rank);
    t = cut(t, axes, 'h', begin, end);
    if (by_groups) t = cut(t, axes, 'g', begin / heads_per_group, end / heads_per_group);
  };
  mamba3::for_inputs(piece.in, heads);
  mamba3::for_outputs(piece.out, [&](const char* name, Tensor& t) {
    if (!t) return;
    const std::string key = name;
    heads(name, t);
    const bool rows = (key == "d_q" || key == "d_k") && !by_groups;
    const bool angles = key == "d_angles" && shared_angles;
    if (rows || angles) set_own(piece, t, false);
  });
}

Piece make_piece(const mamba3::Inputs& in, const mamba3::Outputs& out, const World& world, int rank,
                 Communicator& ranks) {
  Piece piece{in, out, {}, {}, {}, {}};
  const int64_t tokens = in.v.shape[1], heads = in.v.shape[2];
  const int64_t groups = in.q.shape[in.q.rank - 2];
  piece.fact = {rank, 0, heads, 0, tokens};
  const auto begin_of = [&](int64_t total, int r) {
    return even_shard_begin(total, world.ranks, r);
  };
  if (world.tokens) {
    piece.fact.token_begin = begin_of(tokens, rank);
    piece.fact.token_end = begin_of(tokens, rank + 1);
    piece.ranks.sequence = &ranks;
    piece.ranks.token_begin = piece.fact.token_begin;
    cut_tokens(piece, piece.fact.token_begin, piece.fact.token_end);
    return piece;
  }
  piece.fact.head_begin = begin_of(heads, rank);
  piece.fact.head_end = begin_of(heads, rank + 1);
  const int64_t heads_per_group = groups > 0 ? std::max<int64_t>(heads / groups, 1) : 1;
  bool by_groups = true;
  for (int r = 0; r <= world.ranks; ++r)
    by_groups = by_groups && begin_of(heads, r) % heads_per_group == 0;
  piece.ranks.heads = &ranks;
  piece.ranks.head_begin = piece.fact.head_begin;
  piece.ranks.total_heads = heads;
  piece.ranks.total_groups = heads > 0 ? groups : 0;  // no heads have one group, or none
  cut_heads(piece, piece.fact.head_begin, piece.fact.head_end, heads_per_group, by_groups);
  return piece;
}

// f(offset) of every element, the last axis fastest.
template <typename F>
void for_elements(const Tensor& t, F f) {
  std::vector<int64_t> at(static_cast<size_t>(t.rank), 0);
  for (int64_t e = 0; e < t.elements(); ++e) {
    int64_t offset = 0;
    for (size_t i = 0; i < at.size(); ++i) offset += at[i] * t.stride[i];
    f(offset);
    for (size_t axis = at.size(); axis-- > 0;) {
      if (++at[axis] < t.shape[axis]) break;
      at[axis] = 0;
    }
  }
}

std::vector<double> values_of(const Tensor& t) {
  std::vector<double> values;
  for_elements(t, [&](int64_t at) { values.push_back(load_element(t.data, t.dtype, at)); });
  return values;
}

void set_values(const Tensor& t, const double* values) {
  for_elements(t, [&](int64_t at) { store_element(t.data, t.dtype, at, *values++); });
}

// Shares in rank order into the whole: the sum, or the first, which equals the others.
void gather(const std::vector<Piece>& pieces) {
  for (size_t i = 0; i < pieces.front().shares.size(); ++i) {
    const Share& first = pieces.front().shares[i];
    std::vector<double> sum = values_of(first.own);
    for (size_t r = 1; first.sum && r < pieces.size(); ++r) {
      const std::vector<double> more = values_of(pieces[r].shares[i].own);
      for (size_t e = 0; e < sum.size(); ++e) sum[e] += more[e];
    }
    set_values(first.whole, sum.data());
  }
}

// What each process wrote, to all of them.
void exchange(std::vector<Piece>& pieces, Communicator& ranks) {
  std::vector<std::vector<Tensor>> written;
  for (Piece& piece : pieces) {
    written.emplace_back();
    mamba3::for_outputs(piece.out, [&](const char*, Tensor& t) { written.back().push_back(t); });
  }
  for (size_t i = 0; i < written.front().size(); ++i) {
    if (!written.front()[i]) continue;
    int64_t most = 0;
    for (const auto& of_rank : written) most = std::max(most, of_rank[i].elements());
    std::vector<double> own = values_of(written[static_cast<size_t>(ranks.rank())][i]);
    own.resize(static_cast<size_t>(most));
    std::vector<double> all(own.size() * pieces.size());
    ranks.all_gather(own.data(), all.data(), most * static_cast<int64_t>(sizeof(double)), nullptr);
    for (size_t r = 0; r < pieces.size(); ++r)
      if (static_cast<int>(r) != ranks.rank())
        set_values(written[r][i], all.data() + r * own.size());
  }
}

double milliseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

void run_processes(mamba3::Pass pass, std::vector<Piece>& pieces, const mamba3::Options& options,
                   Communicator& ranks, Ran& ran) {
  Piece& own = pieces[static_cast<size_t>(ranks.rank())];
  const auto begin = Clock::now();
  ran.result = call(pass, own.in, own.out, options, own.ranks);
  const double ms = milliseconds_since(begin);
  std::vector<double> times(pieces.size());
  ranks.all_gather(&ms, times.data(), sizeof ms, nullptr);
  ran.ms = *std::max_element(times.begin(), times.end());
  exchange(pieces, ranks);
}

}  // namespace

Ran run_pass(mamba3::Pass pass, const mamba3::Inputs& in, const mamba3::Outputs& out,
             const mamba3::Options& options, const World& world) {
  Ran ran;
  ran.problem = describe(pass, in, out, options);
  const MemoryWatch watch;
  if (world.ranks == 1) {
    const auto begin = Clock::now();
    ran.result = call(pass, in, out, options, {});
    ran.ms = milliseconds_since(begin);
    ran.peak_extra_bytes = watch.peak_extra_bytes();
    return ran;
  }
  std::vector<Piece> pieces(static_cast<size_t>(world.ranks));
  if (world.processes) {
    for (int r = 0; r < world.ranks; ++r)
      pieces[static_cast<size_t>(r)] = make_piece(in, out, world, r, *world.processes);
    run_processes(pass, pieces, options, *world.processes, ran);
  } else {
    std::mutex mutex;
    run_thread_ranks(world.ranks, world.timeout_s, [&](Communicator& ranks) {
      Piece piece = make_piece(in, out, world, ranks.rank(), ranks);
      const auto begin = Clock::now();
      mamba3::Result result = call(pass, piece.in, piece.out, options, piece.ranks);
      const double ms = milliseconds_since(begin);
      const std::lock_guard lock(mutex);
      ran.ms = std::max(ran.ms, ms);
      if (ranks.rank() == 0) ran.result = std::move(result);
      pieces[static_cast<size_t>(ranks.rank())] = std::move(piece);
    });
  }
  gather(pieces);
  ran.peak_extra_bytes = watch.peak_extra_bytes();
  for (const Piece& piece : pieces) ran.pieces.push_back(piece.fact);
  return ran;
}

int64_t least_limit(mamba3::Pass pass, const mamba3::Inputs& in, const mamba3::Outputs& out,
                    const mamba3::Options& options, const World& world) {
  if (world.ranks == 1) return least_workspace_limit(describe(pass, in, out, options));
  int64_t most = 0;
  const auto on_rank = [&](Communicator& ranks) {
    int64_t mine = 0;
    try {
      const Piece piece = make_piece(in, out, world, ranks.rank(), ranks);
      mine = least_workspace_limit(describe(pass, piece.in, piece.out, options, piece.ranks));
    } catch (const Error&) {  // the call throws the same, and tells the other ranks
    }
    std::vector<int64_t> all(static_cast<size_t>(ranks.size()));
    ranks.all_gather(&mine, all.data(), sizeof mine, nullptr);
    if (ranks.rank() == 0 || world.processes) most = *std::max_element(all.begin(), all.end());
  };
  if (world.processes)
    on_rank(*world.processes);
  else
    run_thread_ranks(world.ranks, world.timeout_s, on_rank);
  return most;
}

namespace {

// Token `t` of a tensor with tokens on the axis `s`, without it.
Tensor token_of(const char* name, const Tensor& t, int64_t token) {
  if (!t) return t;
  const std::string axes = axes_of(name, t.rank);
  Tensor one = cut(t, axes, 's', token, token + 1);
  std::string less = axes;
  less.erase(less.find('s'), 1);
  one = in_order(one, axes, less);
  one.rank = static_cast<int>(less.size());
  return one;
}

// The caller's tensor where a final state is wanted, else one of the right shape; as the initial
// state has it.
Tensor begin_state(Tensor wanted, const Tensor& initial, std::vector<int64_t> shape, DType dtype,
                   std::vector<io::HostTensor>& owners) {
  if (!wanted) {
    owners.push_back(io::allocate_tensor(dtype, shape));
    wanted = owners.back().view;
  }
  std::vector<double> values(static_cast<size_t>(wanted.elements()), 0.0);
  if (initial) values = values_of(initial);
  set_values(wanted, values.data());
  return wanted;
}

}  // namespace

Ran run_steps(const mamba3::Inputs& in, const mamba3::Outputs& out,
              const mamba3::Options& options) {
  require(!in.cu_seqlens, ErrorKind::usage, "--step: --cu-seqlens has no steps; B sequences have");
  if (in.v.shape[1] == 0) return run_pass(mamba3::Pass::forward, in, out, options, {});
  Ran ran;
  ran.problem = describe(mamba3::Pass::forward, in, out, options);  // of the whole: its checks
  const MemoryWatch watch;
  const mamba3::Problem& p = ran.problem;
  const DType wide = p.dtype == DType::f64 ? DType::f64 : DType::f32;
  std::vector<io::HostTensor> owners;
  const mamba3::States &first = in.initial_states, &last = out.final_states;
  mamba3::StepArguments a;
  a.state.angle = begin_state(last.angle, first.angle, {p.batch, p.heads, p.pairs}, wide, owners);
  a.state.ssm =
      begin_state(last.ssm, first.ssm, {p.batch, p.heads, p.head_dim, p.state_dim}, wide, owners);
  a.state.k = begin_state(last.k, first.k, {p.batch, p.rank, p.heads, p.state_dim}, wide, owners);
  a.state.v = begin_state(last.v, first.v, {p.batch, p.heads, p.head_dim}, wide, owners);
  for (int64_t t = 0; t < p.tokens; ++t) {
    a.in = in;
    a.in.initial_states = {};
    mamba3::for_inputs(a.in, [&](const char* name, Tensor& tensor) {
      if (tensor && axes_of(name, tensor.rank).find('s') != std::string::npos)
        tensor = token_of(name, tensor, t);
    });
    a.out = token_of("out", out.out, t);
    const int64_t bytes = workspace_bytes(describe(a, options));
    const io::HostTensor memory = io::allocate_tensor(DType::i64, {(bytes + 7) / 8});
    const auto begin = Clock::now();
    ran.result = step(a, options, {memory.view.data, (bytes + 7) / 8 * 8});
    ran.ms += milliseconds_since(begin);
  }
  ran.peak_extra_bytes = watch.peak_extra_bytes();
  return ran;
}

}  // namespace talea::cli::scan
