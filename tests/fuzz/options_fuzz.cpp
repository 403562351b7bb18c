// What: any lines as the arguments of `talea loss` that name options, outputs and tensors.
// Why: parsing, conversion and the library's own checks must end in a problem or in an Error.
// Never: reads a tensor: shapes are fixed, and describe() looks at no data.
#include <CLI/CLI.hpp>
#include <cstdlib>

#include "io/read_tensor.hpp"
#include "linear_cross_entropy/options.hpp"
#include "ops/linear_cross_entropy/contract.hpp"

namespace {

using namespace talea;

void describe_with(const LinearCrossEntropyOptions& options, const cli::Wanted& wanted) {
  static float buffer[64];
  static int64_t ids[4];
  LinearCrossEntropyInputs in;
  in.hidden = make_tensor(buffer, DType::f32, {4, 3});
  in.weight = make_tensor(buffer + 12, DType::f32, {5, 3});
  in.targets = make_tensor(ids, DType::i64, {4});
  LinearCrossEntropyOutputs out;
  if (wanted.loss) out.loss = make_tensor(buffer + 32, DType::f32, {});
  if (wanted.lse) out.lse = make_tensor(buffer + 40, DType::f32, {4});
  const LinearCrossEntropyProblem problem = lce::describe(in, out, options, {});
  // What was accepted must be usable: finite, and inside what the contract allows.
  if (!(problem.options.label_smoothing >= 0 && problem.options.label_smoothing < 1)) std::abort();
  if (!(problem.options.z_loss >= 0) || !(problem.options.softcap >= 0)) std::abort();
  const int64_t limit = problem.options.workspace_limit_bytes;
  if (problem.options.logit_scale == 0 || (limit < 0 && limit != workspace_auto)) std::abort();
  if (problem.vocab_local < 1 || problem.vocab_local > 5) std::abort();
}

template <typename Call>
void expect_usage_or_success(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::usage && error.kind() != ErrorKind::invalid_data) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  std::vector<std::string> arguments;
  for (size_t at = 0; at <= text.size() && arguments.size() < 32;) {
    const size_t end = std::min(text.find('\n', at), text.size());
    arguments.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  cli::OptionFlags flags;
  std::string outputs = "loss", hidden = "x.npy", dtype = "fp32";
  CLI::App app;
  flags.add(app, true);
  app.add_option("--outputs", outputs);
  app.add_option("--hidden", hidden);
  app.add_option("--dtype", dtype);
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::Error&) {
    return 0;  // the tool prints it and exits with 2
  }
  expect_usage_or_success([&] { io::parse_tensor_argument(hidden); });
  expect_usage_or_success([&] { cli::parse_dtype(dtype); });
  expect_usage_or_success([&] { describe_with(flags.options(), cli::parse_outputs(outputs)); });
  return 0;
}
