// What: sequences cut, joined, packed, stepped and empty: what one token hands to the next.
// Why: rows of section 5 about lengths and states, on every lane.
// Never: a tolerance of its own: bits, or the rule of judge.hpp.
#include "ops/mamba3/cuts.hpp"

namespace talea::yardsticks::mamba3 {
namespace {

class ScanStates : public ScanLane {};
const char* const states[] = {"angle", "ssm", "k", "v"};

TEST_P(ScanStates, EveryLengthAroundTheChunk) {
  for (const int64_t S : {1, 2, 4, 5, 6, 7, 11, 13, 31})
    for (const int64_t R : {1, 2}) {
      Case c = usual(S, R);
      chunk(c, 5);
      EXPECT_EQ(verify(lane(), c), "") << S << " tokens";
    }
}

TEST_P(ScanStates, NothingAtAllIsAnAnswer) {
  const auto expect_through = [&](const Case& c, const char* what) {
    const Outcome o = run(lane(), c);
    EXPECT_EQ(o.damage, "") << what;
    for (const char* s : {"ssm", "k", "v"}) {
      const std::string n = s;
      EXPECT_EQ(o.out.at("final_" + n).values(), c.in.at("initial_" + n).values()) << what;
      EXPECT_EQ(o.out.at("d_initial_" + n).values(), c.in.at("d_final_" + n).values()) << what;
    }
    EXPECT_EQ(o.out.at("d_initial_angle").values(), c.in.at("d_final_angle").values()) << what;
    for (const double x : o.out.at("final_angle").values()) EXPECT_TRUE(x >= 0 && x < 6.2831856);
    for (const char* p : {"d_q_bias", "d_k_bias", "d_d", "d_mimo_v", "d_mimo_z", "d_mimo_out"})
      for (const double x : o.out.at(p).values()) EXPECT_EQ(x, 0) << what << " " << p;
  };
  expect_through(usual(0), "S = 0");
  Case none = usual(3);
  pack(none, {0});
  for (const char* s : states)
    for (const char* prefix : {"initial_", "d_final_"})
      fill(none, prefix + std::string(s), DType::f32, 3);
  const Outcome o = run(lane(), none);
  for (const double x : o.out.at("out").values()) EXPECT_EQ(x, 0) << "n = 0: all is padding";
  for (const double x : o.out.at("d_k").values()) EXPECT_EQ(x, 0);
  for (const int64_t G : {0, 1}) {
    Sizes s{2, 3, 0, G, 8, 4, 1, 2};
    expect_through(full_case(s, DType::f32, 1), "H = 0");
  }
  Sizes s{0, 3, 4, 2, 8, 4, 1, 2};
  expect_through(full_case(s, DType::f32, 1), "B = 0");
}

TEST_P(ScanStates, CutAtAnyTokenAndJoined) {
  Case c = usual(9);
  chunk(c, 4);
  const Values truth = oracle(c);
  const Outcome whole = run(lane(), c), plain = run("unfused", c);
  for (int64_t cut = 0; cut <= 9; ++cut) {
    const Tensors joined = cut_and_joined(lane(), c, cut, whole.out);
    EXPECT_EQ(judge(c, joined, truth, plain.out), "") << "cut at " << cut;
  }
}

TEST_P(ScanStates, PackedIsEachSequenceAlone) {
  const std::vector<int64_t> ends = {1, 1, 2, 5, 9, 14, 14, 20, 20};  // 0, 1, 3, 4, 5, 0, 6, 0
  for (const int64_t R : {1, 2}) {
    Case c = usual(23, R);
    chunk(c, 4);
    Case packed = c;
    pack(packed, ends);
    for (const char* s : states)
      for (const char* prefix : {"initial_", "d_final_"})
        fill(packed, prefix + std::string(s), DType::f32, 3);
    const Outcome all = run(lane(), packed);
    EXPECT_EQ(all.forward.padding_tokens, counts_on_device(lane()) ? -1 : 4);
    for (size_t n = 0; n + 1 < ends.size(); ++n)
      EXPECT_EQ(differs_alone(lane(), c, packed, all, n), "") << "sequence " << n;
    for (const int64_t t : {0, 20, 21, 22})
      for (const double x : part(all.out.at("out"), 1, t, t + 1).values()) EXPECT_EQ(x, 0);
  }
}

TEST_P(ScanStates, NothingLeaksFromPaddingOrANeighbour) {
  Case c = usual(20);
  chunk(c, 4);
  pack(c, {2, 9, 9, 17});
  for (const char* s : states)
    for (const char* prefix : {"initial_", "d_final_"})
      fill(c, prefix + std::string(s), DType::f32, 3);
  Case bad = c;
  for (const char* name : {"q", "k", "v", "z", "angles", "d_out"})
    for (const int64_t t : {0, 1, 9, 10, 17, 19}) {  // padding, and the last sequence's first rows
      const int64_t width = c.in.at(name).elements() / 20;
      for (int64_t i = 0; i < width; ++i) bad.in[name].set(t * width + i, NAN);
    }
  for (int64_t i = 0; i < 4 * 6; ++i) bad.in["initial_angle"].set((2 * 4) * 6 + i, NAN);
  const Outcome good = run(lane(), c), other = run(lane(), bad);
  Tensors a, b;
  for (const auto& [name, tensor] : good.out)
    if (const int axis = token_axis(name); axis > 0) {
      a[name] = part(tensor, axis, 2, 9);
      b[name] = part(other.out.at(name), axis, 2, 9);
    } else if (name.find("final_") == 0 || name.find("d_initial_") == 0) {
      a[name] = part(tensor, 0, 0, 2);
      b[name] = part(other.out.at(name), 0, 0, 2);
    }
  EXPECT_EQ(same_bits(a, b), "");
  for (const int64_t t : {0, 1, 17, 19})
    for (const double x : part(other.out.at("d_v"), 1, t, t + 1).values()) EXPECT_EQ(x, 0);
}

TEST_P(ScanStates, EntriesOfPackedSequences) {
  Case c = usual(8);
  const auto with = [&](const std::vector<int64_t>& ends) {
    Case p = c;
    pack(p, ends);
    for (const char* s : states) {
      fill(p, "initial_" + std::string(s), DType::f32, 3);
      fill(p, "d_final_" + std::string(s), DType::f32, 3);
    }
    return p;
  };
  const auto lane_name = lane();
  for (const auto& [ends, words] :
       {std::pair<std::vector<int64_t>, const char*>{{0, 5, 3}, "entry 2 = 3"},
        {{0, -1, 3}, "entry 1 = -1"},
        {{0, 3, 9}, "entry 2 = 9"}}) {
    try {
      run(lane_name, with(ends), {.backward = false});
      ADD_FAILURE() << "no error: " << words;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::invalid_data);
      EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
    }
    Case clamped = with(ends);
    clamped.options.sequence_check = talea::mamba3::SequenceCheck::clamp;
    EXPECT_EQ(run(lane_name, clamped).forward.bad_entries, 1);
  }
}

TEST_P(ScanStates, OneTokenIsAStep) {
  for (const int64_t R : {1, 2, 3}) {
    Case c = usual(1, R);
    c.size.B = 1;
    if (counts_on_device(lane())) {  // a kernel of its own, which rounds less
      EXPECT_EQ(verify_step(lane(), c), "");
      continue;
    }
    const Outcome scan = run(lane(), c, {.backward = false}), step = run_step(lane(), c, {});
    EXPECT_EQ(step.damage, "");
    EXPECT_EQ(same_bits(scan.out, as_scanned(step)), "");
  }
}

TEST_P(ScanStates, StepsAreThePrefill) {
  Case c = usual(7);
  chunk(c, 4);
  const Values truth = oracle(c);
  const Outcome plain = run("unfused", c);
  Case now = tokens_of(c, 0, 1);
  Tensors all = {{"out", HostTensor(DType::f32, shape_of(c, "out"))}};
  for (int64_t t = 0; t < 7; ++t) {
    Case one = tokens_of(c, t, t + 1);
    for (const char* s : states)
      one.in["initial_" + std::string(s)] = now.in.at("initial_" + std::string(s));
    const Outcome step = run_step(lane(), one, {});
    for (const char* s : states)
      now.in["initial_" + std::string(s)] = step.out.at("state_" + std::string(s));
    put_into(all["out"], step.out.at("out"), 1, t);
  }
  for (const char* s : states)
    all["final_" + std::string(s)] = now.in.at("initial_" + std::string(s));
  EXPECT_EQ(judge(c, all, truth, plain.out), "");
}

TEST_P(ScanStates, SlotsOfACache) {
  Sizes s{3, 1, 4, 2, 20, 5, 2, 6};  // P is no multiple of a vector
  s.rank_axis = true;
  Case c = full_case(s, DType::f32, 2);
  Case cache = c;
  cache.size.B = 5;  // rows of the caches
  for (const char* st : states) {
    fill(cache, "initial_" + std::string(st), DType::f32, 9);
    c.in["initial_" + std::string(st)] = cache.in.at("initial_" + std::string(st));
  }
  const Outcome o = run_step(lane(), c, {4, -1, 0});
  EXPECT_EQ(o.damage, "");
  for (const double x : part(o.out.at("out"), 0, 1, 2).values()) EXPECT_EQ(x, 0);
  for (const char* st : states) {
    const HostTensor &before = c.in.at("initial_" + std::string(st)),
                     &after = o.out.at("state_" + std::string(st));
    for (const int64_t row : {1, 2, 3})
      EXPECT_EQ(part(before, 0, row, row + 1).values(), part(after, 0, row, row + 1).values());
    EXPECT_NE(part(before, 0, 4, 5).values(), part(after, 0, 4, 5).values()) << st;
  }
  EXPECT_THROW(run_step(lane(), c, {0, 5, 1}), Error);
  EXPECT_THROW(run_step(lane(), c, {0, 3, 3}), Error);
  c.options.sequence_check = talea::mamba3::SequenceCheck::clamp;
  EXPECT_EQ(run_step(lane(), c, {0, 5, 1}).forward.bad_slots, 1);
}

TALEA_EVERY_SCAN_LANE(ScanStates);

}  // namespace
}  // namespace talea::yardsticks::mamba3
