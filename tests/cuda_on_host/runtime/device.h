// The state of the launch that runs: threads, what they wait for, and what went wrong.
#pragma once

#include <cstdint>
#include <string>

#include "cuda_on_host.h"

namespace cuda_on_host {

constexpr int kMaxThreads = 1024;
constexpr int kWarpSize = 32;

struct Range {
  char* begin = nullptr;
  size_t size = 0;

  bool contains(const void* p) const { return p >= begin && p < begin + size; }
};

// What runs, and the memory that it uses beside its buffers.
struct Running {
  int thread = -1;  // its number in the block; -1 while no kernel runs
  int64_t block = 0;
  Range stacks, arguments, library;
  Range shared;  // of all kernels of the library, for the thread of the host that launches
};
extern Running running;

// Ends the launch with a message; kernel, block and thread are added.
[[noreturn]] void fault(const std::string& what);
std::string line_of(const Site& site);

}  // namespace cuda_on_host
