// What: cases: numbers of a counter-based generator, sizes and options drawn so that every pair of
//       choices occurs.
// Why: a bug that needs two options together is found, with few cases.
// Never: a number that depends on a library's generator.
#include "yardsticks/mamba3/draw.hpp"

#include <algorithm>
#include <cmath>
#include <sstream>

namespace talea::yardsticks::mamba3 {
namespace {

using talea::mamba3::RotaryPairs;
using talea::mamba3::Schedule;

uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// The choices of a case, each with how many there are.
enum Factor {
  dtype,
  state_dim,
  head_dim,
  rank,
  heads,
  groups,
  tokens,
  chunk,
  gate,
  skip,
  biases,
  norm,
  projections,
  angles,
  pairs,
  states,
  packed,
  order,
  schedule,
  mixed_types,
  final_gradients,
  factor_count
};
constexpr int levels[factor_count] = {3, 6, 4, 5, 3, 3, 6, 4, 2, 2, 3,
                                      2, 3, 4, 3, 3, 3, 4, 3, 3, 2};

using Choice = std::vector<int>;

std::vector<Choice> covering(uint64_t seed) {
  std::vector<std::vector<bool>> seen(factor_count * factor_count);
  for (int a = 0; a < factor_count; ++a)
    for (int b = 0; b < factor_count; ++b)
      seen[static_cast<size_t>(a * factor_count + b)].resize(
          static_cast<size_t>(levels[a] * levels[b]));
  const auto pair = [&](const Choice& c, int a, int b) {
    auto& row = seen[static_cast<size_t>(a * factor_count + b)];
    return row.begin() + c[static_cast<size_t>(a)] * levels[b] + c[static_cast<size_t>(b)];
  };
  std::vector<Choice> chosen;
  for (uint64_t round = 0;; ++round) {
    Choice best;
    int most = 0;
    for (uint64_t candidate = 0; candidate < 40; ++candidate) {
      Choice c(factor_count);
      for (int f = 0; f < factor_count; ++f)
        c[static_cast<size_t>(f)] = static_cast<int>(
            mixed(mixed(seed + round * 64 + candidate) ^ static_cast<uint64_t>(f)) %
            static_cast<uint64_t>(levels[f]));
      int fresh = 0;
      for (int a = 0; a < factor_count; ++a)
        for (int b = a + 1; b < factor_count; ++b) fresh += !*pair(c, a, b);
      if (fresh > most) most = fresh, best = c;
    }
    if (most == 0) {
      bool all = true;
      for (int a = 0; a < factor_count; ++a)
        for (int b = a + 1; b < factor_count; ++b)
          for (const bool one : seen[static_cast<size_t>(a * factor_count + b)]) all = all && one;
      if (all) return chosen;
      continue;
    }
    for (int a = 0; a < factor_count; ++a)
      for (int b = a + 1; b < factor_count; ++b) *pair(best, a, b) = true;
    chosen.push_back(best);
  }
}

double scaled(const Case& c, const std::string& of, uint64_t seed, int64_t i) {
  const double x = normal(seed, i);
  if (of == "adt") return -0.15 * std::abs(x);
  if (of == "dt") return 0.05 + 0.2 * std::abs(x);
  if (of == "q" || of == "k") return x / std::sqrt(std::sqrt(static_cast<double>(c.size.N)));
  if (of.find("bias") != std::string::npos) return 0.3 * x;
  if (of.rfind("mimo", 0) == 0 || of == "norm_weight") return 1 + 0.3 * x;
  if (of == "angle") return 3 * x;
  return x;
}

}  // namespace

double uniform(uint64_t seed, int64_t i) {
  const uint64_t bits = mixed(mixed(seed) ^ static_cast<uint64_t>(i)) >> 11;
  return std::ldexp(static_cast<double>(bits), -52) - 1;
}

double normal(uint64_t seed, int64_t i) {
  const double u = (uniform(seed, 2 * i) + 1) / 2 + 0x1p-60;
  return std::sqrt(-2 * std::log(u)) * std::cos(3.14159265358979 * uniform(seed, 2 * i + 1));
}

void fill(Case& c, const std::string& name, DType type, uint64_t seed, const Layout& layout) {
  HostTensor t(type, shape_of(c, name), layout);
  uint64_t own = seed;
  for (const char letter : name) own = mixed(own ^ static_cast<uint64_t>(letter));
  const std::string of = name.rfind("initial_", 0) == 0 ? name.substr(8) : name;
  for (int64_t i = 0; i < t.elements(); ++i) t.set(i, scaled(c, of, own, i));
  c.in[name] = std::move(t);
}

Case full_case(const Sizes& size, DType type, uint64_t seed) {
  Case c;
  c.size = size;
  c.dtype = type;
  const DType plain = type == DType::f64 ? DType::f64 : DType::f32;
  for (const char* name : {"q", "k", "v", "z", "trap", "angles", "q_bias", "k_bias", "d", "mimo_v",
                           "mimo_z", "mimo_out"})
    fill(c, name, type, seed);
  if (size.A == 0) c.in.erase("angles");
  fill(c, "adt", plain, seed);
  fill(c, "dt", plain, seed);
  for (const char* name : {"angle", "ssm", "k", "v"}) {
    fill(c, std::string("initial_") + name, plain, seed);
    fill(c, std::string("d_final_") + name, plain, seed);
  }
  fill(c, "d_out", type, seed);
  return c;
}

namespace {

using Lengths = int64_t[6];
constexpr Lengths short_ones = {0, 1, 2, 17, 40, 75}, long_ones = {0, 1, 63, 64, 130, 321};

void draw_sizes(const Choice& f, const Lengths& lengths, Sizes& s) {
  constexpr int64_t dims[] = {4, 8, 20, 33, 64, 128, 256}, values[] = {1, 5, 16, 64, 128};
  constexpr int64_t ranks[] = {1, 2, 3, 4, 8};
  s.N = dims[f[state_dim]], s.P = values[f[head_dim]], s.R = ranks[f[rank]];
  s.H = f[heads] == 0 ? 1 : f[heads] == 1 ? 4 : 6;
  s.G = f[groups] == 0 ? 1 : f[groups] == 1 ? s.H : std::max<int64_t>(1, s.H / 2);
  s.S = lengths[f[tokens]];
  s.B = f[packed] == 0 ? 2 : 1;
  s.rank_axis = s.R > 1 || f[order] == 3;
  s.A = f[angles] == 0 ? 0 : f[angles] == 3 ? s.N / 4 : s.N / 2;
  s.shared_angles = f[angles] == 2;
}

void draw_sequences(const Choice& f, Case& c) {
  const int64_t S = c.size.S;
  if (f[packed] == 0) return;
  if (f[packed] == 1)
    c.cu = {0, 0, S / 3, S / 3, S - S / 8, S};
  else
    c.cu = {S / 5, S / 5 + S / 2, S / 5 + S / 2, S - S / 9};
  std::sort(c.cu.begin(), c.cu.end());
  HostTensor cu(DType::i32, {static_cast<int64_t>(c.cu.size())});
  for (size_t i = 0; i < c.cu.size(); ++i)
    cu.set(static_cast<int64_t>(i), static_cast<double>(c.cu[i]));
  c.in["cu_seqlens"] = cu;
}

// pieces: rows begin on multiples of so many elements.
Layout draw_layout(const Choice& f, const Sizes& s, int64_t pieces) {
  if (!s.rank_axis) return f[order] == 1 ? Layout{{1, 0, 2, 3}, 0, 0} : Layout{};
  if (f[order] == 1) return {{0, 1, 3, 2, 4}, std::max<int64_t>(pieces, 4), 0};  // (g, r, n), gaps
  if (f[order] == 2) return {{1, 0, 2, 3, 4}, 0, pieces};  // [S, B, ...], off the grid
  return {};
}

Case draw_case(const Choice& f, uint64_t seed, const Lengths& lengths = short_ones,
               int64_t pieces = 1) {
  Case c;
  draw_sizes(f, lengths, c.size);
  c.dtype = f[dtype] == 0 ? DType::f32 : f[dtype] == 1 ? DType::bf16 : DType::f16;
  const DType other = f[mixed_types] == 0 ? c.dtype : DType::f32;
  c.rows = draw_layout(f, c.size, pieces);
  draw_sequences(f, c);
  fill(c, "q", c.dtype, seed, c.rows), fill(c, "k", c.dtype, seed, c.rows);
  fill(c, "v", c.dtype, seed);
  fill(c, "adt", DType::f32, seed), fill(c, "dt", DType::f32, seed);
  fill(c, "trap", f[mixed_types] == 2 ? DType::f16 : other, seed);
  const bool odd = c.size.N % 2 != 0;
  c.options.rotary_pairs = f[pairs] == 0 && !odd   ? RotaryPairs::automatic
                           : f[pairs] == 1 && !odd ? RotaryPairs::halves
                                                   : RotaryPairs::interleaved;
  if (c.size.A > 0) fill(c, "angles", f[mixed_types] == 2 ? DType::bf16 : other, seed);
  if (f[gate]) fill(c, "z", c.dtype, seed);
  if (f[skip]) fill(c, "d", other, seed);
  if (f[biases] > 0) fill(c, "q_bias", other, seed);
  if (f[biases] > 1) fill(c, "k_bias", other, seed);
  c.options.head_norm = f[norm] != 0;
  // One value a row: y (y^2 + eps)^(-1/2) is a step of width sqrt(eps). fp32 leaves 1e-7 of y,
  // hence 1e-7 / sqrt(eps) of its slope, and the formula's 1 - y^2 rstd^2 leaves 6e-8 (1 + y^2 /
  // eps). The rule's 1e-6 needs eps >= 0.01 by the one and, with y near 1, >= 0.06 by the other.
  if (c.size.P == 1) c.options.norm_eps = 0.1;
  if (f[norm] && f[projections] != 1) fill(c, "norm_weight", other, seed);
  if (f[projections] > 0) fill(c, "mimo_v", other, seed);
  if (f[projections] > 1) fill(c, "mimo_out", other, seed);
  if (f[projections] > 1 && f[gate]) fill(c, "mimo_z", other, seed);
  constexpr const char* names[] = {"angle", "ssm", "k", "v"};
  for (int i = 0; i < 4; ++i) {
    if (f[states] == 1 || (f[states] == 2 && i == static_cast<int>(seed % 4)))
      fill(c, std::string("initial_") + names[i], DType::f32, seed);
    if (f[final_gradients]) fill(c, std::string("d_final_") + names[i], DType::f32, seed);
  }
  fill(c, "d_out", f[mixed_types] == 1 ? DType::f32 : c.dtype, seed);
  c.options.chunk = f[chunk] == 0 ? 0 : f[chunk] == 1 ? 1 : f[chunk] == 2 ? 5 : 16;
  c.options.schedule = static_cast<Schedule>(f[schedule]);
  c.fp32_outputs = f[mixed_types] == 1;
  return c;
}

}  // namespace

std::vector<Case> pairwise_cases(uint64_t seed) {
  std::vector<Case> cases;
  for (const Choice& f : covering(seed)) cases.push_back(draw_case(f, seed + cases.size()));
  return cases;
}

std::vector<Case> training_cases(uint64_t seed) {
  std::vector<Case> cases;
  for (Choice f : covering(seed)) {
    f[dtype] = 1;
    f[state_dim] = 5, f[head_dim] = 3;
    if (f[rank] == 2 || f[rank] == 4) --f[rank];
    f[chunk] = f[norm] = f[states] = f[final_gradients] = 0;
    cases.push_back(draw_case(f, seed + cases.size(), long_ones, 8));
  }
  return cases;
}

std::vector<Case> wider_cases(uint64_t seed) {
  std::vector<Case> cases;
  for (Choice f : covering(seed)) {
    f[dtype] = 1;
    f[state_dim] = 4 + f[state_dim] % 3, f[head_dim] = f[head_dim] % 2 == 0 ? 3 : 4;
    if (f[rank] == 2) f[rank] = 4;
    if (f[state_dim] == 5 && f[head_dim] == 3) f[rank] = 4;  // others are training_cases
    f[chunk] = f[norm] = f[states] = f[final_gradients] = 0;
    cases.push_back(draw_case(f, seed + cases.size(), long_ones, 8));
  }
  return cases;
}

Case drawn_again(Case c, uint64_t seed) {
  for (const auto& [name, tensor] : Tensors(c.in)) {
    if (name == "cu_seqlens") continue;
    fill(c, name, tensor.dtype(), seed, name == "q" || name == "k" ? c.rows : Layout{});
  }
  return c;
}

std::string describe_case(const Case& c) {
  const Sizes& s = c.size;
  std::ostringstream text;
  text << name_of(c.dtype) << " B" << s.B << " S" << s.S << " H" << s.H << " G" << s.G << " N"
       << s.N << " P" << s.P << " R" << s.R << " A" << s.A << " chunk " << c.options.chunk
       << " schedule " << static_cast<int>(c.options.schedule)
       << (c.halves() ? " halves" : " interleaved") << (s.shared_angles ? " shared" : "")
       << (c.options.head_norm ? " norm" : "");
  for (const auto& [name, tensor] : c.in) text << ' ' << name;
  text << " cu";
  for (const int64_t e : c.cu) text << ' ' << e;
  return text.str();
}

}  // namespace talea::yardsticks::mamba3
