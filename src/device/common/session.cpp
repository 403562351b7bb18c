// What: the device session of a CUDA build, and the three plain products.
// Why: tools time every lane and the library's products by the same events on the same stream.
// Never: used by a lane.
#include <functional>
#include <vector>

#include "core/device_session.hpp"
#include "core/fail.hpp"
#include "device/common/cublaslt.hpp"
#include "device/common/nvml.hpp"
#include "device/common/random.hpp"

namespace talea {
namespace {

using device::check;

class CudaSession final : public DeviceSession {
 public:
  explicit CudaSession(int index) : index_(index) {
    const device::DeviceGuard current(index_);
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
    check(cudaDeviceGetPCIBusId(bus_, sizeof(bus_), index_), "cudaDeviceGetPCIBusId");
  }
  ~CudaSession() override {
    for (void* p : blocks_) cudaFree(p);
    for (cudaEvent_t e : marks_) cudaEventDestroy(e);
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(stream_);
  }
  CudaSession(const CudaSession&) = delete;
  CudaSession& operator=(const CudaSession&) = delete;

  Stream stream() override { return stream_; }

  void* allocate(int64_t bytes) override {
    const device::DeviceGuard current(index_);
    void* p = nullptr;
    check(cudaMalloc(&p, static_cast<size_t>(bytes > 0 ? bytes : 1)), "cudaMalloc");
    blocks_.push_back(p);
    return p;
  }
  void free_all() override {
    synchronise();
    for (void* p : blocks_) check(cudaFree(p), "cudaFree");
    blocks_.clear();
  }
  void upload(void* to, const void* from, int64_t bytes) override {
    copy(to, from, bytes, cudaMemcpyHostToDevice);
  }
  void download(void* to, const void* from, int64_t bytes) override {
    copy(to, from, bytes, cudaMemcpyDeviceToHost);
  }
  void fill_bytes(void* to, int value, int64_t bytes) override {
    check(cudaMemsetAsync(to, value, static_cast<size_t>(bytes), stream_), "cudaMemsetAsync");
  }
  void fill_normal(const Tensor& t, uint64_t seed, double deviation) override {
    const device::DeviceGuard current(index_);
    device::fill_normal(t.data, t.dtype, t.elements(), seed, static_cast<float>(deviation),
                        stream_);
  }
  void fill_ids(const Tensor& t, uint64_t seed, int64_t bound) override {
    const device::DeviceGuard current(index_);
    device::fill_ids(static_cast<int64_t*>(t.data), t.elements(), seed, bound, stream_);
  }
  void synchronise() override { check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

  double time_ms(const std::function<void()>& work) override {
    const device::DeviceGuard current(index_);
    check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    work();
    check(cudaEventRecord(end_, stream_), "cudaEventRecord");
    check(cudaEventSynchronize(end_), "cudaEventSynchronize");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
    return ms;
  }
  int mark() override {
    const device::DeviceGuard current(index_);
    cudaEvent_t event = nullptr;
    check(cudaEventCreate(&event), "cudaEventCreate");
    marks_.push_back(event);
    check(cudaEventRecord(event, stream_), "cudaEventRecord");
    return static_cast<int>(marks_.size()) - 1;
  }
  double between_ms(int first, int last) override {
    const cudaEvent_t begin = marks_.at(static_cast<size_t>(first)),
                      end = marks_.at(static_cast<size_t>(last));
    check(cudaEventSynchronize(end), "cudaEventSynchronize");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    return ms;
  }
  void queue_copy(void* to, const void* from, int64_t bytes) override {
    check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream_),
          "cudaMemcpyAsync");
  }
  int64_t free_bytes() override {
    const device::DeviceGuard current(index_);
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return static_cast<int64_t>(free);
  }
  DeviceClocks clocks() override { return device::read_clocks(bus_); }
  std::string name() override {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, index_), "cudaGetDeviceProperties");
    return properties.name;
  }
  std::string runtime() override {
    int version = 0;
    check(cudaRuntimeGetVersion(&version), "cudaRuntimeGetVersion");
    return fmt::format("CUDA {}.{}, cuBLASLt {}", version / 1000, version % 1000 / 10,
                       device::cublaslt_version());
  }

 private:
  void copy(void* to, const void* from, int64_t bytes, cudaMemcpyKind kind) {
    check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind, stream_), "cudaMemcpyAsync");
    synchronise();
  }

  int index_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  char bus_[32] = {};
  std::vector<void*> blocks_;
  std::vector<cudaEvent_t> marks_;
};

// What cuBLAS itself asks for on this generation of chips: the limit is not starved of workspace.
constexpr int64_t plain_workspace_bytes = int64_t{32} << 20;

// Row-major c = a b^T, a b or a^T b, told to cuBLASLt column by column.
void plain(const Tensor& left, bool transpose_left, const Tensor& right, bool transpose_right,
           const Tensor& c, void* workspace, Stream stream) {
  const float one = 1, zero = 0;
  device::Product g;
  g.transpose_a = transpose_left;
  g.transpose_b = transpose_right;
  g.m = c.shape[1];
  g.n = c.shape[0];
  g.k = transpose_left ? left.shape[1] : left.shape[0];
  g.lda = left.stride[0];
  g.ldb = right.stride[0];
  g.ldc = c.stride[0];
  g.in = left.dtype;
  g.out = c.dtype;
  g.workspace_bytes = plain_workspace_bytes;
  g.alignment_a = device::alignment_of(left.data, g.lda, g.in);
  g.alignment_b = device::alignment_of(right.data, g.ldb, g.in);
  g.alignment_c = device::alignment_of(c.data, g.ldc, g.out);
  device::run_product(g, {left.data, right.data, c.data, &one, &zero, workspace},
                      device::cuda_stream(stream));
}

}  // namespace

std::unique_ptr<DeviceSession> DeviceSession::open(int device_index, std::string& why) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && device_index >= 0 && device_index < count)
    return std::make_unique<CudaSession>(device_index);
  cudaGetLastError();
  why = status != cudaSuccess ? cudaGetErrorString(status)
                              : fmt::format("CUDA device {} of {}", device_index, count);
  return nullptr;
}

int64_t plain_products_workspace_bytes() { return plain_workspace_bytes; }

void queue_plain_logits(const PlainProducts& p, Stream stream) {
  plain(p.weight, true, p.hidden, false, p.logits, p.workspace, stream);
}
void queue_plain_dx(const PlainProducts& p, Stream stream) {
  plain(p.weight, false, p.logits, false, p.dx, p.workspace, stream);
}
void queue_plain_dw(const PlainProducts& p, Stream stream) {
  plain(p.hidden, false, p.logits, true, p.dw, p.workspace, stream);
}

}  // namespace talea
