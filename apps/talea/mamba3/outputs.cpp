// What: the outputs of a scan by their names.
// Why: --outputs is checked against what is there before anything runs.
// Never: computes.
#include <algorithm>

#include "axes.hpp"
#include "call.hpp"
#include "core/fail.hpp"
#include "ops/mamba3/fields.hpp"

namespace talea::cli::scan {
namespace {

struct Sizes {
  int64_t batch, tokens, rank, groups, columns, heads, head_dim, pairs, sequences;
  bool rank_axis;

  int64_t of(char letter) const {
    switch (letter) {
      case 'b':
        return batch;
      case 's':
        return tokens;
      case 'r':
        return rank;
      case 'g':
        return groups;
      case 'n':
        return columns;
      case 'h':
        return heads;
      case 'p':
        return head_dim;
      case 'a':
        return pairs;
      default:
        return sequences;
    }
  }
};

Sizes sizes_of(const mamba3::Inputs& in) {
  Sizes s{};
  s.rank_axis = in.q.rank == 5;
  s.batch = in.v.shape[0];
  s.tokens = in.v.shape[1];
  s.heads = in.v.shape[2];
  s.head_dim = in.v.shape[3];
  s.rank = s.rank_axis ? in.q.shape[2] : 1;
  s.groups = in.q.shape[in.q.rank - 2];
  s.columns = in.q.shape[in.q.rank - 1];
  const Tensor& angle = in.angles ? in.angles : in.initial_states.angle;
  s.pairs = angle ? angle.shape[angle.rank - 1] : 0;
  s.sequences = in.cu_seqlens ? in.cu_seqlens.shape[0] - 1 : s.batch;
  return s;
}

struct Builder {
  Outputs& out;
  const std::string& layout;

  void add(const std::string& name, Tensor& view, DType dtype, const std::string& axes,
           const std::vector<int64_t>& shape) {
    const std::string order = file_axes(name, static_cast<int>(axes.size()), layout);
    std::vector<int64_t> extents;
    for (char letter : order) extents.push_back(shape[axes.find(letter)]);
    out.owners.push_back(io::allocate_tensor(dtype, extents));
    out.named.push_back({name, out.owners.back().view});
    view = in_order(out.owners.back().view, order, axes);
  }
};

bool any_upstream(const mamba3::Inputs& in) {
  bool any = static_cast<bool>(in.d_out);
  for (auto member : mamba3::state_members) any = any || in.d_final_states.*member;
  return any;
}

std::vector<int64_t> shape_of(const Tensor& t) {
  return {t.shape.begin(), t.shape.begin() + t.rank};
}

// Of out or a final state; false: it is neither.
bool add_forward(const std::string& name, const mamba3::Inputs& in, Builder& b) {
  const Sizes s = sizes_of(in);
  const DType wide = in.q.dtype == DType::f64 ? DType::f64 : DType::f32;
  const auto add = [&](Tensor& view, DType dtype, int axes) {
    const std::string letters = axes_of(name, axes);
    std::vector<int64_t> shape;
    for (char letter : letters) shape.push_back(s.of(letter));
    b.add(name, view, dtype, letters, shape);
  };
  if (name == "out") {
    add(b.out.views.out, in.q.dtype, s.rank > 1 && !in.mimo_out ? 5 : 4);
    return b.out.forward = true;
  }
  for (int i = 0; i < 4; ++i) {
    if (name != mamba3::final_names.names[i]) continue;
    const Tensor& k = in.initial_states.k;  // where R = 1, it says of k whether it has a rank axis
    const int key_axes = k ? k.rank : s.rank_axis ? 4 : 3;
    const int axes = i == 0 || i == 3 ? 3 : i == 1 ? 4 : key_axes;
    add(b.out.views.final_states.*mamba3::state_members[i], wide, axes);
    return b.out.forward = true;
  }
  return false;
}

}  // namespace

std::vector<std::string> all_outputs(const mamba3::Inputs& in) {
  std::vector<std::string> names = {"out"};
  if (!any_upstream(in)) return names;
  mamba3::Outputs wanted;
  mamba3::for_gradients(wanted.d, [&](const std::string& gradient, Tensor&) {
    mamba3::for_inputs(in, [&](const char* name, const Tensor& t) {
      if (t && gradient == std::string("d_") + name) names.push_back(gradient);
    });
  });
  return names;
}

Outputs allocate_outputs(const std::vector<std::string>& names, const mamba3::Inputs& in,
                         const std::string& layout) {
  Outputs out;
  Builder b{out, layout};
  for (const std::string& name : names) {
    require(std::count(names.begin(), names.end(), name) == 1, ErrorKind::usage,
            "--outputs: {} is named twice", name);
    if (add_forward(name, in, b)) continue;
    Tensor* view = nullptr;
    mamba3::for_gradients(out.views.d, [&](const char* field, Tensor& t) {
      if (name == field) view = &t;
    });
    require(view, ErrorKind::usage,
            "--outputs {}: unknown; out, final_angle, final_ssm, final_k, final_v, or d_ and the "
            "name of a tensor that was given",
            name);
    Tensor like;
    mamba3::for_inputs(in, [&](const char* field, const Tensor& t) {
      if (name.substr(2) == field) like = t;
    });
    require(static_cast<bool>(like), ErrorKind::usage, "--outputs {}: {} is not given", name,
            name.substr(2));
    require(any_upstream(in), ErrorKind::usage,
            "--outputs {}: a gradient needs --upstream or one of --upstream-final-*", name);
    b.add(name, *view, like.dtype, axes_of(name, like.rank), shape_of(like));
    out.backward = true;
  }
  return out;
}

}  // namespace talea::cli::scan
