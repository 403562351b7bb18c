// What: the C structs of sparse attention as the C++ values of its passes, and results as facts.
// Why: lists of fields, so that none is forgotten: their counts are checked against the structs.
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

void write_defaults(talea_sparse_attention_options* options, int64_t struct_bytes);
void write_defaults(talea_sparse_attention_select_options* options, int64_t struct_bytes);
void write_defaults(talea_sparse_attention_index_loss_options* options, int64_t struct_bytes);

// The facts' strings and lists are those of `result`, `declined` and `notes`.
talea_sparse_attention_facts facts_of(const sparse_attention::Result& result,
                                      const std::vector<talea_lane_decline>& declined,
                                      const std::vector<const char*>& notes);

}  // namespace talea::capi
