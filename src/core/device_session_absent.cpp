// What: the device session of a build without CUDA.
// Why: tools ask for a device in one way and are told why there is none.
// Never: does anything.
#ifndef TALEA_WITH_CUDA
#include "core/device_session.hpp"
#include "core/fail.hpp"

namespace talea {
namespace {

constexpr const char* reason = "this library was built without CUDA";

}  // namespace

std::unique_ptr<DeviceSession> DeviceSession::open(int, std::string& why) {
  why = reason;
  return nullptr;
}

int64_t plain_products_workspace_bytes() { return 0; }
void queue_plain_logits(const PlainProducts&, Stream) {
  fail(ErrorKind::unavailable, "{}", reason);
}
void queue_plain_dx(const PlainProducts&, Stream) { fail(ErrorKind::unavailable, "{}", reason); }
void queue_plain_dw(const PlainProducts&, Stream) { fail(ErrorKind::unavailable, "{}", reason); }

}  // namespace talea
#endif
