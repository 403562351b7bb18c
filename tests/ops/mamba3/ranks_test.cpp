// What: heads and tokens over ranks, uneven and empty shares, dense and packed, against one rank
//       and fp64; bad worlds.
// Why: section 6: pieces merge like chunks, and every rank says the same of a sequence's ends.
// Never: a tolerance of its own.
#include "talea/ranks.hpp"

#include <functional>
#include <set>

#include "ops/mamba3/cuts.hpp"

namespace talea::yardsticks::mamba3 {
namespace {

const char* const states[] = {"angle", "ssm", "k", "v"};

class ScanRanks : public ScanLane {
 protected:
  // Two sequences of 21 tokens, or a pack of some.
  Case of_tokens(bool packed) const {
    Case c = usual(21, packed ? 1 : 2);
    chunk(c, 4);
    if (packed) {
      pack(c, {1, 6, 6, 18, 20});
      for (const char* s : states)
        for (const char* prefix : {"initial_", "d_final_"})
          fill(c, prefix + std::string(s), DType::f32, 3);
    }
    c.options.threads = 1;
    return c;
  }
};

// Bounds of `ranks` pieces of n things: some uneven, some empty.
std::vector<int64_t> pieces(int64_t n, int ranks, int kind) {
  std::vector<int64_t> bounds(static_cast<size_t>(ranks) + 1, 0);
  for (int r = 1; r <= ranks; ++r) {
    const double share = kind == 0 ? 1.0 * r / ranks : kind == 1 ? 1.0 * r * r / ranks / ranks : 1;
    bounds[static_cast<size_t>(r)] =
        r == ranks ? n : static_cast<int64_t>(share * static_cast<double>(n));
  }
  return bounds;
}

// Every rank's outcome; `local` makes its case and its Ranks from communicator and rank.
std::vector<Outcome> run_world(const std::string& lane, int ranks,
                               const std::function<Case(int, Communicator&, How&)>& local) {
  std::vector<Outcome> all(static_cast<size_t>(ranks));
  run_thread_ranks(ranks, 30, [&](Communicator& c) {
    How how;
    const Case own = local(c.rank(), c, how);
    all[static_cast<size_t>(c.rank())] = run(lane, own, how);
  });
  return all;
}

Tensors join_tokens(const Case& c, const std::vector<Outcome>& all,
                    const std::vector<int64_t>& bounds) {
  Tensors joined;
  for (const auto& [name, first] : all[0].out) {
    const int axis = token_axis(name);
    joined[name] = HostTensor(first.dtype(), shape_of(c, name));
    HostTensor& to = joined[name];
    for (size_t r = 0; r < all.size(); ++r) {
      const HostTensor& own = all[r].out.at(name);
      if (axis > 0) {
        put_into(to, own, axis, bounds[r]);
      } else if (name.find("final_") == 0 || name.find("d_initial_") == 0) {
        EXPECT_EQ(own.values(), first.values()) << name << " of rank " << r;
        to = own;
      } else {
        for (int64_t i = 0; i < to.elements(); ++i) to.set(i, to.get(i) + own.get(i));
      }
    }
  }
  return joined;
}

TEST_P(ScanRanks, TokensInPieces) {
  for (const bool packed : {false, true}) {
    const Case c = of_tokens(packed);
    const Values truth = oracle(c);
    const Outcome plain = run("unfused", c);
    for (const int ranks : {1, 2, 3, 4, 8})
      for (const int kind : {0, 1, 2}) {
        const auto bounds = pieces(21, ranks, kind);
        const auto all = run_world(lane(), ranks, [&](int r, Communicator& world, How& how) {
          how.ranks.sequence = &world;
          how.ranks.token_begin = bounds[static_cast<size_t>(r)];
          return tokens_of(c, bounds[static_cast<size_t>(r)], bounds[static_cast<size_t>(r) + 1]);
        });
        for (const Outcome& o : all) EXPECT_EQ(o.damage, "");
        EXPECT_EQ(judge(c, join_tokens(c, all, bounds), truth, plain.out), "")
            << ranks << " ranks, kind " << kind << (packed ? ", packed" : "");
        EXPECT_EQ(all[0].backward.exchanges.size(), ranks > 1 ? 3u : 0u);
      }
  }
}

// What ranks told each other in forward lies in `saved`: backward asks for the gradients alone.
// Where one rank has not kept it, all are told again.
TEST_P(ScanRanks, WhatForwardWasToldIsKept) {
  for (const bool packed : {false, true}) {
    const Case c = of_tokens(packed);
    const auto bounds = pieces(21, 3, 1);
    const auto of = [&](const std::set<int>& saving) {
      return run_world(lane(), 3, [&](int r, Communicator& world, How& how) {
        how.save = saving.contains(r);
        how.ranks.sequence = &world;
        how.ranks.token_begin = bounds[static_cast<size_t>(r)];
        return tokens_of(c, bounds[static_cast<size_t>(r)], bounds[static_cast<size_t>(r) + 1]);
      });
    };
    const auto anew = of({});
    for (const std::set<int>& saving : {std::set<int>{0, 1, 2}, {0, 2}, {1}}) {
      const auto all = of(saving);
      for (size_t r = 0; r < all.size(); ++r) {
        EXPECT_EQ(all[r].damage, "");
        EXPECT_EQ(all[r].backward.exchanges.size(), saving.size() == 3 ? 1u : 3u);
        for (const auto& [name, tensor] : all[r].out)
          EXPECT_EQ(tensor.values(), anew[r].out.at(name).values())
              << name << " of rank " << r << ", " << saving.size() << " save"
              << (packed ? ", packed" : "");
      }
    }
  }
}

TEST_P(ScanRanks, AResetBetweenPieces) {
  Case c = usual(12);
  for (int64_t h = 0; h < 4; ++h) c.in["adt"].set(h * 12 + 6, -INFINITY);
  const Values truth = oracle(c);
  const Outcome plain = run("unfused", c);
  const std::vector<int64_t> bounds = {0, 5, 8, 12};
  const auto all = run_world(lane(), 3, [&](int r, Communicator& world, How& how) {
    how.ranks.sequence = &world;
    how.ranks.token_begin = bounds[static_cast<size_t>(r)];
    return tokens_of(c, bounds[static_cast<size_t>(r)], bounds[static_cast<size_t>(r) + 1]);
  });
  EXPECT_EQ(judge(c, join_tokens(c, all, bounds), truth, plain.out), "");
}

struct HeadShares {
  std::vector<int64_t> bounds;
  bool replicated;
};

Tensors join_heads(const Case& c, const std::vector<Outcome>& all,
                   const std::vector<int64_t>& bounds, const std::vector<int64_t>& groups) {
  Tensors joined;
  const int group_axis = c.size.rank_axis || c.size.R > 1 ? 3 : 2;
  for (const auto& [name, first] : all[0].out) {
    joined[name] = HostTensor(first.dtype(), shape_of(c, name));
    const int axis = head_axis(c, name);
    for (size_t r = 0; r < all.size(); ++r) {
      const HostTensor& own = all[r].out.at(name);
      if (name == "d_q" || name == "d_k")
        put_into(joined[name], own, group_axis, groups[r]);
      else if (axis >= 0)
        put_into(joined[name], own, axis, bounds[r]);
      else
        joined[name] = own;
    }
  }
  return joined;
}

TEST_P(ScanRanks, HeadsInShares) {
  for (const int64_t G : {1, 2, 6}) {
    Sizes s{1, 9, 6, G, 16, 8, 2, 6};
    s.rank_axis = true;
    s.shared_angles = G == 1;
    Case c = full_case(s, DType::f32, 4);
    chunk(c, 4);
    c.options.threads = 1;
    const Values truth = oracle(c);
    const Outcome plain = run("unfused", c), alone = run(lane(), c);
    const int64_t each = 6 / G;
    for (const bool replicated : {true, false})
      for (const std::vector<int64_t>& bounds : {std::vector<int64_t>{0, 3, 6},
                                                 {0, 2, 4, 6},
                                                 {0, 1, 5, 6},
                                                 {0, 0, 4, 6},
                                                 {0, 2, 6, 6},
                                                 {0, 1, 2, 3, 4, 5, 6}}) {
        std::vector<int64_t> groups;
        for (size_t r = 0; r + 1 < bounds.size(); ++r)
          groups.push_back(replicated ? 0 : std::min(bounds[r] / each, G - 1));
        const int ranks = static_cast<int>(bounds.size()) - 1;
        const auto all = run_world(lane(), ranks, [&](int r, Communicator& world, How& how) {
          const auto at = static_cast<size_t>(r);
          how.ranks.heads = &world;
          how.ranks.head_begin = bounds[at];
          how.ranks.total_heads = 6;
          how.ranks.total_groups = G;
          how.ranks.shared_angles = s.shared_angles && ranks == 6;  // one head each
          const int64_t last = std::min<int64_t>(std::max(bounds[at + 1], bounds[at] + 1), 6) - 1;
          const int64_t count = replicated ? G : last / each - groups[at] + 1;
          return heads_of(c, bounds[at], bounds[at + 1], groups[at], count);
        });
        for (const Outcome& o : all) EXPECT_EQ(o.damage, "");
        const Tensors joined = join_heads(c, all, bounds, groups);
        EXPECT_EQ(judge(c, joined, truth, plain.out), "")
            << "G " << G << (replicated ? " replicated " : " shared ") << bounds[1];
        Tensors same = joined;
        for (const char* summed : {"d_q", "d_k", "d_angles"}) same.erase(summed);
        EXPECT_EQ(same_bits(same, alone.out), "");
      }
  }
}

TEST_P(ScanRanks, HeadsAndTokens) {
  Case c = usual(10);
  c.size.shared_angles = false;
  chunk(c, 4);
  const Values truth = oracle(c);
  const Outcome plain = run("unfused", c);
  const std::vector<int64_t> tokens = {0, 7, 10}, heads = {0, 1, 4};
  auto rows = make_thread_communicators(2), others = make_thread_communicators(2);
  auto left = make_thread_communicators(2), right = make_thread_communicators(2);
  std::vector<Outcome> all(4);
  run_thread_ranks(4, 30, [&](Communicator& world) {
    const auto h = static_cast<size_t>(world.rank() / 2), t = static_cast<size_t>(world.rank() % 2);
    How how;
    how.ranks.heads = t == 0 ? left[h].get() : right[h].get();
    how.ranks.sequence = h == 0 ? rows[t].get() : others[t].get();
    how.ranks.head_begin = heads[h];
    how.ranks.total_heads = 4;
    how.ranks.total_groups = 2;
    how.ranks.token_begin = tokens[t];
    const Case own = tokens_of(heads_of(c, heads[h], heads[h + 1], 0, 2), tokens[t], tokens[t + 1]);
    all[static_cast<size_t>(world.rank())] = run(lane(), own, how);
  });
  std::vector<Outcome> shares(2);
  for (size_t h = 0; h < 2; ++h)
    shares[h].out = join_tokens(heads_of(c, heads[h], heads[h + 1], 0, 2),
                                {all[2 * h], all[2 * h + 1]}, tokens);
  EXPECT_EQ(judge(c, join_heads(c, shares, heads, {0, 0}), truth, plain.out), "");
}

TEST_P(ScanRanks, BadWorldsAreNamed) {
  const Case c = usual(10);
  const auto expect = [&](const char* words, const std::function<void(int, Case&, How&)>& bend) {
    try {
      run_world(lane(), 2, [&](int r, Communicator& world, How& how) {
        Case own = tokens_of(c, r * 5, r * 5 + 5);
        how.ranks.sequence = &world;
        how.ranks.token_begin = r * 5;
        bend(r, own, how);
        return own;
      });
      ADD_FAILURE() << "no error: " << words;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
    }
  };
  expect("token_begin = 4 on rank 1", [](int r, Case&, How& how) {
    if (r == 1) how.ranks.token_begin = 4;
  });
  expect("head_norm", [](int r, Case& own, How&) { own.options.head_norm = r == 1; });
  expect("z: the ranks disagree", [](int r, Case& own, How&) {
    if (r == 1) own.in.erase("z"), own.in.erase("mimo_z");
  });
  expect("initial_k: the ranks disagree", [](int r, Case& own, How&) {
    if (r == 1) own.in.erase("initial_k");
  });
  expect("d_final_ssm: the ranks disagree", [](int r, Case& own, How&) {
    if (r == 0) own.in.erase("d_final_ssm");
  });
}

TEST_P(ScanRanks, AnglesOfAllHeadsAreSoOnEveryRank) {
  Sizes s{1, 9, 3, 3, 16, 8, 2, 6};
  s.rank_axis = true;
  const Case own = full_case(s, DType::f32, 4);
  s.shared_angles = true;
  const Case shared = full_case(s, DType::f32, 4);
  try {
    run_world(lane(), 2, [&](int r, Communicator& world, How& how) {
      how.ranks.heads = &world;
      how.ranks.head_begin = r;
      how.ranks.total_heads = 3;
      how.ranks.total_groups = 3;
      how.ranks.shared_angles = r == 0;
      return r == 0 ? heads_of(shared, 0, 1, 0, 1) : heads_of(own, 1, 3, 1, 2);
    });
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("d_angles: 2 heads on rank 1"), std::string::npos)
        << e.what();
  }
}

TALEA_SCAN_LANES(ScanRanks, host_lanes());

}  // namespace
}  // namespace talea::yardsticks::mamba3
