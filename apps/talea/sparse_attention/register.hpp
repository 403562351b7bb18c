// What: the subcommands of sparse attention.
// Why: main's table of operators names them.
// Never: holds a flag.
#pragma once

#include "../context.hpp"
#include "talea/call.hpp"

namespace talea::cli {

void register_check_sparse_attention(CLI::App& app, Context& context);
void register_bench_sparse_attention(CLI::App& app, Context& context);
void register_explain_sparse_attention(CLI::App& app, Context& context);
// What a lane says to an ordinary forward pass, for doctor.
LaneChoice ordinary_sparse_attention(const std::string& lane, DeviceKind where);

}  // namespace talea::cli
