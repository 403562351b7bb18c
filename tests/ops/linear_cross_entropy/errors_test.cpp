// What: every refusal before work: its kind, and that it names argument and value.
// Why: "an error before any work" is a row of the contract; a caller acts on the text.
// Never: needs a lane to run.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "yardsticks/linear_cross_entropy/run.hpp"

namespace talea::testing {
namespace {

struct Refusal {
  const char* name;
  std::function<void(Case&)> bend;
  ErrorKind kind;
  std::vector<std::string> named;
};

constexpr auto usage = ErrorKind::usage;
constexpr auto data = ErrorKind::invalid_data;

void expect_refusal(const Refusal& r, const std::function<void(const Case&)>& call) {
  Case c = plain_case({.bias = true});
  r.bend(c);
  try {
    call(c);
    ADD_FAILURE() << r.name << " was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), r.kind) << error.what();
    for (const std::string& text : r.named)
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos)
          << r.name << ": \"" << error.what() << "\" does not name " << text;
  }
}

void every(const std::vector<Refusal>& refusals) {
  for (const Refusal& r : refusals)
    for (const std::string& lane : lanes_here()) {
      if (is_device_lane(lane)) continue;
      SCOPED_TRACE(std::string(r.name) + " on lane " + lane);
      expect_refusal(r, [&](const Case& c) { run_lane(host_place(), lane, c); });
    }
}

TEST(Errors, Options) {
  every({
      {"eps", [](Case& c) { c.options.label_smoothing = 1; }, usage, {"label_smoothing", "1"}},
      {"eps", [](Case& c) { c.options.label_smoothing = -0.5; }, usage, {"-0.5"}},
      {"eps", [](Case& c) { c.options.label_smoothing = NAN; }, usage, {"nan"}},
      {"zeta", [](Case& c) { c.options.z_loss = -1; }, usage, {"z_loss", "-1"}},
      {"zeta", [](Case& c) { c.options.z_loss = INFINITY; }, usage, {"z_loss", "inf"}},
      {"cap", [](Case& c) { c.options.softcap = -30; }, usage, {"softcap", "-30"}},
      {"cap", [](Case& c) { c.options.softcap = NAN; }, usage, {"softcap", "nan"}},
      {"cap", [](Case& c) { c.options.softcap = 1e-50; }, usage, {"softcap", "1e-50", "fp32"}},
      {"cap", [](Case& c) { c.options.softcap = 1e39; }, usage, {"softcap", "1e+39", "fp32"}},
      {"scale", [](Case& c) { c.options.logit_scale = 0; }, usage, {"logit_scale", "0"}},
      {"scale", [](Case& c) { c.options.logit_scale = NAN; }, usage, {"logit_scale", "nan"}},
      {"scale", [](Case& c) { c.options.logit_scale = 1e-60; }, usage, {"logit_scale", "1e-60"}},
      {"scale", [](Case& c) { c.options.logit_scale = -1e39; }, usage, {"logit_scale", "-1e+39"}},
      {"given",
       [](Case& c) { c.options.denominator = Denominator::given; },
       usage,
       {"denominator", "0"}},
      {"scope",
       [](Case& c) {
         c.options.denominator = Denominator::given;
         c.options.denominator_value = 4;
         c.options.denominator_scope = DenominatorScope::global;
       },
       usage,
       {"denominator_scope"}},
      {"limit", [](Case& c) { c.options.workspace_limit_bytes = -5; }, usage, {"-5"}},
      {"threads", [](Case& c) { c.options.threads = -2; }, usage, {"threads", "-2"}},
      {"threads", [](Case& c) { c.options.threads = 5000; }, usage, {"threads", "5000", "4096"}},
      {"vocab", [](Case& c) { c.options.vocab = -3; }, usage, {"vocab", "-3"}},
      {"vocab", [](Case& c) { c.options.vocab = 12; }, data, {"vocab", "12", "11"}},
      {"saved",
       [](Case& c) { c.in.saved_lse = Array(DType::f32, {7}); },
       usage,
       {"saved_lse", "saved_target_logprob"}},
      {"top-k",
       [](Case& c) {
         c.out.topk_ids = Array(DType::i64, {7, 33});
       },
       usage,
       {"33", "32"}},
      {"top-k",
       [](Case& c) {
         c.out.topk_ids = Array(DType::i64, {7, 12});
       },
       usage,
       {"12", "11"}},
  });
}

TEST(Errors, Shapes) {
  every({
      {"weight",
       [](Case& c) {
         c.in.weight = Array(DType::f32, {11, 4});
       },
       data,
       {"weight", "[11, 4]", "[11, 5]"}},
      {"bias",
       [](Case& c) { c.in.bias = Array(DType::f32, {10}); },
       data,
       {"bias", "[10]", "[11]"}},
      {"targets", [](Case& c) { c.in.targets = Array(DType::i64, {6}); }, data, {"targets", "[6]"}},
      {"class",
       [](Case& c) { c.in.class_weight = Array(DType::f32, {3}); },
       data,
       {"class_weight", "[3]", "[11]"}},
      {"token",
       [](Case& c) { c.in.token_weight = Array(DType::f32, {8}); },
       data,
       {"token_weight", "[8]", "[7]"}},
      {"scale", [](Case& c) { c.in.token_scale = Array(DType::f32, {8}); }, data, {"token_scale"}},
      {"upstream",
       [](Case& c) { c.in.upstream = Array(DType::f32, {7}); },
       data,
       {"upstream", "[7]", "[]"}},
      {"upstream",
       [](Case& c) {
         c.options.reduction = Reduction::none;
         c.out.loss = Array(DType::f32, {7});
         c.in.upstream = Array(DType::f32, {});
       },
       data,
       {"upstream", "[]", "[7]"}},
      {"loss", [](Case& c) { c.out.loss = Array(DType::f32, {7}); }, data, {"loss", "[7]"}},
      {"lse", [](Case& c) { c.out.lse = Array(DType::f32, {3}); }, data, {"lse", "[3]"}},
      {"dx",
       [](Case& c) {
         c.out.dx = Array(DType::f32, {7, 6});
       },
       data,
       {"dx", "[7, 6]"}},
      {"dw",
       [](Case& c) {
         c.out.dw = Array(DType::f32, {11, 6});
       },
       data,
       {"dw", "[11, 6]"}},
      {"db", [](Case& c) { c.out.db = Array(DType::f32, {12}); }, data, {"db", "[12]"}},
      {"hidden", [](Case& c) { c.in.hidden = Array(DType::f32, {7}); }, data, {"hidden", "[7]"}},
      {"hidden", [](Case& c) { c.in.hidden = Array(); }, data, {"hidden"}},
      {"weight",
       [](Case& c) {
         c.in.weight = Array(DType::f32, {0, 5});
         c.in.bias = Array();
         c.out.db = Array();
         c.out.dw = Array();
       },
       data,
       {"vocab", "0"}},
  });
}

TEST(Errors, Dtypes) {
  every({
      {"hidden",
       [](Case& c) {
         c.in.hidden = Array(DType::i32, {7, 5});
       },
       data,
       {"hidden", "int32", "bf16"}},
      {"weight",
       [](Case& c) {
         c.in.weight = Array(DType::bf16, {11, 5});
       },
       data,
       {"weight", "bf16", "fp32"}},
      {"weight",
       [](Case& c) {
         c.in.hidden = Array(DType::bf16, {7, 5});
         c.in.weight = Array(DType::f16, {11, 5});
       },
       data,
       {"weight", "fp16"}},
      {"targets",
       [](Case& c) { c.in.targets = Array(DType::f32, {7}); },
       data,
       {"targets", "fp32", "int64"}},
      {"bias", [](Case& c) { c.in.bias = Array(DType::f16, {11}); }, data, {"bias", "fp16"}},
      {"loss", [](Case& c) { c.out.loss = Array(DType::bf16, {}); }, data, {"loss", "bf16"}},
      {"argmax", [](Case& c) { c.out.argmax = Array(DType::i32, {7}); }, data, {"argmax", "int32"}},
      {"dw",
       [](Case& c) {
         c.out.dw = Array(DType::f16, {11, 5});
       },
       data,
       {"dw", "fp16"}},
      {"main grad",
       [](Case& c) {
         c = plain_case({.dtype = DType::bf16, .bias = true});
         c.accumulate_dw = true;
       },
       data,
       {"dw", "bf16"}},
  });
}

TEST(Errors, Presence) {
  every({
      {"loss",
       [](Case& c) {
         c.in.targets = Array();
         c.out.target_logprob = c.out.accuracy = Array();
       },
       usage,
       {"loss"}},
      {"logprob",
       [](Case& c) {
         c.in.targets = Array();
         c.out.loss = Array();
       },
       usage,
       {"target_logprob"}},
      {"both",
       [](Case& c) {
         c.in.soft_target_probs = Array(DType::f32, {7, 11});
       },
       usage,
       {"targets", "soft_target_probs"}},
      {"ids",
       [](Case& c) {
         c.in.soft_target_ids = Array(DType::i64, {7, 2});
       },
       usage,
       {"soft_target_ids"}},
      {"db", [](Case& c) { c.in.bias = Array(); }, usage, {"db", "bias"}},
      {"gradient",
       [](Case& c) {
         c.in.targets = Array();
         c.out.loss = c.out.target_logprob = c.out.accuracy = Array();
       },
       usage,
       {"upstream_lse"}},
  });
}

TEST(Errors, Data) {
  const auto weights = [](Real bad) {
    return [bad](Case& c) {
      c.in.class_weight = Array(DType::f32, {11});
      for (int64_t v = 0; v < 11; ++v) c.in.class_weight.set(v, 0, v == 6 ? bad : Real(1));
    };
  };
  const auto scales = [](Real bad) {
    return [bad](Case& c) {
      c.in.token_scale = Array(DType::f32, {7});
      for (int64_t t = 0; t < 7; ++t) c.in.token_scale.set(t, 0, t == 2 ? bad : Real(1));
    };
  };
  every({
      {"class", weights(-1), data, {"class_weight[6]", "-1"}},
      {"class", weights(NAN), data, {"class_weight[6]", "nan"}},
      {"class", weights(INFINITY), data, {"class_weight[6]", "inf"}},
      {"scale", scales(0), data, {"token_scale[2]", "0"}},
      {"scale", scales(NAN), data, {"token_scale[2]", "nan"}},
      {"scale",
       [&](Case& c) {
         scales(1e-30)(c);
         c.options.logit_scale = 1e-30;  // their product is 0 in fp32
       },
       data,
       {"token_scale[2]", "1e-30"}},
      {"target", [](Case& c) { c.in.targets.set_integer(5, 0, 11); }, data, {"targets[5]", "11"}},
      {"soft id",
       [](Case& c) {
         c.in.targets = Array();
         c.in.soft_target_ids = Array(DType::i64, {7, 1});
         c.in.soft_target_probs = Array(DType::f32, {7, 1});
         for (int64_t t = 0; t < 7; ++t) {
           c.in.soft_target_ids.set_integer(t, 0, t == 4 ? 99 : 1);
           c.in.soft_target_probs.set(t, 0, 1);
         }
         want_everything(c);
       },
       data,
       {"soft_target_ids[4, 0]", "99"}},
  });
}

}  // namespace
}  // namespace talea::testing
