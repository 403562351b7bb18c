// What: the definition's recurrence and its adjoint in fp64, written down naively.
// Why: an oracle that shares code with the library would share its mistakes.
// Never: includes anything of src/.
#include "yardsticks/mamba3/oracle.hpp"

#include <cmath>

#include "yardsticks/mamba3/oracle_head.hpp"

namespace talea::yardsticks::mamba3 {
namespace {

const char* const state_names[] = {"angle", "ssm", "k", "v"};

bool backward_of(const Case& c) {
  bool backward = c.has("d_out");
  for (const char* state : state_names)
    backward = backward || c.has(std::string("d_final_") + state);
  return backward;
}

void make_room(const Case& c, const std::string& name, Values& answers) {
  int64_t n = 1;
  for (const int64_t e : shape_of(c, name)) n *= e;
  answers[name].assign(index(n), 0);
}

Values answers_of(const Case& c, bool shaken) {
  Values answers;
  const bool backward = backward_of(c);
  for (const std::string& name : forward_outputs(c)) make_room(c, name, answers);
  if (backward)
    for (const std::string& name : backward_outputs(c)) {
      make_room(c, name, answers);
      if (name.find("angle") != std::string::npos || name == "d_adt" || name == "d_dt" ||
          name == "d_trap")
        answers["noise:" + name] = answers[name];
      if (name == "d_dt" || name == "d_trap") answers["rounds:" + name] = answers[name];
    }
  for (int64_t n = 0; n < c.sequences(); ++n) {
    const bool packed = c.has("cu_seqlens");
    for (int64_t h = 0; h < c.size.H; ++h)
      Head(c, answers, n, packed ? 0 : n, packed ? c.cu[index(n)] : 0,
           packed ? c.cu[index(n + 1)] : c.size.S, h, shaken)
          .run(backward);
  }
  return answers;
}

}  // namespace

Values oracle(const Case& c) {
  Values answers = answers_of(c, false);
  if (!c.options.head_norm) return answers;
  // The norm of a row near zero magnifies what fp32 leaves of its sums: by so much.
  for (const auto& [name, shaken] : answers_of(c, true)) {
    if (name.find(':') != std::string::npos) continue;
    std::vector<double>& noise = answers["noise:" + name];
    noise.resize(shaken.size());
    for (size_t i = 0; i < shaken.size(); ++i) {
      const double moved = std::abs(shaken[i] - answers.at(name)[i]);
      if (moved > 0) noise[i] += moved / fp32_unit;  // not where the truth is NaN or infinite
    }
  }
  return answers;
}

}  // namespace talea::yardsticks::mamba3
