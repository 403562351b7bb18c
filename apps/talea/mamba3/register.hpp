// What: the subcommands of the scan, for the table of main.cpp.
// Why: one line a subcommand there; nothing else of an operator is known to it.
// Never: holds a flag.
#pragma once

#include "context.hpp"
#include "talea/call.hpp"

namespace talea::cli {

void register_scan(CLI::App& app, Context& context);
void register_scan_check(CLI::App& app, Context& context);
void register_scan_bench(CLI::App& app, Context& context);
void register_scan_explain(CLI::App& app, Context& context);
// What a lane says to an ordinary forward pass, for doctor.
LaneChoice ordinary_scan(const std::string& lane, DeviceKind where);

}  // namespace talea::cli
