// What: the text of a step: one token an entry, on states in place; a block has a head.
// Why: it reads a state once and writes it once; a chunk's products would be mostly empty rows.
//      The same text runs on a host in a test, with threads that take turns.
// Never: rounds an operand: rows, state and sums are fp32.
#pragma once

#ifdef __CUDACC__
#include <cuda_pipeline_primitives.h>
#endif

#include <type_traits>

#include "ops/mamba3/mutants.hpp"
#include "ops/mamba3/rows/chunk.hpp"
#include "ops/mamba3/rows/vectors.cuh"

namespace talea::mamba3::cuda::one_step {

constexpr int threads = 128, warps = threads / 32;
constexpr int line = 32 * vector;                    // columns of a warp
constexpr int most_values = 256, usual_values = 64;  // of a head

// A head of some entries, a few at a time: what their tokens are waits for memory, and each waits
// beside the others. ranks: R, up to a power of two; loads: lines of a row of N; whole: all rows
// lie in vectors; wide: values of a head, at most, or all of them where its state is the usual one.
template <int ranks, int loads, bool whole, int wide>
class Step {
 public:
  static constexpr int width = loads * line;
  // Blocks that registers let a multiprocessor have: while one waits for a state, others work.
  static constexpr int blocks = ranks * loads <= 4 ? 4 : 2;
  // Rows of the usual state, N = `line` and P = `wide` without gaps, are copied to shared memory,
  // those of the next turns and of the next entry while some are at work.
  static constexpr bool copies = whole && loads == 1 && wide == usual_values;
  static constexpr int together = !copies ? 1 : ranks <= 2 ? 4 : ranks == 4 ? 2 : 1;  // entries
  static constexpr int rows = (ranks == 8 ? 2 : 4) / loads;         // neighbours, of a warp at work
  static constexpr int ahead = ranks == 1 ? 4 : ranks < 8 ? 3 : 8;  // turns whose rows are copied
  static constexpr int items = (ranks + warps - 1) / warps;         // ranks that a warp stages
  enum Kind { queries, keys, held_keys, kinds, query_biases = kinds, key_biases };  // rows of N

  // Places in the floats of a block. Of the head: rows of N of each kind of bias; projections of
  // each rank, weight. Of an entry, from its own place on: rows of N of each kind; values, those
  // weighed, those held over and y of each rank; gate, cosines, sines, norms, decay.
  static constexpr int v_at = 2 * ranks * width, z_at = v_at + ranks * wide,
                       out_at = z_at + ranks * wide, weight_at = out_at + ranks * wide,
                       list_at = weight_at + wide, copied_at = list_at + 8 * together,
                       entries_at = copied_at + (copies ? ahead * warps * rows * width : 0);
  static constexpr int values_at = kinds * ranks * width, weighed_at = values_at + ranks * wide,
                       held_at = weighed_at + ranks * wide, y_at = held_at + ranks * wide,
                       gate_at = y_at + ranks * wide, cosine_at = gate_at + wide,
                       sine_at = cosine_at + width / 2, norm_at = sine_at + width / 2,
                       decay_at = norm_at + ranks,
                       entry_floats = (decay_at + vector) / vector * vector;
  static constexpr int shared_floats = entries_at + together * entry_floats;

  __device__ Step(const Args& args, float* shared, int head)
      : a(args), s(args.size), at_(shared), head_(head) {
    warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    group_ = (s.head_offset + head) / s.heads_per_group;
    if (mutant(Mutant::m3_1_groups_as_heads)) group_ = head % s.groups;
    held = a.initial.k.data && a.initial.v.data && !mutant(Mutant::m3_22_initial_token_ignored);
    skip = a.d.data ? read(a.d, cuda::at(a.d, head_)) : 0.0f;
    stage_head();
  }

