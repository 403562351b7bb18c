#!/bin/sh
# A project takes Talea in by add_subdirectory, as docs/cpp_api.md says: it is not made to build tests
# or tool, and the headers compile without further settings. The library itself is not built again.
# usage: check_subdirectory.sh SOURCE_DIR
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$1/examples/cpp/training_step.cpp" "$work"
cat >"$work/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.25)
project(consumer CXX)
add_subdirectory($1 talea)
add_library(consumer OBJECT training_step.cpp)
target_link_libraries(consumer PRIVATE talea_internal)
if(TARGET talea_tests OR TARGET talea_tool)
  message(FATAL_ERROR "a consumer is made to build the tests or the tool")
endif()
END
cmake -G Ninja -S "$work" -B "$work/build" -DTALEA_MPI=OFF >"$work/log" 2>&1 || {
  cat "$work/log"
  exit 1
}
ninja -C "$work/build" CMakeFiles/consumer.dir/training_step.cpp.o
