#include <cstdio>
#include <fstream>
#include <iostream>
#include <sstream>
#include "../interp.hpp"
int main(int n, char** v) {
  for (int i = 1; i < n; ++i) {
    std::ifstream f(v[i]);
    std::stringstream s;
    s << f.rdbuf();
    auto m = emu::Module::load(s.str());
    std::cout << "## " << v[i] << "\n" << emu::check(*m) << std::flush;
  }
}
