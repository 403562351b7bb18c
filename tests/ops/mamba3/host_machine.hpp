// What: lane cuda's kernels on one thread of a host: the same text, with plain loops for products.
// Why: index arithmetic and formulas are held against the oracle where there is no GPU.
// Never: says anything of launches, shared memory or tensor cores.
#pragma once

#include <bit>
#include <vector>

#include "ops/mamba3/cuda/backward.hpp"
#include "ops/mamba3/rows/run.hpp"
#include "ops/mamba3/step_on_host.hpp"

namespace talea::mamba3::cuda {

struct HostWarp {
  bool leads() const { return true; }
  template <class F>
  void each(int n, F f) {
    for (int i = 0; i < n; ++i) f(i);
  }
  template <class F>
  float sum(int n, F f) {
    float all = 0;
    for (int i = 0; i < n; ++i) all += f(i);
    return all;
  }
};

// What a product sees of an operand.
struct Wide {
  static float seen(float x) { return x; }
};
struct Tf32 {  // to nearest, ties away from zero
  static float seen(float x) {
    if (!std::isfinite(x)) return x;
    return std::bit_cast<float>((std::bit_cast<uint32_t>(x) + 0x1000u) & 0xffffe000u);
  }
};

template <class Rounding>
struct HostTeam {
  void sync() {}
  template <class N, class F>
  void each(N n, F f) {
    for (N i = 0; i < n; ++i) f(i);
  }
  template <class F>
  void each_warp(int n, F f) {
    HostWarp warp;
    for (int i = 0; i < n; ++i) f(i, warp);
  }
  template <class Get, class Put>
  void prefix(int n, Get get, Put put) {
    double sum = 0;
    for (int i = 0; i < n; ++i) put(i, sum += get(i));
  }
  double sum(double own) { return own; }
  template <class F>
  void grid(int rows, int columns, F f) {
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < columns; ++j) f(i, j);
  }
  template <int together = 2, class Load, class Use>
  void grid(int rows, int columns, Load load, Use use) {
    grid(rows, columns, [&](int i, int j) { use(i, j, load(i, j)); });
  }
  template <int count>
  struct Kept {
    std::vector<float> elements;
  };
  template <int count, class F>
  void each_kept(Kept<count>& kept, int rows, int columns, F f) {
    kept.elements.resize(static_cast<size_t>(rows * columns), NAN);
    grid(rows, columns,
         [&](int i, int j) { f(i, j, kept.elements[static_cast<size_t>(i * columns + j)]); });
  }
  template <int count, class A, class B>
  void add_kept(Kept<count>& kept, int rows, Span columns, Span depth, A a, B b) {
    each_kept(kept, rows, columns.depth,
              [&](int i, int j, float& x) { x += multiply(a, b, i, j, depth); });
  }
  template <class T, bool across>
  static float element(const Operand<T, across>& x, int i, int k) {
    return Rounding::seen(widen(across ? x.data[k * x.stride + i] : x.data[i * x.stride + k]));
  }
  template <class A, class B>
  static float multiply(const A& a, const B& b, int i, int j, Span depth) {
    float sum = 0;
    const int tile = i / 16 * 16;
    for (int k = depth.begin(tile); k < depth.end(tile); ++k)
      sum += element(a, i, k) * element(b, j, k);
    return sum;
  }
  template <class A, class B, class Init, class Done>
  void product(int rows, Span columns, Span depth, A a, B b, Init init, Done done) {
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < columns.end(i / 16 * 16); ++j)
        done(i, j, init(i, j) + multiply(a, b, i, j, depth));
  }
  template <class A, class B, class Middle, class C, class D, class Done>
  void product(int rows, Span columns, Span depth, A a, B b, Middle middle, Span depth2, C c, D d,
               Done done) {
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < columns.end(i / 16 * 16); ++j) {
        const float x = middle(i, j, multiply(a, b, i, j, depth));
        done(i, j, x + multiply(c, d, i, j, depth2));
      }
  }
};

template <class T, class Rounding, int kept>
class HostMachine final : public Machine {
 public:
  HostMachine(const Plan& plan, const Buffers& buffers) : plan_(plan), b_(buffers) {}

