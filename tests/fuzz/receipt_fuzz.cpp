// What: any bytes as a receipt: parsed, shown, compared with itself.
// Why: what the schema accepts must be shown without a crash and without markup of its own.
// Never: touches a file.
#include <cstdlib>

#include "report/report.hpp"
#include "talea/error.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace talea;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    const Receipt receipt = Receipt::parse("fuzz.json", bytes);
    const std::string html = report::render_html({{"fuzz.json", receipt}});
    if (html.find("<script") != std::string::npos) std::abort();
    if (!report::compare(receipt, receipt).worse.empty() && bytes.find("false") == bytes.npos)
      std::abort();
    Receipt::parse("again.json", receipt.text());
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::invalid_data) std::abort();
  }
  return 0;
}
