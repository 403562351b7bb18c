// What: heads and rows cut at once, rows in zig-zag order; worlds that are wrong.
// Why: positions travel with their rows, and heads are summed before rows.
// Never: compares ranks only with each other.
#include <array>
#include <cstring>
#include <mutex>

#include "ops/sparse_attention/rank_calls.hpp"

namespace talea::testing {
namespace {

class AttentionRanksBoth : public RankedLane {};
TALEA_ATTENTION_ON(AttentionRanksBoth, host_attention_lanes);

// Chunks r and 2 ranks - 1 - r of the rows belong to rank r: all have the same work under causal.
std::vector<int64_t> zig_zag(int64_t rows, int ranks) {
  std::vector<int64_t> order;
  const int64_t chunks = 2 * ranks;
  const auto add = [&](int64_t chunk) {
    for (int64_t i = rows * chunk / chunks; i < rows * (chunk + 1) / chunks; ++i)
      order.push_back(i);
  };
  for (int64_t r = 0; r < ranks; ++r) add(r), add(chunks - 1 - r);
  return order;
}

// Rows (the second extent) of a dense grid in another order.
Grid reordered(const Grid& from, const std::vector<int64_t>& order) {
  if (!from) return {};
  Grid to(from.dtype(), from.shape());
  const int64_t batch = from.shape()[0], rows = from.shape()[1];
  const auto bytes = static_cast<size_t>(from.elements() / (batch * rows) * size_of(from.dtype()));
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t i = 0; i < rows; ++i)
      std::memcpy(to.bytes(b, i), from.bytes(b, order[static_cast<size_t>(i)]), bytes);
  return to;
}

Case reordered(const Case& c, const std::vector<int64_t>& order) {
  Case to = c;
  for (Grid Case::*g :
       {&Case::q, &Case::d_o, &Case::d_lse, &Case::indices, &Case::topk_length, &Case::positions})
    to.*g = reordered(c.*g, order);
  return to;
}

struct World {
  int heads = 1, rows = 1;
  std::vector<std::vector<std::unique_ptr<Communicator>>> of_heads, of_rows;

