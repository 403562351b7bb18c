# The library: one object set, linked as libtalea.so (exported talea_* only) and, for the tool and
# the tests, as the static library talea_internal with all C++ symbols.
file(GLOB_RECURSE talea_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/*.cpp)
if(TALEA_CUDA)
  list(FILTER talea_sources EXCLUDE REGEX "linear_cross_entropy/not_built.cpp$")
else()
  list(FILTER talea_sources EXCLUDE REGEX "/(cuda|sm90)/|src/device/(common|sm90)")
endif()
if(NOT TALEA_MPI)
  list(FILTER talea_sources EXCLUDE REGEX "src/dist/mpi")
endif()

include(cmake/embed.cmake)
add_library(talea_internal STATIC ${talea_sources})
add_dependencies(talea_internal talea_git_facts)
target_include_directories(talea_internal PRIVATE ${talea_generated})
target_include_directories(talea_internal PUBLIC ${PROJECT_SOURCE_DIR}/include
                                                 ${PROJECT_SOURCE_DIR}/src)
find_package(hwy REQUIRED)
find_package(dnnl REQUIRED)
target_link_libraries(talea_internal PUBLIC OpenMP::OpenMP_CXX fmt::fmt-header-only
                                     PRIVATE hwy::hwy DNNL::dnnl)
# Highway's kernels: the same code for every instruction set, chosen at run time. Scalable vectors
# are left out because a register block has a fixed size.
target_compile_definitions(talea_internal PRIVATE
                           "HWY_DISABLED_TARGETS=(HWY_SVE|HWY_SVE2|HWY_RVV)")
target_compile_definitions(talea_internal PUBLIC $<$<BOOL:${TALEA_CUDA}>:TALEA_CUDA>
                                                 $<$<BOOL:${TALEA_MPI}>:TALEA_MPI>
                                                 $<$<BOOL:${TALEA_MUTANTS}>:TALEA_MUTANTS>)
if(TALEA_CUDA)
  include(cmake/cuda.cmake)
endif()
