// What: the subcommands of sparse attention.
// Why: main's table of operators names them.
// Never: holds a flag.
#pragma once

#include "../context.hpp"

namespace talea::cli {

void register_check_sparse_attention(CLI::App& app, Context& context);
void register_bench_sparse_attention(CLI::App& app, Context& context);
void register_explain_sparse_attention(CLI::App& app, Context& context);

}  // namespace talea::cli