  World(int heads_ranks, int row_ranks) : heads(heads_ranks), rows(row_ranks) {
    for (int i = 0; i < rows; ++i) of_heads.push_back(make_thread_communicators(heads));
    for (int i = 0; i < heads; ++i) of_rows.push_back(make_thread_communicators(rows));
  }
};

TEST_P(AttentionRanksBoth, HeadsAndRowsInZigZag) {
  for (const auto& size : {std::pair{2, 2}, {3, 2}, {2, 3}})
    for (const bool gather : {false, true}) {
      const int heads = size.first, rows = size.second;  // clang 14 captures no bindings
      const Case original = rank_case(7);
      const std::vector<int64_t> order = zig_zag(original.queries(), rows);
      const Case c = reordered(original, order);
      const Outcome one = run(original);
      Whole w(c);
      World world(heads, rows);
      const Shares h = shares(c.heads(), heads, false), q = shares(c.queries(), rows, false);
      const Shares k = shares(31, rows, true);
      const auto ranks = static_cast<size_t>(heads * rows);
      std::vector<Grid> dkv(ranks, Grid(DType::f32, {2, 31, 1, c.dim()}));
      run_thread_ranks(heads * rows, 30, [&](Communicator& all) {
        const auto i = static_cast<size_t>(all.rank() % heads);
        const auto j = static_cast<size_t>(all.rank() / heads);
        RankCall call;
        call.options = c.options;
        call.options.lane = lane();
        call.in = inputs_of(c);
        for (Tensor* t : {&call.in.q, &call.in.d_o, &call.in.d_lse})
          *t = slice(slice(*t, 2, h.begin[i], h.count[i]), 1, q.begin[j], q.count[j]);
        for (Tensor* t : {&call.in.indices, &call.in.topk_length, &call.in.q_positions})
          *t = slice(*t, 1, q.begin[j], q.count[j]);
        call.in.sink = slice(call.in.sink, 0, h.begin[i], h.count[i]);
        const auto part = [&](const Grid& g) {
          return slice(slice(g.tensor(), 2, h.begin[i], h.count[i]), 1, q.begin[j], q.count[j]);
        };
        call.out.o = part(w.o), call.out.lse = part(w.lse), call.grad.dq = part(w.dq);
        Grid d_sink(DType::f32, {c.heads()});
        call.grad.d_sink = slice(d_sink.tensor(), 0, h.begin[i], h.count[i]);
        call.grad.dkv = dkv[static_cast<size_t>(all.rank())].tensor();
        call.ranks.heads = world.of_heads[j][i].get();
        call.ranks.sequence = world.of_rows[i][j].get();
        call.ranks.head_begin = h.begin[i];
        if (gather) {
          call.in.kv = slice(call.in.kv, 1, k.begin[j], k.count[j]);
          call.grad.dkv = slice(dkv[i].tensor(), 1, k.begin[j], k.count[j]);
          call.ranks.gather_kv = true;
          call.ranks.row_begin = k.begin[j];
          call.ranks.total_kv_rows = 31;
        }
        call.run();
        if (j == 0)
          for (int64_t n = 0; n < h.count[i]; ++n)
            w.d_sink.put(d_sink.get(h.begin[i] + n), h.begin[i] + n);
      });
      // Row i of the ranks is row order[i] of the world of one.
      std::vector<int64_t> back(order.size());
      for (size_t i = 0; i < order.size(); ++i)
        back[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
      w.o = reordered(w.o, back), w.lse = reordered(w.lse, back), w.dq = reordered(w.dq, back);
      const size_t whole_sums = gather ? static_cast<size_t>(heads) : ranks;
      for (size_t r = 0; r < whole_sums; ++r) expect_close(w, dkv[r].numbers(), one);
    }
}

using Bend = std::function<void(sa::Ranks&, sa::Inputs&, sa::Outputs&, sa::Options&)>;

// What the ranks of a cut sequence with gathered kv say where rank 1's call is bent.
std::string error_of(const Bend& bend, const std::function<bool(int)>& comes = {}) {
  const Case c = rank_case(3);
  const Shares q = shares(c.queries(), 3, false), k = shares(31, 3, false);
  std::string text;
  std::mutex mutex;
  run_thread_ranks(3, 2, [&](Communicator& world) {
    const auto r = static_cast<size_t>(world.rank());
    Grid o(DType::f32, {2, q.count[r], c.heads(), c.value_dim()});
    sa::Inputs in = inputs_of(c);
    in.d_o = in.d_lse = {};
    for (Tensor* t : {&in.q, &in.indices, &in.topk_length, &in.q_positions})
      *t = slice(*t, 1, q.begin[r], q.count[r]);
    in.kv = slice(in.kv, 1, k.begin[r], k.count[r]);
    sa::Outputs out;
    out.o = o.tensor();
    sa::Ranks group;
    group.sequence = &world;
    group.gather_kv = true, group.row_begin = k.begin[r], group.total_kv_rows = 31;
    sa::Options options = c.options;
    if (world.rank() == 1) bend(group, in, out, options);
    if (comes && !comes(world.rank())) return;
    try {
      Room room(sa::workspace_bytes(sa::describe(sa::Pass::forward, in, out, options, group)) +
                (1 << 20));
      sa::forward(in, out, options, room.workspace(), group);
    } catch (const Error& e) {
      const std::lock_guard lock(mutex);
      if (text.empty() || text.find("left") != std::string::npos) text = e.what();
    }
  });
  return text;
}

TEST(AttentionRanksBad, SequencesAreNamed) {
  using R = sa::Ranks;
  using I = sa::Inputs;
  using U = sa::Outputs;
  using O = sa::Options;
  EXPECT_EQ(error_of([](R&, I&, U&, O&) {}), "");
  const auto names = [](const Bend& bend, const char* part) {
    const std::string text = error_of(bend);
    EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
  };
  names([](R& r, I&, U&, O&) { r.row_begin -= 1; }, "row_begin");
  names([](R& r, I& in, U&, O&) { r.row_begin += 1, in.kv.shape[1] -= 1; }, "row_begin");
  names([](R& r, I&, U&, O&) { r.total_kv_rows = 32; }, "keys");
  names([](R& r, I&, U&, O&) { r.gather_kv = false; }, "gather_kv");
  names([](R&, I&, U& out, O& o) { o.value_dim -= 1, out.o.shape[3] -= 1; }, "value_dim");
  names([](R&, I& in, U&, O&) { in.sink = {}; }, "sink");
  names(
      [](R&, I& in, U& out, O&) { in.q.shape[2] -= 1, in.sink.shape[0] -= 1, out.o.shape[2] -= 1; },
      "heads");
  // A rank that does not come is named before the time is up.
  const std::string left = error_of([](R&, I&, U&, O&) {}, [](int rank) { return rank != 1; });
  EXPECT_NE(left.find("rank 1"), std::string::npos) << left;
}

}  // namespace
}  // namespace talea::testing
