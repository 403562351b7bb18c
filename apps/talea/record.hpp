// What: a receipt for what another program measured.
// Why: see record.cpp.
// Never: measures.
#pragma once

#include "context.hpp"
#include "core/receipt.hpp"

namespace talea::cli {

// kind: bench or check. file: {"argv", "start_time", "title", "libraries", "notes", and "bench" or
// "check"}; Error(invalid_data) naming the field that is missing or of another type.
void record(Context& context, ReceiptKind kind, const std::string& file,
            const std::string& receipt_file);

}  // namespace talea::cli
