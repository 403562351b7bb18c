// Turns a CUDA status into an Error that names the call.
// Exists so that a failed launch is reported where it happened.
// Never clears or waits for an error of somebody else's.
#pragma once
#include <cuda_runtime.h>

#include <string>

#include "talea/error.hpp"

namespace talea {

inline void cuda_check(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw Error(ErrorKind::runtime, std::string(what) + ": " + cudaGetErrorString(status));
}

inline void launch_check(const char* kernel) { cuda_check(cudaPeekAtLastError(), kernel); }

}  // namespace talea
