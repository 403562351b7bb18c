// What: the memory of the current CUDA device as a place, with a stream of its own.
// Why: the only file of yardsticks that needs the CUDA runtime; built with TALEA_CUDA only.
// Never: uses the default stream.
#ifdef TALEA_WITH_CUDA
#include <cuda_runtime_api.h>

#include <vector>

#include "yardsticks/place.hpp"

namespace talea::testing {
namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw Error(ErrorKind::runtime, std::string(what) + ": " + cudaGetErrorString(status));
}

class CudaPlace final : public Place {
 public:
  CudaPlace() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    check(cudaMalloc(&pool_, pool_bytes), "cudaMalloc");
  }
  ~CudaPlace() override {
    for (void* p : blocks_) cudaFree(p);
    cudaFree(pool_);
    cudaStreamDestroy(stream_);
  }
  DeviceKind kind() const override { return DeviceKind::cuda; }
  void* allocate(int64_t bytes) override {
    const int64_t aligned = (bytes + 511) / 256 * 256;
    if (used_ + aligned <= pool_bytes) {
      used_ += aligned;
      return static_cast<char*>(pool_) + used_ - aligned;
    }
    void* p = nullptr;
    check(cudaMalloc(&p, static_cast<size_t>(aligned)), "cudaMalloc");
    blocks_.push_back(p);
    return p;
  }
  void reset() override {
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    for (void* p : blocks_) check(cudaFree(p), "cudaFree");
    blocks_.clear();
    used_ = 0;
  }
  void upload(void* to, const void* from, int64_t bytes) override {
    check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream_),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }
  void download(void* to, const void* from, int64_t bytes) override {
    check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream_),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }
  Stream stream() override { return stream_; }

 private:
  static constexpr int64_t pool_bytes = int64_t{256} << 20;
  cudaStream_t stream_ = nullptr;
  void* pool_ = nullptr;
  int64_t used_ = 0;
  std::vector<void*> blocks_;
};

}  // namespace

Place* cuda_place(std::string& why) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    cudaGetLastError();  // "no device" is an answer, not a sticky error
    why = "unavailable: no CUDA device";
    return nullptr;
  }
  thread_local CudaPlace place;  // ranks over threads have one each
  return &place;
}

}  // namespace talea::testing
#endif
