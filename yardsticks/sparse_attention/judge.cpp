// What: elementwise comparison against truth and yardstick, and the L2 of whole tensors.
// Why: a factor, a dropped key or a stale tile shows in some element.
// Never: lets NaN pass where the truth is a number, or the reverse.
#include "yardsticks/sparse_attention/judge.hpp"

#include <algorithm>
#include <cmath>

namespace talea::yardsticks::sparse_attention {
namespace {

bool same_odd(double a, double b) { return (std::isnan(a) && std::isnan(b)) || a == b; }

std::string number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", x);
  return text;
}

// lse and row_max: 1e-6 of the largest of |logit|, |lse|, 1, or `cut` where that is more, and what
// the caller adds.
std::string compare_rows(const char* name, const std::vector<double>& ours,
                         const std::vector<double>& truth, double largest, double cut,
                         double more) {
  if (ours.size() != truth.size()) return std::string(name) + ": another size; ";
  for (size_t i = 0; i < ours.size(); ++i) {
    if (same_odd(ours[i], truth[i])) continue;
    const double room = 1e-6 * std::max({largest, std::abs(truth[i]), 1.0}) + more;
    const double error = std::abs(ours[i] - truth[i]);
    if (error > room && cut > 0)
      used_of_cut_sums = std::max(used_of_cut_sums, (error - more) / cut);
    if (!(error <= std::max(room, cut + more)))
      return std::string(name) + "[" + std::to_string(i) + "] = " + number(ours[i]) + " for " +
             number(truth[i]) + "; ";
  }
  return "";
}

double worst(const std::vector<double>& ours, const std::vector<double>& truth) {
  double most = 0;
  for (size_t i = 0; i < truth.size(); ++i)
    if (std::isfinite(ours[i]) && std::isfinite(truth[i]))
      most = std::max(most, std::abs(ours[i] - truth[i]));
  return most;
}

// Beyond the rule of lse and row_max, where a device multiplies a bf16 copy of FP8 rows: the error
// of eager code, whose operands are that copy.
double room_of_copies(const Case& c, const Outcome& ours, const std::vector<double>& eager,
                      const std::vector<double>& truth) {
  const bool copied = ours.on_device && c.options.kv_storage != sa::KvStorage::plain;
  return copied ? 2 * worst(eager, truth) : 0;
}

// Of logits that a tensor core formed: those of 16-bit operands on a device.
double cut_of_logits(const Case& c, const Outcome& ours, double largest) {
  const bool cores = ours.on_device && size_of(c.q.dtype()) <= 2;
  return cores && c.dim() > 128 ? room_of_cut_sums(c.dim(), largest) : 0;
}

}  // namespace

double used_of_cut_sums = 0;

double room_of_cut_sums(int64_t columns, double largest) {
  return std::ldexp(static_cast<double>((columns + 15) / 16) * largest, -23);
}

double relative_l2(const std::vector<double>& ours, const std::vector<double>& truth) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    if (!std::isfinite(truth[i]) || !std::isfinite(ours[i])) continue;
    error += (ours[i] - truth[i]) * (ours[i] - truth[i]);
    norm += truth[i] * truth[i];
  }
  return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}

std::string compare(const Compared& t) {
  const std::vector<double>&ours = *t.ours, &truth = *t.truth, &eager = *t.yardstick;
  if (ours.size() != truth.size()) return std::string(t.name) + ": another size; ";
  const bool half = size_of(t.dtype) == 2;
  double largest = 0, worst_eager = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    if (!std::isfinite(truth[i])) continue;
    largest = std::max(largest, std::abs(truth[i]));
    if (std::isfinite(eager[i])) worst_eager = std::max(worst_eager, std::abs(eager[i] - truth[i]));
    if (t.stored && std::isfinite((*t.stored)[i]))
      worst_eager = std::max(worst_eager, std::abs((*t.stored)[i] - truth[i]));
  }
  largest = std::max(largest, t.term);
  const double e = t.dtype == DType::f64 ? 1e-12 : (half ? 1e-4 : 1e-6) + t.growth;
  for (size_t i = 0; i < truth.size(); ++i) {
    if (same_odd(ours[i], truth[i])) continue;
    // Where eager code fails, it allows nothing. Below the smallest number there are no digits.
    const double rough = std::isfinite(eager[i]) ? std::abs(eager[i] - truth[i]) : 0;
    double room = e * largest + (half ? 2 * worst_eager : rough) + 0x1p-126;
    if (!t.extra.empty()) room += t.extra[t.extra.size() == 1 ? 0 : i];
    if (!(std::abs(ours[i] - truth[i]) <= room))
      return std::string(t.name) + "[" + std::to_string(i) + "] = " + number(ours[i]) + " for " +
             number(truth[i]) + ", eager " + number(eager[i]) + ", room " + number(room) + "; ";
  }
  if (!half || truth.empty()) return "";
  const double rows = static_cast<double>(truth.size()) / static_cast<double>(t.row);
  // Of a truth that is 0 throughout (one key has all the weight) an error has no size beside it,
  // but beside the terms that cancel.
  const bool nothing = std::all_of(truth.begin(), truth.end(), [](double x) { return x == 0; });
  const double size =
      nothing && largest > 0 ? largest * std::sqrt(static_cast<double>(truth.size())) : 1;
  const double own = relative_l2(ours, truth) / size;
  const double limit =
      std::max(relative_l2(eager, truth), t.stored ? relative_l2(*t.stored, truth) : 0) / size;
  if (!(own <= limit * (1 + 4 / std::sqrt(rows)) + 1e-4))
    return std::string(t.name) + ": relative L2 " + number(own) + " where eager has " +
           number(limit) + "; ";
  return "";
}

