#!/bin/sh
# Installs into a fresh prefix and builds the C example from there twice: by find_package(talea) and
# by pkg-config; both programs must run.
# usage: check_install.sh BUILD_DIR SOURCE_DIR
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$1" --prefix "$work/prefix" >"$work/install.log"
cat >"$work/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.25)
project(consumer C)
find_package(talea 0.1 REQUIRED)
add_executable(consumer $2/examples/c/training_step.c)
set_target_properties(consumer PROPERTIES C_STANDARD 11 C_EXTENSIONS OFF)
target_link_libraries(consumer PRIVATE talea::talea)
END
cmake -S "$work" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix" >"$work/configure.log"
cmake --build "$work/build" >"$work/build.log"
"$work/build/consumer"
pc=$(find "$work/prefix" -name talea.pc)
libdir=$(dirname "$(dirname "$pc")")
flags=$(PKG_CONFIG_PATH=$(dirname "$pc") pkg-config --define-variable=prefix="$work/prefix" \
  --cflags --libs talea)
# shellcheck disable=SC2086
cc -std=c11 -Wall -Wextra -Wpedantic -Werror "$2/examples/c/training_step.c" $flags -o "$work/by_pc"
LD_LIBRARY_PATH=$libdir "$work/by_pc"
