// What: the curves of a run in JSON, thinned.
// Why: what a reader wants to see is decided beside what is recorded.
// Never: smooths or averages: a point is one step's value.
#include "train/curves.hpp"

#include <cmath>
#include <nlohmann/json.hpp>

namespace talea::train {
namespace {

using nlohmann::json;

class Curves {
 public:
  Curves(const std::vector<StepRecord>& steps, int64_t stride) : steps_(steps), stride_(stride) {}

  template <typename F>
  void add(const std::string& name, const char* label, F value) {
    json x = json::array(), y = json::array();
    const auto count = static_cast<int64_t>(steps_.size());
    for (int64_t i = 0; i < count; ++i) {
      if (i > 0 && i + 1 < count && (i + 1) % stride_ != 0) continue;
      x.push_back(steps_[i].candidate.step);
      y.push_back(number(value(steps_[i])));
    }
    list.push_back({{"name", name}, {"y_label", label}, {"steps", x}, {"values", y}});
  }

  json list = json::array();

 private:
  const std::vector<StepRecord>& steps_;
  int64_t stride_;
};

json chart(const char* title, const char* text, bool log_y, std::vector<std::string> names) {
  return {{"title", title}, {"text", text}, {"log_y", log_y}, {"curves", names}};
}

}  // namespace

json number(double x) {
  if (std::isnan(x)) return "NaN";
  if (std::isinf(x)) return x > 0 ? "Infinity" : "-Infinity";
  return x;
}

int64_t curve_stride(int64_t steps, int64_t points) {
  return points > 0 ? std::max<int64_t>(1, (steps + points - 1) / points) : 1;
}

json curves_of(const std::vector<StepRecord>& steps, const TwinOptions& o, int64_t stride) {
  using R = const StepRecord&;
  Curves c(steps, stride);
  c.add("loss", "nats", [](R r) { return r.candidate.loss; });
  c.add("reference loss", "nats", [](R r) { return r.reference.loss; });
  c.add("loss difference", "nats", [](R r) { return r.drift.loss; });
  c.add("parameter drift", "relative L2", [](R r) { return r.drift.params; });
  c.add("gradient norm", "L2", [](R r) { return r.candidate.grad_norm; });
  c.add("reference gradient norm", "L2", [](R r) { return r.reference.grad_norm; });
  c.add("clip scale", "", [](R r) { return r.candidate.clip; });
  c.add("parameters moved", "relative L2", [](R r) { return r.params_moved; });
  if (o.same_state) {
    c.add("same-state loss error", "relative", [](R r) { return r.same.loss; });
    c.add("same-state logits error", "relative", [](R r) { return r.same.logits; });
    c.add("same-state gradient error", "relative", [](R r) { return r.same.grads; });
  }
  if (o.twins == 0) return c.list;
  c.add("loss noise band", "nats", [](R r) { return r.band.loss; });
  c.add("parameter noise band", "relative L2", [](R r) { return r.band.params; });
  c.add("parameters from fp32 base", "relative L2", [](R r) { return r.apart; });
  c.add("twins from fp32 base", "relative L2", [](R r) { return r.apart_band; });
  for (size_t i = 0; i <= o.beside.size(); ++i) {
    const std::string lane = i == 0 ? "fp32 base" : "lane " + o.beside[i - 1];
    c.add(lane + ": loss difference", "nats", [i](R r) { return r.beside.at(i).drift_loss; });
    c.add(lane + ": parameter drift", "relative L2",
          [i](R r) { return r.beside.at(i).drift_params; });
  }
  return c.list;
}

json charts_of(const TwinOptions& o) {
  std::vector<std::string> losses = {"loss difference", "loss noise band"};
  std::vector<std::string> drifts = {"parameter drift", "parameter noise band"};
  for (size_t i = 0; o.twins > 0 && i <= o.beside.size(); ++i) {
    const std::string lane = i == 0 ? "fp32 base" : "lane " + o.beside[i - 1];
    losses.push_back(lane + ": loss difference");
    drifts.push_back(lane + ": parameter drift");
  }
  json c = json::array();
  c.push_back(chart("Loss", "Candidate and fp64 reference; they should be one line.", false,
                    {"loss", "reference loss"}));
  c.push_back(chart("Loss difference",
                    "Distance from the fp64 run: the candidate, the largest of the twins (fp32 "
                    "runs whose weights were moved by one ulp: the noise band), the other lanes.",
                    true, losses));
  c.push_back(chart("Parameter drift", "The same for all parameters together.", true, drifts));
  if (o.twins > 0)
    c.push_back(chart("Parameters apart from the fp32 base",
                      "The base is the fp32 run of the reference lane from the same weights: what "
                      "the candidate's lane alone changes, and what one ulp changes.",
                      true, {"parameters from fp32 base", "twins from fp32 base"}));
  c.push_back(chart("Gradient norm", "Before clipping.", false,
                    {"gradient norm", "reference gradient norm"}));
  c.push_back(chart("Clip scale and parameters moved",
                    "What clipping left of the gradient; how far the weights are from the start.",
                    false, {"clip scale", "parameters moved"}));
  if (o.same_state)
    c.push_back(chart(
        "Error of one step", "Against the same step in fp64 from the candidate's own state.", true,
        {"same-state loss error", "same-state logits error", "same-state gradient error"}));
  return c;
}

}  // namespace talea::train
