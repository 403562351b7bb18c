# The CUDA lanes: ahead-of-time code for sm_90a, runtime linked statically, no driver library.
set(CMAKE_CUDA_ARCHITECTURES 90a-real)
enable_language(CUDA)
# CMake 3.25 does not know the flag of this dialect for CUDA 13.
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
set(CMAKE_CUDA20_STANDARD__HAS_FULL_SUPPORT ON)
find_package(CUDAToolkit REQUIRED)
file(GLOB_RECURSE talea_cuda_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/*.cu)
target_sources(talea_internal PRIVATE ${talea_cuda_sources})
set_target_properties(talea_internal PROPERTIES CUDA_ARCHITECTURES 90a-real)
target_compile_options(talea_internal PRIVATE
  "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-lineinfo>")
target_link_libraries(talea_internal PUBLIC CUDA::cudart_static)
target_include_directories(talea_internal PUBLIC ${CUDAToolkit_INCLUDE_DIRS})
