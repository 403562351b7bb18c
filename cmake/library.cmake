include(GNUInstallDirs)

# The library: one object set, linked as libtalea.so (exported talea_* only) and, for the tool and
# the tests, as the static library talea_internal with all C++ symbols.
file(GLOB_RECURSE talea_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/*.cpp)
if(TALEA_CUDA)
  list(FILTER talea_sources EXCLUDE REGEX
       "linear_cross_entropy/not_built.cpp$|/not_built_cuda.cpp$")
else()
  list(FILTER talea_sources EXCLUDE REGEX "/src/.*/(cuda|sm90|rows)/|/src/device/(common|sm90)/")
endif()
list(FILTER talea_sources EXCLUDE REGEX "src/dist/mpi.cpp$")  # a plug-in of its own
list(FILTER talea_sources EXCLUDE REGEX "src/core/fmt.cpp$")
if(TALEA_ONEDNN)
  list(FILTER talea_sources EXCLUDE REGEX "src/device/cpu/onednn_absent.cpp$")
else()
  list(FILTER talea_sources EXCLUDE REGEX "src/device/cpu/onednn.cpp$")
endif()
include(cmake/fmt.cmake)
# NCCL is opened at run time; its header is needed to build.
if(TALEA_CUDA)
  find_path(nccl_include nccl.h HINTS /usr/local/cuda/include)
endif()
if(TALEA_CUDA AND nccl_include)
  list(FILTER talea_sources EXCLUDE REGEX "src/dist/nccl_absent.cpp$")
else()
  list(FILTER talea_sources EXCLUDE REGEX "src/dist/nccl.cpp$")
endif()
if(TALEA_MPI)
  include(cmake/mpi.cmake)
endif()

include(cmake/embed.cmake)

# The C door belongs to the shared library alone: it is where exceptions end.
set(talea_door_sources ${talea_sources})
list(FILTER talea_door_sources INCLUDE REGEX "/src/capi/")
list(FILTER talea_sources EXCLUDE REGEX "/src/capi/")

add_library(talea_internal STATIC ${talea_sources})
target_compile_features(talea_internal PUBLIC cxx_std_20)
add_dependencies(talea_internal talea_git_facts)
# Only where it is read: the other files compile alike in every build folder (and in the cache).
set_property(SOURCE ${PROJECT_SOURCE_DIR}/src/core/provenance.cpp
                    ${PROJECT_SOURCE_DIR}/src/core/receipt_schema.cpp
             APPEND PROPERTY INCLUDE_DIRECTORIES ${talea_generated})
target_include_directories(talea_internal PUBLIC ${PROJECT_SOURCE_DIR}/include
                                                 ${PROJECT_SOURCE_DIR}/src)
find_package(hwy REQUIRED)
target_link_libraries(talea_internal PUBLIC OpenMP::OpenMP_CXX talea_fmt ${CMAKE_DL_LIBS}
                                     PRIVATE hwy::hwy)
if(TALEA_ONEDNN)
  include(cmake/onednn.cmake)
  target_link_libraries(talea_internal PRIVATE DNNL::dnnl)
endif()
# Highway's kernels: the same code for every instruction set, chosen at run time. Scalable vectors
# are left out because a register block has a fixed size, SSE4 because no test
# runs it: processors without AVX2 have SSSE3.
target_compile_definitions(talea_internal PRIVATE
                           "HWY_DISABLED_TARGETS=(HWY_SVE|HWY_SVE2|HWY_RVV|HWY_SSE4)")
if(TALEA_SANITIZE MATCHES "undefined")
  # Checks of pointer arithmetic double what clang takes for these kernels, and an address out of an
  # object is seen where it is read.
  foreach(source IN LISTS talea_sources)
    file(STRINGS ${source} kernels REGEX "hwy/foreach_target.h" LIMIT_COUNT 1)
    if(kernels)
      list(APPEND talea_vector_sources ${source})
    endif()
  endforeach()
  set_property(SOURCE ${talea_vector_sources} APPEND PROPERTY COMPILE_OPTIONS
                                                              -fno-sanitize=pointer-overflow)
endif()
target_compile_definitions(talea_internal PUBLIC $<$<BOOL:${TALEA_MUTANTS}>:TALEA_MUTANTS>)
if(TALEA_CUDA)
  include(cmake/cuda.cmake)
endif()

# One number: the header's TALEA_ABI_VERSION is that of the SONAME and of the symbols.
file(STRINGS ${PROJECT_SOURCE_DIR}/include/talea/talea.h talea_abi
     REGEX "^#define TALEA_ABI_VERSION [0-9]+$")
string(REGEX MATCH "[0-9]+$" talea_abi "${talea_abi}")
set_property(DIRECTORY ${PROJECT_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
             ${PROJECT_SOURCE_DIR}/include/talea/talea.h)
configure_file(${PROJECT_SOURCE_DIR}/src/capi/exports.map.in ${talea_generated}/exports.map @ONLY)

add_library(talea SHARED ${talea_door_sources})
add_library(talea::talea ALIAS talea)
target_include_directories(talea PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                        $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_link_libraries(talea PRIVATE $<BUILD_INTERFACE:talea_internal>)
target_compile_definitions(talea PRIVATE TALEA_BUILDING)
set_target_properties(talea PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${talea_abi}
  LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib
  LINK_DEPENDS ${talea_generated}/exports.map)
target_link_options(talea PRIVATE
  LINKER:--version-script=${talea_generated}/exports.map LINKER:--no-undefined)
if(TALEA_PORTABLE)
  target_sources(talea PRIVATE ${PROJECT_SOURCE_DIR}/cmake/older_glibc.c)
  target_link_options(talea PRIVATE -static-libstdc++)
endif()
include(cmake/install.cmake)
