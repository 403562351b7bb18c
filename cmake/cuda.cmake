# The CUDA half of the library: machine code ahead of time for sm_80 and sm_90, or what
# CMAKE_CUDA_ARCHITECTURES names (sm_90a for the Hopper kernels), the runtime linked in, the driver and
# cuBLASLt found only at run time, so that one binary starts on a machine without a GPU and says so.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80 90)
endif()
# Of the least, the intermediate code, too: newer devices compile it.
set(talea_cuda_targets)
set(talea_cuda_kinds "[sm_@,compute_@]")
foreach(architecture IN LISTS CMAKE_CUDA_ARCHITECTURES)
  if(NOT architecture MATCHES "^[0-9]+$" OR architecture LESS 80)
    message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES: ${architecture}: numbers from 80 on, the least first")
  endif()
  string(REPLACE "@" ${architecture} kinds "${talea_cuda_kinds}")
  list(APPEND talea_cuda_targets "-gencode=arch=compute_${architecture},code=${kinds}")
  set(talea_cuda_kinds "sm_@")
endforeach()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.26 does not know it
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()

set(talea_hopper_target "-gencode=arch=compute_90a,code=sm_90a")
set(talea_cuda_runtime Static)
set(talea_cuda_runtime_library CUDA::cudart_static)
if(TALEA_EMULATED)  # PTX as it is, and who interprets it in place of the runtime
  set(talea_cuda_targets "-gencode=arch=compute_90,code=compute_90" -Xfatbin --compress=false)
  set(talea_hopper_target "-gencode=arch=compute_90a,code=compute_90a" -Xfatbin --compress=false)
  set(talea_cuda_runtime None)
  set(talea_cuda_runtime_library talea_emulator)
  add_subdirectory(${PROJECT_SOURCE_DIR}/tests/emulator tests/emulator)
endif()

file(GLOB_RECURSE talea_cuda_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/*.cu)
target_sources(talea_internal PRIVATE ${talea_cuda_sources})
foreach(source IN LISTS talea_cuda_sources)
  if(source MATCHES "/src/.*/sm90/")
    set(targets ${talea_hopper_target})
  else()
    set(targets ${talea_cuda_targets})
  endif()
  set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS ${targets})
endforeach()
# Line tables are for profilers; they name the folders of whoever builds, which a wheel must not.
set(talea_line_tables -lineinfo)
if(TALEA_PORTABLE)
  set(talea_line_tables)
endif()
set(talea_cuda_flags --expt-relaxed-constexpr --extended-lambda ${talea_line_tables})
target_compile_options(talea_internal PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${talea_cuda_flags}>")
set_target_properties(talea_internal PROPERTIES CUDA_RUNTIME_LIBRARY ${talea_cuda_runtime}
                                                CUDA_SEPARABLE_COMPILATION OFF
                                                CUDA_ARCHITECTURES OFF)
# Only the host files that speak to the runtime see its headers; the others compile as without CUDA.
set(talea_cuda_options -DTALEA_WITH_CUDA -isystem ${CUDAToolkit_INCLUDE_DIRS})
set(talea_cuda_hosts ${talea_sources})
list(FILTER talea_cuda_hosts INCLUDE REGEX
     "/src/ops/.*/(cuda|sm90|rows)/|/src/device/(common|sm90)/|/src/dist/nccl|/src/core/(device_facts|device_session_absent|provenance).cpp$")
set_property(SOURCE ${talea_cuda_hosts} APPEND PROPERTY COMPILE_OPTIONS ${talea_cuda_options})
target_link_libraries(talea_internal PUBLIC $<LINK_ONLY:${talea_cuda_runtime_library}> ${CMAKE_DL_LIBS})

# Lanes over NCCL ranks, a process a GPU: times, correctness, training; writes receipts.
add_executable(talea_nccl_bench EXCLUDE_FROM_ALL
  ${PROJECT_SOURCE_DIR}/bench/nccl/main.cpp ${PROJECT_SOURCE_DIR}/bench/nccl/errors.cpp
  ${PROJECT_SOURCE_DIR}/bench/nccl/speed.cpp ${PROJECT_SOURCE_DIR}/bench/nccl/train.cpp)
target_include_directories(talea_nccl_bench PRIVATE ${PROJECT_SOURCE_DIR})
target_link_libraries(talea_nccl_bench PRIVATE talea_internal)

# What cuBLASLt proposes for the products of lane cuda, timed.
add_executable(talea_product_bench EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/bench/product_bench.cpp)
target_compile_options(talea_product_bench PRIVATE ${talea_cuda_options})
target_link_libraries(talea_product_bench PRIVATE talea_internal)
