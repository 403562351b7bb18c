// What: an index mask by a scatter that sends absent slots to column 0 and repairs it afterwards.
// Why: the repair asks whether a slot really named key 0, which is a host read while a graph is
//      captured, or overwrites a 0 that an earlier use left there.
// Never: needs a GPU: what is shown here is the half that is wrong everywhere.
#include <cmath>

#include "repro/support/sparse.hpp"

namespace talea::repro {
namespace {

constexpr int64_t queries = 5, keys = 12, slots = 4;

struct Lists {
  std::vector<int32_t> indices;
  std::vector<float> mask;  // as it was before: in use already

  Lists() : mask(queries * keys, -INFINITY) {
    for (int64_t s = 0; s < queries; ++s)
      for (int64_t k = 0; k < slots; ++k)
        indices.push_back(k < s ? static_cast<int32_t>((3 * s + 2 * k) % keys) : -1);
    for (int64_t s = 0; s < queries; s += 2) mask[static_cast<size_t>(s * keys)] = 0;
  }
};

// Element by element what the contract says.
std::vector<float> wanted(const Lists& l) {
  std::vector<float> m = l.mask;
  for (int64_t i = 0; i < queries * slots; ++i)
    if (l.indices[static_cast<size_t>(i)] >= 0)
      m[static_cast<size_t>(i / slots * keys + l.indices[static_cast<size_t>(i)])] = 0;
  return m;
}

// scatter(clamp(indices, 0)), then column 0 is set back where "no slot named it".
std::vector<float> column_zero(const Lists& l) {
  std::vector<float> m = l.mask;
  for (int64_t s = 0; s < queries; ++s) {
    bool named = false, absent = false;
    for (int64_t k = 0; k < slots; ++k) {
      const int32_t j = l.indices[static_cast<size_t>(s * slots + k)];
      m[static_cast<size_t>(s * keys + std::max(j, 0))] = 0;
      named = named || j == 0;
      absent = absent || j < 0;
    }
    if (absent && !named) m[static_cast<size_t>(s * keys)] = -INFINITY;
  }
  return m;
}

// Without the repair, which capture forbids.
std::vector<float> clamped(const Lists& l) {
  std::vector<float> m = l.mask;
  for (int64_t i = 0; i < queries * slots; ++i)
    m[static_cast<size_t>(i / slots * keys + std::max(l.indices[static_cast<size_t>(i)], 0))] = 0;
  return m;
}

std::vector<float> ours(const Lists& l) {
  std::vector<float> m = l.mask;
  sa::Inputs in;
  in.indices = make_tensor(l.indices.data(), DType::i32, {queries, slots});
  const Tensor mask = make_tensor(m.data(), DType::f32, {queries, keys});
  sa::index_mask(in, mask, {});
  sa::index_mask(in, mask, {});  // again: nothing changes
  return m;
}

double wrong(const std::vector<float>& a, const std::vector<float>& b) {
  double n = 0;
  for (size_t i = 0; i < b.size(); ++i) n += a[i] == b[i] ? 0 : 1;
  return n;
}

// Foreign indices counted by two calls into one status, as two replays of a graph would.
double miscounted() {
  SparseData d = make_sparse(4, 16, 2, 16, 16, 4, 121);
  d.d_o.clear();
  d.indices[5] = 16, d.indices[9] = -7;
  std::vector<float> o(static_cast<size_t>(4 * 2 * 16));
  int64_t status[4] = {0, -1, 0, 0};
  sa::Inputs in;
  in.q = make_tensor(d.q.data(), DType::f32, {4, 2, 16});
  in.kv = make_tensor(d.kv.data(), DType::f32, {16, 16});
  in.indices = make_tensor(d.indices.data(), DType::i32, {4, 4});
  sa::Outputs out;
  out.o = make_tensor(o.data(), DType::f32, {4, 2, 16});
  out.status = make_tensor(status, DType::i64, {4});
  const int64_t bytes = sa::workspace_bytes(sa::describe(sa::Pass::forward, in, out, d.options));
  std::vector<char> workspace(static_cast<size_t>(bytes));
  double wrong = 0;
  for (int64_t replay = 1; replay <= 2; ++replay) {
    sa::forward(in, out, d.options, {workspace.data(), bytes});
    wrong += status[0] == 2 * replay && status[1] == 5 && status[2] == 16 ? 0 : 1;
  }
  try {
    sa::require_clean(out.status);
    return wrong + 1;
  } catch (const Error& e) {
    return wrong + (e.kind() == ErrorKind::invalid_data ? 0 : 1);
  }
}

void run_all(Report& r) {
  const Lists l;
  const std::vector<float> want = wanted(l);
  r.broken("elements wrong, column 0 set back on a mask in use", wrong(column_zero(l), want), 0);
  r.broken("elements wrong, absent slots clamped to key 0", wrong(clamped(l), want), 0);
  r.ours("elements wrong, twice on a mask in use",
         wrong(r.fix_disabled() ? column_zero(l) : ours(l), want), 0);
  r.ours("replays whose count of foreign indices is wrong", r.fix_disabled() ? 2 : miscounted(), 0);
}

}  // namespace

extern const Reproducer index_mask_capture{
    "index_mask_capture", "SA10 SA11",
    "a mask built by column 0, wrong on a used mask and unfit for capture", run_all,
    "it needs no device to be wrong"};

}  // namespace talea::repro
