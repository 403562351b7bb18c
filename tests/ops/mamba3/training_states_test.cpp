// What: states at the sizes that models are trained at: handed in and on, their gradients, tokens in
//       pieces, on the lanes that take those sizes alone.
// Why: a long sequence is trained in pieces, one after another or over ranks.
// Never: a tolerance of its own: bits, or the rule of judge.hpp.
#include "ops/mamba3/cuts.hpp"
#include "talea/ranks.hpp"
#include "yardsticks/place.hpp"

namespace talea::yardsticks::mamba3 {
namespace {

class ScanTrainingStates : public ScanLane {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ScanTrainingStates);

const char* const states[] = {"angle", "ssm", "k", "v"};

Case case_of(int64_t B, int64_t S, int64_t R, int64_t A) {
  Sizes s{B, S, 8, 2, 128, 64, R, A};  // heads enough that no tensor is a few numbers
  s.rank_axis = R > 1;
  return full_case(s, DType::bf16, 7);
}

// Of parameters whose gradients are summed over pieces: shares in 16 bits would each be rounded.
Case in_pieces(Case c) {
  for (const char* name : {"q_bias", "k_bias", "d", "mimo_v", "mimo_z", "mimo_out"})
    fill(c, name, DType::f32, 7);
  return c;
}

void pack_states(Case& c, const std::vector<int64_t>& ends) {
  pack(c, ends);
  for (const char* st : states)
    for (const char* prefix : {"initial_", "d_final_"})
      fill(c, prefix + std::string(st), DType::f32, 5);
}

// Ranks over threads that exchange device memory by way of the host's.
class StagedRanks final : public Communicator {
 public:
  explicit StagedRanks(Communicator& of, testing::Place& place) : of_(of), place_(place) {}
  const char* engine() const override { return of_.engine(); }
  int rank() const override { return of_.rank(); }
  int size() const override { return of_.size(); }
  DeviceKind device() const override { return place_.kind(); }
  void all_gather(const void* send, void* recv, int64_t bytes, Stream) override {
    std::vector<std::byte> own(static_cast<size_t>(bytes)), all(own.size() * of_.size());
    place_.download(own.data(), send, bytes);
    of_.all_gather(own.data(), all.data(), bytes, nullptr);
    place_.upload(recv, all.data(), static_cast<int64_t>(all.size()));
  }
  void all_reduce_sum(void*, int64_t, DType, Stream) override { unused(); }
  void reduce_scatter_sum(const void*, void*, int64_t, DType, Stream) override { unused(); }
  bool host_gather(const void* send, void* recv, int64_t bytes) override {
    return of_.host_gather(send, recv, bytes);
  }

