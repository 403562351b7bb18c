// What: see axes.hpp.
// Why: see axes.hpp.
// Never: see axes.hpp.
#include "axes.hpp"

#include <cctype>

#include "core/fail.hpp"

namespace talea::cli::scan {
namespace {

struct Axes {
  std::string_view name, full, without_rank;  // the second: where the tensor has one axis less
};

constexpr Axes table[] = {
    {"q", "bsrgn", "bsgn"},      {"k", "bsrgn", "bsgn"},       {"v", "bshp", ""},
    {"z", "bshp", ""},           {"out", "bsrhp", "bshp"},     {"adt", "bhs", ""},
    {"dt", "bhs", ""},           {"trap", "bhs", ""},          {"angles", "bsha", ""},
    {"q_bias", "hrn", "hn"},     {"k_bias", "hrn", "hn"},      {"d", "h", ""},
    {"mimo_v", "hrp", ""},       {"mimo_z", "hrp", ""},        {"mimo_out", "hrp", ""},
    {"norm_weight", "hp", ""},   {"cu_seqlens", "e", ""},      {"initial_angle", "iha", ""},
    {"initial_ssm", "ihpn", ""}, {"initial_k", "irhn", "ihn"}, {"initial_v", "ihp", ""},
};

// As the help has them: "iha" is [n,H,A].
std::string spelled(std::string_view axes) {
  std::string text;
  for (const char letter : axes) {
    if (!text.empty()) text += ',';
    text += letter == 'i'   ? "n"
            : letter == 'e' ? "n+1"
                            : std::string(1, static_cast<char>(std::toupper(letter)));
  }
  return text;
}

}  // namespace

std::string axes_of(std::string_view name, int axes) {
  std::string key(name);
  if (key.rfind("d_", 0) == 0 && key != "d_") key = key.substr(2);
  if (key.rfind("final_", 0) == 0) key = "initial_" + key.substr(6);
  for (const Axes& a : table) {
    if (a.name != key) continue;
    if (static_cast<int>(a.full.size()) == axes) return std::string(a.full);
    if (static_cast<int>(a.without_rank.size()) == axes) return std::string(a.without_rank);
    const std::string shorter =
        a.without_rank.empty() ? "" : fmt::format(" or [{}]", spelled(a.without_rank));
    fail(ErrorKind::invalid_data, "{}: {} axes where [{}]{} is needed", name, axes, spelled(a.full),
         shorter);
  }
  fail(ErrorKind::usage, "{}: no tensor of the scan", name);
}

std::string file_axes(std::string_view name, int axes, std::string_view layout) {
  std::string order = axes_of(name, axes);
  const bool rows = order.rfind("bs", 0) == 0;
  if (rows && order.find('g') != std::string::npos) {
    const bool ranked = order.find('r') != std::string::npos;
    order = layout;
    if (!ranked) order.erase(order.find('r'), 1);
  } else if (rows && layout == "sbrgn") {
    std::swap(order[0], order[1]);
  }
  return order;
}

Tensor in_order(const Tensor& t, std::string_view from, std::string_view to) {
  Tensor turned = t;
  for (size_t i = 0; i < to.size(); ++i) {
    const size_t at = from.find(to[i]);
    turned.shape[i] = t.shape[at];
    turned.stride[i] = t.stride[at];
  }
  return turned;
}

Tensor cut(const Tensor& t, std::string_view axes, char letter, int64_t begin, int64_t end) {
  const size_t at = axes.find(letter);
  if (!t || at == std::string_view::npos) return t;
  if (letter == 'h' && t.shape[at] == 1 && axes == "bsha") return t;  // angles of all heads
  Tensor piece = t;
  piece.shape[at] = end - begin;
  if (t.data) piece.data = static_cast<char*>(t.data) + begin * t.stride[at] * size_of(t.dtype);
  return piece;
}

}  // namespace talea::cli::scan
