// What: a dense talea_tensor over memory of the test, and a call with a workspace of its own.
// Why: C leaves strides and workspace to the caller; the tests write a shape.
// Never: includes a header of the C++ interface.
#pragma once

#include <talea/talea.h>

#include <initializer_list>
#include <vector>

inline talea_tensor view(void* data, int32_t dtype, std::initializer_list<int64_t> shape) {
  talea_tensor t{};
  t.data = data;
  t.dtype = dtype;
  t.present = 1;
  for (int64_t extent : shape) t.shape[t.rank++] = extent;
  int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    t.stride[i] = stride;
    stride *= t.shape[i];
  }
  return t;
}

inline talea_linear_cross_entropy_args args_of(const talea_linear_cross_entropy_inputs& inputs,
                                               const talea_linear_cross_entropy_outputs& outputs,
                                               const talea_linear_cross_entropy_options& options) {
  talea_linear_cross_entropy_args args{};
  args.struct_bytes = sizeof args;
  args.abi_version = TALEA_ABI_VERSION;
  args.inputs = &inputs;
  args.outputs = &outputs;
  args.options = &options;
  return args;
}

// The workspace holds what no call may rely on.
inline talea_status call_in(std::vector<char>& workspace, talea_linear_cross_entropy_args& args,
                            talea_result** result = nullptr) {
  const talea_status status =
      talea_linear_cross_entropy_workspace_bytes(&args, &args.workspace_bytes);
  if (status != TALEA_OK) return status;
  workspace.assign(static_cast<size_t>(args.workspace_bytes), static_cast<char>(0xff));
  args.workspace = workspace.data();
  return talea_linear_cross_entropy(&args, result);
}