  // Entries `first`, `first` + `apart` and on, but for those that are skipped.
  __device__ void run(int64_t first, int64_t apart) {
    apart_ = apart;
    if (is_thread(0)) find_entries(first, 0);
    __syncthreads();
    if constexpr (copies) {
      asked_ = state_of(entry_of(0).row);
      for (int turn = 0; turn < ahead; ++turn) ask(turn, turn);
    }
    while (entry_of(0).row >= 0) {
      begin();
#pragma unroll 1
      for (int e = 0; e < together && entry_of(e).row >= 0; ++e) walk(e);
      __syncthreads();
      if (a.out.data) finish();
      __syncthreads();
      list_ ^= together;
    }
  }

 private:
  using Held = float[rows][loads][vector];             // rows of the state
  static constexpr int turns = wide / (warps * rows);  // of an entry whose state is copied

  struct alignas(16) Entry {
    int64_t sequence = 0, row = -1;  // of the states; -1: there is none
  };

  __device__ __forceinline__ float* place_of(int e) const {
    return at_ + entries_at + e * entry_floats;
  }
  // f(e, entry, i) of i below `count` of each entry that there is, by the threads of the block,
  // from one of them on.
  template <int count, class F>
  __device__ __forceinline__ void each_of_entries(F f, int from = 0) const {
#pragma unroll
    for (int first = 0; first < together * count; first += threads) {
      const int thread = static_cast<int>(threadIdx.x);
      const int item = first + (thread + threads - from) % threads, e = item / count;
      if (e >= together) continue;
      const Entry own = entry_of(e);
      if (own.row >= 0) f(e, own, item % count);
    }
  }
  __device__ __forceinline__ bool is_thread(int i) const {
    return static_cast<int>(threadIdx.x) == i;
  }
  // Two lists of entries, of those at work and of the next ones by turns.
  __device__ __forceinline__ Entry* entries() const {
    return reinterpret_cast<Entry*>(at_ + list_at);
  }
  __device__ __forceinline__ Entry entry_of(int e) const { return entries()[list_ + e]; }
  // By one thread.
  __device__ __forceinline__ void find_entries(int64_t sequence, int list) const {
#pragma unroll 1
    for (int e = 0; e < together; ++e) {
      Entry found;
      for (; found.row < 0 && sequence < s.sequences; sequence += apart_)
        found = {sequence, a.ends[sequence]};
      entries()[list + e] = found;
    }
  }

  __device__ __forceinline__ void begin();

  __device__ __forceinline__ void walk(int e) {
    own_ = place_of(e);
    row_ = entry_of(e).row;
    alpha = own_[decay_at];
    const auto state = [&](const View& v) {
      return static_cast<float*>(v.data) + cuda::at(v, row_, head_, 0, lane * vector);
    };
    from_state = state(a.initial.ssm), to_state = state(a.last.ssm);
    hold_rows();
    if constexpr (copies) {
      if (mutant(Mutant::m3_12_step_beyond_the_head)) to_state += width;
      Held h;
#pragma unroll 1
      for (int turn = 0; turn < turns; ++turn) {
        take_copied(h);
        advance(row_of(turn), h);
        if (turn + ahead == turns) asked_ = state_of(behind(e));
        ask((turn + ahead) % turns, slot_);  // in the place of what has been read
        slot_ = slot_ + 1 < ahead ? slot_ + 1 : 0;
      }
    } else {
      Held one, other;  // one is loaded while the other is at work
      load_state(row_of(0), one);
      load_state(row_of(1), other);
      for (int turn = 0; row_of(turn) < s.values; turn += 2) {
        advance(row_of(turn), one);
        load_state(row_of(turn + 2), one);
        advance(row_of(turn + 1), other);
        load_state(row_of(turn + 3), other);
      }
    }
  }