std::string judge(const Case& c, const Outcome& ours, bool one_order) {
  const Numbers right = truth(c), rough = eager(c);
  const DType in = size_of(c.q.dtype()) == 1 ? DType::bf16 : c.q.dtype();
  const double growth = std::ldexp(right.largest_logit, -22);
  std::string complaints = ours.damage;
  complaints += compare({.name = "o",
                         .ours = &ours.o,
                         .truth = &right.o,
                         .yardstick = &rough.o,
                         .row = c.value_dim(),
                         .dtype = in,
                         .growth = growth});
  const double cut = cut_of_logits(c, ours, right.largest_logit);
  complaints += compare_rows("lse", ours.lse, right.lse, right.largest_logit, cut,
                             room_of_copies(c, ours, rough.lse, right.lse));
  complaints += compare_rows("row_max", ours.row_max, right.row_max, right.largest_logit, cut,
                             room_of_copies(c, ours, rough.row_max, right.row_max));
  const bool counted = ours.forward.slots_valid >= 0;  // a device counts foreign indices alone
  if ((counted && right.valid != ours.forward.slots_valid) ||
      right.foreign != ours.forward.slots_foreign ||
      right.first_foreign != ours.forward.first_foreign_slot)
    complaints += "slots: " + std::to_string(ours.forward.slots_valid) + " valid, " +
                  std::to_string(ours.forward.slots_foreign) + " foreign for " +
                  std::to_string(right.valid) + ", " + std::to_string(right.foreign) + "; ";
  // With it o has the digits of the lane's sum: of weights rounded to 16 bits, those of eager code.
  const bool once = ours.on_device && (c.options.operands == sa::Operands::native ||
                                       c.options.kv_storage != sa::KvStorage::plain);
  const double lost = once ? 2 * worst(rough.o, right.o) : 0;
  for (size_t i = 0; i < ours.o_residual.size(); ++i) {
    const double exact = right.o[i], both = ours.o[i] + ours.o_residual[i];
    if (std::isfinite(exact) &&
        !(std::abs(both - exact) <= 2e-5 * std::abs(exact) + 1e-5 * (1 + growth) + lost)) {
      complaints += "o_residual[" + std::to_string(i) + "]: o + residual = " + number(both) +
                    " for " + number(exact) + "; ";
      break;
    }
  }
  if (!c.backward()) return complaints;
  const StoredO kept = {ours.o, ours.o_residual};
  const Numbers stored = truth(c, &kept);
  complaints += compare({.name = "dq",
                         .ours = &ours.dq,
                         .truth = &right.dq,
                         .yardstick = &rough.dq,
                         .row = c.dim(),
                         .dtype = in,
                         .growth = growth,
                         .term = one_order ? 0 : right.dq_term,
                         .stored = &stored.dq});
  complaints += compare({.name = "dkv",
                         .ours = &ours.dkv,
                         .truth = &right.dkv,
                         .yardstick = &rough.dkv,
                         .row = c.dim(),
                         .dtype = in,
                         .growth = growth,
                         .term = one_order ? 0 : right.dkv_term,
                         .stored = &stored.dkv});
  if (!c.sink) return complaints;
  // Units of o's last place.
  const double place = std::ldexp(1.0, in == DType::bf16 ? -8 : in == DType::f16 ? -11 : -24);
  std::vector<double> room;
  for (const double squares : right.d_sink_squares) room.push_back(4 * place * std::sqrt(squares));
  complaints += compare({.name = "d_sink",
                         .ours = &ours.d_sink,
                         .truth = &right.d_sink,
                         .yardstick = &rough.d_sink,
                         .dtype = in,
                         .growth = growth,
                         .extra = room,
                         .stored = &stored.d_sink});
  return complaints;
}

}  // namespace talea::yardsticks::sparse_attention