 private:
  static void unused() { throw Error(ErrorKind::runtime, "tokens over ranks sum nothing"); }
  Communicator& of_;
  testing::Place& place_;
};

// Tokens on both sides of a chunk's end, of each rank.
int64_t more_than_a_chunk(int64_t R) { return 64 / R * 2 + 3; }

TEST_P(ScanTrainingStates, OfDenseSequences) {
  for (const int64_t R : {1, 2, 4})
    for (const int64_t A : {0, 30, 64}) {
      const Case c = case_of(2, more_than_a_chunk(R), R, A);
      for (const bool save : {false, true})
        EXPECT_EQ(verify(lane(), c, {.save = save}), "") << "R = " << R << ", A = " << A;
    }
}

TEST_P(ScanTrainingStates, OfAPack) {
  for (const int64_t R : {1, 2, 4})
    for (const int64_t A : {0, 30, 64}) {
      const int64_t C = 64 / R;
      Case c = case_of(1, 4 * C + 9, R, A);
      pack_states(c, {3, 3, 4, 4 + C, 6 + 3 * C, 6 + 3 * C, 4 * C + 8});
      for (const bool save : {false, true})
        EXPECT_EQ(verify(lane(), c, {.save = save}), "") << "R = " << R << ", A = " << A;
    }
}

// Each state alone, each gradient of one alone; a turn that no token adds to.
TEST_P(ScanTrainingStates, OneAlone) {
  for (const int64_t R : {1, 4})
    for (const char* kept : states)
      for (const char* prefix : {"initial_", "d_final_"}) {
        Case c = case_of(1, more_than_a_chunk(R), R, 32);
        std::erase_if(c.in, [&](const auto& x) {
          return (x.first.starts_with("initial_") || x.first.starts_with("d_final_")) &&
                 x.first != std::string(prefix) + kept;
        });
        EXPECT_EQ(verify(lane(), c), "") << prefix << kept << " alone, R = " << R;
      }
  for (const int64_t R : {1, 2}) {
    Case constant = case_of(1, 70, R, 32);
    constant.in.erase("angles");
    EXPECT_EQ(verify(lane(), constant), "") << "a constant turn";
  }
}

// What one output is worth does not depend on which others are asked for.
TEST_P(ScanTrainingStates, OneGradientAlone) {
  const Case c = case_of(1, 70, 1, 32);
  const Outcome all = run(lane(), c);
  for (const char* name : {"d_initial_angle", "d_initial_ssm", "d_initial_k", "d_initial_v", "d_dt",
                           "d_mimo_v", "d_k", "d_v", "d_angles"})
    EXPECT_EQ(same_bits(all.out, run(lane(), c, {.forward = false, .only = {name}}).out), "")
        << name;
}

TEST_P(ScanTrainingStates, NothingAtAllIsAnAnswer) {
  Case c = case_of(2, 0, 4, 32);
  Case packed = case_of(1, 3, 1, 32);
  pack_states(packed, {2, 2, 2});
  for (const Case* empty : {&c, &packed}) {
    const Outcome o = run(lane(), *empty);
    for (const char* s : {"ssm", "k", "v"}) {
      const std::string n = s;
      EXPECT_EQ(o.out.at("final_" + n).values(), empty->in.at("initial_" + n).values());
      EXPECT_EQ(o.out.at("d_initial_" + n).values(), empty->in.at("d_final_" + n).values());
    }
    EXPECT_EQ(o.out.at("d_initial_angle").values(), empty->in.at("d_final_angle").values());
    for (const char* p : {"d_q_bias", "d_k_bias", "d_d", "d_mimo_v", "d_mimo_z", "d_mimo_out"})
      for (const double x : o.out.at(p).values()) EXPECT_EQ(x, 0) << p;
  }
}

TEST_P(ScanTrainingStates, CutAtATokenAndJoined) {
  for (const int64_t R : {1, 4}) {
    const int64_t S = more_than_a_chunk(R);
    const Case c = in_pieces(case_of(1, S, R, 32));
    const Values truth = oracle(c);
    Case y = c;
    const Outcome whole = run(lane(), c);
    y.options.chunk = whole.forward.chunk_tokens;
    const Outcome plain = run("unfused", y);
    for (const int64_t cut : {int64_t{0}, int64_t{1}, 64 / R, S - 1, S}) {
      const Tensors joined = cut_and_joined(lane(), c, cut, whole.out);
      EXPECT_EQ(judge(c, joined, truth, plain.out, true), "") << "R = " << R << ", cut at " << cut;
    }
  }
}

TEST_P(ScanTrainingStates, PackedIsEachSequenceAlone) {
  for (const int64_t R : {1, 4}) {
    const int64_t C = 64 / R;
    const std::vector<int64_t> ends = {1, 1, 2, 2 + C, 4 + 3 * C, 4 + 3 * C};
    const Case c = case_of(1, 4 * C, R, 32);
    Case packed = c;
    pack_states(packed, ends);
    const Outcome all = run(lane(), packed);
    for (size_t n = 0; n + 1 < ends.size(); ++n)
      EXPECT_EQ(differs_alone(lane(), c, packed, all, n), "") << "R = " << R << ", sequence " << n;
  }
}

TEST_P(ScanTrainingStates, NothingLeaksFromANeighbour) {
  for (const int64_t R : {1, 4}) {
    const int64_t C = 64 / R, S = 3 * C + 8, first = C + 3, second = 2 * C + 4;
    Case c = case_of(1, S, R, 32);
    pack_states(c, {1, first, second, S - 1});
    Case bad = c;
    for (const char* s : states)
      for (const char* prefix : {"initial_", "d_final_"}) {
        HostTensor& t = bad.in.at(prefix + std::string(s));
        const int64_t width = t.elements() / 3;
        for (int64_t i = 0; i < width; ++i) t.set(width + i, NAN);  // of the sequence in the middle
      }
    const Outcome good = run(lane(), c), other = run(lane(), bad);
    for (const auto& [from, end, row] :
         {std::tuple<int64_t, int64_t, int64_t>{1, first, 0}, {second, S - 1, 2}}) {
      Tensors a, b;
      for (const auto& [name, tensor] : good.out)
        if (const int axis = token_axis(name); axis > 0) {
          a[name] = part(tensor, axis, from, end);
          b[name] = part(other.out.at(name), axis, from, end);
        } else if (name.starts_with("final_") || name.starts_with("d_initial_")) {
          a[name] = part(tensor, 0, row, row + 1);
          b[name] = part(other.out.at(name), 0, row, row + 1);
        }
      EXPECT_EQ(same_bits(a, b), "") << "R = " << R << ", sequence " << row;
    }
  }
}

// Segments, slices and rounds of other lengths change no bit.
TEST_P(ScanTrainingStates, TheSameBitsUnderAnyLimit) {
  for (const bool packed : {false, true}) {
    Case c = case_of(1, 530, 1, 32);
    if (packed) pack_states(c, {3, 70, 70, 400, 410, 529});
    const Outcome first = run(lane(), c);
    EXPECT_EQ(same_bits(first.out, run(lane(), c).out), "") << "again";
    // From far too little on: the first that is kept, and one between it and the usual.
    int kept = 0;
    for (int64_t limit = int64_t{1} << 18; kept < 3 && limit < int64_t{64} << 20;
         limit = limit * 3 / 2) {
      c.options.workspace_limit_bytes = limit;
      try {
        EXPECT_EQ(same_bits(first.out, run(lane(), c).out), "") << limit << " bytes";
        ++kept;
      } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::usage) << e.what();
      }
    }
    EXPECT_EQ(kept, 3);
  }
}