  // The row of the entry behind one.
  __device__ __forceinline__ int64_t behind(int e) const {
    const int64_t row = e + 1 < together ? entry_of(e + 1).row : -1;
    return row < 0 ? entries()[list_ ^ together].row : row;
  }
  // A lane's first columns of an entry's state.
  __device__ __forceinline__ const float* state_of(int64_t row) const {
    return row < 0 ? nullptr
                   : static_cast<const float*>(a.initial.ssm.data) +
                         cuda::at(a.initial.ssm, row, head_, 0, lane * vector);
  }
  // Where a lane's columns of the first row of a turn are copied to.
  __device__ __forceinline__ float* copied(int slot) const {
    return at_ + copied_at + (slot * warps + warp) * rows * width + lane * vector;
  }
  // The rows of a turn, by each lane what it reads itself. Where there is none behind the last
  // entry a group of copies is empty: so many are under way.
  __device__ __forceinline__ void ask(int turn, int slot) const {
    if (asked_) {
      const float* const row = asked_ + row_of(turn) * width;
#pragma unroll
      for (int i = 0; i < rows; ++i)
        __pipeline_memcpy_async(copied(slot) + i * width, row + i * width, vector * sizeof(float));
    }
    __pipeline_commit();
  }
  __device__ __forceinline__ void take_copied(Held& h) const {
    __pipeline_wait_prior(ahead - 1);
    const auto slot = [&] {
      const bool before = mutant(ScanMutant::m3_step_rows_of_the_turn_before);
      return before ? (slot_ + ahead - 1) % ahead : slot_;
    };
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const float4 x = *reinterpret_cast<const float4*>(copied(slot()) + i * width);
      h[i][0][0] = x.x, h[i][0][1] = x.y, h[i][0][2] = x.z, h[i][0][3] = x.w;
    }
  }
  __device__ __forceinline__ int row_of(int turn) const { return (turn * warps + warp) * rows; }

  // Item i of a warp among the rows of a kind: a rank, or one that is not. Few ranks of two kinds
  // are of different warps.
  template <int kind>
  __device__ __forceinline__ int rank_of(int i) const {
    if (ranks >= warps) return warp + i * warps;
    return (warp + kinds * warps - kind * ranks) % warps;
  }
  template <int kind>
  __device__ __forceinline__ void ask_rows(const View& v, int64_t at, int axis, bool wanted,
                                           Four (&x)[items][loads]) const;
  template <int kind>
  __device__ __forceinline__ void stage_rows(const View& v, const Four (&x)[items][loads],
                                             float* to, const float* biases = nullptr) const;

  __device__ __forceinline__ void stage_head();

  // Rows from `from` on of the state before the token, which is fp32 (rules.cpp). Where rows lie in
  // vectors, P is a multiple of those at work.
  __device__ __forceinline__ void load_state(int from, Held& h) const {
    each_row(from_state, a.initial.ssm, from, s.values, [&](const float* row, int i, int j, int c) {
      float4 x = {0, 0, 0, 0};
      const int64_t apart = a.initial.ssm.stride[3];
      if constexpr (whole) {
        if (row) x = *reinterpret_cast<const float4*>(row);
      } else if (row) {
        x.x = row[0];
        if (c + 1 < s.columns) x.y = row[apart];
        if (c + 2 < s.columns) x.z = row[2 * apart];
        if (c + 3 < s.columns) x.w = row[3 * apart];
      }
      h[i][j][0] = x.x, h[i][j][1] = x.y, h[i][j][2] = x.z, h[i][j][3] = x.w;
    });
  }
  __device__ __forceinline__ void put_state(int from, const Held& h) const {
    if constexpr (copies) {
      float* const row = to_state + from * width;
#pragma unroll
      for (int i = 0; i < rows; ++i)
        *reinterpret_cast<float4*>(row + i * width) = {h[i][0][0], h[i][0][1], h[i][0][2],
                                                       h[i][0][3]};
      return;
    }
    const int end = s.values + (mutant(Mutant::m3_12_step_beyond_the_head) ? 1 : 0);
    each_row(to_state, a.last.ssm, from, end, [&](float* row, int i, int j, int c) {
      const float(&x)[vector] = h[i][j];
      if (!row) return;
      if constexpr (whole) {
        *reinterpret_cast<float4*>(row) = {x[0], x[1], x[2], x[3]};
      } else {
#pragma unroll
        for (int e = 0; e < vector; ++e)
          if (c + e < s.columns) row[e * a.last.ssm.stride[3]] = x[e];
      }
    });
  }
  // f(address of a lane's first column, row at work, load, column), null where there is none.
  template <class T, class F>
  __device__ __forceinline__ void each_row(T* state, const View& v, int from, int end, F f) const {
    T* row = state + from * v.stride[2];
    const int64_t line_apart = whole ? line : line * v.stride[3];
#pragma unroll
    for (int i = 0; i < rows; ++i, row += v.stride[2])
#pragma unroll
      for (int j = 0; j < loads; ++j) {
        const int c = j * line + lane * vector;
        const bool inside = (whole ? from : from + i) < end && c < s.columns;
        f(inside ? row + j * line_apart : nullptr, i, j, c);
      }
  }

