// Names for addresses, from the debug information of this library. For messages only.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace cuda_on_host {

std::string function_name(const void* code);
std::string line_name(const void* code);
// The thread-local variables of this library.
struct Variable {
  std::string name;
  size_t offset, size;
  bool is_guard;  // of another one's initialisation, which the device does not have
};
const std::vector<Variable>& variables();
std::string variable_name(size_t offset);

}  // namespace cuda_on_host
