// What: cases: numbers of a counter-based generator, sizes and options drawn so that every pair of
//       choices occurs.
// Why: a bug that needs two options together is found, with few cases.
// Never: a number that depends on a library's generator.
#pragma once

#include <cstdint>

#include "yardsticks/mamba3/case.hpp"

namespace talea::yardsticks::mamba3 {

double uniform(uint64_t seed, int64_t i);  // [-1, 1), as golden.py has it
double normal(uint64_t seed, int64_t i);

// Fills a tensor of the case by name with numbers of a model's size: decays near 1, short steps.
void fill(Case& c, const std::string& name, DType dtype, uint64_t seed, const Layout& layout = {});

// Everything that the sizes allow, in one dtype; with d_out and all d_final_*.
Case full_case(const Sizes& size, DType dtype, uint64_t seed);

// Cases in which every pair of choices occurs at least once.
std::vector<Case> pairwise_cases(uint64_t seed);

// The same of bf16 in the sizes that models are trained at: N 128, P 64, R 1, 2 and 4, rows on 16
// bytes, no states handed in or out.
std::vector<Case> training_cases(uint64_t seed);

// The same of the sizes beside them: N 64, 128 and 256, P 64 and 128, R 1, 2, 4 and 8.
std::vector<Case> wider_cases(uint64_t seed);

// The same choices with other numbers.
Case drawn_again(Case c, uint64_t seed);

std::string describe_case(const Case& c);

}  // namespace talea::yardsticks::mamba3