  void read_sequences(const Sizes& sizes, const Sequences& from) override {
    cuda::read_sequences(team_, sizes, from);
  }
  void clear_padding(const Args& a) override {
    for (int64_t b = 0; b < a.size.batch; ++b)
      for (int64_t t = 0; t < a.size.tokens; ++t)
        for (int64_t i = 0; is_padding(a, b, t) && i < clear_width(a.size); ++i)
          clear_token(a, b, t, i);
  }
  void forward(const Args& a) override {
    if (a.size.step) return step_on_host(a);
    each_unit(a, 0, a.size.sequences, plan_.forward, [&](char* shared, const Unit& u, int64_t) {
      Forward<HostTeam<Rounding>, T, kept>(team_, a, plan_.forward, shared, b_.scratch).run(u);
    });
  }
  void begin_units(const Args& a, const Wave& w) override {
    each_unit(a, w.first, w.last, plan_.states, [&](char* shared, const Unit& u, int64_t number) {
      States<HostTeam<Rounding>, T, kept>(team_, a, plan_.states, shared, b_.scratch)
          .begin_unit(u, number, b_.units, w);
    });
  }
  void segment_states(const Args& a, const Wave& w) override {
    each_unit(a, w.first, w.last, plan_.states, [&](char* shared, const Unit& u, int64_t number) {
      States<HostTeam<Rounding>, T, kept>(team_, a, plan_.states, shared, b_.scratch)
          .segment(u, number, b_.units, w);
    });
  }
  void slice_back(const Args& a, const Wave& w) override {
    each_unit(a, w.first, w.last, plan_.backward, [&](char* shared, const Unit& u, int64_t number) {
      Backward<HostTeam<Rounding>, T>(team_, a, plan_.backward, shared, b_.scratch, b_.units, w)
          .run(u, number);
    });
  }
  void sum_rows(const Args& a, const Wave& w) override {
    const Sizes& s = a.size;
    const int64_t places = (w.last - w.first) * w.slice_chunks * s.chunk;
    for (int64_t place = 0; place < places; ++place) {
      for (int r = 0; r < s.rank; ++r)
        for (int g = 0; g < s.groups; ++g)
          for (int c = 0; c < s.columns; ++c) {
            if (a.grad.q.data) sum_heads(a, w, a.grad.q, b_.units.dq, place, r, g, c);
            if (a.grad.k.data) sum_heads(a, w, a.grad.k, b_.units.dk, place, r, g, c);
          }
      for (int i = 0; s.sum_angles && i < s.pairs; ++i)
        sum_angles(a, w, b_.units.dangles, place, i);
    }
  }
  void clear_totals(const Args& a) override {
    for (int64_t i = 0; i < int64_t{a.size.heads} * parameter_count(a.size); ++i) b_.totals[i] = 0;
  }
  void add_parameters(const Args& a, const Wave& w) override {
    for (int h = 0; h < a.size.heads; ++h)
      for (int i = 0; i < parameter_count(a.size); ++i)
        cuda::add_parameters(a, w, b_.units.parameters, b_.totals, h, i);
  }
  void store_parameters(const Args& a) override {
    for (int h = 0; h < a.size.heads; ++h)
      for (int i = 0; i < parameter_count(a.size); ++i) store_parameter(a, b_.totals, h, i);
  }

 private:
  template <class F>
  void each_unit(const Args& a, int64_t first, int64_t last, const ChunkPlaces& places, F f) {
    std::vector<uint64_t> shared(static_cast<size_t>(places.shared_bytes) / 8 + 32);
    for (int64_t n = first; n < last; ++n)
      for (int h = 0; h < a.size.heads; ++h) {
        std::fill(shared.begin(), shared.end(), ~uint64_t{0});
        const Unit u = unit_of(a, n, h);
        if (u.row < 0) continue;
        f(reinterpret_cast<char*>(shared.data()), u, (n - first) * a.size.heads + h);
      }
  }
  HostTeam<Rounding> team_;
  const Plan& plan_;
  const Buffers& b_;
};

}  // namespace talea::mamba3::cuda
