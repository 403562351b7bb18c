// What: features, dtypes and sizes, and the matrix they span.
// Why: see cases.hpp.
// Never: depends on the machine.
#include "cases.hpp"

#include <fmt/format.h>

namespace talea::cli {
namespace {

using testing::Regime;
using testing::Soft;
using testing::Spec;
using testing::Types;
using testing::Upstream;
using testing::View;

struct Feature {
  const char* name;
  void (*bend)(Spec&);
};

constexpr Feature features[] = {
    {"mean", [](Spec&) {}},
    {"sum", [](Spec& s) { s.reduction = Reduction::sum; }},
    {"none",
     [](Spec& s) {
       s.reduction = Reduction::none;
       s.upstream = Upstream::contiguous;
     }},
    {"none-strided-upstream",
     [](Spec& s) {
       s.reduction = Reduction::none;
       s.upstream = Upstream::strided;
     }},
    {"none-expanded-upstream",
     [](Spec& s) {
       s.reduction = Reduction::none;
       s.upstream = Upstream::expanded;
     }},
    {"bias", [](Spec& s) { s.bias = true; }},
    {"class-weight", [](Spec& s) { s.class_weight = true; }},
    {"token-weight",
     [](Spec& s) {
       s.token_weight = true;
       s.denominator = Denominator::weighted;
     }},
    {"denominator-given", [](Spec& s) { s.denominator = Denominator::given; }},
    {"label-smoothing", [](Spec& s) { s.label_smoothing = 0.1; }},
    {"smoothing-class-weight",
     [](Spec& s) {
       s.label_smoothing = 0.2;
       s.class_weight = true;
     }},
    {"z-loss", [](Spec& s) { s.z_loss = 1e-3; }},
    {"softcap", [](Spec& s) { s.softcap = 5; }},
    {"logit-scale", [](Spec& s) { s.logit_scale = 0.7; }},
    {"token-scale", [](Spec& s) { s.token_scale = true; }},
    {"ignored", [](Spec& s) { s.ignored_percent = 60; }},
    {"all-ignored", [](Spec& s) { s.ignored_percent = 100; }},
    {"ignore-inside",
     [](Spec& s) {
       s.ignored_percent = 30;
       s.ignore_inside = true;
     }},
    {"padded-vocab", [](Spec& s) { s.padding = 5; }},
    {"poison", [](Spec& s) { s.poison = true; }},
    {"soft-dense", [](Spec& s) { s.soft = Soft::dense; }},
    {"soft-sparse", [](Spec& s) { s.soft = Soft::sparse; }},
    {"topk", [](Spec& s) { s.top_k = 5; }},
    {"lse-entropy-upstream", [](Spec& s) { s.upstream_lse = s.upstream_entropy = true; }},
    {"confident", [](Spec& s) { s.regime = Regime::confident; }},
    {"negative", [](Spec& s) { s.regime = Regime::negative; }},
    {"transposed", [](Spec& s) { s.hidden_view = s.weight_view = View::transposed; }},
    {"strided", [](Spec& s) { s.hidden_view = s.weight_view = View::padded_rows; }},
    {"main-grad", [](Spec& s) { s.accumulate = s.wide_gradients = true; }},
    {"dw-only", [](Spec& s) { s.wants_dx = false; }},
    {"everything",
     [](Spec& s) {
       s.bias = s.class_weight = s.token_weight = true;
       s.label_smoothing = 0.1;
       s.z_loss = 1e-4;
       s.softcap = 8;
       s.ignored_percent = 30;
       s.padding = 3;
       s.top_k = 3;
     }},
};

struct Size {
  int tokens, hidden, vocab;
};
constexpr Size quick_sizes[] = {{17, 13, 67}};
constexpr Size full_sizes[] = {{7, 5, 11}, {33, 17, 257}, {64, 96, 1031}};

struct TypeName {
  const char* name;
  Types types;
};
constexpr TypeName quick_types[] = {{"fp32", Types::f32}, {"bf16", Types::bf16}};
constexpr TypeName full_types[] = {{"fp32", Types::f32},
                                   {"bf16", Types::bf16},
                                   {"fp16", Types::f16},
                                   {"bf16-fp32", Types::bf16_f32}};

template <typename TypeList, typename SizeList>
std::vector<CheckCase> span_cases(const TypeList& types, const SizeList& sizes, uint64_t seed) {
  std::vector<CheckCase> cases;
  for (const Size& size : sizes)
    for (const TypeName& type : types)
      for (const Feature& feature : features) {
        Spec s;
        s.seed = seed;
        s.tokens = size.tokens;
        s.hidden = size.hidden;
        s.vocab = size.vocab;
        s.types = type.types;
        feature.bend(s);
        cases.push_back({fmt::format("{}/{}/{}x{}x{}", feature.name, type.name, size.tokens,
                                     size.hidden, size.vocab),
                         s});
      }
  return cases;
}

}  // namespace

std::vector<CheckCase> check_cases(const std::string& preset, uint64_t seed) {
  return preset == "quick" ? span_cases(quick_types, quick_sizes, seed)
                           : span_cases(full_types, full_sizes, seed);
}

}  // namespace talea::cli