TEST_P(ScanTrainingStates, TokensInPiecesOverRanks) {
  for (const int64_t R : {1, 4})
    for (const bool packed : {false, true}) {
      const int64_t S = more_than_a_chunk(R);
      Case c = in_pieces(case_of(1, S, R, 32));
      if (packed) pack_states(c, {1, 6, 6, S - 9, S - 1});
      const Values truth = oracle(c);
      Case y = c;
      y.options.chunk = 64 / R;
      const Outcome plain = run("unfused", y);
      // Saved by all, by some, by none.
      struct Cut {
        std::vector<int64_t> bounds;
        size_t save_every;
      };
      for (const Cut& cut : {Cut{{0, S / 3, S}, 1}, Cut{{0, 5, 5, S}, 2}, Cut{{0, S / 3, S}, 0}}) {
        const std::vector<int64_t>& bounds = cut.bounds;
        const auto ranks = static_cast<int>(bounds.size()) - 1;
        std::vector<Outcome> all(static_cast<size_t>(ranks));
        run_thread_ranks(ranks, 300, [&](Communicator& threads) {
          std::string why;
          StagedRanks world(threads, *testing::cuda_place(why));
          const auto r = static_cast<size_t>(world.rank());
          How how{.save = cut.save_every > 0 && r % cut.save_every == 0};
          how.ranks.sequence = &world;
          how.ranks.token_begin = bounds[r];
          all[r] = run(lane(), tokens_of(c, bounds[r], bounds[r + 1]), how);
        });
        Tensors joined;
        for (const auto& [name, first] : all[0].out) {
          const int axis = token_axis(name);
          HostTensor& to = joined[name] = HostTensor(first.dtype(), shape_of(c, name));
          for (size_t r = 0; r < all.size(); ++r) {
            EXPECT_EQ(all[r].damage, "");
            const HostTensor& own = all[r].out.at(name);
            if (axis > 0) {
              put_into(to, own, axis, bounds[r]);
            } else if (name.starts_with("final_") || name.starts_with("d_initial_")) {
              EXPECT_EQ(own.values(), first.values()) << name << " of rank " << r;
              to = own;
            } else {
              for (int64_t i = 0; i < to.elements(); ++i) to.set(i, to.get(i) + own.get(i));
            }
          }
        }
        EXPECT_EQ(judge(c, joined, truth, plain.out, true), "")
            << "R = " << R << ", " << ranks << " ranks" << (packed ? ", packed" : "");
      }
    }
}

TALEA_SCAN_LANES(ScanTrainingStates, lanes_of_sizes());

}  // namespace
}  // namespace talea::yardsticks::mamba3
