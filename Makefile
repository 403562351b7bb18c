# The front door. `make demo` and `make test` need nothing done before them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
JOBS ?= $(shell nproc)
OUT ?= out
SECONDS_EACH ?= 60

.PHONY: help setup build demo test figures-attack soak mutants asan tsan fuzz python fresh site format lint cuda clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 10

setup: ## install what the build and the tests need (apt)
	@tools/setup build test

build: ## the library and build/bin/talea
	@tools/setup build
	@cmake --preset release -DTALEA_TESTS=OFF >/dev/null
	@cmake --build build --parallel $(JOBS)

demo: build ## the main job on real input: trains on this project's sources, checks, reports
	@tools/demo $(OUT)

test: ## build and pass the tests
	@tools/setup build test
	@cmake --preset release -DTALEA_TESTS=ON >/dev/null
	@cmake --build build --parallel $(JOBS)
	@ctest --test-dir build --output-on-failure --parallel $(JOBS) -LE gpu

figures-attack: ## plant wrong figures in the pages and watch tools/check_figures refuse each
	@python3 tests/figures/attack.py

soak: ## hours: 10,000 cases a property, 100,000 runs a lane, fuzzers for 10 minutes each
	@tools/setup build test check
	@cmake --preset release -DTALEA_TESTS=ON >/dev/null
	@cmake --build build --parallel $(JOBS)
	@tools/soak

mutants: ## plant every known bug and watch the suite kill it
	@tools/setup build test
	@cmake --preset dev >/dev/null
	@cmake --build build/dev --target talea_tests --parallel $(JOBS)
	@ctest --test-dir build/dev --output-on-failure -L mutants

asan: ## the tests under the address and undefined-behaviour sanitizers
	@tools/setup build test check
	@cmake --preset asan >/dev/null
	@cmake --build build/asan --target talea_tests --parallel $(JOBS)
	@ctest --test-dir build/asan --output-on-failure -R '^sanitized' --parallel $(JOBS)

tsan: ## the tests that run threads under the thread sanitizer, which is first shown two races
	@tools/setup build test check
	@cmake --preset tsan >/dev/null
	@cmake --build build/tsan --target talea_race talea_thread_tests --parallel $(JOBS)
	@ctest --test-dir build/tsan --output-on-failure -R '^(race|threads)_' --parallel $(JOBS)

fuzz: ## each fuzzer for SECONDS_EACH (60)
	@tools/setup build test check
	@tests/fuzz/run.sh $(SECONDS_EACH)

cuda: ## build the CUDA lanes (needs nvcc, no GPU)
	@tools/setup build test
	@cmake --preset cuda >/dev/null
	@cmake --build build/cuda --parallel $(JOBS)

python: ## build the wheel and test it in a venv of its own (installs PyTorch there)
	@tools/setup build test
	@tools/wheel --test

fresh: ## `make demo` and `make test` on a bare Debian 12 and 13 (needs root and mmdebstrap)
	@tools/fresh

site: ## the documentation as a site, offline, in build/site/html
	@tools/site

format: ## clang-format everything
	@git ls-files '*.cpp' '*.hpp' '*.cu' '*.cuh' '*.h' '*.c' | xargs clang-format -i

lint: ## what pre-commit runs, without installing hooks
	@tools/lint

clean: ## remove what was built
	@rm -rf build out
