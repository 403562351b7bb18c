# talea_fmt: {fmt} inside the library, so that no libfmt.so is needed. Its code is compiled once,
# where the version's declarations are known; header-only otherwise, which compiles it in each file.
find_package(fmt REQUIRED)
if(fmt_VERSION VERSION_GREATER_EQUAL 9 AND fmt_VERSION VERSION_LESS 11)
  add_library(talea_fmt STATIC ${PROJECT_SOURCE_DIR}/src/core/fmt.cpp)
  target_compile_features(talea_fmt PUBLIC cxx_std_20)
  # By value: a project that adds this one as a subdirectory does not see the imported target.
  get_target_property(fmt_headers fmt::fmt-header-only INTERFACE_INCLUDE_DIRECTORIES)
  target_include_directories(talea_fmt SYSTEM PUBLIC ${fmt_headers})
else()
  add_library(talea_fmt INTERFACE)
  target_link_libraries(talea_fmt INTERFACE fmt::fmt-header-only)
endif()
