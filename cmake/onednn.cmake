# DNNL::dnnl by its header and library, not by oneDNN's own CMake package: where a distribution builds
# oneDNN with its GPU engine, that package demands OpenCL's headers, which the CPU engine, the only
# one used here, does not need (and which Debian's libdnnl-dev does not install).
if(NOT TARGET DNNL::dnnl)
  find_path(onednn_include oneapi/dnnl/dnnl.hpp REQUIRED)
  find_library(onednn_library dnnl REQUIRED)
  mark_as_advanced(onednn_include onednn_library)
  add_library(DNNL::dnnl UNKNOWN IMPORTED GLOBAL)
  set_target_properties(DNNL::dnnl PROPERTIES IMPORTED_LOCATION ${onednn_library}
                                              INTERFACE_INCLUDE_DIRECTORIES ${onednn_include})
endif()
