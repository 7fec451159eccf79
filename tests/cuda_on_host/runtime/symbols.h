// Names for addresses, from the debug information of this library. For messages only.
#pragma once

#include <cstddef>
#include <string>

namespace cuda_on_host {

std::string function_name(const void* code);
std::string line_name(const void* code);
// The thread-local variable at an offset into the library's thread-local memory.
std::string variable_name(size_t offset);

}  // namespace cuda_on_host
