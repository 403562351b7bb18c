// What: what a lane may know of the machine before it accepts a problem.
// Why: choices are pure functions of (problem, device facts) and can be tested anywhere.
// Never: touches a device by itself; facts are gathered once by gather_device_facts().
#pragma once

#include <cstdint>
#include <string>

namespace talea {

struct DeviceFacts {
  int threads = 1;         // that OpenMP offers
  std::string isa;         // best instruction set of the row passes, e.g. "AVX3_ZEN4"
  bool fast_bf16 = false;  // the CPU multiplies bf16 natively
  bool fast_fp16 = false;
  bool cuda_built = false;  // this library holds CUDA code
  int cuda_devices = 0;
  std::string cuda_problem;      // why there is none, where cuda_built
  std::string cublaslt_problem;  // why the products of lane cuda cannot run; empty: they can
  int sm = 0;                    // compute capability of the problem's device, 90 for Hopper
  int sm_count = 0;
  int64_t shared_bytes = 0;  // per block, opted in
  int64_t l2_bytes = 0;
  int64_t memory_bytes = 0;
  int memory_mhz = 0, memory_bus_bits = 0;  // the clock at its highest, and how wide; 0: not known
  std::string device_name;
};

// device_index: which CUDA device the facts describe (ignored without one).
DeviceFacts gather_device_facts(int device_index);
// Of that CUDA device, now; 0 where it cannot be asked.
int64_t free_device_bytes(int device_index);

}  // namespace talea
