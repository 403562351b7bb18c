// What: main of the GPU tests.
// Why: a machine without a device is told so by an exit code that no runner takes for a pass.
// Never: skips single cases in silence.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdio>

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a fresh process: CUDA does not survive a fork
  if (GTEST_FLAG_GET(list_tests)) return RUN_ALL_TESTS();
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("unavailable: no CUDA device");
    return 3;
  }
  return RUN_ALL_TESTS();
}
