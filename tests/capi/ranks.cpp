// What: a world of two ranks whose exchanges are C callbacks, one thread a rank.
// Why: tables of functions are how a C caller brings its ranks; they must carry a whole call.
// Never: includes a header of the C++ interface.
#include <gtest/gtest.h>
#include <talea/talea.h>

#include <cmath>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "view.hpp"

namespace {

// Two ranks in two threads: each callback leaves what it sends, meets the other and takes both.
struct Table {
  std::vector<char> sent[2];

  // False: one of the two has broken off.
  bool meet() {
    std::unique_lock<std::mutex> lock(mutex);
    const int turn = turns;
    if (++here == 2) {
      here = 0;
      ++turns;
      both.notify_all();
    } else {
      both.wait(lock, [&] { return turns != turn || broken; });
    }
    return !broken;
  }
  void break_off() {
    const std::lock_guard<std::mutex> lock(mutex);
    broken = true;
    both.notify_all();
  }

 private:
  std::mutex mutex;
  std::condition_variable both;
  int here = 0, turns = 0;
  bool broken = false;
};

struct Seat {
  Table* table;
  int rank;
  int gathers = 0, sums = 0, scatters = 0, fail_at = -1;

  // False: this call of all fails, or the other's did.
  bool leave(const void* data, int64_t bytes) {
    EXPECT_GT(bytes, 0);
    if (gathers + sums + scatters - 1 == fail_at) table->break_off();
    const char* from = static_cast<const char*>(data);
    table->sent[rank].assign(from, from + bytes);
    return table->meet();
  }
  static int64_t size_of(int32_t dtype) { return dtype == TALEA_F64 ? 8 : 4; }
  template <typename T>
  void add(void* to, int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      T part[2];
      for (int r = 0; r < 2; ++r)
        std::memcpy(&part[r], table->sent[r].data() + (first + i) * sizeof(T), sizeof(T));
      static_cast<T*>(to)[i] = part[0] + part[1];
    }
  }
  // The sum of `count` elements of both, from element `first` on.
  int32_t take_sum(void* to, int64_t first, int64_t count, int32_t dtype) {
    if (dtype == TALEA_F32) add<float>(to, first, count);
    if (dtype == TALEA_F64) add<double>(to, first, count);
    table->meet();
    return dtype == TALEA_F32 || dtype == TALEA_F64 ? 0 : 21;
  }
};

talea_communicator communicator(Seat& seat) {
  talea_communicator c{};
  c.struct_bytes = sizeof c;
  c.engine = "two threads";
  c.rank = seat.rank;
  c.size = 2;
  c.user = &seat;
  c.all_gather = [](void* user, const void* send, void* recv, int64_t bytes, void*) -> int32_t {
    auto* s = static_cast<Seat*>(user);
    ++s->gathers;
    if (!s->leave(send, bytes)) return 22;
    for (int r = 0; r < 2; ++r)
      std::memcpy(static_cast<char*>(recv) + r * bytes, s->table->sent[r].data(),
                  static_cast<size_t>(bytes));
    s->table->meet();
    return 0;
  };
  c.all_reduce_sum = [](void* user, void* buffer, int64_t n, int32_t dtype, void*) -> int32_t {
    auto* s = static_cast<Seat*>(user);
    ++s->sums;
    if (!s->leave(buffer, n * Seat::size_of(dtype))) return 23;
    return s->take_sum(buffer, 0, n, dtype);
  };
  c.reduce_scatter_sum = [](void* user, const void* send, void* recv, int64_t n, int32_t dtype,
                            void*) -> int32_t {
    auto* s = static_cast<Seat*>(user);
    ++s->scatters;
    if (!s->leave(send, 2 * n * Seat::size_of(dtype))) return 24;
    return s->take_sum(recv, s->rank * n, n, dtype);
  };
  return c;
}

