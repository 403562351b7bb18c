// What: see scan.hpp.
// Why: see scan.hpp.
// Never: see scan.hpp.
#include "repro/support/scan.hpp"

#include <cmath>
#include <random>

#include "core/fail.hpp"
#include "ops/mamba3/fields.hpp"
#include "repro/support/on_device.hpp"

namespace talea::repro {
namespace {

constexpr double pi = 3.14159265358979323846;

const std::map<std::string, std::string>& axes() {
  static const std::map<std::string, std::string> table = {{"q", "BSRGN"},
                                                           {"k", "BSRGN"},
                                                           {"v", "BSHP"},
                                                           {"z", "BSHP"},
                                                           {"adt", "BHS"},
                                                           {"dt", "BHS"},
                                                           {"trap", "BHS"},
                                                           {"angles", "BSHA"},
                                                           {"q_bias", "HRN"},
                                                           {"k_bias", "HRN"},
                                                           {"d", "H"},
                                                           {"mimo_v", "HRP"},
                                                           {"mimo_z", "HRP"},
                                                           {"mimo_out", "HRP"},
                                                           {"initial_angle", "nHA"},
                                                           {"initial_ssm", "nHPN"},
                                                           {"initial_k", "nRHN"},
                                                           {"initial_v", "nHP"},
                                                           {"norm_weight", "HP"}};
  return table;
}

Tensor view(const void* data, DType dtype, const std::vector<int64_t>& shape) {
  Tensor t;
  t.data = const_cast<void*>(data);
  t.dtype = dtype;
  t.rank = static_cast<int>(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    t.shape[i] = shape[i];
    t.stride[i] = stride;
    stride *= shape[i];
  }
  t.present = true;
  return t;
}

int64_t count(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (int64_t extent : shape) n *= extent;
  return n;
}

using Buffers = std::map<std::string, std::vector<float>>;

// The outputs that a pass has on this problem, each in a buffer of its own.
template <typename Each>
void place(const Scan& s, mamba3::Outputs& out, bool backward, Buffers& buffers, Each&& wanted) {
  mamba3::for_outputs(out, [&](const char* name, Tensor& t) {
    const std::string key = name;
    if (key == "saved" || key == "status" || !wanted(key)) return;
    if ((key.rfind("d_", 0) == 0) != backward) return;
    const std::vector<int64_t> shape = s.shape(key);
    auto& buffer = buffers[key];
    buffer.assign(static_cast<size_t>(count(shape)), 0.f);
    t = view(buffer.data(), DType::f32, shape);
  });
}

mamba3::Inputs inputs_of(const Scan& s, bool backward) {
  mamba3::Inputs in;
  mamba3::for_inputs(in, [&](const char* name, Tensor& t) {
    const auto found = s.in.find(name);
    const bool upstream =
        std::string(name) == "d_out" || std::string(name).rfind("d_final", 0) == 0;
    if (found == s.in.end() || (upstream && !backward)) return;
    t = view(found->second.data(), DType::f32, s.shape(name));
  });
  if (!s.cu.empty())
    in.cu_seqlens = view(s.cu.data(), DType::i32, {static_cast<int64_t>(s.cu.size())});
  return in;
}

// On the host, or where the caller has named a device on copies in its memory.
mamba3::Result run_pass(bool backward, mamba3::Inputs in, mamba3::Outputs out,
                        const mamba3::Options& options) {
  const auto pass = backward ? mamba3::Pass::backward : mamba3::Pass::forward;
  const auto call = backward ? mamba3::backward : mamba3::forward;
  if (!device_in_use() || options.lane != "auto") {
    std::vector<double> workspace(
        static_cast<size_t>(workspace_bytes(describe(pass, in, out, options)) / 8 + 1));
    return call(in, out, options, {workspace.data(), static_cast<int64_t>(workspace.size() * 8)},
                {}, nullptr);
  }
  OnDevice there;
  mamba3::for_inputs(in, [&](const char*, Tensor& t) { there.take(t, false); });
  mamba3::for_outputs(out, [&](const char*, Tensor& t) { there.take(t, true); });
  const Workspace workspace = there.workspace(workspace_bytes(describe(pass, in, out, options)));
  const mamba3::Result result = call(in, out, options, workspace, {}, there.stream());
  there.finish();
  return result;
}

mamba3::Result call(const Scan& s, const std::string& lane, bool backward, Values& into) {
  mamba3::Options options = s.options;
  options.lane = lane;
  options.threads = 1;  // also called in a forked child, which has no thread pool
  mamba3::Outputs out;
  Buffers buffers;
  place(s, out, backward, buffers,
        [&](const std::string& name) { return !backward || s.in.count(name.substr(2)) > 0; });
  const mamba3::Inputs in = inputs_of(s, backward);
  const mamba3::Result result = run_pass(backward, in, out, options);
  for (const auto& [name, buffer] : buffers)
    into[name] = std::vector<double>(buffer.begin(), buffer.end());
  return result;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// The rows of one token and head.
struct Row {
  std::vector<double> q, k, v;  // [R, N], [R, N], [R, P]
};

struct Reader {
  const Scan& s;

  double get(const char* name, int64_t i, double neutral = 0) const {
    const auto found = s.in.find(name);
    return found == s.in.end() ? neutral : found->second[static_cast<size_t>(i)];
  }

  void turn(std::vector<double>& x, const std::vector<double>& theta) const {
    for (int64_t r = 0; r < s.R; ++r)
      for (size_t i = 0; i < theta.size(); ++i) {
        double* row = x.data() + r * s.N;
        double& u = s.R > 1 ? row[i] : row[2 * i];
        double& w = s.R > 1 ? row[i + static_cast<size_t>(s.N / 2)] : row[2 * i + 1];
        const double c = std::cos(theta[i]), n = std::sin(theta[i]), a = u, b = w;
        u = a * c - b * n;
        w = a * n + b * c;
      }
  }

  Row row(int64_t b, int64_t t, int64_t h, int64_t g, const std::vector<double>& theta) const {
    Row x;
    for (int64_t r = 0; r < s.R; ++r) {
      for (int64_t n = 0; n < s.N; ++n) {
        const int64_t at = (((b * s.S + t) * s.R + r) * s.G + g) * s.N + n;
        const int64_t bias = (h * s.R + r) * s.N + n;
        x.q.push_back(get("q", at) + get("q_bias", bias));
        x.k.push_back(get("k", at) + get("k_bias", bias));
      }
      for (int64_t p = 0; p < s.P; ++p)
        x.v.push_back(get("v", ((b * s.S + t) * s.H + h) * s.P + p) *
                      get("mimo_v", (h * s.R + r) * s.P + p, 1));
    }
    turn(x.q, theta);
    turn(x.k, theta);
    return x;
  }
};

void add_outer(const Scan& s, std::vector<double>& h, const Row& x, double weight) {
  for (int64_t r = 0; r < s.R; ++r)
    for (int64_t p = 0; p < s.P; ++p)
      for (int64_t n = 0; n < s.N; ++n)
        h[static_cast<size_t>(p * s.N + n)] +=
            weight * x.v[static_cast<size_t>(r * s.P + p)] * x.k[static_cast<size_t>(r * s.N + n)];
}

// out of one token: sum over r of mimo_out (h q + d v), gated.
void finish(const Reader& read, int64_t b, int64_t t, int64_t head, const std::vector<double>& h,
            const Row& x, std::vector<double>& out) {
  const Scan& s = read.s;
  for (int64_t p = 0; p < s.P; ++p) {
    double sum = 0;
    for (int64_t r = 0; r < s.R; ++r) {
      double y = read.get("d", head) * x.v[static_cast<size_t>(r * s.P + p)];
      for (int64_t n = 0; n < s.N; ++n)
        y += h[static_cast<size_t>(p * s.N + n)] * x.q[static_cast<size_t>(r * s.N + n)];
      const int64_t row = (head * s.R + r) * s.P + p;
      if (s.in.count("z")) {
        const double u =
            read.get("z", ((b * s.S + t) * s.H + head) * s.P + p) * read.get("mimo_z", row, 1);
        y *= u * sigmoid(u);
      }
      sum += y * read.get("mimo_out", row, 1);
    }
    out[static_cast<size_t>(((b * s.S + t) * s.H + head) * s.P + p)] = sum;
  }
}

}  // namespace

std::vector<int64_t> Scan::shape(const std::string& name) const {
  const bool rows = name == "d_out" || name == "out";
  std::string key(rows ? "v" : name);
  if (key.rfind("d_", 0) == 0) key = key.substr(2);
  if (key.rfind("final_", 0) == 0) key = "initial_" + key.substr(6);
  std::vector<int64_t> shape;
  for (const char axis : axes().at(key)) {
    if (axis == 'R' && R == 1 && key != "mimo_v" && key != "mimo_z" && key != "mimo_out") continue;
    shape.push_back(axis == 'B'   ? B
                    : axis == 'S' ? S
                    : axis == 'R' ? R
                    : axis == 'G' ? G
                    : axis == 'N' ? N
                    : axis == 'H' ? H
                    : axis == 'P' ? P
                    : axis == 'A' ? A
                                  : sequences());
  }
  return shape;
}

Scan draw_scan(const Scan& sizes, const std::vector<std::string>& more, uint64_t seed) {
  Scan s = sizes;
  std::mt19937_64 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<std::string> names = {"q", "k", "v", "adt", "dt", "trap"};
  if (s.A > 0) names.emplace_back("angles");
  names.insert(names.end(), more.begin(), more.end());
  for (const std::string& name : names) {
    auto& values = s.in[name];
    values.resize(static_cast<size_t>(count(s.shape(name))));
    for (float& x : values) {
      x = normal(engine);
      if (name == "adt") x = -0.05f * std::abs(x);
      if (name == "dt") x = 0.05f + 0.05f * std::abs(x);
    }
  }
  return s;
}

ScanAnswer run_scan(const Scan& s, const std::string& lane) {
  ScanAnswer a;
  a.forward = call(s, lane, false, a.t);
  if (s.in.count("d_out")) a.backward = call(s, lane, true, a.t);
  return a;
}

Values plain_scan(const Scan& s, const Loop& loop) {
  const Reader read{s};
  Values made;
  auto& out = made["out"];
  out.assign(static_cast<size_t>(count(s.shape("out"))), 0);
  for (int64_t n = 0; n < s.sequences(); ++n)
    for (int64_t head = 0; head < s.H; ++head) {
      const int64_t b = s.cu.empty() ? n : 0;
      const int64_t lo = s.cu.empty() ? 0 : s.cu[static_cast<size_t>(n)];
      const int64_t hi = s.cu.empty() ? s.S : s.cu[static_cast<size_t>(n) + 1];
      const int64_t g = loop.group_of ? loop.group_of(head) : head / (s.H / s.G);
      std::vector<double> h(static_cast<size_t>(s.P * s.N), 0), theta(static_cast<size_t>(s.A), 0);
      Row before;
      for (int64_t t = lo; t < hi; ++t) {
        const int64_t at = (b * s.H + head) * s.S + t;
        const double dt = loop.step(read.get("dt", at)), lambda = sigmoid(read.get("trap", at));
        for (int64_t a = 0; a < s.A; ++a) {
          const double rate = std::tanh(read.get("angles", ((b * s.S + t) * s.H + head) * s.A + a));
          theta[static_cast<size_t>(a)] = loop.turn(theta[static_cast<size_t>(a)], pi * rate * dt);
        }
        if (!before.k.empty()) add_outer(s, h, before, (1 - lambda) * dt);
        for (double& x : h) x *= std::exp(read.get("adt", at));
        const Row now = read.row(b, t, head, g, theta);
        add_outer(s, h, now, lambda * dt);
        finish(read, b, t, head, h, now, out);
        before = now;
      }
    }
  return made;
}

double off(const Values& ours, const Values& truth, const std::string& name) {
  return relative_l2(ours.at(name), truth.at(name));
}

}  // namespace talea::repro
