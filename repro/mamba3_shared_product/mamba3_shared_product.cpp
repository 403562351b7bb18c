// What: the product dO V^T formed three times in a chunk's backward, each under a mask of its own.
// Why: three places to edit alike; one product serves dq, dk, the steps' gradients and d.
// Never: counts what a compiler may merge: every product here is a call.
#include <cmath>

#include "repro/support/chunk.hpp"
#include "repro/support/scan.hpp"

namespace talea::repro {
namespace {

using Matrix = std::vector<double>;

// One chunk of one head without rotation: what backward reads, by the names of the formulas.
struct Chunk {
  int64_t m = 0, n = 0, p = 0;
  Matrix q, k, v, dO, gamma_mask, same, L, scale, gamma, h_in, E;
  double d = 0;
};

struct Counters {
  int products = 0;
};

// dO V^T, [m, m].
Matrix product(const Chunk& c, Counters& counters) {
  ++counters.products;
  Matrix w(static_cast<size_t>(c.m * c.m), 0);
  for (int64_t i = 0; i < c.m; ++i)
    for (int64_t j = 0; j < c.m; ++j)
      for (int64_t e = 0; e < c.p; ++e)
        w[static_cast<size_t>(i * c.m + j)] +=
            c.dO[static_cast<size_t>(i * c.p + e)] * c.v[static_cast<size_t>(j * c.p + e)];
  return w;
}

Matrix masked(Matrix w, const Matrix& mask) {
  for (size_t i = 0; i < w.size(); ++i) w[i] *= mask[i];
  return w;
}

// The seven gradients from three masked forms of the product.
Values gradients(const Chunk& c, const Matrix& for_q, const Matrix& for_k, const Matrix& same) {
  Values g;
  auto &dq = g["dq"], &dk = g["dk"], &dv = g["dv"], &dh = g["d_initial_ssm"];
  dq.assign(c.q.size(), 0), dk = dq, dv.assign(c.v.size(), 0), dh.assign(c.h_in.size(), 0);
  g["dQK_dot"].assign(static_cast<size_t>(c.m), 0);
  g["d_d"] = {0};
  const auto at = [](const Matrix& x, int64_t i, int64_t width, int64_t j) {
    return x[static_cast<size_t>(i * width + j)];
  };
  for (int64_t i = 0; i < c.m; ++i) {
    g["dQK_dot"][static_cast<size_t>(i)] = at(same, i, c.m, i);
    g["d_d"][0] += at(same, i, c.m, i);
    const double enter = std::exp(c.L[static_cast<size_t>(i)]);
    const double leave = std::exp(c.L[static_cast<size_t>(c.m - 1)] - c.L[static_cast<size_t>(i)]) *
                         c.scale[static_cast<size_t>(i)];
    for (int64_t n = 0; n < c.n; ++n) {
      double q = 0, k = 0;
      for (int64_t e = 0; e < c.p; ++e) {
        q += enter * at(c.dO, i, c.p, e) * at(c.h_in, e, c.n, n);
        k += leave * at(c.v, i, c.p, e) * at(c.E, e, c.n, n);
        dh[static_cast<size_t>(e * c.n + n)] += enter * at(c.dO, i, c.p, e) * at(c.q, i, c.n, n);
      }
      for (int64_t j = 0; j < c.m; ++j) {
        q += at(for_q, i, c.m, j) * at(c.k, j, c.n, n);
        k += at(for_k, j, c.m, i) * at(c.q, j, c.n, n);
      }
      dq[static_cast<size_t>(i * c.n + n)] = q;
      dk[static_cast<size_t>(i * c.n + n)] = k;
    }
    for (int64_t e = 0; e < c.p; ++e) {
      double sum = c.d * at(c.dO, i, c.p, e);
      for (int64_t n = 0; n < c.n; ++n) sum += leave * at(c.k, i, c.n, n) * at(c.E, e, c.n, n);
      for (int64_t j = i; j < c.m; ++j) {
        double dot = 0;
        for (int64_t n = 0; n < c.n; ++n) dot += at(c.q, j, c.n, n) * at(c.k, i, c.n, n);
        sum += dot * at(c.gamma_mask, j, c.m, i) * at(c.dO, j, c.p, e);
      }
      dv[static_cast<size_t>(i * c.p + e)] = sum;
    }
  }
  auto& adt = g["d_adt"];  // sums from the end of <q, dq> - <k, dk>; the chunk is the last: E = 0
  adt.assign(static_cast<size_t>(c.m), 0);
  double sum = 0;
  for (int64_t i = c.m; i-- > 0;) {
    for (int64_t n = 0; n < c.n; ++n)
      sum += at(c.q, i, c.n, n) * at(dq, i, c.n, n) - at(c.k, i, c.n, n) * at(dk, i, c.n, n);
    adt[static_cast<size_t>(i)] = sum;
  }
  return g;
}

Chunk chunk_of(const Scan& s) {
  Chunk c;
  c.m = s.S, c.n = s.N, c.p = s.P;
  const auto wide = [&](const char* name) {
    return Matrix(s.in.at(name).begin(), s.in.at(name).end());
  };
  c.q = wide("q"), c.k = wide("k"), c.v = wide("v"), c.dO = wide("d_out");
  c.h_in = wide("initial_ssm"), c.d = s.in.at("d")[0];
  c.E.assign(c.h_in.size(), 0);
  const Matrix adt = wide("adt"), dt = wide("dt"), trap = wide("trap");
  const auto lambda = [&](int64_t i) { return 1 / (1 + std::exp(-trap[static_cast<size_t>(i)])); };
  double sum = 0;
  for (int64_t i = 0; i < c.m; ++i) {
    c.L.push_back(sum += adt[static_cast<size_t>(i)]);
    c.gamma.push_back(lambda(i) * dt[static_cast<size_t>(i)]);
    const double next = i + 1 < c.m ? (1 - lambda(i + 1)) * dt[static_cast<size_t>(i + 1)] : 0;
    c.scale.push_back(c.gamma.back() + next);
  }
  for (int64_t i = 0; i < c.m; ++i)
    for (int64_t j = 0; j < c.m; ++j) {
      const double gap = c.L[static_cast<size_t>(i)] - c.L[static_cast<size_t>(j)];
      c.gamma_mask.push_back(i > j    ? c.scale[static_cast<size_t>(j)] * std::exp(gap)
                             : i == j ? c.gamma[static_cast<size_t>(i)]
                                      : 0);
      c.same.push_back(i == j ? 1 : 0);
    }
  return c;
}

// The same in kernels of a device, whose blocks count the products that they form.
void run_on_device(Report& r) {
  ChunkKernels kernels({4096, 4, 8});
  const ChunkGradients thrice = kernels.run({.once = false}), once = kernels.run({.once = true});
  const ChunkGradients edited = kernels.run({.once = true, .edited = true});
  const auto wide = [](const std::vector<float>& x) {
    return std::vector<double>(x.begin(), x.end());
  };
  r.broken("products dO V^T of a chunk, counted on the device", thrice.products, 1);
  r.broken("dk on the device, one of the three masks edited alone",
           relative_l2(wide(edited.dk), wide(once.dk)), 1e-2);
  const ChunkGradients& shown = r.fix_disabled() ? edited : once;
  r.ours("gradients of four that differ on the device between one product and three",
         thrice.differ(shown), 0);
  r.ours("products dO V^T of a chunk, shared, counted on the device",
         r.fix_disabled() ? thrice.products : once.products, 1);
  r.ours("dq and dk on the device, beside fp64", kernels.error(shown, 5), 6e-3);
  r.figure("ms with three products", thrice.ms);
  r.figure("ms with one", once.ms);
}

void run_all(Report& r) {
  if (std::string why; has_chunk_kernels(why)) run_on_device(r);
  const Scan s =
      draw_scan({1, 48, 1, 1, 1, 8, 8, 0, {}, {}, {}}, {"d", "initial_ssm", "d_out"}, 51);
  const Chunk c = chunk_of(s);
  Counters thrice, once;
  const Values three =
      gradients(c, masked(product(c, thrice), c.gamma_mask),
                masked(product(c, thrice), c.gamma_mask), masked(product(c, thrice), c.same));
  const Matrix w = product(c, once);
  const Values one =
      gradients(c, masked(w, c.gamma_mask), masked(w, c.gamma_mask), masked(w, c.same));
  r.broken("products dO V^T in a chunk's backward", thrice.products, 1);
  // One of three masks edited, the others not: the diagonal of dk's is s in place of gamma.
  Matrix edited = c.gamma_mask;
  for (int64_t i = 0; i < c.m; ++i)
    edited[static_cast<size_t>(i * c.m + i)] = c.scale[static_cast<size_t>(i)];
  const Values wrong = gradients(c, masked(w, c.gamma_mask), masked(w, edited), masked(w, c.same));
  r.broken("dk, one of the three masks edited alone", off(wrong, one, "dk"), 1e-2);
  const Values& shown = r.fix_disabled() ? wrong : one;
  double differ = 0;
  for (const auto& [name, values] : three) differ += shown.at(name) != values;
  r.ours("gradients of seven that differ between one product and three", differ, 0);
  r.ours("products dO V^T, shared", r.fix_disabled() ? thrice.products : once.products, 1);
  const ScanAnswer ours = run_scan(s, "auto");
  const std::pair<const char*, const char*> names[] = {
      {"dq", "d_q"},      {"dk", "d_k"},  {"dv", "d_v"},
      {"d_adt", "d_adt"}, {"d_d", "d_d"}, {"d_initial_ssm", "d_initial_ssm"}};
  for (const auto& [formula, name] : names) {
    if (r.fix_disabled()) continue;
    r.ours(std::string("the operator's ") + name + " beside it",
           relative_l2(ours.t.at(name), one.at(formula)), 2e-6);
  }
  for (const mamba3::ProductFact& f : ours.backward.products)
    r.figure("the operator's receipt: " + f.name + ", times a chunk", f.per_chunk);
}

}  // namespace

extern const Reproducer mamba3_shared_product{
    "mamba3_shared_product", "M3-3", "one product in place of three, and their masks", run_all};

}  // namespace talea::repro
