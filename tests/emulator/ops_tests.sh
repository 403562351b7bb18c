#!/bin/sh
# Links the built tests of mamba3 and sparse_attention alone into build/ops_tests (seconds instead of all of talea_tests).
cd ./build/emu || exit 1
D=tests/CMakeFiles/talea_tests.dir
g++ -fopenmp -o tests/emulator/build/ops_tests $D/ops/mamba3/*.o $D/ops/sparse_attention/*.o $D/support/main.cpp.o \
  -Wl,--start-group tests/libtalea_test_support.a yardsticks/libtalea_yardsticks.a libtalea_internal.a libtalea_fmt.a \
  tests/emulator/build/libemu_cudart.a -Wl,--end-group /usr/lib/x86_64-linux-gnu/libgtest.a /usr/lib/x86_64-linux-gnu/librapidcheck.a -lpthread -ldl
