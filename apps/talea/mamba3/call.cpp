// What: the measured call, alone or over threads that are ranks.
// Why: see call.hpp.
// Never: allocates between the watch's start and end but the workspace and what ranks sum.
#include "call.hpp"

#include <chrono>
#include <mutex>

#include "axes.hpp"
#include "core/half.hpp"
#include "memory.hpp"
#include "ops/mamba3/fields.hpp"
#include "talea/ranks.hpp"

namespace talea::cli::scan {
namespace {

using Clock = std::chrono::steady_clock;

mamba3::Result call(mamba3::Pass pass, const mamba3::Inputs& in, const mamba3::Outputs& out,
                    const mamba3::Options& options, const mamba3::Ranks& ranks) {
  const int64_t bytes = workspace_bytes(describe(pass, in, out, options, ranks));
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
    const bool angles = key == "d_angles" && t.shape[2] == 1;
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
  piece.ranks.total_groups = groups;
  cut_heads(piece, piece.fact.head_begin, piece.fact.head_end, heads_per_group, by_groups);
  return piece;
}

double element(const Tensor& t, const std::vector<int64_t>& at) {
  int64_t offset = 0;
  for (size_t i = 0; i < at.size(); ++i) offset += at[i] * t.stride[i];
  return load_element(t.data, t.dtype, offset);
}

void set_element(const Tensor& t, const std::vector<int64_t>& at, double value) {
  int64_t offset = 0;
  for (size_t i = 0; i < at.size(); ++i) offset += at[i] * t.stride[i];
  store_element(t.data, t.dtype, offset, value);
}

// Shares in rank order into the whole: the sum, or the first, which equals the others.
void gather(const std::vector<Piece>& pieces) {
  for (size_t i = 0; i < pieces.front().shares.size(); ++i) {
    const Share& first = pieces.front().shares[i];
    std::vector<int64_t> at(static_cast<size_t>(first.whole.rank), 0);
    for (int64_t e = 0; e < first.whole.elements(); ++e) {
      double value = element(first.own, at);
      for (size_t r = 1; first.sum && r < pieces.size(); ++r)
        value += element(pieces[r].shares[i].own, at);
      set_element(first.whole, at, value);
      for (size_t axis = at.size(); axis-- > 0;) {
        if (++at[axis] < first.whole.shape[axis]) break;
        at[axis] = 0;
      }
    }
  }
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
    ran.ms = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
    ran.peak_extra_bytes = watch.peak_extra_bytes();
    return ran;
  }
  std::vector<Piece> pieces(static_cast<size_t>(world.ranks));
  std::mutex mutex;
  run_thread_ranks(world.ranks, world.timeout_s, [&](Communicator& ranks) {
    Piece piece = make_piece(in, out, world, ranks.rank(), ranks);
    const auto begin = Clock::now();
    mamba3::Result result = call(pass, piece.in, piece.out, options, piece.ranks);
    const double ms = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
    const std::lock_guard lock(mutex);
    ran.ms = std::max(ran.ms, ms);
    if (ranks.rank() == 0) ran.result = std::move(result);
    pieces[static_cast<size_t>(ranks.rank())] = std::move(piece);
  });
  gather(pieces);
  ran.peak_extra_bytes = watch.peak_extra_bytes();
  for (const Piece& piece : pieces) ran.pieces.push_back(piece.fact);
  return ran;
}

}  // namespace talea::cli::scan
