# What `cmake --install` lays down: the C library with header, find_package(talea) and pkg-config.
include(CMakePackageConfigHelpers)

install(TARGETS talea EXPORT talea_targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES include/talea/talea.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/talea)
install(DIRECTORY include/talea/c DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/talea
        FILES_MATCHING PATTERN "*.h")
install(EXPORT talea_targets NAMESPACE talea:: FILE talea-targets.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/talea)
configure_package_config_file(cmake/talea-config.cmake.in ${PROJECT_BINARY_DIR}/talea-config.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/talea)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/talea-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/talea-config.cmake
              ${PROJECT_BINARY_DIR}/talea-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/talea)
configure_file(cmake/talea.pc.in ${PROJECT_BINARY_DIR}/talea.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/talea.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# The Python wheel takes the library alone, beside its modules.
install(FILES $<TARGET_FILE:talea> RENAME libtalea.so DESTINATION lib COMPONENT python
        EXCLUDE_FROM_ALL)
