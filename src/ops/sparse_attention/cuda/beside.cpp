// What: index mask and packed rows of device tensors, and the reading of a status.
// Why: pack.cpp has checked the arguments; here they become launches.
// Never: synchronises, but to read a status.
#include "ops/sparse_attention/beside.hpp"

#include "ops/sparse_attention/cuda/run.hpp"

namespace talea::sparse_attention {

void index_mask_on_device(const Problem& p, const Args& a, const View& mask, Stream stream) {
  const device::DeviceGuard guard(p.device_index);
  cuda::mask_keys(cuda::tables_of(p, a), mask, p.batch, device::cuda_stream(stream));
}

void pack_rows_on_device(const Tensor& kv, const Tensor& rows, Stream stream) {
  const device::DeviceGuard guard(kv.device_index);
  cuda::PackedRows r;
  const int outer = kv.rank - 1;
  for (int i = 0; i < outer; ++i) {
    const int at = 4 - outer + i;
    r.shape[at] = kv.shape[i];
    r.from[at] = kv.stride[i];
    r.to[at] = rows.stride[i];
  }
  r.column = kv.stride[kv.rank - 1];
  View from;
  from.data = kv.data;
  from.dtype = kv.dtype;
  from.present = true;
  cuda::pack_rows(from, static_cast<uint8_t*>(rows.data), r, device::cuda_stream(stream));
}

std::array<int64_t, 4> read_status(const View& status, int device_index, Stream stream) {
  const device::DeviceGuard guard(device_index);
  const cudaStream_t queue = device::cuda_stream(stream);
  require(!device::capturing(queue), ErrorKind::usage,
          "status: needs a synchronisation, impossible while the stream is captured");
  std::array<int64_t, 4> read{};
  const auto pitch = static_cast<size_t>(status.stride[0]) * 8;
  device::check(
      cudaMemcpy2DAsync(read.data(), 8, status.data, pitch, 8, 4, cudaMemcpyDeviceToHost, queue),
      "status: reading");
  device::check(cudaStreamSynchronize(queue), "status: waiting for the stream");
  return read;
}

}  // namespace talea::sparse_attention