// One rank of TwoTokensByHand: a word each; under sequence parallelism a token each, too.
void one_of_two(Seat& seat, const char* lane, bool sequence, float* loss, float* dx, float* dw,
                std::string* said = nullptr) {
  float x[2] = {1, 2}, w[2] = {0, std::log(3.0f)};
  int64_t y[2] = {1, 0};
  const int r = seat.rank;
  const int64_t own = sequence ? 1 : 2, first = sequence ? r : 0;
  talea_linear_cross_entropy_inputs in{};
  in.struct_bytes = sizeof in;
  in.hidden = view(x + first, TALEA_F32, {own, 1});
  in.weight = view(w + r, TALEA_F32, {1, 1});
  in.targets = view(y, TALEA_I64, {2});
  talea_linear_cross_entropy_outputs out{};
  out.struct_bytes = sizeof out;
  out.loss = view(loss, TALEA_F32, {});
  out.dx = view(dx + first, TALEA_F32, {own, 1});
  out.dw = view(dw, TALEA_F32, {1, 1});
  talea_linear_cross_entropy_options options;
  ASSERT_EQ(talea_linear_cross_entropy_options_init(&options, sizeof options), TALEA_OK);
  options.vocab = 2;
  options.lane = lane;
  const talea_communicator c = communicator(seat);
  talea_linear_cross_entropy_ranks ranks{};
  ranks.struct_bytes = sizeof ranks;
  ranks.vocab = &c;
  ranks.vocab_begin = r;
  ranks.sequence_parallel = sequence;
  talea_linear_cross_entropy_args args = args_of(in, out, options);
  args.ranks = &ranks;
  std::vector<char> workspace;
  const int32_t status = call_in(workspace, args);
  if (!said) {
    EXPECT_EQ(status, TALEA_OK) << talea_last_error();
  } else if (status != TALEA_OK) {
    EXPECT_EQ(status, TALEA_RUNTIME);
    *said = talea_last_error();
  }
}

TEST(CApiRanks, CallbacksCarryTheRanks) {
  // `reference` has exchanges without bytes where nothing is ranked; they reach no callback.
  for (const auto& [lane, sequence] :
       {std::pair("auto", false), {"auto", true}, {"reference", false}, {"reference", true}}) {
    Table table;
    Seat seats[2] = {{&table, 0}, {&table, 1}};
    float loss[2] = {}, dx[2][2] = {}, dw[2] = {};
    std::thread other(
        [&, l = lane, s = sequence] { one_of_two(seats[1], l, s, &loss[1], dx[1], &dw[1]); });
    one_of_two(seats[0], lane, sequence, &loss[0], dx[0], &dw[0]);
    other.join();
    for (int r = 0; r < 2; ++r) {
      EXPECT_NEAR(loss[r], (std::log(4.0 / 3.0) + std::log(10.0)) / 2, 1e-6);
      const bool first = r == 0 || !sequence, second = r == 1 || !sequence;  // its tokens
      EXPECT_NEAR(dx[r][0], first ? -0.25 * std::log(3.0) / 2 : 0, 1e-6);
      EXPECT_NEAR(dx[r][1], second ? 0.9 * std::log(3.0) / 2 : 0, 1e-6);
      EXPECT_NEAR(dw[r], (r == 1 ? 1 : -1) * (-0.25 + 0.9 * 2) / 2, 1e-6);
      EXPECT_GT(seats[r].gathers, 0);
      EXPECT_EQ(seats[r].sums > 0, !sequence);
      EXPECT_EQ(seats[r].scatters > 0, sequence);
    }
  }
}

// Whichever exchange fails, both ranks end with its name and status, and a new world works.
TEST(CApiRanks, AnErrorOfAnyCallbackIsNamed) {
  for (const bool sequence : {false, true}) {
    for (int fail_at = 0;; ++fail_at) {
      ASSERT_LT(fail_at, 20);
      Table table;
      Seat seats[2] = {{&table, 0}, {&table, 1}};
      seats[1].fail_at = fail_at;
      float loss[2] = {}, dx[2][2] = {}, dw[2] = {};
      std::string said[2];
      std::thread other(
          [&] { one_of_two(seats[1], "auto", sequence, &loss[1], dx[1], &dw[1], &said[1]); });
      one_of_two(seats[0], "auto", sequence, &loss[0], dx[0], &dw[0], &said[0]);
      other.join();
      const int calls = seats[1].gathers + seats[1].sums + seats[1].scatters;
      if (calls <= fail_at) {  // the call has no more exchanges
        EXPECT_EQ(said[0] + said[1], "");
        EXPECT_GE(fail_at, 3);
        break;
      }
      for (int r = 0; r < 2; ++r) {
        EXPECT_NE(said[r].find(" of engine two threads returned 2"), std::string::npos) << said[r];
        EXPECT_NE(said[r].find("on rank " + std::to_string(r) + " of 2"), std::string::npos)
            << said[r];
      }
    }
  }
}

}  // namespace
