// What: a dispatch that believes the dtype a wrapper reports, and every storage that is none.
// Why: the wrapper says bf16, its data pointer is null, and the payload is e4m3 beside a scale.
// Never: reads a logical dtype.
#include <cmath>
#include <cstring>

#include "core/half.hpp"
#include "repro/support/sparse.hpp"

namespace talea::repro {
namespace {

constexpr int64_t queries = 6, keys = 32, heads = 4, dim = 64, value_dim = 32, slots = 8;

// A quantised tensor as frameworks wrap it.
struct Wrapper {
  DType logical = DType::bf16;
  void* data_ptr = nullptr;  // of the logical tensor, which does not exist
  std::vector<uint8_t> payload;
  float scale = 0;
};

struct Problem {
  SparseData d = make_sparse(queries, keys, heads, dim, value_dim, slots, 111);
  Wrapper kv;
  std::vector<float> o = std::vector<float>(queries * heads * value_dim);
  sa::Inputs in;
  sa::Outputs out;
  sa::Options options;

  Problem() {
    d.d_o.clear();
    float largest = 0;
    for (const float v : d.kv) largest = std::max(largest, std::abs(v));
    kv.scale = largest / 448;
    for (float& v : d.kv) {
      kv.payload.push_back(float_to_e4m3(v / kv.scale));
      v = e4m3_to_float(kv.payload.back()) * kv.scale;
    }
    in.q = make_tensor(d.q.data(), DType::f32, {queries, heads, dim});
    in.kv = make_tensor(kv.payload.data(), DType::f8_e4m3, {keys, dim});
    in.kv_scale = make_tensor(&kv.scale, DType::f32, {});
    in.indices = make_tensor(d.indices.data(), DType::i32, {queries, slots});
    out.o = make_tensor(o.data(), DType::f32, {queries, heads, value_dim});
    options.value_dim = value_dim;
    options.kv_storage = sa::KvStorage::fp8_scaled;
  }

  sa::Result run() {
    const int64_t bytes = sa::workspace_bytes(sa::describe(sa::Pass::forward, in, out, options));
    std::vector<char> workspace(static_cast<size_t>(bytes));
    return sa::forward(in, out, options, {workspace.data(), bytes});
  }
};

// What a dispatcher hands on that asks the wrapper for its dtype and its pointer.
Tensor believed(const Wrapper& w) { return make_tensor(w.data_ptr, w.logical, {keys, dim}); }

// 1 where the call is refused with a message that names the argument.
double refused(const char* argument, const std::function<void(Problem&)>& spoil) {
  Problem p;
  spoil(p);
  try {
    p.run();
  } catch (const Error& e) {
    return std::string(e.what()).find(argument) != std::string::npos ? 1 : 0;
  }
  return 0;
}

double not_refused() {
  const std::pair<const char*, std::function<void(Problem&)>> bad[] = {
      {"kv", [](Problem& p) { p.in.kv.data = nullptr; }},
      {"kv_scale", [](Problem& p) { p.in.kv_scale = {}; }},
      {"kv_scale",
       [](Problem& p) {
         p.options.kv_storage = sa::KvStorage::plain;
         p.in.kv = make_tensor(p.d.kv.data(), DType::f32, {keys, dim});
       }},
      {"kv", [](Problem& p) { p.options.kv_storage = sa::KvStorage::plain; }},
      {"kv", [](Problem& p) { p.in.kv.dtype = DType::u8; }},
      {"kv", [](Problem& p) { p.options.kv_storage = sa::KvStorage::fp8_656; }},
      {"kv_scale", [](Problem& p) { p.in.kv_scale.dtype = DType::f64; }},
      {"kv_scale",
       [](Problem& p) { p.in.kv_scale = make_tensor(p.d.q.data(), DType::f32, {keys + 1}); }},
      {"kv_scale", [](Problem& p) { p.kv.scale = 0; }},
      {"kv_scale", [](Problem& p) { p.kv.scale = -1; }},
      {"kv_scale", [](Problem& p) { p.kv.scale = NAN; }},
      {"kv_scale", [](Problem& p) { p.kv.scale = INFINITY; }}};
  double missed = 0;
  for (const auto& [argument, spoil] : bad) missed += 1 - refused(argument, spoil);
  return missed;
}

void run_all(Report& r) {
  Problem p;
  const SparseAnswer truth = attend(p.d, "reference");
  r.broken("null pointers handed on, dtype and address asked of the wrapper",
           believed(p.kv).data == nullptr ? 1 : 0, 0);
  const double copy = static_cast<double>(keys * dim) * 2;
  r.broken("bytes of a bf16 copy, the payload dequantised without a word", copy, 0);
  std::vector<double> have;
  bool named = false;
  if (!r.fix_disabled()) {
    named = !p.run().kv_path.empty();
    have.assign(p.o.begin(), p.o.end());
  } else {
    have.assign(truth.o.size(), NAN);  // nothing could be read
  }
  r.ours("o from payload and scale", relative_l2(have, truth.o), 1e-5);
  r.ours("receipts that do not say how a row becomes an operand (kv_path)", named ? 0 : 1, 0);
  r.ours("bad storages that are not refused by name, of 12", r.fix_disabled() ? 12 : not_refused(),
         0);
}

}  // namespace

extern const Reproducer fp8_storage{"fp8_storage", "SA19",
                                    "a wrapper's logical dtype is taken for what lies in memory",
                                    run_all, "it says what a host tensor may be"};

}  // namespace talea::repro