  struct Token {
    float alpha, b, gamma;
  };
  __device__ __forceinline__ float dt_of(int64_t sequence) const {
    return read(a.dt, cuda::at(a.dt, sequence, head_));
  }
  __device__ __forceinline__ Token token_of(int64_t sequence) const {
    const float dt = dt_of(sequence);
    float logit = read(a.trap, cuda::at(a.trap, sequence, head_));
    const float adt = read(a.adt, cuda::at(a.adt, sequence, head_));
    if (mutant(Mutant::m3_b_and_gamma_exchanged)) logit = -logit;
    float alpha = expf(adt <= -128.0f ? -128.0f : adt);
    if (mutant(Mutant::m3_20_decay_clamped)) alpha = alpha > 1 ? 1.0f : alpha;
    return {alpha, sigmoid(-logit) * dt, sigmoid(logit) * dt};
  }

  __device__ __forceinline__ void stage_values(float* to, const Entry& of, int c);

  __device__ __forceinline__ void turn(float* to, const Entry& of, int i);

  __device__ __forceinline__ void turn_row(float* own, int r, int i);

  __device__ __forceinline__ void hold_rows();

  // Of each of the rows at work.
  __device__ __forceinline__ static void take(const float* from, float (&to)[rows]) {
    if constexpr (rows == 4) {
      const float4 x = *reinterpret_cast<const float4*>(from);
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    } else {
#pragma unroll
      for (int i = 0; i < rows; ++i) to[i] = from[i];
    }
  }
  // f(row at work, load, column) of each element that a lane has.
  template <class F>
  __device__ __forceinline__ static void each_element(F f) {
#pragma unroll
    for (int i = 0; i < rows; ++i)
#pragma unroll
      for (int j = 0; j < loads; ++j)
#pragma unroll
        for (int e = 0; e < vector; ++e) f(i, j, e);
  }

  // h = alpha (h + b v_held k_held) + gamma v k, in place, and y = h q.
  __device__ __forceinline__ void advance(int from, Held& h) {
    if (!copies && from >= s.values) return;
    float sums[rows * ranks] = {};
#pragma unroll
    for (int r = 0; r < ranks; ++r) {
      float by[rows];
      take(own_ + held_at + r * wide + from, by);
      each_element([&](int i, int j, int e) { h[i][j][e] += by[i] * held_k[r][j][e]; });
    }
    if (alpha != 0)
      each_element([&](int i, int j, int e) { h[i][j][e] *= alpha; });
    else  // nothing is left behind a reset, not 0 * Inf
      each_element([&](int i, int j, int e) { h[i][j][e] = 0; });
#pragma unroll
    for (int r = 0; r < ranks; ++r) {
      float by[rows];
      take(own_ + weighed_at + r * wide + from, by);
      each_element([&](int i, int j, int e) { h[i][j][e] += by[i] * k[r][j][e]; });
    }
    put_state(from, h);
#pragma unroll
    for (int r = 0; r < ranks; ++r)
      each_element([&](int i, int j, int e) { sums[i * ranks + r] += h[i][j][e] * q[r][j][e]; });
    warp_sums<rows * ranks>(sums, lane);
    constexpr int lanes = 32 / (rows * ranks);
    const int j = lane / lanes, row = from + j / ranks;
    if (lane % lanes == 0 && (copies || row < s.values))
      own_[y_at + j % ranks * wide + row] = sums[0];
  }

