// What: heads and rows of sparse attention cut over ranks, against the world of one.
// Why: shards of any size, empty ones included, must give what one rank gives.
// Never: compares ranks only with each other.
#include <mutex>
#include <thread>

#include "ops/sparse_attention/rank_calls.hpp"
#include "yardsticks/sparse_attention/index_case.hpp"

namespace talea::testing {
namespace {

class AttentionRanks : public RankedLane {};
TALEA_ATTENTION_ON(AttentionRanks, host_attention_lanes);

TEST_P(AttentionRanks, HeadsCut) {
  for (const int ranks : {1, 2, 3, 4, 8})
    for (const bool uneven : {false, true}) {
      const Case c = rank_case(3);
      const Outcome one = run(c);
      Whole w(c);
      const Shares h = shares(c.heads(), ranks, uneven);
      std::vector<Grid> dkv(static_cast<size_t>(ranks), Grid(DType::f32, {2, 31, 1, c.dim()}));
      run_thread_ranks(ranks, 30, [&](Communicator& world) {
        const auto r = static_cast<size_t>(world.rank());
        const int64_t first = h.begin[r], n = h.count[r];
        RankCall call;
        call.options = c.options;
        call.options.lane = lane();
        call.in = inputs_of(c);
        for (Tensor* t : {&call.in.q, &call.in.d_o, &call.in.d_lse}) *t = slice(*t, 2, first, n);
        call.in.sink = slice(call.in.sink, 0, first, n);
        call.out.o = slice(w.o.tensor(), 2, first, n);
        call.out.lse = slice(w.lse.tensor(), 2, first, n);
        call.grad.dq = slice(w.dq.tensor(), 2, first, n);
        call.grad.d_sink = slice(w.d_sink.tensor(), 0, first, n);
        call.grad.dkv = dkv[r].tensor();
        call.ranks.heads = &world;
        call.ranks.head_begin = first;
        call.run();
      });
      for (const Grid& g : dkv) expect_close(w, g.numbers(), one);
    }
}

// Rows [begin, begin + count) or every ranks-th; kv whole, or gathered from shards.
TEST_P(AttentionRanks, SequenceCut) {
  for (const int ranks : {1, 2, 3, 8})
    for (const bool gather : {false, true})
      for (const bool uneven : {false, true}) {
        const Case c = rank_case(5, gather ? DType::f32 : DType::bf16);
        Case wide = c;
        wide.dkv_dtype = DType::f32;
        const Outcome one = run(wide);
        Whole w(c);
        const bool strided = !uneven && ranks > 1;
        const Shares q = shares(c.queries(), ranks, uneven), k = shares(31, ranks, uneven);
        std::vector<Grid> dkv(static_cast<size_t>(ranks), Grid(DType::f32, {2, 31, 1, c.dim()}));
        Grid shared(DType::f32, {2, 31, 1, c.dim()});
        std::vector<std::vector<double>> sinks(static_cast<size_t>(ranks));
        run_thread_ranks(ranks, 30, [&](Communicator& world) {
          const auto r = static_cast<size_t>(world.rank());
          const int64_t first = strided ? world.rank() : q.begin[r];
          const int64_t step = strided ? ranks : 1;
          const int64_t n = strided ? (c.queries() - first + ranks - 1) / ranks : q.count[r];
          RankCall call;
          call.options = c.options;
          call.options.lane = lane();
          call.in = inputs_of(c);
          for (Tensor* t : {&call.in.q, &call.in.d_o, &call.in.d_lse, &call.in.indices,
                            &call.in.topk_length, &call.in.q_positions})
            *t = slice(*t, 1, first, n, step);
          call.out.o = slice(w.o.tensor(), 1, first, n, step);
          call.out.lse = slice(w.lse.tensor(), 1, first, n, step);
          call.grad.dq = slice(w.dq.tensor(), 1, first, n, step);
          Grid d_sink(DType::f32, {c.heads()});
          call.grad.d_sink = d_sink.tensor();
          call.grad.dkv = dkv[r].tensor();
          call.ranks.sequence = &world;
          if (gather) {
            call.in.kv = slice(call.in.kv, 1, k.begin[r], k.count[r]);
            call.grad.dkv = slice(shared.tensor(), 1, k.begin[r], k.count[r]);
            call.ranks.gather_kv = true;
            call.ranks.row_begin = k.begin[r];
            call.ranks.total_kv_rows = 31;
          }
          call.run();
          sinks[r] = d_sink.numbers();
        });
        for (int r = 0; r < ranks; ++r) {
          for (int64_t h = 0; h < c.heads(); ++h)
            w.d_sink.put(sinks[static_cast<size_t>(r)][static_cast<size_t>(h)], h);
          expect_close(w, gather ? shared.numbers() : dkv[static_cast<size_t>(r)].numbers(), one);
        }
      }
}

std::string error_of(int ranks,
                     const std::function<void(sa::Ranks&, sa::Inputs&, sa::Options&)>& bend) {
  const Case c = rank_case(3);
  const Shares h = shares(c.heads(), ranks, false);
  std::string text;
  std::mutex mutex;
  run_thread_ranks(ranks, 10, [&](Communicator& world) {
    const auto r = static_cast<size_t>(world.rank());
    Grid o(DType::f32, {2, 9, h.count[r], c.value_dim()});
    sa::Inputs in = inputs_of(c);
    in.d_o = in.d_lse = {};
    in.q = slice(in.q, 2, h.begin[r], h.count[r]);
    in.sink = slice(in.sink, 0, h.begin[r], h.count[r]);
    sa::Outputs out;
    out.o = o.tensor();
    sa::Ranks ranks_of;
    ranks_of.heads = &world;
    ranks_of.head_begin = h.begin[r];
    sa::Options options = c.options;
    if (world.rank() == 1) bend(ranks_of, in, options);
    try {
      Room room(sa::workspace_bytes(sa::describe(sa::Pass::forward, in, out, options, ranks_of)) +
                (1 << 20));
      sa::forward(in, out, options, room.workspace(), ranks_of);
    } catch (const Error& e) {
      const std::lock_guard lock(mutex);
      if (text.empty() || std::string(e.what()).find("left") == std::string::npos) text = e.what();
    }
  });
  return text;
}

TEST(AttentionRanksBad, AreNamed) {
  EXPECT_EQ(error_of(3, [](auto&, auto&, auto&) {}), "");
  EXPECT_NE(error_of(3, [](sa::Ranks& r, auto&, auto&) { r.head_begin += 1; }).find("head_begin"),
            std::string::npos);
  EXPECT_NE(error_of(2, [](auto&, auto&, sa::Options& o) { o.scale = 3; }).find("scale"),
            std::string::npos);
  EXPECT_NE(error_of(2, [](auto&, auto&, sa::Options& o) { o.causal = false; }).find("causal"),
            std::string::npos);
  EXPECT_NE(
      error_of(2, [](auto&, sa::Inputs& in, auto&) { in.q_positions = {}; }).find("q_positions"),
      std::string::npos);
}

// What each of two ranks with half of the queries says of options(rank), or "".
template <class F>
std::vector<std::string> errors_of_halves(const Case& c, F options) {
  std::vector<std::string> text(2);
  run_thread_ranks(2, 10, [&](Communicator& world) {
    Grid o(DType::f32, {1, 4, c.heads(), c.value_dim()});
    sa::Inputs in = inputs_of(c);
    in.d_o = in.d_lse = {};
    for (Tensor* t : {&in.q, &in.indices}) *t = slice(*t, 1, 4 * world.rank(), 4);
    sa::Outputs out;
    out.o = o.tensor();
    sa::Ranks ranks;
    ranks.sequence = &world;
    const sa::Options own = options(world.rank());
    try {
      Room room(sa::workspace_bytes(sa::describe(sa::Pass::forward, in, out, own, ranks)));
      sa::forward(in, out, own, room.workspace(), ranks);
    } catch (const Error& e) {
      text[static_cast<size_t>(world.rank())] = e.what();
    }
  });
  return text;
}

// A rank that counts its queries from 0 under causal would bound them by their local numbers.
TEST(AttentionRanksBad, QueriesAtTheSamePositions) {
  Spec spec;
  spec.queries = 8, spec.batch = 1;
  const Case c = make_case(spec);
  const auto errors = [&](int64_t base, bool causal) {  // base: of the second rank's first query
    return errors_of_halves(c, [&](int rank) {
      sa::Options options = c.options;
      options.causal = causal;
      options.q_position_base = rank == 1 ? base : 0;
      return options;
    });
  };
  const std::vector<std::string> none(2);
  EXPECT_EQ(errors(4, true), none);
  EXPECT_EQ(errors(9, true), none);
  EXPECT_EQ(errors(0, false), none);
  for (const int64_t base : {0, 3})
    for (const std::string& text : errors(base, true)) {
      EXPECT_NE(text.find("q_position_base = " + std::to_string(base) + " on rank 1"),
                std::string::npos)
          << text;
      EXPECT_NE(text.find("q_positions"), std::string::npos) << text;
    }
}

// Data that one rank refuses is refused by all: none waits for it, none returns half of a result.
TEST(AttentionRanksBad, DataOfOneRankIsNamedOnAll) {
  Spec spec;
  spec.queries = 8, spec.batch = 1, spec.foreign = false;
  Case c = make_case(spec);
  c.indices.put_integer(99, 0, 6, 0, 2);
  for (const bool checked : {true, false}) {
    const auto errors = errors_of_halves(c, [&](int) {
      sa::Options options = c.options;
      options.index_check = checked ? sa::IndexCheck::checked : sa::IndexCheck::ignore;
      return options;
    });
    for (const std::string& t : errors)
      EXPECT_EQ(t.find("indices: 99 at batch 0, query 2, slot 2") != std::string::npos, checked)
          << t;
  }
}

TEST(AttentionRanksLoss, HeadsAndRows) {
  IndexSpec s;
  s.loss = true, s.batch = 1, s.row_weight = true;
  const IndexCase c = make_index_case(s);
  const LossOutcome one = run_loss(c, "auto");
  for (const bool heads : {true, false}) {
    const int ranks = 3;
    const Shares cut = shares(heads ? 3 : c.queries(), ranks, !heads);
    Grid dq(DType::f32, c.q.shape());
    run_thread_ranks(ranks, 30, [&](Communicator& world) {
      const auto r = static_cast<size_t>(world.rank());
      const int64_t first = cut.begin[r], n = cut.count[r];
      sa::IndexLossInputs in;
      in.index_q = c.q.tensor(), in.index_k = c.k.tensor(), in.index_weights = c.weights.tensor();
      in.q = c.attention_q.tensor(), in.kv = c.kv.tensor(), in.indices = c.indices.tensor();
      in.row_weight = c.row_weight.tensor();
      Grid loss(DType::f64, {}), dk(DType::f32, c.k.shape()), own(DType::f32, c.q.shape());
      sa::IndexLossOutputs out;
      out.loss = loss.tensor(), out.dindex_k = dk.tensor();
      out.dindex_q = heads ? own.tensor() : slice(dq.tensor(), 1, first, n);
      sa::IndexLossOptions o = c.loss;
      sa::Ranks group;
      if (heads) {
        in.q = slice(in.q, 2, first, n);
        group.heads = &world, group.head_begin = first;
      } else {
        for (Tensor* t : {&in.index_q, &in.index_weights, &in.q, &in.indices, &in.row_weight})
          *t = slice(*t, 1, first, n);
        group.sequence = &world;
        o.denominator_scope = sa::LossScope::global;
      }
      Room room(sa::workspace_bytes(sa::describe(in, out, o, group)));
      sa::index_loss(in, out, o, room.workspace(), group);
      EXPECT_TRUE(room.intact());
      EXPECT_NEAR(loss.get(), one.loss, 1e-5 * std::abs(one.loss));
      EXPECT_LE(relative_l2(dk.numbers(), one.dk), 1e-5);
      EXPECT_LE(heads ? relative_l2(own.numbers(), one.dq) : 0, 1e-5);
    });
    EXPECT_LE(heads ? 0 : relative_l2(dq.numbers(), one.dq), 1e-5);
  }
}

}  // namespace
}  // namespace talea::testing
