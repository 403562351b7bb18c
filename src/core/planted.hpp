// What: the switch of a list of planted bugs, on the host and in every file of kernels.
// Why: several lists are planted the same way; what differs between them is their bugs.
// Never: present in a normal build: without TALEA_MUTANTS every switch is a constant false.
#pragma once

#include <cstdint>
#ifdef TALEA_MUTANTS
#include <vector>
#endif

// TALEA_PLANTED(LIST, Bug): the enum of LIST(X), whose lines are X(name, text), and mutant(Bug),
// which says whether a bug is planted. In the namespace of the list.
#define TALEA_PLANTED(LIST, Bug)                                  \
  enum class Bug : int32_t { off = 0, LIST(TALEA_PLANTED_NAME) }; \
  TALEA_PLANTED_SWITCH(Bug)
#define TALEA_PLANTED_NAME(name, text) name,

#ifdef __CUDACC__
#define TALEA_PLANTED_ANYWHERE __host__ __device__
#else
#define TALEA_PLANTED_ANYWHERE
#endif

#ifndef TALEA_MUTANTS
#define TALEA_PLANTED_SWITCH(Bug) \
  TALEA_PLANTED_ANYWHERE constexpr bool mutant(Bug) { return false; }
#else
namespace talea {

template <class Bug>
inline Bug planted{};  // set by the test program before any call

// Each file of kernels has a switch of its own on the device. They report a failure.
template <class Bug>
inline constinit std::vector<bool (*)(Bug)> device_switches;

}  // namespace talea

#ifndef __CUDACC__
#define TALEA_PLANTED_SWITCH(Bug) \
  inline bool mutant(Bug bug) { return talea::planted<Bug> == bug; }
#else
#define TALEA_PLANTED_SWITCH(Bug)                                               \
  static __device__ Bug device_##Bug = Bug::off;                                \
  static const bool knows_##Bug = [] {                                          \
    talea::device_switches<Bug>.push_back([](Bug bug) {                         \
      return cudaMemcpyToSymbol(device_##Bug, &bug, sizeof bug) == cudaSuccess; \
    });                                                                         \
    return true;                                                                \
  }();                                                                          \
  static TALEA_PLANTED_ANYWHERE inline bool mutant(Bug bug) {                   \
    return TALEA_PLANTED_HERE(Bug) == bug;                                      \
  }
#ifdef __CUDA_ARCH__
#define TALEA_PLANTED_HERE(Bug) device_##Bug
#else
#define TALEA_PLANTED_HERE(Bug) talea::planted<Bug>
#endif
#endif
#endif