  __device__ __forceinline__ void finish();
  __device__ __forceinline__ void finish(const float* own, int64_t sequence, int c);

  const Args& a;
  const Sizes& s;
  float* const at_;
  int64_t apart_ = 0;
  int list_ = 0, slot_ = 0;  // the list of the entries at work; where the next turn's rows lie
  int head_, group_, warp, lane;
  bool held;
  float skip = 0;
  const float* asked_ = nullptr;  // a lane's first columns of the state that is copied
  // Of the entry at work; addresses of a lane's first column.
  int64_t row_ = 0;
  float* own_ = nullptr;
  const float* from_state = nullptr;
  float* to_state = nullptr;
  float alpha = 0;
  float q[ranks][loads][vector], k[ranks][loads][vector], held_k[ranks][loads][vector];
};

inline bool lie_in_vectors(const Args& a) {
  const Sizes& s = a.size;
  if (s.columns % vector != 0 || s.values % vector != 0) return false;
  const int64_t B = s.batch, H = s.heads, R = s.rank, rows = s.state_rows;
  for (const StateViews* x : {&a.initial, &a.last})
    if (!lies_in_vectors(x->ssm, {rows, H, s.values}) || !lies_in_vectors(x->k, {rows, R, H}) ||
        !lies_in_vectors(x->v, {rows, H}))
      return false;
  for (const View* x : {&a.q, &a.k})
    if (!lies_in_vectors(*x, {B, 1, R, s.groups})) return false;
  for (const View* x : {&a.v, &a.z})
    if (!lies_in_vectors(*x, {B, 1, H})) return false;
  for (const View* x : {&a.q_bias, &a.k_bias, &a.mimo_v, &a.mimo_z, &a.mimo_out})
    if (!lies_in_vectors(*x, {H, R})) return false;
  return lies_in_vectors(a.norm_weight, {H});
}

// N = `line`, P = usual_values, and rows of a head's state without gaps.
inline bool has_usual_state(const Args& a) {
  return a.size.columns == line && a.size.values == usual_values &&
         a.initial.ssm.stride[2] == line && a.last.ssm.stride[2] == line;
}

// f(a Step as a type) of the call's sizes.
template <class F>
void with_step(const Args& a, F f) {
  const bool whole = lie_in_vectors(a);
  const auto by_lines = [&](auto ranks, auto loads) {
    if (!whole) return f(std::type_identity<Step<ranks(), loads(), false, most_values>>{});
    if constexpr (loads() == 1)
      if (has_usual_state(a)) return f(std::type_identity<Step<ranks(), 1, true, usual_values>>{});
    f(std::type_identity<Step<ranks(), loads(), true, most_values>>{});
  };
  const auto by_rank = [&](auto ranks) {
    if (a.size.columns <= line) return by_lines(ranks, std::integral_constant<int, 1>{});
    by_lines(ranks, std::integral_constant<int, 2>{});
  };
  if (a.size.rank == 1) return by_rank(std::integral_constant<int, 1>{});
  if (a.size.rank == 2) return by_rank(std::integral_constant<int, 2>{});
  if (a.size.rank <= 4) return by_rank(std::integral_constant<int, 4>{});
  by_rank(std::integral_constant<int, 8>{});
}

}  // namespace talea::mamba3::cuda::one_step
