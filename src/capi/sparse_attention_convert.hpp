// What: the C structs of sparse attention as the C++ values of its passes.
// Why: what every pass has is read once, its fields by the operator's lists.
// Never: touches tensor memory.
#pragma once

#include <memory>
#include <vector>

#include "capi/tensor.hpp"
#include "talea/sparse_attention.hpp"
#include "talea/talea.h"

namespace talea::capi {

// What every pass has beside its own tensors and options.
struct PassArguments {
  sparse_attention::Ranks ranks;
  Workspace workspace;
  Stream stream = nullptr;
  std::shared_ptr<Communicator> heads, sequence, batch;  // what ranks points to
};

struct AttentionArguments : PassArguments {
  sparse_attention::Inputs inputs;
  sparse_attention::Outputs outputs;
  sparse_attention::Options options;
};
struct SelectArguments : PassArguments {
  sparse_attention::SelectInputs inputs;
  sparse_attention::SelectOutputs outputs;
  sparse_attention::SelectOptions options;
};
struct IndexLossArguments : PassArguments {
  sparse_attention::IndexLossInputs inputs;
  sparse_attention::IndexLossOutputs outputs;
  sparse_attention::IndexLossOptions options;
};

// Throw Error(usage) for a struct, enum or pointer that is wrong in itself.
AttentionArguments convert(const talea_sparse_attention_args* args, Purpose purpose);
SelectArguments convert(const talea_sparse_attention_select_args* args, Purpose purpose);
IndexLossArguments convert(const talea_sparse_attention_index_loss_args* args, Purpose purpose);

}  // namespace talea::capi
