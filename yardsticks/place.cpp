// What: host memory as a place.
// Why: each block is its own allocation, so that AddressSanitizer sees every edge.
// Never: includes a CUDA header; place_cuda.cpp does.
#include "yardsticks/place.hpp"

#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

namespace talea::testing {
namespace {

class HostPlace final : public Place {
 public:
  DeviceKind kind() const override { return DeviceKind::cpu; }
  void* allocate(int64_t bytes) override {
    void* p = ::operator new (static_cast<size_t>(bytes > 0 ? bytes : 1), std::align_val_t{256});
    blocks_.push_back(p);
    return p;
  }
  void reset() override {
    for (void* p : blocks_) ::operator delete (p, std::align_val_t{256});
    blocks_.clear();
  }
  void upload(void* to, const void* from, int64_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  void download(void* to, const void* from, int64_t bytes) override { upload(to, from, bytes); }

 private:
  std::vector<void*> blocks_;
};

}  // namespace

Place& host_place() {
  static HostPlace place;
  return place;
}

#ifndef TALEA_WITH_CUDA
Place* cuda_place(std::string& why) {
  why = "unavailable: built without CUDA";
  return nullptr;
}
#endif

}  // namespace talea::testing
